"""The paged cache: growth by blocks, sharing, splits, and nothing changed by what fails."""

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.block_pool import BlockError
from forge.cache.kv_cache import Hit, KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.cache.off import OffKvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.trace.records import BlockSplit, TableRecord

BOTH = pytest.mark.parametrize("kind", [PagedKvCache, PrefixKvCache])


def grown(cache: KvCache, seq_id: int, length: int) -> tuple[int, ...]:
    """Let a sequence have `length` computed tokens, adding it if need be."""
    try:
        start = cache.computed_length(seq_id)
    except KeyError:
        start = 0
        cache.add(seq_id, ())
    cache.reserve(seq_id, length - start)
    cache.commit(seq_id, [100 * seq_id + position for position in range(start, length)])
    return cache.block_table(seq_id)


def counts(cache: KvCache) -> tuple[int, ...]:
    return cache.block_map().reference_counts


@BOTH
def test_a_sequence_takes_a_block_when_the_last_one_is_full_and_not_before(kind):
    cache = kind(8, 4)
    cache.add(0, ())
    assert (cache.block_table(0), cache.stats().used_blocks) == ((), 0)
    for length in range(1, 10):
        assert cache.blocks_needed(0, 1) == (length % 4 == 1)
        assert len(grown(cache, 0, length)) == -(-length // 4)
    assert cache.blocks_needed(0, 7) == 1
    assert cache.blocks_needed(0, 8) == 2
    assert cache.blocks_needed(0, 0) == 0


@BOTH
def test_less_than_one_block_per_sequence_is_wasted(kind):
    cache = kind(64, 16)
    for seq_id, length in enumerate((1, 15, 16, 17, 40)):
        grown(cache, seq_id, length)

    stats = cache.stats()
    assert stats.used_blocks * 16 - stats.tokens_held == 15 + 1 + 0 + 15 + 8
    assert (stats.used_blocks, stats.tokens_held) == (1 + 1 + 1 + 2 + 3, 89)


@BOTH
def test_blocks_lie_anywhere_and_the_ones_freed_last_are_taken_first(kind):
    cache = kind(6, 4)
    grown(cache, 0, 3)
    grown(cache, 1, 3)
    grown(cache, 2, 3)
    cache.remove(1)
    cache.remove(0)

    assert grown(cache, 3, 11) == (0, 1, 3)


@BOTH
def test_a_reservation_that_does_not_fit_changes_nothing(kind):
    cache = kind(4, 4)
    grown(cache, 0, 6)
    grown(cache, 1, 4)
    before = cache.stats(), cache.block_map()

    with pytest.raises(OutOfBlocks) as shortage:
        cache.reserve(0, 7)

    assert (shortage.value.needed, shortage.value.free) == (2, 1)
    assert (cache.stats(), cache.block_map()) == before
    cache.check_invariants()
    assert cache.reserve(0, 6) == ()


@BOTH
def test_truncation_gives_whole_blocks_back_across_a_block_boundary(kind):
    cache = kind(8, 4)
    blocks = grown(cache, 0, 10)
    cache.reserve(0, 3)

    cache.truncate(0, 10)
    assert (cache.block_table(0), cache.reserved_length(0)) == (blocks, 10)
    cache.truncate(0, 7)
    assert (cache.block_table(0), cache.computed_length(0)) == (blocks[:2], 7)
    cache.truncate(0, 4)
    assert cache.block_table(0) == blocks[:1]
    cache.truncate(0, 5)  # longer than it is
    assert (cache.computed_length(0), cache.reserved_length(0)) == (4, 4)
    cache.truncate(0, 0)
    assert (cache.block_table(0), cache.stats().used_blocks) == ((), 0)


@BOTH
def test_a_fork_shares_every_block_with_the_partly_filled_last_one_and_takes_none(kind):
    cache = kind(8, 4)
    blocks = grown(cache, 0, 6)
    cache.reserve(0, 5)  # on its way to being written, and not the child's

    assert cache.fork(0, 1) == ()

    assert cache.block_table(1) == blocks
    assert (cache.computed_length(1), cache.reserved_length(1)) == (6, 6)
    assert counts(cache)[:3] == (2, 2, 1)
    stats = cache.stats()
    assert (stats.used_blocks, stats.blocks_saved, stats.tokens_held) == (3, 2, 6)


@BOTH
def test_the_first_write_into_a_shared_block_splits_it_and_the_other_then_writes_in_place(kind):
    cache = kind(8, 4)
    grown(cache, 0, 6)
    cache.fork(0, 1)
    assert (cache.blocks_needed(1, 1), cache.blocks_needed(1, 3), cache.blocks_needed(1, 0)) == (1, 2, 0)

    assert cache.reserve(1, 1) == (BlockCopy(source=1, destination=2),)

    assert (cache.block_table(0), cache.block_table(1)) == ((0, 1), (0, 2))
    assert counts(cache)[:3] == (2, 1, 1)
    assert cache.take_events() == (BlockSplit(seq_id=1, source=1, destination=2, references=2),)
    assert cache.blocks_needed(0, 1) == 0
    assert cache.reserve(0, 1) == ()
    assert (cache.stats().splits, cache.take_events()) == (1, ())


@BOTH
def test_a_block_shared_by_three_is_split_twice(kind):
    cache = kind(8, 4)
    grown(cache, 0, 2)
    cache.fork(0, 1)
    cache.fork(1, 2)

    assert cache.reserve(0, 1) == (BlockCopy(0, 1),)
    assert cache.reserve(1, 1) == (BlockCopy(0, 2),)
    assert cache.reserve(2, 1) == ()
    assert [event.references for event in cache.take_events()] == [3, 2]
    cache.check_invariants()


@BOTH
def test_a_fork_at_a_block_boundary_needs_no_split(kind):
    cache = kind(4, 4)
    grown(cache, 0, 8)
    cache.fork(0, 1)

    assert cache.blocks_needed(1, 1) == 1
    assert cache.reserve(1, 1) == ()
    assert counts(cache) == (2, 2, 1, 0)


@BOTH
def test_a_split_that_finds_no_block_changes_nothing(kind):
    cache = kind(2, 4)
    grown(cache, 0, 6)
    cache.fork(0, 1)
    before = cache.stats(), cache.block_map()

    with pytest.raises(OutOfBlocks) as shortage:
        cache.reserve(1, 1)

    assert (shortage.value.needed, shortage.value.free) == (1, 0)
    assert (cache.stats(), cache.block_map(), cache.take_events()) == (*before, ())
    cache.check_invariants()
    cache.remove(0)  # now it is the child's own
    assert cache.reserve(1, 1) == ()


@BOTH
def test_a_snapshot_is_references_and_outlives_its_sequence(kind):
    cache = kind(4, 4)
    grown(cache, 0, 6)

    snapshot, copies = cache.snapshot(0)
    assert (snapshot.length, copies, cache.stats().used_blocks) == (6, (), 2)
    assert cache.reserve(0, 1) == (BlockCopy(1, 2),), "what is kept is not written"
    cache.remove(0)

    assert cache.stats().used_blocks == 2
    for seq_id in (1, 2):
        assert cache.restore(snapshot, seq_id) == ()
        assert (cache.block_table(seq_id), cache.computed_length(seq_id)) == ((0, 1), 6)
    assert counts(cache) == (3, 3, 0, 0)
    assert [table.is_snapshot for table in cache.block_map().tables] == [False, False, True]
    cache.release(snapshot)
    assert counts(cache) == (2, 2, 0, 0)
    with pytest.raises(KeyError):
        cache.restore(snapshot, 3)


@BOTH
def test_removing_one_of_two_that_share_frees_only_what_it_had_alone(kind):
    cache = kind(8, 4)
    grown(cache, 0, 6)
    cache.fork(0, 1)
    grown(cache, 1, 11)

    cache.remove(1)

    assert counts(cache) == (1, 1, 0, 0, 0, 0, 0, 0)
    assert cache.block_table(0) == (0, 1)
    assert cache.stats().tokens_held == 6


@BOTH
def test_a_slot_that_several_have_is_filled_once_and_as_far_as_the_longest_says(kind):
    cache = kind(8, 4)
    grown(cache, 0, 7)
    cache.fork(0, 1)
    cache.truncate(1, 5)
    assert cache.stats().tokens_held == 7
    cache.remove(0)
    assert cache.stats().tokens_held == 5


@BOTH
def test_the_block_map_shows_every_table_and_count(kind):
    cache = kind(5, 4)
    grown(cache, 4, 5)
    cache.fork(4, 2)
    cache.snapshot(2)

    block_map = cache.block_map()

    assert block_map.tables == (
        TableRecord(4, False, (0, 1), 5, 5),
        TableRecord(2, False, (0, 1), 5, 5),
        TableRecord(0, True, (0, 1), 5, 5),
    )
    assert (block_map.block_size, block_map.reference_counts, block_map.cached) == (4, (3, 3, 0, 0, 0), ())


def test_beginning_takes_the_blocks_of_the_prompt():
    cache = PagedKvCache(4, 4)
    assert cache.lookup([1, 2, 3]) == Hit()
    assert [cache.blocks_to_begin(Hit(), length) for length in (0, 1, 4, 5, 99)] == [0, 1, 1, 2, 25]
    assert (cache.num_available, cache.add(0, [1, 2, 3])) == (4, 0)


def test_a_freed_block_in_a_live_table_is_noticed():
    cache = PagedKvCache(4, 4)
    blocks = grown(cache, 0, 6)
    cache.pool.decref(blocks[1])

    with pytest.raises(AssertionError, match="block 1 is in 1 tables and has 0 references"):
        cache.check_invariants()
    with pytest.raises(BlockError, match="block 1 was freed twice"):
        cache.remove(0)


@BOTH
def test_after_a_failure_in_the_middle_clearing_leaves_the_snapshots_and_nothing_else(kind):
    cache = kind(6, 4)
    blocks = grown(cache, 0, 6)
    snapshot, _ = cache.snapshot(0)
    cache.snapshot(0)
    grown(cache, 1, 9)
    assert (cache.stats().tokens_held, cache.max_sequence_length) == (15, 24)

    def fail(block):
        raise KeyboardInterrupt

    cache._release_block, release = fail, cache._release_block
    with pytest.raises(KeyboardInterrupt):
        cache.remove(1)
    cache._release_block = release
    cache.clear()

    cache.check_invariants()
    assert (0 in cache, 1 in cache) == (False, False)
    assert counts(cache) == (2, 2, 0, 0, 0, 0)
    assert (cache.num_available, cache.stats().tokens_held) == (4, 6)
    assert cache.restore(snapshot, 3) == () and cache.block_table(3) == blocks
    assert grown(cache, 2, 16) == (2, 3, 4, 5)
    assert cache.stats().tokens_held == 22
    cache.clear()
    assert cache.stats().tokens_held == 6


@BOTH
def test_the_last_of_n_samples_to_write_needs_no_block(kind):
    """Three samples of a prompt of 10: the prompt's 3 blocks and 2 copies of its last one are all that they take."""
    cache = kind(5, 4)
    grown(cache, 0, 10)
    for sample in (1, 2):
        cache.fork(0, sample)

    needed, copies = [], []
    for sample in (1, 2, 0):
        needed.append(cache.blocks_needed(sample, 1))
        copies += cache.reserve(sample, 1)

    assert needed == [1, 1, 0]
    assert copies == [BlockCopy(2, 3), BlockCopy(2, 4)]
    assert (cache.num_available, cache.block_table(0)) == (0, (0, 1, 2))


@BOTH
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
def test_an_unknown_sequence_or_snapshot_is_a_key_error_that_changes_nothing(kind, call):
    cache = kind(4, 4)
    grown(cache, 0, 5)
    before = cache.stats(), cache.block_map()

    with pytest.raises(KeyError):
        call(cache)
    assert (cache.stats(), cache.block_map()) == before
    cache.check_invariants()


@BOTH
def test_committing_what_was_not_reserved_is_a_bug_and_stops(kind):
    cache = kind(4, 4)
    cache.add(0, ())
    cache.reserve(0, 2)

    with pytest.raises(AssertionError, match="more tokens than were reserved"):
        cache.commit(0, [1, 2, 3])
    assert cache.computed_length(0) == 0


@pytest.mark.parametrize(
    "cache", [OffKvCache(6, 4), BasicKvCache(3, 8, 4), PagedKvCache(6, 4), PrefixKvCache(6, 4)], ids=lambda c: c.kind
)
def test_a_renamed_sequence_goes_on_under_its_new_id(cache):
    cache.add(0, ())
    cache.add(1, ())
    cache.reserve(0, 5)
    before = cache.block_table(0), cache.reserved_length(0), cache.stats(), cache.num_available

    cache.rename(0, 7)

    assert (0 in cache, 7 in cache) == (False, True)
    assert (cache.block_table(7), cache.reserved_length(7), cache.stats(), cache.num_available) == before
    with pytest.raises(AssertionError, match="sequence 1 is already there"):
        cache.rename(7, 1)
    assert (1 in cache, 7 in cache) == (True, True)
    cache.add(0, ())  # its old id is free
    cache.remove(7)
    cache.check_invariants()
