"""The rows of a comparison's table: which figures there are of two sides, and how each is shown."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from forge.views.figures import NOTHING, count, ms, rate, share, size, times
from forge.views.metrics import with_unit

if TYPE_CHECKING:
    from forge.views.cache_figures import CacheFigures
    from forge.views.comparison import Side


class Row(NamedTuple):
    name: str
    cells: tuple[str, ...]
    """One per side."""
    ratio: str = ""


def comparison_rows(sides: "Sequence[Side]") -> list[Row]:
    """The rows that these sides have something to say to."""
    caches = [side.cache for side in sides]
    several = any(side.others for side in sides)
    rows = [
        *(_many_prompts(sides) if several else _one_prompt(sides)),
        _row("all forwards", _milliseconds, [sum(side.result.forward_ms) for side in sides]),
        _row("tokens computed", count, [side.result.tokens_computed for side in sides]),
        _row("KV held", size, [side.result.kv_bytes_held for side in sides]),
    ]
    if any(cache and cache.most_bytes_reserved for cache in caches):
        rows += _blocks(caches)
    if any(cache and cache.kind == "prefix" for cache in caches):
        rows += _hits(caches, several)
    return rows


def _one_prompt(sides: "Sequence[Side]") -> list[Row]:
    results = [side.result for side in sides]
    return [
        _row("time to first token", _milliseconds, [run.time_to_first_token_ms for run in results]),
        _decode(sides),
        _row("last / second forward", times, [run.last_over_second for run in results]),
    ]


def _many_prompts(sides: "Sequence[Side]") -> list[Row]:
    return [
        _row("first token, median", _milliseconds, [side.time_to_first_token_ms for side in sides]),
        _decode(sides),
    ]


def _decode(sides: "Sequence[Side]") -> Row:
    """The one row with a ratio: decoding speed is the figure that people quote."""
    speeds = [side.result.decode_tokens_per_second for side in sides]
    row = _row("decode", lambda value: with_unit(rate(value), "tok/s"), speeds)
    return row._replace(ratio=times(speeds[1] / speeds[0])) if all(speeds) else row


def _blocks(caches: "Sequence[CacheFigures | None]") -> list[Row]:
    return [
        _row("KV reserved", size, [cache and cache.most_bytes_reserved for cache in caches]),
        _row("blocks used at once", count, [cache and cache.most_blocks for cache in caches]),
        _row("reserved and empty", share, [cache and cache.fragmentation for cache in caches]),
    ]


def _hits(caches: "Sequence[CacheFigures | None]", several: bool) -> list[Row]:
    rows = [_row("prompt tokens found", _hit_text, caches)]
    if several:
        rows.append(_row("blocks saved at once", count, [cache and cache.most_saved for cache in caches]))
    return rows


def _hit_text(cache: "CacheFigures") -> str:
    """`96 of 140 (68.6 %)`."""
    return f"{count(cache.tokens_cached)} of {count(cache.prompt_tokens)} ({share(cache.hit_rate)})"


def _milliseconds(value: float | None) -> str:
    return with_unit(ms(value), "ms")


def _row(name: str, show: Callable[[Any], str], values: Sequence[Any]) -> Row:
    return Row(name, tuple(NOTHING if value is None else show(value) for value in values))
