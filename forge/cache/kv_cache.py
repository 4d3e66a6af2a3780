"""The policy of the KV cache: which block belongs to which sequence, what is shared, what is evicted.

A `KvCache` holds no arrays (see `kv_storage`) and runs no model, so every rule in it can be tested without either. The
engine uses every kind through this interface and does not know which it is.

Two lengths describe a sequence while a step is in flight. `reserved_length` counts the token slots that it owns;
`computed_length` counts those whose keys and values have been written. `reserve` moves the first ahead, the forward
pass writes, `commit` lets the second follow. Between steps the first is ahead for the rest of a prompt that comes in
chunks, and by one slot where the next step is already launched.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from forge.cache.kv_storage import BlockCopy
from forge.errors import ForgeError
from forge.trace.records import BlockMap, CacheEvent, TableRecord


class OutOfBlocks(ForgeError):
    """A reservation found too few available blocks. The attempt changed nothing."""

    def __init__(self, needed: int, free: int):
        super().__init__(
            f"the KV cache needs {needed} more blocks and has {free} free: raise --num-blocks, or ask for less"
        )
        self.needed = needed
        self.free = free


class CacheStats(NamedTuple):
    """The cache at one moment, in blocks and tokens. Bytes follow from the storage's layout.

    The fields are those of `CacheRecord`, where each is explained.
    """

    num_blocks: int
    used_blocks: int
    tokens_held: int
    cached_blocks: int = 0
    blocks_saved: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    splits: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Hit:
    """The part of a prompt that a cache already has."""

    num_tokens: int = 0
    """How many of the prompt's first tokens need no computing."""
    blocks: tuple[int, ...] = ()
    """The blocks that hold them; the last is shared in part if the tokens do not fill it."""
    num_unreferenced: int = 0
    """How many of these blocks no table references at the moment: they are counted in `num_available` too."""


NO_HIT = Hit()


@dataclass(frozen=True)
class Snapshot:
    """A sequence's cache as it was, kept for `restore`. It holds blocks until it is released."""

    snapshot_id: int
    length: int
    """Computed tokens in it."""


