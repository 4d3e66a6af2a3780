"""The options that benchmarks share, and checks of what they are given. Each refusal is one line."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from forge.errors import UsageError

MEASURE = "Measurement"


def option(help: str, *names: str, default: str | bool = True, **more: Any) -> Any:
    """An option of a benchmark's command. default: what `--help` says where the value's own says nothing."""
    return typer.Option(*names, help=help, show_default=default, rich_help_panel=MEASURE, **more)


QuickOption = Annotated[bool, option("Few and short turns: to see it run.", "--quick")]


def select_peers(names: list[str] | None, known: Mapping[str, str]) -> tuple[str, ...]:
    """`all`, `none`, or names of peers, in their own order. Raises `UsageError` for one that is none."""
    if names in (None, ["all"], ["none"]):
        return () if names == ["none"] else tuple(known)
    assert names is not None
    for name in names:
        if name not in known:
            raise UsageError(f"unknown peer {name!r}; there are {', '.join(known)}, all and none")
    return tuple(name for name in known if name in names)


def select_cases(names: str | None, known: tuple) -> tuple:
    """The cases that `names`, with commas, asks for, in their own order; None means all. Raises `UsageError`."""
    wanted = [name.strip() for name in names.split(",")] if names is not None else [case.name for case in known]
    for name in wanted:
        if name not in (case.name for case in known):
            raise UsageError(f"unknown figure {name!r}; there are {', '.join(case.name for case in known)}")
    return tuple(case for case in known if case.name in wanted)


def at_least_one(**values: float | None) -> None:
    """Raises `UsageError` for an option below 1; None stands for one that was not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is at least 1, and {value:g} is less")
