"""The chart that every generation has: one row per forward pass, with its phase, the tokens it computed and its time.

prefill  4 tok  ███▌ 1.9
decode   1 tok  ▉ 0.6
"""

from collections.abc import Callable, Sequence

from rich.text import Text

from forge.views.charts import bar, sparkline
from forge.views.formatting import count, ms
from forge.views.palette import ACCENT, QUIET
from forge.views.summary import Forward

MAX_BAR = 48
_OUTLIER = 6.0
"""A forward that takes longer than this many of the decodes' ninth decile is cut at the edge of the chart."""

Note = Callable[[Forward], str]
"""What is said after a row's time, or an empty string."""


def chart_scale(forwards: Sequence[Forward]) -> float:
    """The time at which a bar reaches the edge: the longest, unless a long prefill or a spike flattens the rest."""
    longest = max((forward.ms for forward in forwards), default=0.0)
    decodes = sorted(forward.ms for forward in forwards if forward.phase == "decode")
    return min(longest, decodes[(len(decodes) - 1) * 9 // 10] * _OUTLIER) if decodes else longest


def chart_rows(forwards: Sequence[Forward], scale: float, width: int, note: Note | None = None) -> list[Text]:
    """One line per forward, none wider than `width`."""
    digits = max((len(count(forward.tokens)) for forward in forwards), default=1)
    notes = [note(forward) if note else "" for forward in forwards]
    beside = 9 + digits + 4 + 2 + 9 + max((len(text) + 3 for text in notes if text), default=0)
    bar_width = max(4, min(MAX_BAR, width - beside))
    return [
        _row(forward, scale, digits, bar_width, text, pad=any(notes))
        for forward, text in zip(forwards, notes, strict=True)
    ]


def compact_chart(forwards: Sequence[Forward], width: int, head: int = 4, last: int = 3) -> list[Text]:
    """The first and the last rows, and between them one line that draws all the rows left out."""
    scale = chart_scale(forwards)
    if len(forwards) <= head + last + 2:
        return chart_rows(forwards, scale, width)
    rows = chart_rows([*forwards[:head], *forwards[-last:]], scale, width)
    return [*rows[:head], _elided(forwards[head:-last], scale, width), *rows[head:]]


def spaced(forwards: Sequence[Forward], most: int) -> list[Forward]:
    """At most `most` forwards at even distances, the first and the last among them."""
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
