"""The rows of a comparison's table: which figures there are of two sides, and how each is shown."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from forge.trace.speculation_summary import draft_totals
from forge.views.curves import short_name
from forge.views.formatting import NOTHING, count, ms, percent, rate, share, size, times
from forge.views.metrics import with_unit
from forge.views.palette import QUIET, TITLE, sequence_style
from forge.views.terminal import new_table

if TYPE_CHECKING:
    from forge.views.cache_figures import CacheFigures
    from forge.views.comparison import Side


class Row(NamedTuple):
    """One line of a comparison: a figure on both sides and their ratio."""

    name: str
    cells: tuple[str, ...]
    """One per side."""
    ratio: str = ""


def two_sided_table(names: Sequence[str], rows: Sequence[Row]) -> Table:
    """The rows under the sides' names, each in its side's colour."""
    table = new_table()
    table.add_column("")
    for index, name in enumerate(names):
        style = sequence_style(index)
        table.add_column(Text(short_name(name), style), header_style=f"{TITLE} {style}", min_width=10)
    table.add_column("")
    for one in rows:
        table.add_row(Text(one.name, QUIET), *one.cells, one.ratio)
    return table


def comparison_rows(sides: "Sequence[Side]") -> list[Row]:
    """The rows that these sides have something to say to."""
    caches = [side.cache for side in sides]
    several = any(side.others for side in sides)
    rows = [
        *(_many_prompts(sides) if several else _one_prompt(sides)),
        row("all forwards", milliseconds, [sum(side.result.forward_ms) for side in sides]),
        row("forwards", count, [len(side.result.records) for side in sides]),
        *_speculation(sides),
        row("tokens computed", count, [side.result.tokens_computed for side in sides]),
        row("KV held", size, [side.result.kv_bytes_held for side in sides]),
    ]
    if any(cache and cache.most_bytes_reserved for cache in caches):
        rows += _blocks(caches)
    if any(cache and cache.kind == "prefix" for cache in caches):
        rows += _hits(caches, several)
    return rows


def _speculation(sides: "Sequence[Side]") -> list[Row]:
    """Acceptance and the time of the drafts, where a side has any."""
    drafts = [draft_totals(record.cycles for record in side.result.records) for side in sides]
    if not any(drafts):
        return []
    accepted = [
        sum(draft.accepted for draft in side) / sum(draft.proposed for draft in side) if side else None
        for side in drafts
    ]
    return [
        row("guesses accepted", percent, accepted),
        row("proposing them", milliseconds, [sum(draft.ms for draft in side) if side else None for side in drafts]),
    ]


def _one_prompt(sides: "Sequence[Side]") -> list[Row]:
    results = [side.result for side in sides]
    return [
        row("time to first token", milliseconds, [run.time_to_first_token_ms for run in results]),
        _decode(sides),
        row("last / second forward", times, [run.last_over_second for run in results]),
    ]


def _many_prompts(sides: "Sequence[Side]") -> list[Row]:
    return [
        row("first token, median", milliseconds, [side.time_to_first_token_ms for side in sides]),
        _decode(sides),
    ]


def _decode(sides: "Sequence[Side]") -> Row:
    """The one row with a ratio: decoding speed is the figure that people quote."""
    speeds = [side.result.decode_tokens_per_second for side in sides]
    decode = row("decode", lambda value: with_unit(rate(value), "tok/s"), speeds)
    left, right = speeds
    return decode._replace(ratio=times(right / left)) if left and right else decode


def _blocks(caches: "Sequence[CacheFigures | None]") -> list[Row]:
    return [
        row("KV reserved", size, [cache and cache.most_bytes_reserved for cache in caches]),
        row("blocks used at once", count, [cache and cache.most_blocks for cache in caches]),
        row("reserved and empty", share, [cache and cache.internal_fragmentation for cache in caches]),
    ]


def _hits(caches: "Sequence[CacheFigures | None]", several: bool) -> list[Row]:
    rows = [row("prompt tokens found", _hit_text, caches)]
    if several:
        rows.append(row("blocks saved at once", count, [cache and cache.most_blocks_saved for cache in caches]))
    return rows


def _hit_text(cache: "CacheFigures") -> str:
    """`96 of 140 (68.6 %)`."""
    return f"{count(cache.tokens_cached)} of {count(cache.prompt_tokens)} ({share(cache.hit_rate)})"


def milliseconds(value: float | None) -> str:
    return with_unit(ms(value), "ms")


def row(name: str, show: Callable[[Any], str], values: Sequence[Any]) -> Row:
    """A row of values, one per side; None is shown as nothing."""
    return Row(name, tuple(NOTHING if value is None else show(value) for value in values))
