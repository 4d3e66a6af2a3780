"""Pictures made of characters: a bar, a sparkline, a plot of several curves, and a roofline. They know only numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from forge.views.formatting import rate
from forge.views.palette import QUIET

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
CUT = "»"
"""Ends a bar that is longer than the scale."""

# Braille cells hold 2 x 4 dots; _DOTS[row][column] is the bit of a dot in the character's code.
_BRAILLE = 0x2800
_ROWS_PER_CELL = 4
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def bar(value: float, scale: float, width: int) -> str:
    """Draw a bar of eighths of a column, `width` columns long where `value` is `scale`; cut there with `»` if it is
    more."""
    if scale <= 0 or width <= 0:
        return ""
    if value > scale * 1.0001:
        return "█" * (width - 1) + CUT
    eighths = max(1, round(value / scale * width * 8)) if value > 0 else 0
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def sparkline(values: Sequence[float], scale: float, width: int) -> str:
    """Draw one character per value, or per group of neighbours (their mean) if there are more values than columns."""
    return "".join(_level(value, scale) for value in _grouped(values, width))


def _level(value: float, scale: float) -> str:
    if scale <= 0:
        return _LEVELS[0]
    return _LEVELS[min(max(int(value / scale * len(_LEVELS)), 0), len(_LEVELS) - 1)]


def _grouped(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class Curve:
    """One line of a plot. Its i-th value stands at x = i."""

    values: Sequence[float]
    style: str


def line_plot(curves: Sequence[Curve], scale: float, num_points: int, width: int, height: int) -> list[Text]:
    """Draw `height` lines of `width` columns with all curves on the axes x 0 to `num_points` - 1, y 0 to `scale`.

    A later curve lies over an earlier one. Values above the scale run along the upper edge.
    """
    dots = [[0] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]
    for curve in curves:
        columns = (round(x * (width * 2 - 1) / max(num_points - 1, 1)) for x in range(len(curve.values)))
        points = [(column, _dot_row(y, scale, height)) for column, y in zip(columns, curve.values, strict=True)]
        for start, end in zip(points, points[1:] or points, strict=False):
            for column, row in _segment(start, end):
                dots[row // _ROWS_PER_CELL][column // 2] |= _DOTS[row % _ROWS_PER_CELL][column % 2]
                styles[row // _ROWS_PER_CELL][column // 2] = curve.style
    return [_braille(*line) for line in zip(dots, styles, strict=True)]


def _braille(dots: Sequence[int], styles: Sequence[str]) -> Text:
    """Return a line of cells, each with its dots, in the style of the curve drawn there last."""
    characters = (chr(_BRAILLE + bits) if bits else " " for bits in dots)
    return Text.assemble(*zip(characters, styles, strict=True), no_wrap=True)


def throughput_plot(times: Sequence[float], seconds: float, width: int, style: str, height: int = 8) -> list[Text]:
    """Plot tokens per second over the time of a run, from the moment of each token: the curve, its scale, the time
    axis.

    A point is the mean over one of up to 60 slices of the run, so a burst within a slice is not seen.
    """
    slices = min(60, max(2, len(times) // 8))
    length = seconds / slices
    counts = [0] * slices
    for time in times:
        counts[min(int(time / length), slices - 1)] += 1
    rates = [number / length for number in counts]
    top = f"{max(rates):,.0f} tok/s"
    label, columns = len(top) + 2, max(16, min(80, width) - len(top) - 2)
    lines = line_plot([Curve(rates, style)], max(rates), slices, columns, height)
    names = [top, *[""] * (height - 2), "0"]
    axis = f"{seconds:,.2f} s"
    drawn = [Text.assemble(f"{name:>{label - 2}}  ", line) for name, line in zip(names, lines, strict=True)]
    return [*drawn, Text(" " * label + "0" + axis.rjust(columns - 1))]


def row_of(value: float, scale: float, height: int) -> int:
    """Return the line of a plot, counted from the upper one, on which `value` lies."""
    return _dot_row(value, scale, height) // _ROWS_PER_CELL


def _dot_row(value: float, scale: float, height: int) -> int:
    level = min(max(value / scale, 0.0), 1.0) if scale > 0 else 0.0
    return round((1 - level) * (height * _ROWS_PER_CELL - 1))


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line, both ends included."""
    (x, y), width, height = start, end[0] - start[0], end[1] - start[1]
    steps = max(abs(width), abs(height), 1)
    return [(round(x + width * i / steps), round(y + height * i / steps)) for i in range(steps + 1)]


_HEIGHT, _MOST_WIDTH, _LEFT = 9, 66, 14


@dataclass(frozen=True)
class Point:
    """A measured pass: its place in the picture, and its mark."""

    mark: str
    """Its character in the picture."""
    name: str
    """The name of what the mark stands for; printed once below the picture."""
    intensity: float
    """Operations per byte."""
    per_second: float
    style: str = ""


def roofline(points: Sequence[Point], bytes_per_second: float, per_second: float, what: str, width: int) -> list[Text]:
    """Draw a roofline. The roof is the lower of two limits: bandwidth times intensity, and the rate of `what`, for
    instance `int8 products`."""
    room = max(24, min(_MOST_WIDTH, width - _LEFT))
    ridge, every = math.log10(per_second / bytes_per_second), [math.log10(point.intensity) for point in points]
    low, high = min([*every, ridge - 0.2]), max([*every, ridge + 0.5])
    top = math.log10(max([per_second, *(point.per_second for point in points)]))
    bottom = math.log10(min(point.per_second for point in points)) - 0.15
    slope = [low + (high - low) * column / (room * 2 - 1) for column in range(room * 2)]
    roof = [max(0.0, min(math.log10(per_second), math.log10(bytes_per_second) + x) - bottom) for x in slope]
    placed: dict[tuple[int, int], tuple[str, str]] = {}
    for point, x in zip(points, every, strict=True):
        row = row_of(max(0.0, math.log10(point.per_second) - bottom), top - bottom, _HEIGHT)
        placed[row, round((x - low) / (high - low) * (room - 1))] = (point.mark, point.style)
    labels = [_with_unit(10**top), *[""] * (_HEIGHT - 2), _with_unit(10**bottom)]
    edge = max(map(len, labels))
    plot = [Text(f"{what} per second (log, log)", QUIET)]
    lines = line_plot([Curve(roof, QUIET)], top - bottom, room * 2, room, _HEIGHT)
    for row, (label, line) in enumerate(zip(labels, lines, strict=True)):
        cells = [placed.get((row, column), (character, QUIET)) for column, character in enumerate(line.plain)]
        plot.append(Text.assemble((f"{label:>{edge}} {'┤' if label else '│'}", QUIET), *cells))
        plot[-1].rstrip()
    scale = f"{10**low:.1f}{f'{what} per byte':^{max(0, room - 8)}}{10**high:>5,.0f}"
    plot.append(Text(" " * (edge + 2) + scale, QUIET))
    named = {point.mark: Text.assemble((point.mark, point.style), f" {point.name}") for point in points}
    return [*plot, Text(" " * (edge + 2)).append_text(Text("   ").join(named.values()))]


def _with_unit(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= limit:
            return f"{rate(value / limit)} {unit}"
    return f"{value:.0f}"
