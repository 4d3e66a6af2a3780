"""The cache switched off: nothing survives a step, so every step computes the whole sequence again.

A null object, so that no caller ever asks "is there a cache?". Attention still reads keys and values from storage, as
with every other kind; they live in the scratch range past the last block for the length of one step. That is why the
results have the same bits with the cache off: the arithmetic is the same, only the memory of it is missing.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from forge.cache.kv_cache import CacheStats, Hit, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.trace.records import BlockMap


class _Loan(NamedTuple):
    """What a sequence has of the scratch range while a step is in flight."""

    reserved: int = 0
    blocks: tuple[int, ...] = ()


class OffKvCache(KvCache):
    """Hands out scratch blocks at `reserve` and takes them back at `commit`. A block that nobody has is free."""

    kind = "off"
    persistent = False

    def __init__(self, first_scratch_block: int, num_scratch_blocks: int, block_size: int):
        """The scratch range is blocks `first_scratch_block` to `first_scratch_block + num_scratch_blocks` - 1."""
        self.block_size = block_size
        self._all_blocks = range(first_scratch_block, first_scratch_block + num_scratch_blocks)
        self._loans: dict[int, _Loan] = {}

    @property
    def max_sequence_length(self) -> int:
        return len(self._all_blocks) * self.block_size

    @property
    def num_available(self) -> int:
        return len(self._all_blocks) - len(self._lent())

    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        return -(-length // self.block_size)

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._loans, f"sequence {seq_id} is already there"
        self._loans[seq_id] = _Loan()
        return 0

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        loan = self._loans[seq_id]
        return max(0, -(-(loan.reserved + num_tokens) // self.block_size) - len(loan.blocks))

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        needed = self.blocks_needed(seq_id, num_tokens)
        lent = set(self._lent())
        taken = tuple(islice((block for block in self._all_blocks if block not in lent), needed))
        if len(taken) < needed:
            raise OutOfBlocks(needed, len(taken))
        loan = self._loans[seq_id]
        self._loans[seq_id] = _Loan(loan.reserved + num_tokens, loan.blocks + taken)
        return ()

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        assert len(token_ids) <= self._loans[seq_id].reserved, "committed more tokens than were reserved"
        self._loans[seq_id] = _Loan()

    def truncate(self, seq_id: int, length: int) -> None:
        """Whatever the length: nothing is computed, so nothing stays."""
        self._known(seq_id)
        self._loans[seq_id] = _Loan()

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        self._known(parent)
        self.add(child, ())
        return ()

    def snapshot(self, seq_id: int) -> tuple[Snapshot, tuple[BlockCopy, ...]]:
        self._known(seq_id)
        return Snapshot(seq_id, 0), ()

    def restore(self, snapshot: Snapshot, seq_id: int) -> tuple[BlockCopy, ...]:
        self.add(seq_id, ())
        return ()

    def release(self, snapshot: Snapshot) -> None:
        """A snapshot of nothing holds nothing."""

    def remove(self, seq_id: int) -> None:
        del self._loans[seq_id]

    def clear(self) -> None:
        self._loans = {}

    def rename(self, seq_id: int, new_id: int) -> None:
        assert new_id not in self._loans, f"sequence {new_id} is already there"
        self._loans[new_id] = self._loans.pop(seq_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._loans

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        return self._loans[seq_id].blocks

    def reserved_length(self, seq_id: int) -> int:
        return self._loans[seq_id].reserved

    def computed_length(self, seq_id: int) -> int:
        self._known(seq_id)
        return 0

    def stats(self) -> CacheStats:
        return CacheStats(num_blocks=0, used_blocks=0, tokens_held=0)

    def block_map(self) -> BlockMap:
        """Empty: what lies in the scratch range means nothing once the step is over."""
        return BlockMap(self.block_size, tables=(), reference_counts=(), cached=())

    def check_invariants(self) -> None:
        lent = self._lent()
        assert len(set(lent)) == len(lent), "a scratch block is lent twice"
        assert all(block in self._all_blocks for block in lent), "a block outside the scratch range is lent"
        for loan in self._loans.values():
            assert len(loan.blocks) == -(-loan.reserved // self.block_size), f"blocks and slots do not match: {loan}"

    def _lent(self) -> list[int]:
        return [block for loan in self._loans.values() for block in loan.blocks]

    def _known(self, seq_id: int) -> None:
        """KeyError for an unknown sequence."""
        self._loans[seq_id]
