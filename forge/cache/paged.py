"""The paged cache: blocks taken one at a time from a common pool, shared where contents are the same.

A sequence owns as many blocks as its tokens take, so less than one block per sequence is reserved and not filled, and
the blocks of one sequence lie anywhere (PagedAttention, Kwon et al., 2023). `fork`, `snapshot` and `restore`, of
`table_cache`, copy a table and no block. Copy-on-write: the first sequence that writes into a shared block gets a copy
of that block. The decision, and the copy that the engine performs before the write, are `reserve`'s.

Only a sequence's last block can be both shared and written, so one `reserve` copies one block at most.
"""

from collections.abc import Sequence

from forge.cache.block_pool import BlockPool, BlockTable, blocks_for
from forge.cache.kv_cache import NO_HIT, CacheStats, Hit, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.cache.table_cache import TableCache
from forge.trace.records import BlockMap, BlockSplit, CacheEvent


class PagedKvCache(TableCache[BlockTable]):
    """A cache whose sequences grow block by block and share blocks after a fork or a snapshot.

    Holds a `BlockPool` and one `BlockTable` per sequence and per snapshot. The tables are the truth; counts, free list
    and statistics follow from them. Promises that a block with more than one reference is never written, and that the
    tables in use never name a free block. What speaks of an index is for `PrefixKvCache`, which derives from it: here
    no block is cacheable or cached.
    """

    kind = "paged"

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(block_size)
        self.pool = BlockPool(num_blocks)
        self.max_sequence_length = num_blocks * block_size
        self._events: list[CacheEvent] = []
        self._counts = {"splits": 0}
        """What `stats` tells that is counted from the beginning."""
        self._filled: int | None = 0
        """Slots with something in them, shared ones counted once. Commits add to it; None: `stats` counts them."""

    @property
    def num_available(self) -> int:
        return len(self.pool.free) + len(self.pool.cached)

    def lookup(self, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> Hit:
        return NO_HIT

    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        return blocks_for(length, self.block_size)

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        self._tables[seq_id] = BlockTable()
        return 0

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Return the number of new blocks, and one more if the last block is shared and would be written."""
        table = self._tables[seq_id]
        reserved, blocks = table.reserved, table.blocks
        grown = blocks_for(reserved + num_tokens, self.block_size) - len(blocks)
        if reserved % self.block_size and num_tokens and self.pool.reference_counts[blocks[-1]] > 1:
            return grown + 1
        return grown

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        table, pool = self._tables[seq_id], self.pool
        if not num_tokens:
            return ()
        end, blocks = table.reserved + num_tokens, table.blocks
        in_last_block = table.reserved % self.block_size and end <= len(blocks) * self.block_size
        if in_last_block and pool.reference_counts[blocks[-1]] == 1 and blocks[-1] not in pool.cacheable:
            table.reserved = end  # nearly every decode step: a slot of a block that is the sequence's own
            return ()
        return self.grow(seq_id, table, num_tokens)

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        table = self._tables[seq_id]
        computed = table.computed + len(token_ids)
        assert computed <= table.reserved, "committed more tokens than were reserved"
        table.computed = computed
        if self._filled is not None:
            self._filled += len(token_ids)

    def truncate(self, seq_id: int, length: int) -> None:
        table = self._tables[seq_id]
        if length >= table.reserved:
            return
        if length < table.computed:
            self._filled = None
        num_left = blocks_for(length, self.block_size)
        dropped = table.blocks[num_left:]
        table.blocks, table.reserved, table.computed = table.blocks[:num_left], length, min(table.computed, length)
        for block in reversed(dropped):
            self._release_block(block)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        return self._tables[seq_id].blocks

    def reserved_length(self, seq_id: int) -> int:
        return self._tables[seq_id].reserved

    def computed_length(self, seq_id: int) -> int:
        return self._tables[seq_id].computed

    def take_events(self) -> tuple[CacheEvent, ...]:
        events, self._events = self._events, []
        return tuple(events)

    def stats(self) -> CacheStats:
        if self._filled is None:
            self._filled = self._count_filled()
        pool = self.pool
        used = pool.num_blocks - len(pool.free) - len(pool.cached)
        return CacheStats(
            num_blocks=pool.num_blocks,
            used_blocks=used,
            tokens_held=self._filled,
            cached_blocks=len(pool.cached),
            blocks_saved=pool.num_references - used,
            **self._counts,
        )

    def block_map(self) -> BlockMap:
        counts, cached = self.pool.reference_counts, self.pool.cached
        return BlockMap(self.block_size, self._table_records(), tuple(counts), tuple(cached))

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        references = [0] * self.pool.num_blocks
        places: dict[int, int] = {}
        for table in self._all_tables():
            assert 0 <= table.computed <= table.reserved, f"lengths out of order: {table}"
            assert len(table.blocks) == blocks_for(table.reserved, self.block_size), f"blocks and slots differ: {table}"
            for place, block in enumerate(table.blocks):
                references[block] += 1
                assert places.setdefault(block, place) == place, f"block {block} is in two places: {table}"
        for block, (counted, referenced) in enumerate(zip(self.pool.reference_counts, references, strict=True)):
            assert counted == referenced, f"block {block} is in {referenced} tables and has {counted} references"
        assert self._filled in (None, self._count_filled()), "the filled slots do not add up"

    def grow(self, seq_id: int, table: BlockTable, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Reserve where blocks are needed, or where the last block is shared or indexed."""
        needed, available = self.blocks_needed(seq_id, num_tokens), self.num_available
        if needed > available:
            raise OutOfBlocks(needed, available)
        copies = self._copy_on_write(seq_id, table, needed) if table.reserved % self.block_size else ()
        reserved = table.reserved + num_tokens
        taken = self._allocate(blocks_for(reserved, self.block_size) - len(table.blocks))
        table.blocks, table.reserved = table.blocks + taken, reserved
        return copies

    def _copy_on_write(self, seq_id: int, table: BlockTable, needed: int) -> tuple[BlockCopy, ...]:
        """Give the sequence a last block that it may write: with no other reference, and in no index."""
        last, pool = table.blocks[-1], self.pool
        references = pool.reference_counts[last]
        if references == 1 and last not in pool.cacheable:
            return ()
        if references == 1 and len(pool.free) <= needed:
            self._drop_from_index(last)  # no free block is left for a copy: what is cached behind it is lost
            return ()
        # With one reference the old block becomes a cached one, so the copy does not change `num_available`.
        (copy,) = self._allocate(1)
        self._release_block(last)
        table.blocks = (*table.blocks[:-1], copy)
        self._counts["splits"] += 1
        self._filled = None
        self._events.append(BlockSplit(seq_id, last, copy, references))
        return (BlockCopy(last, copy),)

    def _copied(self, table: BlockTable) -> tuple[BlockTable, tuple[BlockCopy, ...]]:
        """Share the blocks of the computed tokens: no block is copied before one is written."""
        part = table.computed_part(self.block_size)
        self._attach(part)
        return part, ()

    def _attach(self, table: BlockTable) -> None:
        """Count the references of a new table over blocks that are referenced or cached already."""
        self._filled = None
        for block in table.blocks:
            self.pool.incref(block)

    def release_order(self, blocks: tuple[int, ...]) -> Sequence[int]:
        """Return the order in which a sequence that ends releases its blocks: the last one first.

        So the first is the next to be allocated, and a prefix cache evicts what stands behind a block before it. An
        exercise replaces this.
        """
        return blocks[::-1]

    def release_table(self, table: BlockTable) -> None:
        """Release the blocks of a sequence that ends, or of a snapshot."""
        for block in self.release_order(table.blocks):
            self._release_block(block)

    def _detach(self, table: BlockTable) -> None:
        self._filled = None
        self.release_table(table)

    def _allocate(self, number: int) -> tuple[int, ...]:
        """Take blocks; the caller has checked that enough are available."""
        return self.pool.allocate(number)

    def _release_block(self, block: int) -> None:
        """Count one table fewer that has this block."""
        self.pool.decref(block)

    def _drop_from_index(self, block: int) -> None:
        """Remove a block from the prefix index. Called before the block is overwritten, and when it is evicted."""

    def _rebuild(self) -> None:
        """Recompute everything that follows from the tables."""
        self.pool.recount(table.blocks for table in self._all_tables())
        self._filled = None

    def _count_filled(self) -> int:
        """Return the number of slots that some table has as computed.

        A table has full blocks, then one that is partly filled, then empty ones. A block is as full as its fullest
        table says: one that is seen behind the full ones less often than it is referenced is full in another table.
        """
        partial: dict[int, tuple[int, int]] = {}
        for table in self._all_tables():
            full, filled_here = divmod(table.computed, self.block_size)
            for block in table.blocks[full:]:
                seen, most = partial.get(block, (0, 0))
                partial[block] = seen + 1, max(most, filled_here)
                filled_here = 0  # of the blocks behind the first
        counts, size = self.pool.reference_counts, self.block_size
        empty = sum(size - most for block, (seen, most) in partial.items() if seen == counts[block])
        return (self.pool.num_blocks - self.num_available) * size - empty
