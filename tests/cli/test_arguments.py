"""Dataclasses as options of a command."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pytest
import typer
from typer.testing import CliRunner

from forge.cli.arguments import Takes, command
from forge.errors import UsageError
from forge.option import option

if TYPE_CHECKING:
    from nowhere import Thing


@dataclass(frozen=True)
class Args:
    size: int = option(3, "How large.")
    named: "str | Thing | None" = option(None, "A name.", "Rest", shown="none")
    texts: str | Sequence[str] = option((), "Some texts.", "Rest", flags="--text -t")
    path: Path | None = option(None, "A file.", "Rest", envvar="ARGS_PATH")
    plans: bool = option(True, "Whether to plan.", "Rest")
    quick: bool = option(False, "Whether to hurry.", "Rest")
    inner: int = 7

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError("--size is at least 1")


def run(function, *words: str):
    app = typer.Typer()
    app.command()(command(function))
    return CliRunner().invoke(app, list(words))


def test_each_field_that_is_described_is_an_option():
    seen = []

    def show(word: str, args: Args, times: int = 1) -> None:
        seen.append((word, args, times))

    assert run(show, "x").exit_code == 0
    words = ["x", "--size", "4", "--named", "n", "-t", "a", "--text", "b", "--path", "p", "--no-plans", "--quick"]
    assert run(show, *words, "--times", "2").exit_code == 0
    assert seen == [("x", Args(), 1), ("x", Args(4, "n", ("a", "b"), Path("p"), False, True), 2)]
    assert run(show, "x", "--inner", "8").exit_code == 2


def test_a_command_has_its_own_fields_and_defaults():
    seen = []

    def show(
        few: Annotated[Args, Takes("size named", size=9)],
    ) -> None:
        seen.append(few)

    assert run(show).exit_code == 0 and run(show, "--size", "5").exit_code == 0
    assert seen == [Args(9), Args(5)]
    assert run(show, "--quick").exit_code == 2
    found = run(show, "--help").output
    assert "[default: 9]" in found and "[default: (none)]" in found and "--plans" not in found


def test_all_but_some():
    def show(args: Annotated[Args, Takes(without="quick path")]) -> None:
        pass

    found = run(show, "--help").output
    assert "--no-plans" in found and "--quick" not in found and "--path" not in found


def test_a_field_that_is_not_there_is_noticed_when_the_command_is_defined():
    def show(args: Annotated[Args, Takes("size weight")]) -> None:
        pass

    with pytest.raises(AssertionError, match="Args has no weight"):
        command(show)


def test_the_dataclass_refuses():
    def show(args: Args) -> None:
        pass

    refused = run(show, "--size", "0").exception
    assert isinstance(refused, UsageError) and str(refused) == "--size is at least 1"


def test_the_context_is_given_to_those_that_take_it():
    seen = []

    def show(ctx: typer.Context, args: Args) -> None:
        seen.append((ctx.params["size"], args.size))

    assert run(show, "--size", "2").exit_code == 0
    assert seen == [(2, 2)]
