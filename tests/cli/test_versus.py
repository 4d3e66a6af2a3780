"""The grammar of `forge compare`: one option as `A vs B`."""

import json

import pytest

from forge.cli.versus import Switch, split_versus
from forge.errors import UsageError

OPTIONS = {"--kv": "--kv", "--model": "--model", "-m": "--model", "--threads": "--threads", "--seed": "--seed"}
SWITCHES = {
    "--chunked-prefill": Switch("--chunked-prefill", True),
    "--no-chunked-prefill": Switch("--chunked-prefill", False),
    "--invariant": Switch("--invariant", True),
    "--ignore-eos": Switch("--ignore-eos", True),
}


def split(*args):
    return split_versus(args, OPTIONS, SWITCHES)


@pytest.mark.parametrize(
    "args",
    [
        ("--kv", "off", "vs", "on", "a prompt", "64"),
        ("a prompt", "64", "--kv", "off", "vs", "on"),
        ("a prompt", "--kv", "off", "vs", "on", "64"),
        ("--kv=off", "vs", "on", "a prompt", "64"),
        ("--kv", "off", "VS", "on", "a prompt", "64"),
    ],
)
def test_the_option_may_stand_anywhere(args):
    found = split(*args)
    assert found.option == "--kv" and found.names == ("off", "on")
    for line, value in ((found.left, "off"), (found.right, "on")):
        assert line[line.index("--kv") + 1] == value
        assert [arg for arg in line if arg not in ("--kv", "off", "on")] == ["a prompt", "64"]


def test_any_option_that_takes_a_value_may_vary():
    found = split("-m", "tales", "vs", "tales-q4_0", "--kv", "on")
    assert found.option == "--model" and found.names == ("tales", "tales-q4_0")
    assert found.left == ("-m", "tales", "--kv", "on")
    assert found.right == ("-m", "tales-q4_0", "--kv", "on")


@pytest.mark.parametrize(
    ("words", "left", "right", "names"),
    [
        ("--chunked-prefill vs --no-chunked-prefill", "--chunked-prefill", "--no-chunked-prefill", ("on", "off")),
        ("--chunked-prefill off vs on", "--no-chunked-prefill", "--chunked-prefill", ("off", "on")),
        ("--invariant on vs off", "--invariant", "", ("on", "off")),
        ("--ignore-eos off vs on", "", "--ignore-eos", ("off", "on")),
    ],
)
def test_a_switch_may_vary(words, left, right, names):
    found = split("a prompt", *words.split(), "64")
    assert found.names == names
    assert (found.left, found.right) == (("a prompt", *left.split(), "64"), ("a prompt", *right.split(), "64"))


def test_a_switch_of_the_engine_varies_on_the_command_line(forge):
    line = ("-m", "hash", "-n", "6", "--prompt-tokens", "4:64", "--max-num-batched-tokens", "16", "4")
    found = forge("compare", "--chunked-prefill", "vs", "--no-chunked-prefill", *line)
    assert found.status == 0 and "Who waits for a long prompt?" in found.out
    assert "✓ identical: 6 requests, 24 tokens each way" in found.out
    sides = json.loads(forge("compare", "--chunked-prefill", "on", "vs", "off", *line, "--json").out)["sides"]
    assert [side["value"] for side in sides] == ["on", "off"]
    assert sides[0]["totals"]["num_steps"] != sides[1]["totals"]["num_steps"]


def test_a_value_may_begin_with_a_minus():
    assert split("--seed", "-1", "vs", "-2").names == ("-1", "-2")


def test_a_prompt_may_hold_the_word():
    assert split("cats vs dogs", "--kv", "off", "vs", "on").left == ("cats vs dogs", "--kv", "off")
    assert split("--kv", "off", "vs", "on", "--", "vs").right == ("--kv", "on", "--", "vs")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "nothing to compare"),
        (("--kv", "off", "a prompt"), "nothing to compare"),
        (("--kv", "off", "vs", "on", "--threads", "1", "vs", "2"), "--kv and --threads vary"),
        (("--kv", "off", "vs"), "no value after 'vs'"),
        (("--kv", "off", "vs", "--threads", "1"), "no value after 'vs'"),
        (("--kv", "vs", "on"), "no value before 'vs'"),
        (("--max-num-seqs", "1", "vs", "4"), "--max-num-seqs is no option with a value here"),
        (("--ignore-eos", "vs", "off"), "write --ignore-eos on vs off"),
        (("--ignore-eos", "on", "vs", "on"), "write --ignore-eos on vs off"),
        (("--ignore-eos", "vs", "--invariant"), "write --ignore-eos on vs off"),
        (("--ignore-eos", "off", "vs"), "write --ignore-eos on vs off"),
        (("--ignore-eos", "off", "vs", "on", "--ignore-eos"), "more than once"),
        (("vs", "on"), "between the two values of one option"),
        (("a", "vs", "b"), "between the two values of one option"),
        (("--json", "vs", "--kv"), "--json is no option with a value here"),
        (("--kv", "off", "vs", "on", "vs", "paged"), "two sides"),
        (("--kv", "off", "vs", "on", "--kv", "basic"), "more than once"),
        (("--kv=basic", "--kv", "off", "vs", "on"), "more than once"),
        (("-m", "a", "vs", "b", "--model", "c"), "more than once"),
    ],
)
def test_a_wrong_line_is_one_error_that_says_how(args, expected):
    with pytest.raises(UsageError) as found:
        split(*args)
    message = str(found.value)
    assert expected in message and "\n" not in message and found.value.exit_code == 2
    assert "forge compare --kv off vs on" in message or "A vs B" in message


def test_both_sides_get_every_other_option(forge, small):
    found = forge("compare", "--kv", "off", "vs", "on", *small, "--temperature", "1", "--json", "Once", "4")
    sides = json.loads(found.out)["sides"]
    assert [side["kv"] for side in sides] == ["off", "basic"]
    assert sides[0]["seed"] == sides[1]["seed"]
    assert sides[0]["prompt"] == sides[1]["prompt"] == "Once"
    assert found.status == 0


def test_each_value_is_checked_like_any_other(forge, small):
    found = forge("compare", "--threads", "1", "vs", "two", *small)
    assert found.status == 2 and "'--threads'" in found.err and len(found.err.splitlines()) == 1
