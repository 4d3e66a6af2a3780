from forge.cache.block_pool import BlockTable, blocks_for
from forge.cache.kv_cache import OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.exercises.paged_cache import PagedBase


class MyPagedCache(PagedBase):
    def add(self, seq_id, token_ids, salt="", max_cached=None):
        self.tables[seq_id] = BlockTable()
        return 0

    def writes_shared(self, table, num_tokens):
        if num_tokens == 0 or table.reserved % self.block_size == 0:
            return False
        return self.pool.reference_counts[table.blocks[-1]] > 1

    def blocks_needed(self, seq_id, num_tokens):
        table = self.tables[seq_id]
        new = blocks_for(table.reserved + num_tokens, self.block_size) - len(table.blocks)
        return new + self.writes_shared(table, num_tokens)

    def reserve(self, seq_id, num_tokens):
        table = self.tables[seq_id]
        needed = self.blocks_needed(seq_id, num_tokens)
        if needed > self.num_available:
            raise OutOfBlocks(needed, self.num_available)
        copies = ()
        if self.writes_shared(table, num_tokens):
            old = table.blocks[-1]
            (new,) = self.pool.allocate(1)
            self.pool.decref(old)
            table.blocks = (*table.blocks[:-1], new)
            self.note_split(seq_id, old, new)
            copies = (BlockCopy(old, new),)
        table.reserved += num_tokens
        missing = blocks_for(table.reserved, self.block_size) - len(table.blocks)
        table.blocks += self.pool.allocate(missing)
        return copies

    def commit(self, seq_id, token_ids):
        self.tables[seq_id].computed += len(token_ids)

    def truncate(self, seq_id, length):
        table = self.tables[seq_id]
        table.reserved = min(table.reserved, length)
        table.computed = min(table.computed, length)
        left = blocks_for(table.reserved, self.block_size)
        dropped = table.blocks[left:]
        table.blocks = table.blocks[:left]
        for block in reversed(dropped):
            self.pool.decref(block)

    def fork(self, parent, child):
        table = self.tables[parent]
        blocks = table.blocks[: blocks_for(table.computed, self.block_size)]
        for block in blocks:
            self.pool.incref(block)
        self.tables[child] = BlockTable(blocks, table.computed, table.computed)
        return ()

    def remove(self, seq_id):
        table = self.tables.pop(seq_id)
        for block in reversed(table.blocks):
            self.pool.decref(block)
