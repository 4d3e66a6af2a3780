"""The cache switched off: nothing survives a step, so every step computes the whole sequence again.

A null object: the engine never asks "is there a cache?". Attention still reads keys and values from storage, as with
every other kind; they stay there for the length of one step. So the results have the same bits with the cache off: the
arithmetic is the same, only nothing is kept.
"""

from collections.abc import Sequence

from forge.cache.kv_cache import CacheStats
from forge.cache.paged import PagedKvCache
from forge.trace.records import BlockMap


class OffKvCache(PagedKvCache):
    """A cache that holds blocks for one step only: `reserve` takes them from the pool, `commit` gives them all back.

    Holds what a paged cache does, while a step is in flight. Promises that nothing is ever computed, shared or kept.
    """

    kind = "off"
    persistent = False

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        assert len(token_ids) <= self.reserved_length(seq_id), "committed more tokens than were reserved"
        self.truncate(seq_id, 0)

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop everything, whatever the length: nothing is computed, so nothing stays."""
        super().truncate(seq_id, 0)

    def stats(self) -> CacheStats:
        return CacheStats(num_blocks=0, used_blocks=0, tokens_held=0)

    def block_map(self) -> BlockMap:
        """Return an empty map: what lies in the blocks means nothing once the step is over."""
        return BlockMap(self.block_size, tables=(), reference_counts=(), cached=())
