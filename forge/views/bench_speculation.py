"""The figures of `forge bench speculation`: for each batch a table of K by proposer."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.speculation import SpeculationFigure
from forge.views.figures import NOTHING, count, plural
from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table

QUESTION = "How many tokens should be guessed at a time?"
_COLUMNS = ("", "K", "α", "tokens\nper\ncycle", "speed-up", "least–most", "formula", "with\nverify", "tok/s")
"""Narrow enough for 80 columns."""


def print_speculation_benchmark(console: Console, figures: Sequence[SpeculationFigure], label: str) -> None:
    """Every batch's table, what plain decoding does beside it, and whether the tokens stayed the same."""
    console.print(Text(QUESTION, TITLE))
    console.print(Text(label, QUIET))
    for batch in dict.fromkeys(figure.case.batch for figure in figures):
        own = [figure for figure in figures if figure.case.batch == batch]
        plain = count(round(own[0].plain_tokens_per_second))
        console.print()
        console.print(Text(f"{plural(batch, 'sequence')}, {plain} tok/s without guesses", TITLE))
        print_table(console, _table(own))
    console.print()
    console.print(
        Text(
            "formula: (αK + 1) / (1 + K · t_draft / t_target). With verify: the same with the measured time of "
            "the forward over K + 1 rows in place of the 1.",
            QUIET,
        )
    )
    differing = [figure.case for figure in figures if not figure.identical]
    if differing:
        console.print(
            Text.assemble(("✗ the tokens differ", TROUBLE), f" in {plural(len(differing), 'case')}: {differing}")
        )
    else:
        console.print(
            Text.assemble(("✓ identical", GOOD), ": every turn of every case gave the tokens of plain decoding")
        )


def _table(figures: Sequence[SpeculationFigure]) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    best = {
        max((f for f in figures if f.case.proposer == name), key=lambda f: f.speed_up).case for name in _names(figures)
    }
    for column in _COLUMNS:
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for figure in figures:
        row = (
            figure.case.proposer,
            str(figure.case.k),
            _number(figure.alpha),
            _number(figure.tokens_per_cycle),
            f"{figure.speed_up:.2f} x",
            f"{figure.least:.2f}–{figure.most:.2f}",
            _number(figure.predicted),
            _number(figure.predicted_with_verification),
            count(round(figure.tokens_per_second)),
        )
        table.add_row(*row, style=TITLE if figure.case in best else "")
    return table


def _names(figures: Sequence[SpeculationFigure]) -> list[str]:
    return list(dict.fromkeys(figure.case.proposer for figure in figures))


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
