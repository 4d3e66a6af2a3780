"""The block table of one sequence: where each of its positions lies.

Position p is slot `p % block_size` of block `blocks[p // block_size]`, as a page table maps addresses (PagedAttention,
Kwon et al., 2023). A table does not tell whether a block is shared: the pool counts references.
"""

from dataclasses import dataclass


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
    """Token slots owned."""
    computed: int = 0
    """Token slots with keys and values in them, the first ones."""

    def computed_part(self, block_size: int) -> "BlockTable":
        """Return a table of the computed tokens alone, over the same blocks."""
        return BlockTable(self.blocks[: blocks_for(self.computed, block_size)], self.computed, self.computed)
