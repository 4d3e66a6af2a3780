"""The cache switched off: blocks for the length of one step, and no memory."""

import pytest

from forge.cache.kv_cache import OutOfBlocks, Snapshot
from forge.cache.off import OffKvCache


def test_nothing_is_computed_after_a_commit():
    cache = OffKvCache(8, 4)
    cache.add(0, ())
    cache.reserve(0, 6)
    assert cache.block_table(0) == (0, 1)

    cache.commit(0, range(6))

    assert (cache.computed_length(0), cache.reserved_length(0), cache.block_table(0)) == (0, 0, ())


def test_too_few_blocks_change_nothing():
    cache = OffKvCache(3, 4)
    for seq_id in (0, 1):
        cache.add(seq_id, ())
    cache.reserve(0, 8)

    with pytest.raises(OutOfBlocks) as shortage:
        cache.reserve(1, 5)

    assert (shortage.value.needed, shortage.value.free) == (2, 1)
    assert cache.block_table(1) == ()
    cache.reserve(1, 4)
    assert cache.block_table(1) == (2,)


def test_it_never_shows_a_block_as_used():
    cache = OffKvCache(4, 4)
    cache.add(0, ())
    cache.reserve(0, 9)

    assert set(cache.stats()) == {0}


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.blocks_needed(9, 1),
        lambda cache: cache.reserve(9, 1),
        lambda cache: cache.commit(9, ()),
        lambda cache: cache.truncate(9, 0),
        lambda cache: cache.fork(9, 1),
        lambda cache: cache.snapshot(9),
        lambda cache: cache.restore(Snapshot(9, 0), 1),
        lambda cache: cache.release(Snapshot(9, 0)),
        lambda cache: cache.remove(9),
        lambda cache: cache.rename(9, 1),
        lambda cache: cache.block_table(9),
        lambda cache: cache.reserved_length(9),
        lambda cache: cache.computed_length(9),
    ],
)
def test_an_unknown_sequence_is_a_key_error_that_adds_nothing(call):
    cache = OffKvCache(4, 4)

    with pytest.raises(KeyError):
        call(cache)
    cache.check_invariants()
    with pytest.raises(KeyError):
        cache.reserved_length(9)
