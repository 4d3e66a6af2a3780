"""The reader's options in the chapter's command lines."""

import shlex

import pytest

from forge.book.given import Given, Syntax

SYNTAX = Syntax(
    ("prompt", "max_tokens"), {"--model": "model", "-m": "model", "--kv": "kv", "--only": "only", "--seed": "seed"}
)


def applied(line: str, **values: str | tuple[str, ...]) -> list[str]:
    return Given(values).applied(shlex.split(line), SYNTAX)


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        ("--only run 'Once upon' 128", {}, "'Once upon' 128 --only run"),
        ("--only run 'Once upon' 128", {"prompt": "The fox"}, "'The fox' 128 --only run"),
        ("--only run 'Once upon' 128", {"max_tokens": "8"}, "'Once upon' 8 --only run"),
        ("--only run", {"prompt": "The fox", "max_tokens": "8"}, "'The fox' 8 --only run"),
        ("x --model tales", {"model": "a.gguf"}, "x --model a.gguf"),
        ("x -m tales", {"model": "a.gguf"}, "x --model a.gguf"),
        ("x --model=tales --kv on", {"model": "a.gguf"}, "x --kv on --model a.gguf"),
        ("x --kv off vs on", {"model": "a.gguf"}, "x --kv off vs on --model a.gguf"),
        ("x --model tales vs tales-q4_0 --kv on", {"model": "a.gguf"}, "x --model tales vs tales-q4_0 --kv on"),
        ("x --kv=off vs on", {"kv": "basic"}, "x --kv=off vs on"),
        ("x --json", {"device": "cuda"}, "x --json"),
        ("x --kv on", {"model": ("a.gguf", "b.gguf")}, "x --kv on --model a.gguf --model b.gguf"),
    ],
)
def test_what_was_given_takes_the_place_of_what_was_written(line, values, expected):
    assert applied(line, **values) == shlex.split(expected)


def test_a_later_argument_cannot_be_given_without_the_one_before():
    assert applied("--only run", max_tokens="8") == ["--only", "run"]
