"""The basic cache: one contiguous run per sequence, taken whole."""

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.kv_cache import OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy


def test_a_sequence_owns_its_whole_run_from_the_start():
    cache = BasicKvCache(num_runs=2, max_model_len=10, block_size=4)

    cache.add(7, [1, 2, 3])

    assert cache.stats().num_blocks == 6
    assert cache.stats().used_blocks == 3
    assert cache.stats().tokens_held == 0
    assert cache.max_sequence_length == 10
    assert cache.block_map().reference_counts == (1, 1, 1, 0, 0, 0)
    assert (cache.reserved_length(7), cache.computed_length(7)) == (0, 0)


@pytest.mark.parametrize("seq_id", [0, 1])
def test_the_check_sees_what_is_wrong_with_any_run(seq_id):
    cache = BasicKvCache(num_runs=2, max_model_len=10, block_size=4)
    for one in (0, 1):
        cache.add(one, ())
    cache.check_invariants()
    cache._tables[seq_id].computed = 1
    with pytest.raises(AssertionError, match="lengths out of order"):
        cache.check_invariants()


def test_a_run_is_contiguous_and_the_table_covers_what_is_reserved():
    cache = BasicKvCache(num_runs=3, max_model_len=10, block_size=4)
    for seq_id in (0, 1):
        cache.add(seq_id, ())
        cache.reserve(seq_id, 9)

    assert cache.block_table(0) == (0, 1, 2)
    assert cache.block_table(1) == (3, 4, 5)
    cache.truncate(1, 4)
    assert cache.block_table(1) == (3,)


def test_a_freed_run_is_used_again():
    cache = BasicKvCache(num_runs=1, max_model_len=4, block_size=4)
    cache.add(0, ())
    cache.remove(0)
    cache.add(1, ())
    cache.reserve(1, 1)

    assert cache.block_table(1) == (0,)


@pytest.mark.parametrize("begin", ["add", "fork", "snapshot", "restore"])
def test_without_a_free_run_nothing_begins_and_nothing_changes(begin):
    cache = BasicKvCache(num_runs=2, max_model_len=8, block_size=4)
    cache.add(0, ())
    cache.reserve(0, 5)
    cache.commit(0, range(5))
    snapshot, _ = cache.snapshot(0)
    before = cache.stats()

    with pytest.raises(OutOfBlocks, match="needs 2 more blocks and has 0 free") as shortage:
        {
            "add": lambda: cache.add(1, ()),
            "fork": lambda: cache.fork(0, 1),
            "snapshot": lambda: cache.snapshot(0),
            "restore": lambda: cache.restore(snapshot, 1),
        }[begin]()

    assert (shortage.value.needed, shortage.value.free) == (2, 0)
    assert cache.stats() == before
    assert cache.computed_length(0) == 5
    cache.check_invariants()
    with pytest.raises(KeyError):
        cache.computed_length(1)


@pytest.mark.parametrize("max_model_len", [8, 9])
def test_max_model_len_bounds_a_sequence_even_inside_its_last_block(max_model_len):
    cache = BasicKvCache(num_runs=1, max_model_len=max_model_len, block_size=4)
    cache.add(0, ())
    cache.reserve(0, max_model_len)

    for num_tokens, needed in ((1, 1), (7, 10 - max_model_len), (12, 3)):
        with pytest.raises(OutOfBlocks) as shortage:
            cache.reserve(0, num_tokens)
        assert (shortage.value.needed, shortage.value.free) == (needed, 0)
    assert cache.reserved_length(0) == max_model_len


def test_a_fork_copies_the_blocks_with_computed_tokens_and_no_others():
    cache = BasicKvCache(num_runs=2, max_model_len=16, block_size=4)
    cache.add(0, ())
    cache.reserve(0, 12)
    cache.commit(0, range(5))

    copies = cache.fork(0, 1)

    assert copies == (BlockCopy(0, 4), BlockCopy(1, 5))
    assert cache.computed_length(1) == cache.reserved_length(1) == 5


def test_a_snapshot_outlives_its_sequence_and_serves_more_than_once():
    cache = BasicKvCache(num_runs=3, max_model_len=8, block_size=4)
    cache.add(0, ())
    cache.reserve(0, 6)
    cache.commit(0, range(6))
    snapshot, copies = cache.snapshot(0)
    cache.remove(0)

    assert snapshot.length == 6
    assert copies == (BlockCopy(0, 2), BlockCopy(1, 3))
    assert cache.restore(snapshot, 1) == (BlockCopy(2, 0), BlockCopy(3, 1))
    assert cache.restore(snapshot, 2) == (BlockCopy(2, 4), BlockCopy(3, 5))
    assert cache.computed_length(2) == 6
    cache.release(snapshot)
    assert cache.stats().used_blocks == 4
    with pytest.raises(KeyError):
        cache.restore(snapshot, 3)


def test_committing_what_was_not_reserved_is_a_bug_and_stops():
    cache = BasicKvCache(num_runs=1, max_model_len=8, block_size=4)
    cache.add(0, ())
    cache.reserve(0, 2)

    with pytest.raises(AssertionError, match="more tokens than were reserved"):
        cache.commit(0, [1, 2, 3])
    assert cache.computed_length(0) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.blocks_needed(9, 1),
        lambda cache: cache.reserve(9, 1),
        lambda cache: cache.commit(9, ()),
        lambda cache: cache.truncate(9, 0),
        lambda cache: cache.fork(9, 1),
        lambda cache: cache.snapshot(9),
        lambda cache: cache.restore(Snapshot(9, 1), 1),
        lambda cache: cache.release(Snapshot(9, 1)),
        lambda cache: cache.remove(9),
        lambda cache: cache.rename(9, 1),
        lambda cache: cache.block_table(9),
        lambda cache: cache.reserved_length(9),
        lambda cache: cache.computed_length(9),
    ],
)
def test_an_unknown_sequence_or_snapshot_is_a_key_error_that_changes_nothing(call):
    cache = BasicKvCache(num_runs=2, max_model_len=8, block_size=4)
    cache.add(0, ())
    before = cache.stats()

    with pytest.raises(KeyError):
        call(cache)
    assert cache.stats() == before
    cache.check_invariants()
