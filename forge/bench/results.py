"""What every benchmark is made of: figures with their spread, tables of them, and the options that commands share.

A benchmark's result is one dictionary of plain values and `Figure`s, its *facts*: `--json` prints them, nothing
rounded, and the screen is drawn from them.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from forge.cli.running import INTERRUPTED
from forge.views.figures import NOTHING
from forge.views.json_output import plain
from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE
from forge.views.report import Report
from forge.views.terminal import new_table, print_table
from forge.views.text import one_line

Facts = dict[str, Any]
Progress = Callable[[str], None]
"""Called with what is about to be done."""


def silent(text: str) -> None:
    """A `Progress` that shows nothing."""


def option(help: str, *names: str, default: str | bool = True, **more: Any) -> Any:
    """An option of a benchmark's command. default: what `--help` says where the value's own says nothing."""
    return typer.Option(*names, help=help, show_default=default, rich_help_panel="Measurement", **more)


QuickOption = Annotated[bool, option("Few and short turns: to see it run.", "--quick")]


@dataclass(frozen=True)
class Figure:
    """The median of some repetitions, and how far they lie apart."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """With the least and the most. Raises ValueError for none."""
        return cls(median(values), min(values), max(values), len(values))

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> "Figure":
        """With the quartiles: a step in the middle of which the system did something else says nothing."""
        if len(values) < 2:
            return cls.of(values)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high, len(values))

    def __mul__(self, factor: float) -> "Figure":
        return Figure(self.median * factor, self.low * factor, self.high * factor, self.count)

    def text(self, show: Callable[[float], str]) -> str:
        """`44.1 (43.8–44.6)`."""
        return f"{show(self.median)} ({show(self.low)}–{show(self.high)})"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Repetition i of both was measured in one round, so a machine that slows down for a while slows both down: a
    comparison is made pair by pair, and its figure is the median of these. What only one has is left out."""
    return [value / other for value, other in zip(values, others, strict=False)]


def ratio_text(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def times_text(figure: Figure | None, show: Callable[[float], str] = ratio_text) -> str:
    """`2.50 (2.00–3.00) x`."""
    return NOTHING if figure is None else f"{figure.text(show)} x"


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
            justify, style = "left" if number < self.names else "right", (self.styles or {}).get(number)
            table.add_column(heading, justify=justify, style=style, no_wrap=not self.wraps, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def fits(self, console: Console) -> bool:
        options = console.options.update(max_width=1000)
        return console.measure(self.rich(), options=options).maximum <= console.width


Part = str | Text | Table | None
"""Of a screen: a table; a sentence about it, grey if it is a plain text; None, an empty line."""
Screen = Callable[[Console], Sequence[Part]]
"""The parts of a screen for a console: what depends on its width asks it."""


def title(text: str, style: str = TITLE) -> Text:
    return Text(text, style)


def trouble(text: str) -> Text:
    return Text(text, TROUBLE)


def verdict(holds: bool, what: str, otherwise: str = "") -> Text:
    """`✓ the same tokens`, or `✗ not the same tokens`."""
    return Text(f"✓ {what}", GOOD) if holds else trouble(f"✗ {otherwise or f'not {what}'}")


def where(facts: Facts, *more: str) -> str:
    """`tales, cpu (…) on this processor; 5 turns`: the line under a title."""
    on = f" on {one_line(facts['machine'])}" if facts.get("machine") else ""
    named = [one_line(facts[name]) for name in ("model", "device") if name in facts]
    return "; ".join([", ".join(named) + on, *more])


def draw(console: Console, parts: Sequence[Part]) -> None:
    for part in parts:
        if isinstance(part, Table):
            print_table(console, part.rich())
        else:
            console.print(Text(part, QUIET) if isinstance(part, str) else part if part is not None else "")


def shown(facts: Facts, screen: Screen, json: bool, status: int = 0) -> Report:
    """What a benchmark's command returns."""
    status = INTERRUPTED if facts.get("interrupted") else status
    report = Report(plain(facts), lambda console: draw(console, screen(console)), status)
    return report.as_json() if json else report


def last_of(measuring: Generator[Facts, None, None]) -> Facts:
    """What a run that yields its facts so far comes to. Ctrl-C keeps what there is, marked `interrupted`."""
    facts = None
    try:
        for facts in measuring:  # noqa: B007 (the last one is the whole)
            pass
    except KeyboardInterrupt:
        if facts is None:
            raise
        return facts | {"interrupted": True}
    finally:
        measuring.close()
    assert facts is not None, "a benchmark has at least a beginning"
    return facts
