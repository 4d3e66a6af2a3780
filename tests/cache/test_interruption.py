"""An exception between any two lines of the cache: `clear` afterwards leaves a sound cache with its snapshots intact.

Lines of every operation are tried, in a cache that random operations have filled: every seventh, or all.
"""

from contextlib import suppress
from functools import partial

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.kv_cache import OutOfBlocks, Snapshot
from forge.cache.off import OffKvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.testing.caches import KINDS, Operation, Oracle, random_operations
from tests.engine.test_interruption import interrupted_at
from tests.slow import every

OPERATIONS = (*KINDS, "clear")
CACHES = {
    "off": lambda: OffKvCache(12, 4),
    "basic": lambda: BasicKvCache(7, 14, 4),
    "paged": lambda: PagedKvCache(30, 4),
    "prefix": lambda: PrefixKvCache(30, 4),
    "prefix, few blocks": lambda: PrefixKvCache(10, 4),
}
SEEDS = 3
"""Caches in which lines of an operation are tried."""


def filled(make_cache, seed: int) -> Oracle:
    oracle = Oracle(make_cache(), 30)
    for operation in random_operations(seed, 40):
        oracle.perform(operation)
    return oracle


def do(oracle: Oracle, operation: Operation) -> None:
    """The operation without the oracle's own observations; nothing where there is no sequence or snapshot for it."""
    kind, which, count, word = operation
    cache, held = oracle.cache, list(oracle.snapshots if kind in ("restore", "release") else oracle.sequences)
    name = held[which % len(held)] if held else None
    if kind == "clear":
        cache.clear()
    elif kind in ("add", "begin"):
        prompt, salt, limit = oracle.request(count, word)
        cached = cache.add(1000, prompt, salt, limit)
        if kind == "begin":
            cache.reserve(1000, len(prompt) - cached)
    elif name is None:
        return
    elif kind in ("fork", "rename"):
        getattr(cache, kind)(name, 1000)
    elif kind == "snapshot":
        cache.snapshot(name)
    elif kind == "restore":
        cache.restore(oracle.snapshots[name][0], 1000)
    else:
        getattr(oracle, f"_{kind}")(name, count, word)


def attempt(oracle: Oracle, operation: Operation) -> None:
    with suppress(OutOfBlocks):  # a refusal is a result too
        do(oracle, operation)


def clear(oracle: Oracle, kind: str) -> None:
    """Drop every sequence, as the engine does after an exception; the snapshots have to be the same as before."""
    cache, snapshots = oracle.cache, {snapshot.snapshot_id for snapshot, _ in oracle.snapshots.values()}
    cache.clear()
    oracle.sequences = {}
    tables = cache.block_map().tables
    assert all(table.is_snapshot for table in tables), "a sequence is still there"
    left = {snapshot.snapshot_id for snapshot in cache._tables}  # the map of a cache that is off is empty
    if kind == "snapshot":  # the new one may have been entered, and then belongs to no caller
        for table in tables:
            if table.owner not in snapshots:
                cache.release(Snapshot(table.owner, table.computed))
    elif kind == "release":
        oracle.snapshots = {name: pair for name, pair in oracle.snapshots.items() if pair[0].snapshot_id in left}
        assert len(snapshots - left) <= 1
    stats = cache.stats()
    oracle.counts = {name: getattr(stats, name) for name in oracle.counts}
    cache.take_events()


@every(7)
@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("name", CACHES)
def test_after_an_interrupted_operation_clearing_leaves_a_sound_cache_with_its_snapshots(name, kind, stride):
    for seed in range(1, SEEDS + 1):
        operation = (kind, *random_operations(seed + 100, 1)[0][1:])
        line = 2 * seed % stride  # other lines in each cache
        while True:
            oracle = filled(CACHES[name], seed)
            if not interrupted_at(line, partial(attempt, oracle, operation)):
                break
            clear(oracle, kind)
            oracle.cache.check_invariants()
            oracle.check()
            for later in random_operations(seed + 200, 6):
                oracle.perform(later)
            line += stride
