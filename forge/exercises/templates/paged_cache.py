"""Exercise 5: a paged KV cache with copy-on-write.

Read chapter 4 first (forge paged). A sequence takes blocks from a pool as it grows. A fork copies a table and no block;
the first sequence that writes into a shared block gets a copy of that block.

    before    seq 0  blocks 0 1     after seq 1 has reserved a slot     seq 0  blocks 0 1
              seq 1  blocks 0 1     (block 1 is copied into block 2)    seq 1  blocks 0 2

Fill in the seven functions. The pool is forge's, and in `forge build run 5` your own from exercise 4, if that has
passed. The time of a call may grow with the length of its own sequence, not with the number of others. Then:

    forge build check 5      does it keep its promises?
    forge build run 5        the engine: four samples of one story share its blocks
"""

from collections.abc import Sequence

from forge.cache.block_pool import BlockTable, blocks_for  # blocks_for(5, 4) == 2: how many blocks 5 tokens take
from forge.cache.kv_cache import OutOfBlocks  # OutOfBlocks(needed, free): raise it if blocks are missing
from forge.cache.kv_storage import BlockCopy  # BlockCopy(old, new): the engine copies one block into the other
from forge.exercises.paged_cache import PagedBase


class MyPagedCache(PagedBase):
    """A cache whose sequences grow block by block and share blocks after a fork.

    You have `self.block_size`; `self.pool`, a `BlockPool` (`allocate(n)`, `incref(block)`, `decref(block)`,
    `reference_counts`); `self.num_available`; and `self.tables`, a `BlockTable` for each sequence id, with `blocks` (a
    tuple, to be replaced as a whole), `reserved` (slots owned) and `computed` (slots with keys and values). A new
    `BlockTable()` is empty; `BlockTable(blocks, reserved, computed)` is not.
    """

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        """Begin a sequence without blocks; return how many of its tokens are cached already, which is 0."""
        raise NotImplementedError("add")

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        """Return how many blocks `reserve` with the same arguments takes: new ones, and one more if the last block is
        partly filled, shared, and about to be written (num_tokens above 0). Changes nothing."""
        raise NotImplementedError("blocks_needed")

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Own slots for `num_tokens` more tokens; return the copies to perform before they are written.

        Raises `OutOfBlocks(needed, free)`, with everything as it was, if there are too few blocks. For a copy: allocate
        a block, give the old one back, replace it in the table, call `self.note_split(seq_id, old, new)` once, and
        return `(BlockCopy(old, new),)`; without one, `()`.
        """
        raise NotImplementedError("reserve")

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Count these tokens, which follow the computed ones, as computed: their keys and values have been written."""
        raise NotImplementedError("commit")

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop everything past the first `length` tokens, computed or reserved; give back the blocks behind them, the
        last one first. A sequence that is shorter stays as it is."""
        raise NotImplementedError("truncate")

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        """Begin `child` with the parent's computed tokens, in the same blocks; return the copies: ()."""
        raise NotImplementedError("fork")

    def remove(self, seq_id: int) -> None:
        """Drop a sequence and give its blocks back, the last one first."""
        raise NotImplementedError("remove")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
