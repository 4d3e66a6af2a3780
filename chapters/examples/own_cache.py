"""A cache of your own: one that does not keep other people's prompts for long."""

from forge import LLM, SamplingParams
from forge.cache.factory import CacheSize
from forge.cache.prefix import PrefixKvCache
from forge.testing import check_cache


class ModestKvCache(PrefixKvCache):
    """The prefix cache, but of what no sequence holds any more it keeps a few blocks, and forgets the rest at once."""

    kind = "modest"

    def __init__(self, num_blocks: int, block_size: int, most_kept: int = 8):
        super().__init__(num_blocks, block_size)
        self.most_kept = most_kept

    def _release_block(self, block: int) -> None:  # a sequence releases its last block first
        super()._release_block(block)
        while len(self.pool.cached) > self.most_kept:
            self._drop_from_index(next(iter(self.pool.cached)))  # the least recently used

    def check_invariants(self) -> None:
        super().check_invariants()
        assert len(self.pool.cached) <= self.most_kept, "more is kept than may be"


def modest(size: CacheSize) -> ModestKvCache:
    return ModestKvCache(size.num_blocks or 256, size.block_size)


check_cache(lambda: ModestKvCache(12, 4, most_kept=3))  # 6,000 random operations against an oracle
llm = LLM("tales", kv=modest)
llm.generate(["Once upon a time", "The fox and the lantern", "An owl"], SamplingParams(max_tokens=80))
print(llm.engine.cache.stats().cached_blocks, "blocks kept")
