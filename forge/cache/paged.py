"""The paged cache: blocks taken one at a time from a common pool, shared where contents are the same.

A sequence owns as many blocks as its tokens take, so that less than one block per sequence is reserved and not filled,
and blocks of one sequence lie anywhere (PagedAttention, Kwon et al., 2023). `fork`, `snapshot` and `restore` copy a
table and no block; whoever then writes into a block that others have too gets a copy of that one block first. That
decision, and the copy that has to be made before the write, are `reserve`'s.

Only a sequence's last block can be both shared and written, so one `reserve` splits one block at most. Slots past what
the others have computed may be on their way to being written when a block becomes shared: nobody reads them there.

The tables are the truth; counts, free list and statistics follow from them. A table changes in one assignment, and an
operation that was interrupted (Ctrl-C) halfway leaves a mark, upon which the next one counts everything anew.
"""

from collections.abc import Sequence
from itertools import chain, count

from forge.cache.block_pool import BlockPool
from forge.cache.block_table import BlockTable, blocks_for
from forge.cache.kv_cache import CacheStats, Hit, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.trace.records import BlockMap, BlockSplit, CacheEvent, TableRecord


class PagedKvCache(KvCache):
    kind = "paged"

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._snapshots: dict[int, BlockTable] = {}
        self._snapshot_ids = count()
        self._events: list[CacheEvent] = []
        self._splits = 0
        self._filled = 0
        """Slots with something in them, shared ones counted once; commits keep it up to date."""
        self._filled_is_known = True
        """False once something other than a commit has changed what is filled: then the next who asks counts."""
        self._unsettled = False
        """An operation has begun to change counts and not finished."""

    @property
    def max_sequence_length(self) -> int:
        return self.pool.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        self._settle()
        return self.pool.num_free + len(self.pool.cached)

    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        return blocks_for(length, self.block_size)

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        self._tables[seq_id] = BlockTable()
        return 0

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """New blocks, and one more if the last block is shared and would be written."""
        if self._unsettled:
            self._settle()
        table = self._tables[seq_id]
        reserved, blocks = table.reserved, table.blocks
        grown = -(-(reserved + num_tokens) // self.block_size) - len(blocks)
        if reserved % self.block_size and num_tokens and self.pool.reference_counts[blocks[-1]] > 1:
            return grown + 1
        return grown

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        if self._unsettled:
            self._settle()
        table, pool = self._tables[seq_id], self.pool
        end, blocks = table.reserved + num_tokens, table.blocks
        fits = num_tokens and table.reserved % self.block_size and end <= len(blocks) * self.block_size
        if fits and pool.reference_counts[blocks[-1]] == 1 and blocks[-1] not in pool.kept:
            table.reserved = end  # nearly every decode step: a slot of a block that is the sequence's own
            return ()
        return self._grow(seq_id, table, num_tokens) if num_tokens else ()

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        table = self._tables[seq_id]
        computed = table.computed + len(token_ids)
        assert computed <= table.reserved, "committed more tokens than were reserved"
        table.computed, self._filled = computed, self._filled + len(token_ids)  # one line: both or neither

    def truncate(self, seq_id: int, length: int) -> None:
        self._settle()
        table = self._tables[seq_id]
        if length >= table.reserved:
            return
        kept = blocks_for(length, self.block_size)
        self._shorten(table, table.blocks[:kept], length, table.blocks[kept:])

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        assert child not in self._tables, f"sequence {child} is already there"
        self._share(self._tables[parent], self._tables, child)
        return ()

    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        table = self._tables[seq_id]
        snapshot = Snapshot(next(self._snapshot_ids), table.computed)
        self._share(table, self._snapshots, snapshot.snapshot_id)
        return snapshot, ()

    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        self._share(self._snapshots[snapshot.snapshot_id], self._tables, seq_id)
        return ()

    def release(self, snapshot: Snapshot) -> None:
        self._drop(self._snapshots, snapshot.snapshot_id)

    def remove(self, seq_id: int) -> None:
        self._drop(self._tables, seq_id)

    def clear(self) -> None:
        self._unsettled = True  # what is left when the tables are gone is counted anew
        self._tables = {}
        self._settle()

    def rename(self, seq_id: int, new_id: int) -> None:
        assert new_id not in self._tables, f"sequence {new_id} is already there"
        self._tables[new_id] = self._tables.pop(seq_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        return self._tables[seq_id].blocks

    def reserved_length(self, seq_id: int) -> int:
        return self._tables[seq_id].reserved

    def computed_length(self, seq_id: int) -> int:
        return self._tables[seq_id].computed

    def take_events(self) -> tuple[CacheEvent, ...]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return tuple(events)

    def stats(self) -> CacheStats:
        self._settle()
        if not self._filled_is_known:
            self._filled = self._count_filled()
            self._filled_is_known = True
        used = self.pool.num_used
        return CacheStats(
            num_blocks=self.pool.num_blocks,
            used_blocks=used,
            tokens_held=self._filled,
            cached_blocks=len(self.pool.cached),
            slots_reserved=used * self.block_size,
            slots_filled=self._filled,
            blocks_saved=self.pool.num_references - used,
            splits=self._splits,
        )

    def block_map(self) -> BlockMap:
        self._settle()
        return BlockMap(
            self.block_size,
            tuple(
                TableRecord(owner, is_snapshot, table.blocks, table.computed, table.reserved)
                for owners, is_snapshot in ((self._tables, False), (self._snapshots, True))
                for owner, table in owners.items()
            ),
            tuple(self.pool.reference_counts),
            tuple(self.pool.cached),
        )

    def check_invariants(self) -> None:
        self._settle()
        self.pool.check_invariants()
        references = [0] * self.pool.num_blocks
        places: dict[int, int] = {}
        for table in self._all_tables():
            assert 0 <= table.computed <= table.reserved, f"lengths out of order: {table}"
            assert len(table.blocks) == blocks_for(table.reserved, self.block_size), f"blocks and slots differ: {table}"
            for place, block in enumerate(table.blocks):
                references[block] += 1
                assert places.setdefault(block, place) == place, f"block {block} is in two places: {table}"
        for block, (counted, found) in enumerate(zip(self.pool.reference_counts, references, strict=True)):
            assert counted == found, f"block {block} is in {found} tables and has {counted} references"
        assert not self._filled_is_known or self._filled == self._count_filled(), "the filled slots do not add up"

    def _grow(self, seq_id: int, table: BlockTable, num_tokens: int) -> tuple[BlockCopy, ...]:
        """`reserve` where blocks are needed, or the last block is not simply the sequence's own."""
        needed, free = self.blocks_needed(seq_id, num_tokens), self.num_available
        if needed > free:
            raise OutOfBlocks(needed, free)
        blocks, copies = table.blocks, ()
        self._unsettled = True
        references = 0
        if table.reserved % self.block_size:
            references = self.pool.reference_counts[blocks[-1]]
            if references == 1:
                self._forget(blocks[-1])
        taken = self._allocate(needed)
        if references > 1:
            copies = (BlockCopy(blocks[-1], taken[0]),)
            self.pool.decref(blocks[-1])
            blocks = blocks[:-1]
            self._splits += 1
            self._filled_is_known = False
        table.blocks, table.reserved = blocks + taken, table.reserved + num_tokens
        self._unsettled = False
        self._events += [BlockSplit(seq_id, copy.source, copy.destination, references) for copy in copies]
        return copies

    def _shorten(self, table: BlockTable, blocks: tuple[int, ...], length: int, dropped: tuple[int, ...]) -> None:
        self._unsettled = True
        if length < table.computed:
            self._filled_is_known = False
        table.blocks, table.reserved, table.computed = blocks, length, min(table.computed, length)
        for block in reversed(dropped):
            self._let_go(block)
        self._unsettled = False

    def _share(self, source: BlockTable, owners: dict[int, BlockTable], owner: int) -> None:
        """Give `owner` a table of what `source` has computed."""
        self._settle()
        table = source.computed_part(self.block_size)
        self._begin(table, owners, owner)

    def _begin(self, table: BlockTable, owners: dict[int, BlockTable], owner: int) -> None:
        """Enter a table over blocks that others have, or that are cached."""
        self._unsettled = True
        self._filled_is_known = False
        for block in table.blocks:
            self.pool.incref(block)
        owners[owner] = table
        self._unsettled = False

    def _drop(self, owners: dict[int, BlockTable], owner: int) -> None:
        """Strike a table out, the last block first: of those freed together the first is the next to be taken."""
        self._settle()
        table = owners[owner]
        self._unsettled = True
        self._filled_is_known = False
        del owners[owner]
        for block in reversed(table.blocks):
            self._let_go(block)
        self._unsettled = False

    def _allocate(self, number: int) -> tuple[int, ...]:
        """Take blocks, of which there are enough."""
        return self.pool.allocate(number)

    def _let_go(self, block: int) -> None:
        """A table no longer has this block."""
        self.pool.decref(block)

    def _forget(self, block: int) -> None:
        """This block is about to be written by its only owner."""

    def _settle(self) -> None:
        """Make good what an interrupted operation left."""
        if self._unsettled:
            self.pool.recount(table.blocks for table in self._all_tables())
            self._filled_is_known = False
            self._unsettled = False

    def _all_tables(self) -> chain[BlockTable]:
        return chain(self._tables.values(), self._snapshots.values())

    def _count_filled(self) -> int:
        """Slots that some table has as computed.

        A block is filled as far as the fullest of its tables says. Tables have their full blocks in front, so only
        those behind are looked at: a block that is seen there less often than it is referenced is full elsewhere.
        """
        partial: dict[int, tuple[int, int]] = {}
        for table in self._all_tables():
            full, filled = divmod(table.computed, self.block_size)
            for block in table.blocks[full:]:
                seen, most = partial.get(block, (0, 0))
                partial[block] = seen + 1, max(most, filled)
                filled = 0
        empty = sum(
            self.block_size - most
            for block, (seen, most) in partial.items()
            if seen == self.pool.reference_counts[block]
        )
        return self.pool.num_used * self.block_size - empty
