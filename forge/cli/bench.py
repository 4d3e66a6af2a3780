"""`forge bench`: how fast forge is beside its peers on this machine, and what the cheaper ways of computing cost.

Each benchmark is one file of `forge/bench`, which holds its command too; this is the table of them. A benchmark's file
is imported when it runs, or when its help is shown.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "cpu": "cpu:bench_cpu",
    "cache": "cache:bench_cache",
    "cuda": "cuda:bench_cuda",
    "oneshot": "oneshot:bench_oneshot",
    "prefix-planning": "planning:bench_planning",
    "tokenizer": "tokenizer:bench_tokenizer",
    "engine": "engine:bench_engine",
    "quality": "quality:bench_quality",
    "host": "host:bench_host",
    "speculation": "speculation:bench_speculation",
    "serve": "serve:bench_serve",
}
"""Name → its module in `forge.bench`, and the function there."""


class Benchmarks(TyperGroup):
    """The commands of the table, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            module, _, function = COMMANDS[cmd_name].partition(":")
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            alone.command(cmd_name)(getattr(import_module(f"forge.bench.{module}"), function))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)


bench = typer.Typer(
    cls=Benchmarks,
    help="Measure speed beside llama.cpp and transformers, the caches, the engine, guessing ahead, or the accuracy "
    "of quantization.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@bench.callback()
def _group() -> None:
    pass
