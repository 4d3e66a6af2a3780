"""Operations per second over operations per byte, both logarithmic (Williams, Waterman and Patterson 2009): a roof, and
a mark for whatever was measured under it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from forge.views.charts import Curve, line_plot, row_of
from forge.views.formatting import rate
from forge.views.palette import QUIET

_HEIGHT, _MOST_WIDTH, _LEFT = 9, 66, 14


@dataclass(frozen=True)
class Point:
    """A measured pass: its place in the picture, and its mark."""

    mark: str
    """Its character in the picture."""
    name: str
    """What the mark stands for; printed once below the picture."""
    intensity: float
    """Operations per byte."""
    per_second: float
    style: str = ""


def roofline(points: Sequence[Point], bytes_per_second: float, per_second: float, what: str, width: int) -> list[Text]:
    """The roof is the lower of two limits: bandwidth times intensity, and the rate of `what`, `int8 products`."""
    room = max(24, min(_MOST_WIDTH, width - _LEFT))
    ridge, every = math.log10(per_second / bytes_per_second), [math.log10(one.intensity) for one in points]
    low, high = min([*every, ridge - 0.2]), max([*every, ridge + 0.5])
    top = math.log10(max([per_second, *(one.per_second for one in points)]))
    bottom = math.log10(min(one.per_second for one in points)) - 0.15
    slope = [low + (high - low) * column / (room * 2 - 1) for column in range(room * 2)]
    roof = [max(0.0, min(math.log10(per_second), math.log10(bytes_per_second) + x) - bottom) for x in slope]
    marks: dict[tuple[int, int], tuple[str, str]] = {}
    for one, x in zip(points, every, strict=True):
        row = row_of(max(0.0, math.log10(one.per_second) - bottom), top - bottom, _HEIGHT)
        marks[row, round((x - low) / (high - low) * (room - 1))] = (one.mark, one.style)
    labels = [_with_unit(10**top), *[""] * (_HEIGHT - 2), _with_unit(10**bottom)]
    edge = max(map(len, labels))
    plot = [Text(f"{what} per second (log, log)", QUIET)]
    lines = line_plot([Curve(roof, QUIET)], top - bottom, room * 2, room, _HEIGHT)
    for row, (label, line) in enumerate(zip(labels, lines, strict=True)):
        cells = [marks.get((row, column), (character, QUIET)) for column, character in enumerate(line.plain)]
        plot.append(Text.assemble((f"{label:>{edge}} {'┤' if label else '│'}", QUIET), *cells))
        plot[-1].rstrip()
    scale = f"{10**low:.1f}{f'{what} per byte':^{max(0, room - 8)}}{10**high:>5,.0f}"
    plot.append(Text(" " * (edge + 2) + scale, QUIET))
    named = {one.mark: Text.assemble((one.mark, one.style), f" {one.name}") for one in points}
    return [*plot, Text(" " * (edge + 2)).append_text(Text("   ").join(named.values()))]


def _with_unit(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= limit:
            return f"{rate(value / limit)} {unit}"
    return f"{value:.0f}"
