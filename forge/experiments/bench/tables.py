"""Screens of benchmarks: parts that draw themselves, one below the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import new_table, print_table
from forge.views.text import one_line


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; it draws itself. The first `names` columns stand to the left."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    names: int = 1
    styles: Mapping[int, str] | None = None
    """Column → style."""
    wraps: bool = False
    """Whether cells may be broken where the screen is too narrow."""

    def rich(self) -> RichTable:
        table = new_table()
        for number, heading in enumerate(self.headings):
            style, wraps = (self.styles or {}).get(number), self.wraps
            table.add_column(heading, style=style, no_wrap=not wraps, overflow="fold")
            table.columns[number].justify = "left" if number < self.names else "right"
        for row in self.rows:
            table.add_row(*row)
        return table

    def fits(self, console: Console) -> bool:
        options = console.options.update(max_width=1000)
        return console.measure(self.rich(), options=options).maximum <= console.width


@dataclass(frozen=True)
class Fitting:
    """Groups of tables that say the same, the widest first: the first that fits the screen is drawn."""

    groups: Sequence[Sequence[Table]]

    def parts(self, console: Console) -> list["Part"]:
        fitting = (group for group in self.groups if all(table.fits(console) for table in group))
        return [part for table in next(fitting, self.groups[-1]) for part in (None, table)]


Part = str | Text | Table | Fitting | None
"""Of a screen: a table; a sentence about it, grey if it is a plain text; None, an empty line."""


def title(text: str, style: str = TITLE) -> Text:
    return Text(text, style)


def trouble(text: str) -> Text:
    return Text(text, TROUBLE)


def verdict(holds: bool, what: str, otherwise: str = "") -> Text:
    """`✓ the same tokens`, or `✗ not the same tokens`."""
    return Text(f"✓ {what}", GOOD) if holds else trouble(f"✗ {otherwise or f'not {what}'}")


def where(facts: Mapping[str, Any], *more: str) -> str:
    """`tales, cpu (…) on this processor; 5 turns`: the line under a title."""
    on = f" on {one_line(facts['machine'])}" if facts.get("machine") else ""
    named = [one_line(facts[name]) for name in ("model", "device") if name in facts]
    return "; ".join([", ".join(named) + on, *more])


def draw(console: Console, parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, Fitting):
            draw(console, part.parts(console))
        elif isinstance(part, Table):
            print_table(console, part.rich())
        else:
            console.print(Text(part, QUIET) if isinstance(part, str) else part if part is not None else "")


def ratio_text(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"
