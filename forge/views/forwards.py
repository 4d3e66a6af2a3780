"""The chart that every generation has: one row per forward pass, with its phase, the tokens it computed and its time.

prefill  4 tok  ███▌ 1.9
decode   1 tok  ▉ 0.6
"""

from collections.abc import Callable, Sequence
from statistics import median

from rich.text import Text

from forge.views.charts import Curve, bar, line_plot, row_of, sparkline
from forge.views.formatting import count, ms, plural
from forge.views.palette import ACCENT, QUIET, sequence_style
from forge.views.summary import Forward
from forge.views.text import short_name

MAX_BAR = 48
_FIRST, _LAST = 4, 3
"""Rows at either end of a compact chart."""
_CHART_OUTLIER = 6.0
"""A forward that takes longer than this many of the decodes' ninth decile is cut at the edge of the chart."""

Note = Callable[[Forward], str]
"""Returns the text after a row's time, or an empty string."""


def chart_scale(forwards: Sequence[Forward]) -> float:
    """Return the time at which a bar reaches the edge: the longest, unless a long prefill or a spike flattens the
    rest."""
    longest = max((forward.ms for forward in forwards), default=0.0)
    decodes = sorted(forward.ms for forward in forwards if forward.phase == "decode")
    return min(longest, decodes[(len(decodes) - 1) * 9 // 10] * _CHART_OUTLIER) if decodes else longest


def chart_rows(forwards: Sequence[Forward], scale: float, width: int, note: Note | None = None) -> list[Text]:
    """Return one line per forward, none wider than `width`."""
    digits = max((len(count(forward.tokens)) for forward in forwards), default=1)
    notes = [note(forward) if note else "" for forward in forwards]
    beside = 9 + digits + 4 + 2 + 9 + max((len(text) + 3 for text in notes if text), default=0)
    bar_width = max(4, min(MAX_BAR, width - beside))
    noted = zip(forwards, notes, strict=True)
    return [_row(forward, scale, digits, bar_width, text, pad=any(notes)) for forward, text in noted]


def compact_chart(forwards: Sequence[Forward], width: int) -> list[Text]:
    """Return the first and the last rows, and between them one line that draws all the rows left out."""
    scale = chart_scale(forwards)
    if len(forwards) <= _FIRST + _LAST + 2:
        return chart_rows(forwards, scale, width)
    rows = chart_rows([*forwards[:_FIRST], *forwards[-_LAST:]], scale, width)
    return [*rows[:_FIRST], _elided(forwards[_FIRST:-_LAST], scale, width), *rows[_FIRST:]]


def spaced(forwards: Sequence[Forward], most: int) -> list[Forward]:
    """Pick at most `most` forwards at even distances, the first and the last among them."""
    if len(forwards) <= most:
        return list(forwards)
    return [forwards[round(index * (len(forwards) - 1) / (most - 1))] for index in range(most)]


def _row(forward: Forward, scale: float, digits: int, bar_width: int, note: str, pad: bool) -> Text:
    drawn = bar(forward.ms, scale, bar_width)
    row = Text(no_wrap=True, overflow="ellipsis")
    row.append(f"{forward.phase:<8} ", QUIET if forward.phase == "decode" else "")
    row.append(f"{count(forward.tokens):>{digits}} tok  ", QUIET)
    row.append(drawn, ACCENT)
    row.append(f" {ms(forward.ms)}" if drawn else ms(forward.ms))
    if note:
        room = 9 + digits + 6 + bar_width + 8
        row.append(" " * (max(2, room - row.cell_len) if pad else 2))
        row.append(note, QUIET)
    return row


def _elided(forwards: Sequence[Forward], scale: float, width: int) -> Text:
    label = f"… {count(len(forwards))} more  "
    row = Text(label, QUIET, no_wrap=True, overflow="crop")
    row.append(sparkline([forward.ms for forward in forwards], scale, max(8, width - len(label) - 2)), ACCENT)
    return row


PLOT_HEIGHT = 6
_MAX_PLOT_WIDTH = 64
_PLOT_OUTLIER = 2.0
"""A forward that takes longer than this many of the ninth decile is cut off, so that the rest can be seen."""
_CLIMB = 1.25
"""A curve is said to climb if the last quarter's median is more than this many times the first quarter's."""


def curve_plot(names: Sequence[str], forwards: Sequence[Sequence[Forward]], num_points: int, width: int) -> list[Text]:
    """Plot all curves on one pair of axes, each with its name where it ends, so that colour is not needed to tell
    them."""
    scale, cut = _plot_scale(forwards)
    axis = max(len(ms(scale)), 2)
    ends = _names_at_ends(names, forwards, scale)
    room = max(10, min(_MAX_PLOT_WIDTH, width - axis - 3 - max((text.cell_len for text in ends.values()), default=0)))
    curves = [Curve([forward.ms for forward in side], sequence_style(index)) for index, side in enumerate(forwards)]
    ticks = [ms(scale), *[""] * (PLOT_HEIGHT - 2), "0"]
    plot = []
    lines = line_plot(curves, scale, num_points, room, PLOT_HEIGHT)
    for row, (mark, line) in enumerate(zip(ticks, lines, strict=True)):
        edge = (f"{mark:>{axis}} ┤" if mark else " " * axis + " │", QUIET)
        plot.append(Text.assemble(edge, line, ends.get(row, "")))
        plot[-1].rstrip()
    plot.append(Text(f"{'ms':>{axis}}  forward 1{num_points:>{max(1, room - 9)}}", QUIET))
    if cut:
        plot.append(Text(f"{'':{axis}}  {cut}", QUIET))
    return plot


def shape_sentence(forwards: Sequence[Forward]) -> str:
    """Return what a curve does, as measured, and why, from the tokens that its forwards computed. The prefill is left
    out."""
    later = forwards[1:]
    if len(later) < 2:
        return f"{plural(len(forwards), 'forward')}: too few to have a shape"
    most = max(forward.num_draft_tokens for forward in later)
    if most:
        return f"{plural(len(forwards), 'forward')}: up to {plural(most, 'draft token')} verified in each"
    quarter = max(1, len(later) // 4)
    before, after = (median(forward.ms for forward in part) for part in (later[:quarter], later[-quarter:]))
    climbs = after > before * _CLIMB
    if later[-1].tokens > later[0].tokens:
        work = "every forward recomputes the whole sequence"
        return f"climbs: {work}" if climbs else f"about flat, although {work}"
    computed = later[-1].tokens
    work = f"every forward computes {'one token' if computed == 1 else plural(computed, 'token')}"
    return f"climbs, although {work}: is the machine busy?" if climbs else f"flat: {work}"


def _names_at_ends(names: Sequence[str], forwards: Sequence[Sequence[Forward]], scale: float) -> dict[int, Text]:
    """Return row of the plot → the names of the curves that end there."""
    ends: dict[int, Text] = {}
    for index, (name, side) in enumerate(zip(names, forwards, strict=True)):
        if side:
            row = row_of(side[-1].ms, scale, PLOT_HEIGHT)
            ends.setdefault(row, Text()).append(f" {short_name(name)}", sequence_style(index))
    return ends


def _plot_scale(forwards: Sequence[Sequence[Forward]]) -> tuple[float, str]:
    """Return the top of the plot, and what it cuts off: outliers, such as a long prefill, that would flatten all the
    rest."""
    every = sorted(forward.ms for side in forwards for forward in side)
    if not every:
        return 0.0, ""
    usual = every[(len(every) - 1) * 9 // 10]  # a spike is not among nine in ten; a climbing curve's end is near it
    if every[-1] <= usual * _PLOT_OUTLIER:
        return every[-1], ""
    scale = max(value for value in every if value <= usual * _PLOT_OUTLIER)
    cut = sum(value > scale for value in every)
    return scale, f"{plural(cut, 'forward')} cut off, the longest {ms(every[-1])} ms"
