"""The pool: three states of a block, and the errors that name it."""

import pytest

from forge.cache.block_pool import BlockError, BlockPool
from forge.cache.kv_cache import OutOfBlocks


def num_used(pool: BlockPool) -> int:
    return sum(count > 0 for count in pool.reference_counts)


def state(pool: BlockPool) -> tuple:
    return list(pool.reference_counts), pool.num_references, len(pool.free), list(pool.cached), set(pool.cacheable)


def test_a_new_pool_is_free_and_hands_out_block_0_first():
    pool = BlockPool(4)

    assert (len(pool.free), num_used(pool)) == (4, 0)
    assert pool.allocate(3) == (0, 1, 2)
    assert (len(pool.free), num_used(pool), pool.num_references) == (1, 3, 3)
    pool.check_invariants()


def test_the_block_freed_last_is_taken_first():
    pool = BlockPool(6)
    pool.allocate(5)
    for block in (1, 4, 2):
        pool.decref(block)

    assert pool.allocate(4) == (2, 4, 1, 5)


def test_too_few_free_blocks_take_none():
    pool = BlockPool(3)
    pool.allocate(1)
    before = state(pool)

    with pytest.raises(OutOfBlocks) as shortage:
        pool.allocate(3)

    assert (shortage.value.needed, shortage.value.free) == (3, 2)
    assert state(pool) == before
    assert pool.allocate(2) == (1, 2)


def test_a_block_is_free_only_when_its_last_reference_goes():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.incref(block)
    pool.incref(block)
    for left in (2, 1):
        pool.decref(block)
        assert (pool.reference_counts[block], len(pool.free)) == (left, 1)
    pool.decref(block)
    assert len(pool.free) == 2
    pool.check_invariants()


def test_a_block_to_keep_is_cached_and_can_be_used_again():
    pool = BlockPool(3)
    pool.allocate(3)
    pool.cacheable = {2, 0}
    for block in (0, 1, 2):
        pool.decref(block)

    assert list(pool.cached) == [0, 2], "in the order in which they were let go"
    assert (len(pool.free), num_used(pool)) == (1, 0)
    pool.incref(0)
    assert (list(pool.cached), pool.reference_counts) == ([2], [1, 0, 0])
    pool.cacheable.remove(2)
    pool.uncache(2)
    assert (list(pool.cached), len(pool.free)) == ([], 2)
    pool.check_invariants()


@pytest.mark.parametrize(
    "misuse, message",
    [
        (lambda pool: pool.decref(1), "block 1 was freed twice"),
        (lambda pool: pool.decref(2), "block 2 was freed twice"),
        (lambda pool: pool.incref(1), "block 1 is free, and was about to be used"),
        (lambda pool: pool.incref(4), "block 4 does not exist: there are 4"),
        (lambda pool: pool.decref(-1), "block -1 does not exist"),
    ],
)
def test_misuse_names_the_block_and_changes_nothing(misuse, message):
    pool = BlockPool(4)
    pool.allocate(3)
    pool.cacheable = {2}
    pool.decref(1)
    pool.decref(2)  # 0 is referenced, 1 and 3 are free, 2 is cached
    before = state(pool)

    with pytest.raises(BlockError, match=message) as error:
        misuse(pool)

    assert f"block {error.value.block} " in message + " "
    assert state(pool) == before
    pool.check_invariants()


def test_counting_anew_believes_the_tables_and_nothing_else():
    pool = BlockPool(5)
    pool.allocate(4)
    pool.cacheable = {3}
    pool.decref(3)
    pool.cacheable.clear()

    pool.recount([(1, 2), (2, 3)])

    assert pool.reference_counts == [0, 1, 2, 1, 0]
    assert (pool.num_references, list(pool.cached), pool.free) == (4, [], [4, 0])
    pool.check_invariants()
