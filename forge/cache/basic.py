"""The basic cache: one contiguous run of blocks per sequence, as long as the longest sequence may become.

This is the KV cache of every first implementation. A sequence gets room for `max_model_len` tokens when it begins,
whether it will use them or not, and no table is needed to find position p: it is p slots after the start of the run.
What that costs (a pool full of reserved and empty slots) is where the chapter on paging begins.

Runs are blocks here only because all kinds share one storage; they are handed out and taken back whole, never shared.
So `fork` and `snapshot` copy.

There is no list of free runs: a run is free when nobody holds it. Every operation is therefore one entry made or
dropped, and an interruption (Ctrl-C) finds the cache either before it or after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from forge.cache.kv_cache import CacheStats, Hit, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.trace.records import BlockMap, TableRecord


@dataclass
class _Run:
    """A contiguous run of blocks and how much of it is in use."""

    index: int
    """Which run: its first block is `index * blocks_per_run`."""
    reserved: int = 0
    computed: int = 0


class BasicKvCache(KvCache):
    kind = "basic"

    def __init__(self, num_runs: int, max_model_len: int, block_size: int):
        """Room for `num_runs` sequences (or snapshots) of up to `max_model_len` tokens each."""
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.blocks_per_run = -(-max_model_len // block_size)
        self.num_runs = num_runs
        self._sequences: dict[int, _Run] = {}
        self._snapshots: dict[int, _Run] = {}
        self._snapshot_ids = count()

    @property
    def num_blocks(self) -> int:
        return self.num_runs * self.blocks_per_run

    @property
    def max_sequence_length(self) -> int:
        return self.max_model_len

    @property
    def num_available(self) -> int:
        return self.num_blocks - len(self._runs_in_use()) * self.blocks_per_run

    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        """A whole run, whatever the length."""
        return self.blocks_per_run

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._sequences, f"sequence {seq_id} is already there"
        self._sequences[seq_id] = self._take_run()
        return 0

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """None: the run was taken whole when the sequence began."""
        self._sequences[seq_id]  # KeyError for an unknown sequence
        return 0

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        run = self._sequences[seq_id]
        if run.reserved + num_tokens > self.max_model_len:
            beyond = run.reserved + num_tokens - self.blocks_per_run * self.block_size
            raise OutOfBlocks(needed=max(1, -(-beyond // self.block_size)), free=0)
        run.reserved += num_tokens
        return ()

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        run = self._sequences[seq_id]
        assert run.computed + len(token_ids) <= run.reserved, "committed more tokens than were reserved"
        run.computed += len(token_ids)

    def truncate(self, seq_id: int, length: int) -> None:
        run = self._sequences[seq_id]
        run.computed = min(run.computed, length)  # before the other: computed never exceeds reserved
        run.reserved = min(run.reserved, length)

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        assert child not in self._sequences, f"sequence {child} is already there"
        source = self._sequences[parent]
        self._sequences[child] = self._take_run(source.computed)
        return self._copies(source, self._sequences[child])

    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        source = self._sequences[seq_id]
        kept = self._take_run(source.computed)
        snapshot = Snapshot(next(self._snapshot_ids), source.computed)
        self._snapshots[snapshot.snapshot_id] = kept
        return snapshot, self._copies(source, kept)

    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        assert seq_id not in self._sequences, f"sequence {seq_id} is already there"
        kept = self._snapshots[snapshot.snapshot_id]
        self._sequences[seq_id] = self._take_run(kept.computed)
        return self._copies(kept, self._sequences[seq_id])

    def release(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.snapshot_id]

    def remove(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    def clear(self) -> None:
        self._sequences = {}

    def rename(self, seq_id: int, new_id: int) -> None:
        assert new_id not in self._sequences, f"sequence {new_id} is already there"
        self._sequences[new_id] = self._sequences.pop(seq_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        run = self._sequences[seq_id]
        return tuple(self._blocks(run)[: -(-run.reserved // self.block_size)])

    def reserved_length(self, seq_id: int) -> int:
        return self._sequences[seq_id].reserved

    def computed_length(self, seq_id: int) -> int:
        return self._sequences[seq_id].computed

    def stats(self) -> CacheStats:
        runs = self._runs_in_use()
        used_blocks = len(runs) * self.blocks_per_run
        tokens_held = sum(run.computed for run in runs)
        return CacheStats(
            num_blocks=self.num_blocks,
            used_blocks=used_blocks,
            tokens_held=tokens_held,
            slots_reserved=used_blocks * self.block_size,
            slots_filled=tokens_held,
        )

    def block_map(self) -> BlockMap:
        """Every block of a run is its owner's, also those that the table does not reach yet."""
        counts = [0] * self.num_blocks
        tables = []
        for owners, is_snapshot in ((self._sequences, False), (self._snapshots, True)):
            for owner, run in owners.items():
                blocks = tuple(self._blocks(run))
                tables.append(TableRecord(owner, is_snapshot, blocks, run.computed, run.reserved))
                for block in blocks:
                    counts[block] = 1
        return BlockMap(self.block_size, tuple(tables), tuple(counts), cached=())

    def check_invariants(self) -> None:
        runs = self._runs_in_use()
        assert len({run.index for run in runs}) == len(runs), "a run has two owners"
        for run in runs:
            assert 0 <= run.index < self.num_runs, f"there is no such run: {run}"
            assert 0 <= run.computed <= run.reserved <= self.max_model_len, f"lengths out of order: {run}"

    def _runs_in_use(self) -> list[_Run]:
        return [*self._sequences.values(), *self._snapshots.values()]

    def _take_run(self, length: int = 0) -> _Run:
        """The lowest run that nobody holds; it is the caller's once it has an entry."""
        held = {run.index for run in self._runs_in_use()}
        index = next((index for index in range(self.num_runs) if index not in held), None)
        if index is None:
            raise OutOfBlocks(needed=self.blocks_per_run, free=0)
        return _Run(index, reserved=length, computed=length)

    def _blocks(self, run: _Run) -> range:
        first = run.index * self.blocks_per_run
        return range(first, first + self.blocks_per_run)

    def _copies(self, source: _Run, destination: _Run) -> tuple[BlockCopy, ...]:
        filled = -(-source.computed // self.block_size)
        pairs = zip(self._blocks(source)[:filled], self._blocks(destination)[:filled], strict=True)
        return tuple(BlockCopy(*pair) for pair in pairs)
