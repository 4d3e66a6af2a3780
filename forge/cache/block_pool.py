"""The pool of blocks: which are free, which are referenced and how often, which are cached.

All blocks are allocated when the pool is made; from then on every operation on a block takes the same short time,
however large the pool. A block is in exactly one of three states:

    free          its content is not needed. Free blocks are a stack: the block freed last, whose bytes may still be in
                  the processor's caches, is taken first
    referenced    one or more tables or snapshots have it
    cached        no table has it, but a later prompt may hit its content: it is one of those that are `cacheable`

The pool knows numbers and counts, never contents or owners.

A table says where each position of one sequence lies: position p is slot `p % block_size` of block `blocks[p //
block_size]`, as a page table maps addresses (PagedAttention, Kwon et al., 2023). It does not tell whether a block is
shared: the pool counts references.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from forge.cache.kv_cache import OutOfBlocks


def blocks_for(length: int, block_size: int) -> int:
    """Return how many blocks `length` tokens take."""
    return -(-length // block_size)


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks, and how many of their slots are reserved and computed.

    `blocks` is replaced as a whole and never changed in place, so a caller may keep the tuple that it was given.
    """

    blocks: tuple[int, ...] = ()
    """Physical blocks in the order of the positions that they hold; as many as `reserved` takes."""
    reserved: int = 0
    """Token slots that may be written, or have been."""
    computed: int = 0
    """Token slots with keys and values in them, the first ones."""

    def computed_part(self, block_size: int) -> "BlockTable":
        """Return a table of the computed tokens alone, over the same blocks."""
        return BlockTable(self.blocks[: blocks_for(self.computed, block_size)], self.computed, self.computed)


class BlockError(AssertionError):
    """A caller broke the rules of the pool, which is a bug. The attempt changed nothing."""

    def __init__(self, block: int, problem: str):
        super().__init__(f"block {block} {problem}")
        self.block = block


class BlockPool:
    """Hands out blocks and counts the references to each.

    Holds the free list, the reference counts, and the cached blocks in the order of eviction. Promises that a block
    becomes free or cached only when its last reference goes, and that a call that raises changes nothing.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        """`[num_blocks]`. To be read; the list stays the same object for the pool's life."""
        self.num_references = 0
        """All counts together."""
        self.cacheable: Collection[int] = ()
        """Blocks that become cached and not free when the last reference goes: those of a prefix index, if there is
        one."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, the one released longest ago in front. To be read."""
        self.free = list(range(num_blocks - 1, -1, -1))
        """Free blocks, the one to take next at the end. To be read."""

    def allocate(self, number: int) -> tuple[int, ...]:
        """Take free blocks, with one reference each. Raises `OutOfBlocks`, with nothing taken, if there are too few."""
        if number > len(self.free):
            raise OutOfBlocks(number, len(self.free))
        taken = tuple(self.free.pop() for _ in range(number))
        for block in taken:
            self.reference_counts[block] = 1
        self.num_references += number
        return taken

    def incref(self, block: int) -> None:
        """Count one more table that has this block, which is referenced or cached."""
        if self._count(block) == 0:
            if block not in self.cached:
                raise BlockError(block, "is free, and was about to be used")
            del self.cached[block]
        self.reference_counts[block] += 1
        self.num_references += 1

    def decref(self, block: int) -> None:
        """Count one table fewer that has this block. After the last it is cached if it is cacheable, free otherwise."""
        count = self._count(block)
        if count == 0:
            raise BlockError(block, "was freed twice")
        self.reference_counts[block] = count - 1
        self.num_references -= 1
        if count == 1:
            if block in self.cacheable:
                self.cached[block] = None
            else:
                self.free.append(block)

    def uncache(self, block: int) -> None:
        """Free a block if it is cached, because it is no longer cacheable."""
        if block in self.cached:
            del self.cached[block]
            self.free.append(block)

    def recount(self, tables: Iterable[tuple[int, ...]]) -> None:
        """Count again from these tables: a reference for each time that a block is in one; all other blocks are
        free."""
        counts = Counter(block for table in tables for block in table)
        self.reference_counts[:] = [counts[block] for block in range(self.num_blocks)]
        self.num_references = counts.total()
        self.cached.clear()
        self.free = [block for block in range(self.num_blocks - 1, -1, -1) if not self.reference_counts[block]]

    def check_invariants(self) -> None:
        """Raise AssertionError if a block is in no state, or in two."""
        free, cached = set(self.free), self.cached.keys()
        referenced = {block for block, count in enumerate(self.reference_counts) if count}
        assert len(free) == len(self.free), "a block is on the free list twice"
        assert all(count >= 0 for count in self.reference_counts), "a reference count is negative"
        assert not free & referenced, f"blocks {free & referenced} are free and referenced"
        assert free.isdisjoint(self.cacheable), f"blocks {free & set(self.cacheable)} are free and cacheable"
        assert cached == set(self.cacheable) - referenced, f"cached are {set(cached)}, cacheable are {self.cacheable}"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks, "a block is lost"
        assert self.num_references == sum(self.reference_counts), "the references do not add up"

    def _count(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockError(block, f"does not exist: there are {self.num_blocks}")
        return self.reference_counts[block]
