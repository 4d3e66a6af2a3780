from forge.cache.block_pool import BlockError, BlockPool
from forge.cache.kv_cache import OutOfBlocks


class MyBlockPool(BlockPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        self.num_references = 0
        self.free = list(range(num_blocks - 1, -1, -1))

    def allocate(self, number):
        if number > len(self.free):
            raise OutOfBlocks(number, len(self.free))
        taken = []
        for _ in range(number):
            block = self.free.pop()
            self.reference_counts[block] = 1
            taken.append(block)
        self.num_references += number
        return tuple(taken)

    def used(self, block):
        if not 0 <= block < self.num_blocks:
            raise BlockError(block, "does not exist")
        if self.reference_counts[block] == 0:
            raise BlockError(block, "is free")

    def incref(self, block):
        self.used(block)
        self.reference_counts[block] += 1
        self.num_references += 1

    def decref(self, block):
        self.used(block)
        self.reference_counts[block] -= 1
        self.num_references -= 1
        if self.reference_counts[block] == 0:
            self.free.append(block)

    def recount(self, tables):
        self.reference_counts[:] = [0] * self.num_blocks
        for table in tables:
            for block in table:
                self.reference_counts[block] += 1
        self.num_references = sum(self.reference_counts)
        self.free = [block for block in range(self.num_blocks) if not self.reference_counts[block]]
