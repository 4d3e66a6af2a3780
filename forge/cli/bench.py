"""`forge bench`: how fast forge is beside its peers on this machine, and what the cheaper ways of computing cost.

To add a benchmark, write one file, `forge/experiments/bench/NAME.py`, and add its line to `COMMANDS`. The file holds

1. `bench_NAME(...) -> Found`, the command: its options (`options.py` there, `forge.cli.options`) and its help;
2. `run(...) -> Facts`, which measures: a dictionary of plain values and `Figure`s, the JSON as it is printed. What is
   compared takes turns, and a ratio is the median of the turns' `ratios`. A program that must not share threads or
   memory runs in a process of its own: a `Worker` with a `load`, a `prepare` and a `_step`, driven by a `Runner`;
3. `screen(facts)`, which yields the parts of the screen: a `title`, sentences, `Table`s of cells, a `verdict`.

The command ends with `return shown(facts, screen(facts), json)`. Its figures belong into `forge/bench/RESULTS.md`. A
file is imported when its benchmark runs, or when `forge bench --help` is shown; `forge --help` imports none.
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
"""Name → its module in `forge.experiments.bench`, and the function there."""


class Benchmarks(TyperGroup):
    """The commands of the table, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            module, _, function = COMMANDS[cmd_name].partition(":")
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            alone.command(cmd_name)(getattr(import_module(f"forge.experiments.bench.{module}"), function))
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
