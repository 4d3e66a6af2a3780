"""The policy of the KV cache: which block belongs to which sequence, what may be shared, what may be given up.

A `KvCache` holds no arrays (see `kv_storage`) and runs no model, so every rule in it can be exercised without either.
Kinds differ in what they promise about blocks; whoever uses one does not know which it is.

Two lengths describe a sequence while a step is in flight. `reserved_length` counts the token slots that it owns;
`computed_length` counts those whose keys and values have been written. `reserve` moves the first ahead, the forward
pass writes, `commit` brings the second level. Between steps the two are equal for slots that hold tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.cache.kv_storage import BlockCopy
from forge.errors import ForgeError
from forge.trace.records import BlockMap, CacheEvent


class OutOfBlocks(ForgeError):
    """A reservation found too few free blocks. Nothing was changed by the attempt."""

    def __init__(self, needed: int, free: int):
        super().__init__(
            f"the KV cache needs {needed} more blocks and has {free} free: raise --num-blocks, or ask for less"
        )
        self.needed = needed
        self.free = free


class CacheStats(NamedTuple):
    """The cache at one moment, in blocks and tokens. Bytes follow from the storage's layout.

    The fields are those of `CacheRecord`, where each is explained, in its order.
    """

    num_blocks: int
    used_blocks: int
    """Blocks that belong to some sequence or snapshot, filled or not."""
    tokens_held: int
    """Token slots with a computed key and value."""
    cached_blocks: int = 0
    slots_reserved: int = 0
    slots_filled: int = 0
    blocks_saved: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    splits: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Hit:
    """What a cache already has of a prompt. A value: looking up changes nothing."""

    num_tokens: int = 0
    """How many of the prompt's first tokens need no computing."""
    blocks: tuple[int, ...] = ()
    """The blocks that hold them; the last is shared in part if the tokens do not fill it."""
    num_unreferenced: int = 0
    """How many of these blocks no table references now: they are counted in `num_available` too."""


NO_HIT = Hit()


@dataclass(frozen=True)
class Snapshot:
    """A sequence's cache as it was, kept for `restore`. It holds blocks until it is released."""

    snapshot_id: int
    length: int
    """Computed tokens in it."""


class KvCache(ABC):
    """The seam. Sequences are known by integer ids of the caller's choosing.

    Every method raises `KeyError` for a sequence that was never added or has been removed, and changes nothing when it
    raises.
    """

    kind: str
    """What `--kv` calls it."""
    persistent: bool = True
    """Whether keys and values outlive the step that computed them."""

    block_size: int
    """Token slots in a block."""

    @property
    @abstractmethod
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence that this cache could ever hold, all others gone."""

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Blocks that could be taken now: free ones, and cached ones that nobody refers to."""

    def lookup(self, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> Hit:
        """What `add` with the same arguments would find. Changes nothing, not even the order of eviction."""
        return NO_HIT

    def prefix_keys(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, ...]:
        """One number per full block of a prompt: two prompts that begin with the same blocks begin with the same ones.

        Empty for a kind that shares nothing by content. Changes nothing.
        """
        return ()

    @abstractmethod
    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        """How many of `num_available` it takes to add a sequence with this hit and reserve its first `length` slots.

        Blocks of the hit that nobody refers to count too: once they are attached nobody else can take them. Changes
        nothing.
        """

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What happened since the last call, in order."""
        return ()

    @abstractmethod
    def block_map(self) -> BlockMap:
        """Where every block is."""

    @abstractmethod
    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        """Begin a sequence; return how many of its first tokens are already cached.

        `salt` keeps sequences apart that must not share (other users, other adapters); `max_cached` caps the answer: at
        least the last prompt token has to be computed for its logits. Raises `OutOfBlocks` where a kind reserves up
        front.
        """

    @abstractmethod
    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Free blocks that `reserve` with the same arguments would take. Changes nothing."""

    @abstractmethod
    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Own slots for `num_tokens` more tokens; return the copies to perform before they are written.

        All or nothing: raises `OutOfBlocks` with everything as it was.
        """

    @abstractmethod
    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """These tokens' keys and values, which follow the computed ones, have been written."""

    @abstractmethod
    def truncate(self, seq_id: int, length: int) -> None:
        """Forget everything past the first `length` tokens, computed or reserved."""

    @abstractmethod
    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        """Begin `child` with the parent's computed tokens; return the copies that make it so."""

    @abstractmethod
    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        """Keep the sequence's computed tokens for later; return the snapshot and the copies that make it."""

    @abstractmethod
    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        """Begin `seq_id` from a snapshot, which stays valid; return the copies that make it so."""

    @abstractmethod
    def release(self, snapshot: Snapshot) -> None:
        """Give up a snapshot and what it holds."""

    @abstractmethod
    def remove(self, seq_id: int) -> None:
        """Forget the sequence and give back its blocks."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every sequence, and whatever else can be computed again. Snapshots stay.

        Works from any state that an exception between two lines of another method may have left.
        """

    @abstractmethod
    def rename(self, seq_id: int, new_id: int) -> None:
        """The sequence goes on under another id. AssertionError if a sequence has that id already."""

    @abstractmethod
    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence was added and not removed since."""

    @abstractmethod
    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Block numbers that cover positions 0 to `reserved_length` - 1, `block_size` positions each."""

    @abstractmethod
    def reserved_length(self, seq_id: int) -> int:
        """Token slots that the sequence owns and may write."""

    @abstractmethod
    def computed_length(self, seq_id: int) -> int:
        """Tokens whose keys and values are in the cache: the position of the next one to compute."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Where the blocks are."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError, saying which, if any rule of this kind does not hold. For tests and `--check`."""
