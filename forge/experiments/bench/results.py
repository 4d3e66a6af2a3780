"""What every benchmark is made of: figures with their spread, tables of them, and the options that commands share.

A benchmark's result is one dictionary of plain values and `Figure`s, its *facts*: `--json` prints them, nothing
rounded, and the screen is drawn from them.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from forge.cli.run_control import INTERRUPTED
from forge.experiments.bench.tables import Part, draw, ratio_text
from forge.views.json_output import plain
from forge.views.report import Report

Facts = dict[str, Any]
Progress = Callable[[str], None]
"""Called with what is about to be done."""


def silent(text: str) -> None:
    """A `Progress` that shows nothing."""


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

    def times(self, show: Callable[[float], str] = ratio_text) -> str:
        """`2.50 (2.00–3.00) x`."""
        return f"{self.text(show)} x"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Repetition i of both was measured in one round, so a machine that slows down for a while slows both down: a
    comparison is made pair by pair, and its figure is the median of these. What only one has is left out."""
    return [value / other for value, other in zip(values, others, strict=False)]


def shown(facts: Facts, screen: Iterable[Part], json: bool, status: int = 0) -> Report:
    """What a benchmark's command returns."""
    parts = list(screen)
    status = INTERRUPTED if facts.get("interrupted") else status
    report = Report(plain(facts), lambda console: draw(console, parts), status)
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
