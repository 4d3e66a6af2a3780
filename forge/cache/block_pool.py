"""The pool of blocks: which are free, which are in use and by how many, and which are worth keeping.

Everything is allocated when the pool is made; from then on every operation on a block takes the same short time,
however large the pool. A block is in exactly one of three states:

    free          nothing in it is wanted; on a stack, so that the block freed last, whose bytes are still in the
                  processor's caches, is taken first
    referenced    one or more tables (or snapshots) have it
    cached        nobody has it, but its content may be wanted again: it was marked with `keep`

The pool knows numbers and counts. What is in a block, and whose it is, it must never ask.
"""

from collections import OrderedDict
from collections.abc import Iterable

from forge.cache.kv_cache import OutOfBlocks


class BlockError(AssertionError):
    """A block was used against the rules: a bug in whoever used it. Nothing was changed by the attempt."""

    def __init__(self, block: int, problem: str):
        super().__init__(f"block {block} {problem}")
        self.block = block


class BlockPool:
    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        """`[num_blocks]`. To be read; the list stays the same object for the pool's life."""
        self.num_references = 0
        """All counts together."""
        self.kept: set[int] = set()
        """Blocks that become cached and not free when the last reference goes. To be read."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, the one that was let go first in front. To be read."""
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - len(self._free) - len(self.cached)

    def allocate(self, number: int) -> tuple[int, ...]:
        """Take free blocks, with one reference each. Raises `OutOfBlocks`, with nothing taken, if there are too few."""
        if number > len(self._free):
            raise OutOfBlocks(number, len(self._free))
        taken = tuple(self._free.pop() for _ in range(number))
        for block in taken:
            self.reference_counts[block] = 1
        self.num_references += number
        return taken

    def incref(self, block: int) -> None:
        """One more has this block, which is referenced or cached."""
        if self._count(block) == 0:
            if block not in self.cached:
                raise BlockError(block, "is free, and was about to be used")
            del self.cached[block]
        self.reference_counts[block] += 1
        self.num_references += 1

    def decref(self, block: int) -> None:
        """One fewer has this block. Without any it is free, or cached if it is one to keep."""
        count = self._count(block)
        if count == 0:
            raise BlockError(block, "was freed twice")
        self.reference_counts[block] = count - 1
        self.num_references -= 1
        if count == 1:
            if block in self.kept:
                self.cached[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """From now on this block's content is worth keeping. Only a referenced block has any."""
        if self._count(block) == 0:
            raise BlockError(block, "is free, and has nothing worth keeping")
        self.kept.add(block)

    def forget(self, block: int) -> None:
        """This block's content is no longer worth keeping: if that is all that kept it from being free, it is free."""
        self._count(block)
        self.kept.discard(block)
        if block in self.cached:
            del self.cached[block]
            self._free.append(block)

    def recount(self, tables: Iterable[tuple[int, ...]]) -> None:
        """Forget everything but these tables: one reference for each time that a block is in one; all others free."""
        self.reference_counts[:] = [0] * self.num_blocks
        self.num_references = 0
        for table in tables:
            for block in table:
                self.reference_counts[block] += 1
                self.num_references += 1
        self.kept.clear()
        self.cached.clear()
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if not self.reference_counts[block]]

    def check_invariants(self) -> None:
        """Raise AssertionError if a block is in no state, or in two."""
        free, cached = set(self._free), self.cached.keys()
        referenced = {block for block, count in enumerate(self.reference_counts) if count}
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert all(count >= 0 for count in self.reference_counts), "a reference count is negative"
        assert not free & referenced, f"blocks {free & referenced} are free and referenced"
        assert not free & self.kept, f"blocks {free & self.kept} are free and kept"
        assert cached == self.kept - referenced, f"cached are {set(cached)}, kept are {self.kept}"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks, "a block is lost"
        assert self.num_references == sum(self.reference_counts), "the references do not add up"

    def _count(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockError(block, f"does not exist: there are {self.num_blocks}")
        return self.reference_counts[block]
