from forge.cache.kv_cache import OutOfBlocks
from forge.exercises.contiguous_cache import ContiguousBase, Run


class MyContiguousCache(ContiguousBase):
    def free_run(self):
        taken = {run.blocks.start for run in self.all_runs()}
        for start in range(0, self.num_blocks, self.blocks_per_run):
            if start not in taken:
                return range(start, start + self.blocks_per_run)
        raise OutOfBlocks(self.blocks_per_run, 0)

    def add(self, seq_id, token_ids, salt="", max_cached=None):
        self.runs[seq_id] = Run(self.free_run())
        return 0

    def reserve(self, seq_id, num_tokens):
        run = self.runs[seq_id]
        if run.reserved + num_tokens > self.max_model_len:
            raise OutOfBlocks(1, 0)
        run.reserved += num_tokens
        return ()

    def commit(self, seq_id, token_ids):
        run = self.runs[seq_id]
        run.computed += len(token_ids)

    def truncate(self, seq_id, length):
        run = self.runs[seq_id]
        run.reserved = min(run.reserved, length)
        run.computed = min(run.computed, length)

    def remove(self, seq_id):
        del self.runs[seq_id]
