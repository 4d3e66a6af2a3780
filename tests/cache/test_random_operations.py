"""Cache policy with no model: random operations against an oracle, invariants after every one."""

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.off import OffKvCache
from tests.cache.operations import new_oracle, random_operations, shortest_failure

CACHES = {
    "off": (lambda: OffKvCache(2, 8, 3), 10, 3),
    "off, one slot per block": (lambda: OffKvCache(0, 12, 1), 12, 1),
    "basic": (lambda: BasicKvCache(14, 14, 4), 56, 4),
    "basic, too few runs": (lambda: BasicKvCache(3, 14, 4), 12, 4),
    "basic, one run": (lambda: BasicKvCache(1, 10, 16), 1, 16),
    "basic, one slot per block": (lambda: BasicKvCache(6, 7, 1), 42, 1),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(25))
def test_random_operations_keep_every_promise(name, seed):
    make_cache, num_blocks, block_size = CACHES[name]

    found = shortest_failure(lambda: new_oracle(make_cache, num_blocks, block_size), random_operations(seed, 150))

    assert found is None, f"shortest failing sequence:\n{found}"


class ForgetfulCache(BasicKvCache):
    """Broken on purpose: a fork does not copy."""

    def fork(self, parent, child):
        super().fork(parent, child)
        return ()


def test_the_driver_finds_a_broken_cache_and_prints_the_shortest_sequence():
    found = [
        shortest_failure(lambda: new_oracle(lambda: ForgetfulCache(14, 14, 4), 56, 4), random_operations(seed, 250))
        for seed in range(3)
    ]

    for text in found:
        assert text.startswith("AssertionError: contents of")
        assert [line.split("'")[1] for line in text.splitlines()[1:]] == ["add", "reserve", "commit", "fork"]
