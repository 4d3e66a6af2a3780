"""Two slips that the parser of every command explains: a text without its quotes, an option without its value."""

import shlex

import pytest

from forge.cli.main import PANELS, command_named
from forge.cli.parsing import TEXTS, Command
from tests.cli.test_errors import complaint


def _commands(command, path):
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from _commands(command.get_command(None, name), (*path, name))
    else:
        yield path, command


COMMANDS = {
    " ".join(path): command
    for names in PANELS.values()
    for name in names
    for path, command in _commands(command_named(name), (name,))
}
OF_A_TEXT = {
    name: [param.metavar for param in command.params if param.param_type_name == "argument"]
    for name, command in COMMANDS.items()
    if any(param.metavar in TEXTS and param.nargs == 1 for param in command.params)
}
SIDES = {"compare": ("--kv", "off", "vs", "on")}


def test_every_command_has_the_parser():
    assert {"generate", "compare", "naive", "bench cpu", "models inspect", "trace export"} <= COMMANDS.keys()
    assert [name for name, command in COMMANDS.items() if not isinstance(command, Command)] == []
    assert {"generate", "compare", "naive", "score", "logprobs", "speculation", "glossary", "tour"} <= OF_A_TEXT.keys()


@pytest.mark.parametrize(("name", "arguments"), OF_A_TEXT.items(), ids=OF_A_TEXT)
def test_a_prompt_without_quotes_is_shown_with_them(forge, name, arguments):
    texts = [argument for argument in arguments if argument in TEXTS]
    number = ("32",) if len(texts) < len(arguments) else ()
    sides = SIDES.get(name, ())

    line = complaint(forge(name, *sides, *["once", "upon", "a", "time"], *number))

    words = '"once upon a time"' if len(texts) == 1 else '"once upon a" "time"'
    assert line.endswith(" ".join(["forge", name, *sides, words, *number]))
    assert ("'upon'" if len(texts) == 1 else "'a'") in line


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        (
            "generate --kv paged Once upon a time 32 --seed 3",
            'forge generate --kv paged --seed 3 "Once upon a time" 32',
        ),
        ("generate Once 32 upon", 'forge generate "Once 32 upon"'),
        ("generate --choice happy --choice sad He was", 'forge generate --choice happy --choice sad "He was"'),
        ("generate -mhash Once upon", 'forge generate -mhash "Once upon"'),
        ("generate What is '$HOME' 3", "forge generate 'What is $HOME' 3"),
        ("generate Once -- -upon", 'forge generate "Once -upon"'),
        ("compare --kv=off vs on Once upon", 'forge compare --kv=off vs on "Once upon"'),
        ("generate 3 -- -upon a time", 'forge generate "3 -upon a time"'),
        ("compare --chunked-prefill vs --no-chunked-prefill Once upon", 'vs --no-chunked-prefill "Once upon"'),
        ("generate -- -upon a time 3", 'forge generate -- "-upon a time" 3'),
        ("compare Once upon --chunked-prefill on vs off", '--chunked-prefill on vs off "Once upon"'),
        ("chapter naive Once upon", 'forge naive "Once upon"'),
        ("rerank --query who found lines.txt", '--query "who found"'),
    ],
)
def test_the_line_is_shown_as_it_is_to_be_typed(forge, line, mended):
    assert complaint(forge(*shlex.split(line))).endswith(mended)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('generate "Once upon" many', "MAX_TOKENS is a whole number, and 'many' is none (see forge generate --help)"),
        ("generate --tempratur 0.3 Once 2", "No such option: --tempratur"),
        ("serve --attach", "Option '--attach' requires an argument (see forge serve --help)"),
        ("generate Once -5", "must not be negative"),
    ],
)
def test_another_mistake_is_not_taken_for_missing_quotes(forge, line, expected):
    found = complaint(forge(*shlex.split(line)))
    assert expected in found and "quote" not in found


def test_an_option_never_takes_another_for_its_value(forge):
    for name, command in COMMANDS.items():
        for option, first in command.value_options().items():
            if first == "--kv":
                continue
            found = complaint(forge(*name.split(), option, "--help-me", "3"))
            assert found.startswith(f"forge: {option} has no value: --help-me"), name


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("generate --seed --kv off Once", "--seed", "--kv"),
        ("generate --seed -m hash Once", "--seed", "-m"),
        ("compare --seed --kv off vs on", "--seed", "--kv"),
        ("bench cpu -m --quick", "-m", "--quick"),
        ("generate --system --echo Once", "--system", "--echo"),
    ],
)
def test_an_option_without_its_value_is_named(forge, line, option, value):
    assert f"{option} has no value: {value}" in complaint(forge(*line.split()))


def test_the_cache_without_a_kind_lists_the_kinds(forge):
    found = forge(*["generate", "--kv", "--seed", "3", "Once", "2"])
    first, *kinds = found.err.splitlines()
    assert found.status == 2 and first.endswith(" and --seed stands in its place") and len(kinds) == 4


def test_a_value_with_dashes_is_given_behind_an_equals_sign(forge):
    found = forge("generate", "-m", "hash", "--system=--kv", "--temperature", "0", "Once", "1", "--json")
    assert '"text"' in found.out
    assert "negative" in complaint(forge("generate", "Once", "--temperature", "-1"))