class KvCache(ABC):
    """Decides which blocks each sequence has. Sequences are known by integer ids that the caller chooses.

    Holds a table for each sequence and each snapshot: its `blocks`, how many of their slots are `reserved`, and how
    many of these are `computed`. A kind says what it takes to begin, grow and copy a table.

    Every method raises `KeyError` for a sequence that was never added or has been removed. A method that raises such an
    error, or `OutOfBlocks`, changes nothing. After any other exception in the middle of a method, call `clear`.
    """

    kind: str
    """What `--kv` calls it."""
    persistent: bool = True
    """Whether keys and values outlive the step that computed them."""

    max_sequence_length: int
    """The number of tokens of the longest sequence that an empty cache could hold."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        """Blocks of the storage that goes with it."""
        self.block_size = block_size
        """Token slots in a block."""
        self._tables: dict[int | Snapshot, Any] = {}
        self._snapshot_ids = count()

    @property
    @abstractmethod
    def num_available(self) -> int:
        """The number of blocks that `reserve` could take now: free ones, and cached ones, which no table references."""

    def lookup(self, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> Hit:
        """Return what `add` with the same arguments would find. Changes nothing, not even the order of eviction."""
        return NO_HIT

    def prefix_keys(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, ...]:
        """Return one number per full block of a prompt: prompts that begin with the same blocks begin with the same
        numbers.

        Empty for a kind that shares nothing by content. Changes nothing.
        """
        return ()

    @abstractmethod
    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        """Return how many of `num_available` it takes to add a sequence with this hit and reserve its first `length`
        slots.

        Counts the cached blocks of the hit too: once they are attached they are not available. Changes nothing.
        """

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Return what happened since the last call, in order."""
        return ()

    @abstractmethod
    def block_map(self) -> BlockMap:
        """Return every table, reference count and cached block."""

    @abstractmethod
    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        """Begin a sequence; return how many of its first tokens are already cached.

        `salt` keeps sequences apart that must not share (other users, other adapters); `max_cached` caps the answer: at
        least the last prompt token has to be computed for its logits. Raises `OutOfBlocks` if a kind reserves all
        blocks at once.
        """

    @abstractmethod
    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Return how many of `num_available` `reserve` with the same arguments would take. Changes nothing."""

    @abstractmethod
    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Reserve slots for `num_tokens` more tokens; return the copies to perform before they are written.

        All or nothing: raises `OutOfBlocks` with everything as it was.
        """

    @abstractmethod
    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Record that these tokens' keys and values, which follow the computed ones, have been written."""

    @abstractmethod
    def truncate(self, seq_id: int, length: int) -> None:
        """Drop everything past the first `length` tokens, computed or reserved."""

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        """Begin `child` with the parent's computed tokens; return the copies that this takes."""
        return self._begin(child, parent)

    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        """Keep the sequence's computed tokens for later; return the snapshot and the copies that this takes."""
        snapshot = Snapshot(next(self._snapshot_ids), self._tables[seq_id].computed)
        return snapshot, self._begin(snapshot, seq_id)

    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        """Begin `seq_id` from a snapshot, which stays valid; return the copies that this takes."""
        return self._begin(seq_id, snapshot)

    def release(self, snapshot: Snapshot) -> None:
        """Drop a snapshot and free what only it holds."""
        self.release_table(self._tables.pop(snapshot))

    def remove(self, seq_id: int) -> None:
        """Drop a sequence and free what only it holds."""
        self.release_table(self._tables.pop(seq_id))

    def rename(self, seq_id: int, new_id: int) -> None:
        """Give a sequence another id. Raises AssertionError if `new_id` is taken."""
        assert new_id not in self._tables, f"sequence {new_id} is already there"
        self._tables[new_id] = self._tables.pop(seq_id)

    def clear(self) -> None:
        """Drop every sequence and everything that can be computed again; keep the snapshots.

        Works from any state that an exception between two lines of any method may have left.
        """
        self._tables = {key: table for key, table in self._tables.items() if isinstance(key, Snapshot)}
        self._rebuild()

    def __contains__(self, seq_id: int) -> bool:
        """Return whether a sequence was added and not removed since."""
        return seq_id in self._tables

    @abstractmethod
    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Return the block numbers that cover positions 0 to `reserved_length` - 1, `block_size` positions each."""

    @abstractmethod
    def reserved_length(self, seq_id: int) -> int:
        """Return how many token slots the sequence holds and may write."""

    @abstractmethod
    def computed_length(self, seq_id: int) -> int:
        """Return how many tokens have keys and values in the cache: the position of the next one to compute."""

    def __repr__(self) -> str:
        """`<paged KV cache: 3 of 64 blocks used, 2 cached, 41 tokens held>`."""
        stats = self.stats()
        blocks = f"{stats.used_blocks} of {stats.num_blocks} blocks used, {stats.cached_blocks} cached"
        return f"<{self.kind} KV cache: {blocks}, {stats.tokens_held} tokens held>"

    @abstractmethod
    def stats(self) -> CacheStats:
        """Return how many blocks and slots are used, cached, shared and filled."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError, saying which, if any rule of this kind does not hold. For tests and `--check`."""

    @abstractmethod
    def _copied(self, table: Any) -> tuple[Any, tuple[BlockCopy, ...]]:
        """Return a table with the computed tokens of another, and the copies that this takes."""

    def release_table(self, table: Any) -> None:  # noqa: B027 (a kind may have nothing to release)
        """Release what a table held that has been dropped."""

    def _rebuild(self) -> None:  # noqa: B027 (a kind may have nothing to recompute)
        """Recompute everything that follows from the tables."""

    def _begin(self, key: int | Snapshot, source: int | Snapshot) -> tuple[BlockCopy, ...]:
        assert key not in self._tables, f"sequence {key} is already there"
        self._tables[key], copies = self._copied(self._tables[source])
        return copies

    def _table_records(self) -> tuple[TableRecord, ...]:
        """Return every table in the order of the sequences, then those of the snapshots."""
        records = []
        for key, table in self._tables.items():
            owner, is_snapshot = (key.snapshot_id, True) if isinstance(key, Snapshot) else (key, False)
            records.append(TableRecord(owner, is_snapshot, tuple(table.blocks), table.computed, table.reserved))
        return tuple(sorted(records, key=lambda record: record.is_snapshot))
