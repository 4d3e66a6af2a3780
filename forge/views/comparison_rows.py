"""The rows of a comparison's table: which figures there are of two sides."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from forge.trace.speculation_summary import draft_totals
from forge.views.screen import sides as side_by_side

if TYPE_CHECKING:
    from forge.views.comparison import Side


def comparison_table(sides: "Sequence[Side]") -> Table:
    """The figures of both sides, where at least one has them. Decoding alone has a ratio: people quote its speed."""
    facts = [_facts(side) for side in sides]
    left, right = (side.result.decode_tokens_per_second for side in sides)
    gains = {"decode": right / left} if left and right else {}
    return side_by_side([side.name for side in sides], facts, *_rows(sides, facts), gains=gains)


def _facts(side: "Side") -> dict[str, Any]:
    drafts = draft_totals(record.cycles for record in side.result.records)
    accepted, proposed = sum(draft.accepted for draft in drafts), sum(draft.proposed for draft in drafts)
    return {
        "result": side.result,
        "cache": side.cache,
        "first_ms": side.time_to_first_token_ms,
        "all_ms": sum(side.result.forward_ms),
        "forwards": len(side.result.records),
        "accepted": accepted / proposed if drafts else None,
        "drafts_ms": sum(draft.ms for draft in drafts) if drafts else None,
    }


def _rows(sides: "Sequence[Side]", facts: Sequence[dict[str, Any]]) -> Iterator[str]:
    several, caches = any(side.others for side in sides), [side.cache for side in sides]
    if several:
        yield "first token, median: {first_ms:ms ms}"
    else:
        yield "time to first token: {result.time_to_first_token_ms:ms ms}"
    yield "decode: {result.decode_tokens_per_second:rate tok/s}"
    if not several:
        yield "last / second forward: {result.last_over_second:times}"
    yield from ("all forwards: {all_ms:ms ms}", "forwards: {forwards:count}")
    if any(one["accepted"] is not None for one in facts):
        yield from ("guesses accepted: {accepted:percent}", "proposing them: {drafts_ms:ms ms}")
    yield from ("tokens computed: {result.tokens_computed:count}", "KV held: {result.kv_bytes_held:size}")
    if any(cache and cache.most_bytes_reserved for cache in caches):
        yield from ("KV reserved: {cache.most_bytes_reserved:size}", "blocks used at once: {cache.most_blocks:count}")
        yield "reserved and empty: {cache.internal_fragmentation:share}"
    if any(cache and cache.kind == "prefix" for cache in caches):
        yield "prompt tokens found: {cache.hits}"
        if several:
            yield "blocks saved at once: {cache.most_blocks_saved:count}"
