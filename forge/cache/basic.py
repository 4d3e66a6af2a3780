"""The basic cache: one contiguous run of blocks per sequence, as long as the longest sequence may become.

This is the KV cache of every first implementation. A sequence gets room for `max_model_len` tokens when it begins,
whether it will use them or not, and no table is needed to find position p: it is p slots after the start of the run.
What that costs (a pool full of reserved and empty slots) is where the chapter on paging begins.

Runs are blocks here only because all kinds share one storage. A run has one owner, so `fork` and `snapshot` copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forge.cache.block_pool import blocks_for
from forge.cache.kv_cache import CacheStats, Hit, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.trace.records import BlockMap


@dataclass
class _Run:
    """A contiguous run of blocks and how many of its token slots are in use."""

    blocks: range
    reserved: int = 0
    computed: int = 0


class BasicKvCache(KvCache):
    """A cache that reserves room for the longest sequence when a sequence begins.

    Holds one run per sequence and per snapshot; a run that neither has is free. Promises that a sequence which has
    begun never lacks a block, and that its blocks are contiguous.
    """

    kind = "basic"
    _tables: dict[int | Snapshot, _Run]

    def __init__(self, num_runs: int, max_model_len: int, block_size: int):
        """Make room for `num_runs` sequences (or snapshots) of up to `max_model_len` tokens each."""
        self.blocks_per_run = blocks_for(max_model_len, block_size)
        super().__init__(num_runs * self.blocks_per_run, block_size)
        self.max_model_len = self.max_sequence_length = max_model_len

    @property
    def num_available(self) -> int:
        return self.num_blocks - len(self._tables) * self.blocks_per_run

    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        """Return the blocks of a whole run, whatever the length."""
        return self.blocks_per_run

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        self._tables[seq_id] = self._free_run()
        return 0

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Return 0: the sequence took its whole run when it began."""
        self._tables[seq_id]  # KeyError for an unknown sequence
        return 0

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        run = self._tables[seq_id]
        if run.reserved + num_tokens > self.max_model_len:
            beyond = blocks_for(run.reserved + num_tokens, self.block_size) - self.blocks_per_run
            raise OutOfBlocks(needed=max(1, beyond), free=0)
        run.reserved += num_tokens
        return ()

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        run = self._tables[seq_id]
        assert run.computed + len(token_ids) <= run.reserved, "committed more tokens than were reserved"
        run.computed += len(token_ids)

    def truncate(self, seq_id: int, length: int) -> None:
        run = self._tables[seq_id]
        run.reserved, run.computed = min(run.reserved, length), min(run.computed, length)

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        run = self._tables[seq_id]
        return tuple(run.blocks[: blocks_for(run.reserved, self.block_size)])

    def reserved_length(self, seq_id: int) -> int:
        return self._tables[seq_id].reserved

    def computed_length(self, seq_id: int) -> int:
        return self._tables[seq_id].computed

    def stats(self) -> CacheStats:
        used = self.num_blocks - self.num_available
        return CacheStats(self.num_blocks, used, tokens_held=sum(run.computed for run in self._tables.values()))

    def block_map(self) -> BlockMap:
        """Return the block map. All blocks of a run belong to its owner, also those that `block_table` does not reach
        yet."""
        used = {block for run in self._tables.values() for block in run.blocks}
        counts = tuple(int(block in used) for block in range(self.num_blocks))
        return BlockMap(self.block_size, self._table_records(), counts, ())

    def check_invariants(self) -> None:
        runs = self._tables.values()
        assert len({run.blocks for run in runs}) == len(runs), "a run has two owners"
        for run in runs:
            assert run.blocks.start % self.blocks_per_run == 0 <= run.blocks.start < self.num_blocks, f"no run: {run}"
            assert 0 <= run.computed <= run.reserved <= self.max_model_len, f"lengths out of order: {run}"

    def _free_run(self, length: int = 0) -> _Run:
        """Return the lowest free run, with its first `length` slots computed. It is taken once it has an owner."""
        used = {run.blocks.start for run in self._tables.values()}
        for start in range(0, self.num_blocks, self.blocks_per_run):
            if start not in used:
                return _Run(range(start, start + self.blocks_per_run), length, length)
        raise OutOfBlocks(needed=self.blocks_per_run, free=0)

    def _copied(self, source: _Run) -> tuple[_Run, tuple[BlockCopy, ...]]:
        """Return a free run for the computed tokens of another, and the copies that fill it."""
        run = self._free_run(source.computed)
        filled = source.blocks[: blocks_for(source.computed, self.block_size)]
        return run, tuple(map(BlockCopy, filled, run.blocks))
