"""The cache switched off: nothing survives a step, so every step computes the whole sequence again.

A null object, so that no caller ever asks "is there a cache?". Attention still reads keys and values from storage, as
with every other kind; they live in the scratch range past the last block for the length of one step. That is why the
results have the same bits with the cache off: the arithmetic is the same, only the memory of it is missing.
"""

from collections.abc import Sequence

from forge.cache.kv_cache import CacheStats, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy


class OffKvCache(KvCache):
    """Hands out scratch blocks at `reserve` and takes them back at `commit`."""

    kind = "off"

    def __init__(self, first_scratch_block: int, num_scratch_blocks: int, block_size: int):
        """The scratch range is blocks `first_scratch_block` to `first_scratch_block + num_scratch_blocks` - 1."""
        self.block_size = block_size
        self._all_blocks = range(first_scratch_block, first_scratch_block + num_scratch_blocks)
        self._free = list(reversed(self._all_blocks))  # popped from the end: lowest block first
        self._tables: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        self._tables[seq_id] = []
        self._reserved[seq_id] = 0
        return 0

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        total = self._reserved[seq_id] + num_tokens
        return max(0, -(-total // self.block_size) - len(self._tables[seq_id]))

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        needed = self.blocks_needed(seq_id, num_tokens)
        if needed > len(self._free):
            raise OutOfBlocks(needed, len(self._free))
        self._tables[seq_id] += [self._free.pop() for _ in range(needed)]
        self._reserved[seq_id] += num_tokens
        return ()

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.truncate(seq_id, 0)

    def truncate(self, seq_id: int, length: int) -> None:
        self._free += reversed(self._tables[seq_id])
        self._tables[seq_id] = []
        self._reserved[seq_id] = 0

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        if parent not in self._tables:
            raise KeyError(parent)
        self.add(child, ())
        return ()

    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        if seq_id not in self._tables:
            raise KeyError(seq_id)
        return Snapshot(seq_id, 0), ()

    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        self.add(seq_id, ())
        return ()

    def release(self, snapshot: Snapshot) -> None:
        """A snapshot of nothing holds nothing."""

    def remove(self, seq_id: int) -> None:
        self.truncate(seq_id, 0)
        del self._tables[seq_id], self._reserved[seq_id]

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        return tuple(self._tables[seq_id])

    def reserved_length(self, seq_id: int) -> int:
        return self._reserved[seq_id]

    def computed_length(self, seq_id: int) -> int:
        if seq_id not in self._tables:
            raise KeyError(seq_id)
        return 0

    def stats(self) -> CacheStats:
        return CacheStats(num_blocks=0, used_blocks=0, tokens_held=0)

    def check_invariants(self) -> None:
        lent = [block for table in self._tables.values() for block in table]
        assert sorted(lent + self._free) == list(self._all_blocks), "scratch blocks lost or lent twice"
