"""The paged cache: blocks taken one at a time from a common pool, shared where contents are the same.

A sequence owns as many blocks as its tokens take, so less than one block per sequence is reserved and not filled, and
the blocks of one sequence lie anywhere (PagedAttention, Kwon et al., 2023). `fork`, `snapshot` and `restore` copy a
table and no block. Copy-on-write: the first sequence that writes into a shared block gets a copy of that block.
`reserve` decides that, and returns the copy that the engine performs before the write.

Only a sequence's last block can be both shared and written, so one `reserve` copies one block at most.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from forge.cache.block_pool import BlockPool, BlockTable, blocks_for
from forge.cache.kv_cache import NO_HIT, CacheStats, Hit, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.trace.records import BlockMap, BlockSplit, CacheEvent


class PagedKvCache(KvCache):
    """A cache whose sequences grow block by block and share blocks after a fork or a snapshot.

    Holds a `BlockPool` and one `BlockTable` per sequence and per snapshot. The tables are the truth; counts, free list
    and statistics follow from them. Promises that a block with more than one reference is never written, and that the
    tables in use never name a free block. No block is cacheable here, and none cached: `PrefixKvCache` adds an index.
    """

    kind = "paged"
    _tables: dict[int | Snapshot, BlockTable]

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.pool = BlockPool(num_blocks)
        self.max_sequence_length = num_blocks * block_size
        self._events: list[CacheEvent] = []
        self._counts = {"splits": 0}
        """Counters in `stats`, since the cache was made."""
        self._filled, self._recounts_filled = 0, False
        """Computed slots, shared ones counted once. A commit adds to them; after any other change `stats` recounts."""

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

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Reserve `num_tokens` more slots; return the copy to perform before they are written, if there is one."""
        table, pool = self._tables[seq_id], self.pool
        blocks, room = table.blocks, len(table.blocks) * self.block_size - table.reserved
        if 0 < num_tokens <= room and pool.reference_counts[blocks[-1]] == 1 and blocks[-1] not in pool.cacheable:
            # Nearly every decode step: a slot of a block that is the sequence's own. (Cacheable: in a prefix cache.)
            table.reserved += num_tokens
            return ()
        # 0 tokens: async scheduling has reserved the slot a step ahead. Nothing will be written, so nothing is copied.
        return self.grow(seq_id, table, num_tokens) if num_tokens else ()

    def grow(self, seq_id: int, table: BlockTable, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Reserve slots where that takes blocks, or where the last block may have to be copied."""
        needed, available = self.blocks_needed(seq_id, num_tokens), self.num_available
        if needed > available:
            raise OutOfBlocks(needed, available)
        copies = self._copy_on_write(seq_id, table, needed) if table.reserved % self.block_size else ()
        reserved = table.reserved + num_tokens
        taken = self._allocate(blocks_for(reserved, self.block_size) - len(table.blocks))
        table.blocks, table.reserved = table.blocks + taken, reserved
        return copies

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Return the number of new blocks, and one more if the last block is shared and would be written."""
        table = self._tables[seq_id]
        room = len(table.blocks) * self.block_size - table.reserved  # in the last block
        must_copy = room and num_tokens and self.pool.reference_counts[table.blocks[-1]] > 1
        return blocks_for(num_tokens - room, self.block_size) + (1 if must_copy else 0)

    def _allocate(self, number: int) -> tuple[int, ...]:
        """Take blocks; the caller has checked that enough are available."""
        return self.pool.allocate(number)

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Count these tokens, which have been written into the next reserved slots, as computed."""
        table = self._tables[seq_id]
        computed = table.computed + len(token_ids)
        assert computed <= table.reserved, "committed more tokens than were reserved"
        table.computed = computed
        self._filled += len(token_ids)

    def truncate(self, seq_id: int, length: int) -> None:
        table = self._tables[seq_id]
        self._recounts_filled |= length < table.computed
        num_left = blocks_for(length, self.block_size)
        table.blocks, dropped = table.blocks[:num_left], table.blocks[num_left:]
        table.reserved, table.computed = min(table.reserved, length), min(table.computed, length)
        for block in reversed(dropped):
            self._release_block(block)

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
        if self._recounts_filled:
            self._filled, self._recounts_filled = self._count_filled(), False
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
        references = Counter(block for table in self._tables.values() for block in table.blocks)
        places: dict[int, int] = {}
        for table in self._tables.values():
            assert 0 <= table.computed <= table.reserved, f"lengths out of order: {table}"
            assert len(table.blocks) == blocks_for(table.reserved, self.block_size), f"blocks and slots differ: {table}"
            for place, block in enumerate(table.blocks):
                assert places.setdefault(block, place) == place, f"block {block} is in two places: {table}"
        for block, counted in enumerate(self.pool.reference_counts):
            referenced = references[block]
            assert counted == referenced, f"block {block} is in {referenced} tables and has {counted} references"
        assert self._recounts_filled or self._filled == self._count_filled(), "the filled slots do not add up"

    def _copy_on_write(self, seq_id: int, table: BlockTable, needed: int) -> tuple[BlockCopy, ...]:
        """Give the sequence a last block that it may write: with no other reference, and not cacheable.

        needed: the blocks that the reservation takes, this copy included. The prefix cache alone reads it.
        """
        last, references = table.blocks[-1], self.pool.reference_counts[table.blocks[-1]]
        if references == 1 and last not in self.pool.cacheable:
            return ()
        (copy,) = self._allocate(1)
        self._release_block(last)
        table.blocks = (*table.blocks[:-1], copy)
        self._counts["splits"] += 1
        self._events.append(BlockSplit(seq_id, last, copy, references))
        return (BlockCopy(last, copy),)

    def _copied(self, table: BlockTable) -> tuple[BlockTable, tuple[BlockCopy, ...]]:
        """Share the blocks of the computed tokens: no block is copied before one is written."""
        part = table.computed_part(self.block_size)
        self._attach(part)
        return part, ()

    def _attach(self, table: BlockTable) -> None:
        """Count the references of a new table over blocks that are referenced or cached already."""
        self._recounts_filled = True
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

    def _release_block(self, block: int) -> None:
        """Count one table fewer that has this block."""
        self._recounts_filled = True
        self.pool.decref(block)

    def _rebuild(self) -> None:
        """Recompute everything that follows from the tables."""
        self.pool.recount(table.blocks for table in self._tables.values())
        self._recounts_filled = True

    def _count_filled(self) -> int:
        """Return the number of slots that some table has as computed.

        A table has full blocks, then one that is partly filled, then empty ones. A block is as full as its fullest
        table says: one that is seen behind the full ones less often than it is referenced is full in another table.
        """
        size, counts = self.block_size, self.pool.reference_counts
        filled_of: defaultdict[int, list[int]] = defaultdict(list)
        for table in self._tables.values():
            num_full, filled = divmod(table.computed, size)
            for block in table.blocks[num_full:]:
                filled_of[block].append(filled)
                filled = 0  # in the blocks behind the first
        empty = sum(size - max(filled) for block, filled in filled_of.items() if len(filled) == counts[block])
        return (self.pool.num_blocks - self.num_available) * size - empty
