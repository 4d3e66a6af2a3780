"""`forge bench`: how fast forge is beside its peers on this machine, and what the cheaper ways of computing cost.

To add a benchmark, write one file, `forge/bench/NAME.py`, whose docstring begins with `forge bench NAME`.
It holds

1. `bench_NAME`, made a command by `@benchmark(screen)`: its parameters are the options, and it returns its facts, a
   dictionary of plain values and `Figure`s, the JSON as it is printed. What is compared takes turns (`kit.in_turns`),
   and a ratio is the median of the turns' `ratios`. A program that must not share threads or memory runs in a process
   of its own: a `Worker` with a `load`, a `prepare` and a `_step`, driven by a `Runner`;
2. `screen(facts)`, which yields the parts of the screen (`forge.views.screen`).

Its figures belong into `forge/bench/RESULTS.md`. A file is imported when its benchmark runs, or when
`forge bench --help` is shown; `forge --help` imports none.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from forge import bench as benchmarks
from forge.cli.parsing import command_of
from forge.drop_ins import first_lines

_FIRST = "`forge bench "


def names() -> list[str]:
    """Return the names of the benchmarks; `cpu` comes first, because most people look for it."""
    first = first_lines(benchmarks.__path__).values()
    names = [line.removeprefix(_FIRST).partition("`")[0] for line in first if line.startswith(_FIRST)]
    return sorted(names, key=lambda name: (name != "cpu", name))


class Benchmarks(TyperGroup):
    """The benchmarks, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in names():
            name = cmd_name.replace("-", "_")
            function = getattr(import_module(f"{benchmarks.__name__}.{name}"), f"bench_{name}")
            self.commands[cmd_name] = command_of(function, cmd_name)
        return self.commands.get(cmd_name)


bench = typer.Typer(cls=Benchmarks, no_args_is_help=True, rich_markup_mode="rich")
