"""Ctrl-C anywhere in the cache: `clear` makes sense of whatever state it left, and the snapshots are still good.

Every place in an operation is tried, in a cache that random operations have filled.
"""

from contextlib import suppress
from functools import partial

import pytest

from forge.cache.kv_cache import OutOfBlocks
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.testing.caches import Operation, Oracle, random_operations
from tests.engine.test_interruption import interrupted_at

OPERATIONS = ("begin", "fill", "reserve", "commit", "truncate", "fork", "restore", "release", "remove", "rename")
CACHES = {
    "paged": lambda: PagedKvCache(30, 4),
    "prefix": lambda: PrefixKvCache(30, 4),
    "prefix, few blocks": lambda: PrefixKvCache(10, 4),
}


def filled(make_cache, seed: int) -> Oracle:
    oracle = Oracle(make_cache(), 30, 4)
    for operation in random_operations(seed, 60):
        oracle.perform(operation)
    return oracle


def do(oracle: Oracle, operation: Operation) -> None:
    """The operation without the oracle's own looking around."""
    kind, which, count, word = operation
    held = list(oracle.snapshots if kind in ("restore", "release") else oracle.sequences)
    if kind == "begin":
        prompt, salt, limit = oracle.request(count, word)
        oracle.cache.reserve(1000, len(prompt) - oracle.cache.add(1000, prompt, salt, limit))
    elif kind == "fork" and held:
        oracle.cache.fork(held[which % len(held)], 1000)
    elif kind == "restore" and held:
        oracle.cache.restore(oracle.snapshots[held[which % len(held)]][0], 1000)
    elif held:
        getattr(oracle, f"_{kind}")(held[which % len(held)], count, word)


def attempt(oracle: Oracle, operation: Operation) -> None:
    with suppress(OutOfBlocks):  # refused is as good as done
        do(oracle, operation)


def clear(oracle: Oracle) -> None:
    """Forget every sequence, as the engine does after an exception, and believe the cache about its snapshots."""
    cache = oracle.cache
    cache.clear()
    oracle.sequences = {}
    kept = {table.owner for table in cache.block_map().tables if table.is_snapshot}
    oracle.snapshots = {name: pair for name, pair in oracle.snapshots.items() if pair[0].snapshot_id in kept}
    stats = cache.stats()
    oracle.counts = {name: getattr(stats, name) for name in oracle.counts}
    cache.take_events()


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("name", CACHES)
def test_after_an_interrupted_operation_clearing_leaves_a_cache_that_goes_on(name, kind):
    tried = seed = 0
    while tried < 60:
        seed += 1
        assert seed < 60, "there is nothing to interrupt"
        operation = (kind, *random_operations(seed + 100, 1)[0][1:])
        line = 0
        while True:
            oracle = filled(CACHES[name], seed)
            if not interrupted_at(line, partial(attempt, oracle, operation)):
                break
            clear(oracle)
            oracle.cache.check_invariants()
            oracle.check()
            for later in random_operations(seed + 200, 6):
                oracle.perform(later)
            line += 1 + line // 12
            tried += 1
