"""Cache policy with no model: random operations against an oracle, invariants after every one. 105,000, or a fifth."""

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.eviction import prefix_cost
from forge.cache.kv_cache import KvCache
from forge.cache.off import OffKvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.testing.caches import LENGTH, Oracle, check_cache, random_operations, shortest_failure
from tests.slow import every


def rarely_different(preceding: int, token_ids: tuple[int, ...]) -> int:
    """A hash function with five values, so that contents collide all the time."""
    return hash((preceding, token_ids)) % 5


# cache, blocks in its storage, tokens per block, how many lists of 300 operations
CACHES = {
    "off": (lambda: OffKvCache(8, 3), 8, 3, 5),
    "off, one slot per block": (lambda: OffKvCache(12, 1), 12, 1, 5),
    "basic": (lambda: BasicKvCache(14, 14, 4), 56, 4, 10),
    "basic, too few runs": (lambda: BasicKvCache(3, 14, 4), 12, 4, 10),
    "basic, one run": (lambda: BasicKvCache(1, 10, 16), 1, 16, 5),
    "basic, one slot per block": (lambda: BasicKvCache(6, 7, 1), 42, 1, 5),
    "paged": (lambda: PagedKvCache(40, 4), 40, 4, 30),
    "paged, too few blocks": (lambda: PagedKvCache(9, 4), 9, 4, 40),
    "paged, one slot per block": (lambda: PagedKvCache(24, 1), 24, 1, 20),
    "paged, large blocks": (lambda: PagedKvCache(8, 16), 8, 16, 20),
    "prefix": (lambda: PrefixKvCache(40, 4), 40, 4, 40),
    "prefix, too few blocks": (lambda: PrefixKvCache(12, 3), 12, 3, 35),
    "prefix, very few blocks": (lambda: PrefixKvCache(5, 4), 5, 4, 20),
    "prefix, one slot per block": (lambda: PrefixKvCache(24, 1), 24, 1, 25),
    "prefix, large blocks": (lambda: PrefixKvCache(8, 16), 8, 16, 20),
    "prefix, by cost": (lambda: PrefixKvCache(12, 3, evict=prefix_cost), 12, 3, 25),
    "prefix, hashes collide": (lambda: PrefixKvCache(14, 2, rarely_different), 14, 2, 35),
}


def test_there_are_at_least_100_000_operations():
    assert sum(lists for *_, lists in CACHES.values()) * LENGTH >= 100_000


@every(5)
@pytest.mark.parametrize("name", CACHES)
def test_random_operations_keep_every_promise(name, stride):
    make_cache, num_blocks, block_size, lists = CACHES[name]

    assert make_cache().block_size == block_size
    check_cache(make_cache, num_blocks, lists // stride, "collide" not in name, "by cost" not in name)


def kinds_of_failing(make_cache, num_blocks: int, block_size: int, seed: int) -> tuple[str, list[str]]:
    """What goes wrong with a broken cache, and the kinds of operations in the shortest list that shows it."""
    for attempt in range(seed, seed + 50):
        found = shortest_failure(lambda: Oracle(make_cache(), num_blocks), random_operations(attempt, 300))
        if found is not None:
            return found.splitlines()[0], [line.split("'")[1] for line in found.splitlines()[1:]]
    raise AssertionError("a broken cache was not noticed")


class ForgetfulCache(BasicKvCache):
    """Broken on purpose: a fork does not copy."""

    def fork(self, parent, child):
        super().fork(parent, child)
        return ()


class CarelessCache(PagedKvCache):
    """Broken on purpose: a shared block is written without a split."""

    def reserve(self, seq_id, num_tokens):
        table = self._tables[seq_id]
        if num_tokens and table.reserved % self.block_size and num_tokens == 1:
            table.reserved += 1
            return ()
        return super().reserve(seq_id, num_tokens)


class HastyCache(PrefixKvCache):
    """Broken on purpose: nobody takes what is written into an indexed block for a reason to drop it."""

    def _drop_from_index(self, block):
        if not self.pool.reference_counts[block]:
            super()._drop_from_index(block)


class TrustingCache(PrefixKvCache):
    """Broken on purpose: it believes a hash."""

    def __init__(self):
        super().__init__(14, 2, rarely_different)
        self.index.child = lambda parent, token_ids: self.index.nodes.get(rarely_different(parent.key, token_ids))


BROKEN: dict[str, tuple[type[KvCache] | object, int, int]] = {
    "forgetful": (lambda: ForgetfulCache(14, 14, 4), 56, 4),
    "careless": (lambda: CarelessCache(20, 4), 20, 4),
    "hasty": (lambda: HastyCache(12, 3), 12, 3),
    "trusting": (TrustingCache, 14, 2),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_driver_finds_a_broken_cache_and_prints_the_shortest_sequence(name):
    for seed in range(0, 150, 50):
        error, kinds = kinds_of_failing(*BROKEN[name], seed)

        assert error.startswith("AssertionError: ")
        assert len(kinds) <= 8, f"{error} after {kinds}"
