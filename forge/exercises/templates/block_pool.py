"""Exercise 4: a block pool.

Read chapter 4 first (forge paged). A pool hands out blocks and counts how many tables have each. A block is in one of
two states:

    free          no table has it; it is on the free list
    referenced    one or more tables have it; its reference count says how many

(The engine's pool knows a third, *cached*. That is exercise 6.)

Fill in the four functions. Then:

    forge build check 4      does it keep its promises?
    forge build run 4        the engine, with a paged cache on your pool
"""

from collections.abc import Iterable

from forge.cache.block_pool import BlockError  # BlockError(block, problem): a block was used against the rules
from forge.cache.kv_cache import OutOfBlocks  # OutOfBlocks(needed, free): fewer are free than are needed
from forge.exercises.block_pool import PoolBase


class MyBlockPool(PoolBase):
    """Hands out blocks and counts the references to each. A call that raises changes nothing. The first three take the
    same short time however large the pool is."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks  # by block; this list stays the same object for the pool's life
        self.num_references = 0  # all counts together
        self.free = list(range(num_blocks - 1, -1, -1))  # free blocks, the one to take next at the end

    def allocate(self, number: int) -> tuple[int, ...]:
        """Take free blocks from the end of the free list, with one reference each. Their order in the tuple is free.

        Raises `OutOfBlocks(needed, free)`, with nothing taken, if there are too few.
        """
        raise NotImplementedError("allocate")

    def incref(self, block: int) -> None:
        """Add a reference: one more table has this block. Raises `BlockError(block, problem)` if it is free or does not
        exist."""
        raise NotImplementedError("incref")

    def decref(self, block: int) -> None:
        """Drop a reference: one table fewer has this block. After the last it goes to the end of the free list, and is
        the next to be taken: what it held may still be in the processor's caches, so it is the fastest to write.

        Raises `BlockError(block, problem)` if it is free already or does not exist.
        """
        raise NotImplementedError("decref")

    def recount(self, tables: Iterable[tuple[int, ...]]) -> None:
        """Recount everything from these tables, whatever was before: a reference for each time that a block is in one,
        all other blocks free, in any order. `tables` can be gone through once. The engine calls it after an
        exception."""
        raise NotImplementedError("recount")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
