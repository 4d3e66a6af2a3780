"""Containers without a scheduler: the queue against a sorted list, retained caches over blocks."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.kv_cache import OutOfBlocks
from forge.cache.paged import PagedKvCache
from forge.engine.containers import Containers, RequestQueue, RetainedCaches
from forge.engine.policies import SchedulerConfig
from forge.engine.sequence import Sequence
from tests.engine.schedules import sequence


def place(one: Sequence) -> tuple[int, ...]:
    return one.priority, one.arrival, one.seq_id


def left(waiting: list[Sequence], passed: set[int], blocked: set[bool]) -> list[Sequence]:
    in_order = sorted(waiting, key=place)
    return [one for one in in_order if one.prefill_only not in blocked and one.seq_id not in passed]


@pytest.mark.parametrize("seed", range(6))
def test_the_queue_is_a_sorted_list_in_two_lanes(seed):
    rng, counted, naive = random.Random(seed), [], []
    planner: Any = SimpleNamespace(add=counted.append, remove=counted.remove, clear=counted.clear)
    queue = RequestQueue(lambda one: (one.priority,), planner)
    for number in range(60):
        options = {"priority": rng.randrange(3), "arrival": rng.randrange(3), "prefill_only": rng.random() < 0.5}
        naive.append(sequence(number, prefix_keys=(1,) * rng.randrange(2), **options))
        queue.add(naive[-1])
        passed: set[int] = set()
        blocked: set[bool] = set()
        for one in queue.in_order(blocked):
            assert one is left(naive, passed, blocked)[0]
            action = rng.choice(["pass", "pass", "remove", "block", "move"])
            if action == "remove":
                queue.remove(one)
                naive.remove(one)
            elif action == "block":
                blocked.add(one.prefill_only)
            elif action == "move" and one.prefill_only and False not in blocked:
                queue.move_to_generations(one)
                assert not one.prefill_only
            else:
                passed.add(one.seq_id)
        assert not left(naive, passed, blocked)
        queue.check_invariants()
        assert [*queue] == sorted(naive, key=place)
        assert queue.sequences == {one.seq_id: one for one in naive}
        assert sorted(counted, key=place) == sorted((one for one in naive if one.prefix_keys), key=place)
    with pytest.raises(KeyError):
        queue.remove(sequence(99))
    queue.clear()
    queue.check_invariants()
    assert [*queue] == counted == [] and not queue.sequences


def test_the_check_sees_a_queue_out_of_order_and_one_that_lost_a_sequence():
    queue = Containers.empty(PagedKvCache(4, 4), SchedulerConfig()).queue
    for lane in (False, True):
        for seq_id in range(2):
            queue.add(sequence(seq_id + 2 * lane, arrival=1 - seq_id, prefill_only=lane))
    for lane in queue._lanes:
        queue.check_invariants()
        lane.reverse()
        with pytest.raises(AssertionError, match="out of order"):
            queue.check_invariants()
        lane.reverse()
    del queue.sequences[0]
    with pytest.raises(AssertionError, match="views differ"):
        queue.check_invariants()


def retained(num_blocks: int = 8) -> tuple[PagedKvCache, RetainedCaches]:
    """Two ended sequences, 3 and 1, with 6 and 5 computed tokens and a slot more."""
    cache = PagedKvCache(num_blocks, 4)
    caches = RetainedCaches(cache)
    for seq_id, length in ((3, 6), (1, 5)):
        cache.add(seq_id, ())
        cache.reserve(seq_id, length + 1)
        cache.commit(seq_id, range(length))
        caches.retain(sequence(seq_id, token_ids=list(range(length))))
    return cache, caches


def test_the_oldest_is_released_first_and_nothing_twice():
    cache, caches = retained()
    assert [cache.reserved_length(seq_id) for seq_id in (3, 1)] == [6, 5], "slots without tokens are given back"
    assert caches.release_oldest(but=3) and list(caches.sequences) == [3] and 1 not in cache
    assert not caches.release_oldest(but=3) and caches.release_oldest() and not caches.release_oldest()
    caches.release(3)
    assert cache.num_available == 8


def test_a_fork_of_a_retained_cache_has_tokens_of_its_own():
    cache, caches = retained()
    assert caches.fork(3, 7) == ()
    caches.sequences[7].token_ids.append(9)
    assert (caches.sequences[3].token_ids, caches.sequences[7].seq_id) == (list(range(6)), 7)
    assert cache.block_table(7) == cache.block_table(3)
    with pytest.raises(KeyError):
        caches.fork(5, 8)
    whole = RetainedCaches(BasicKvCache(1, 4, 4))
    whole._cache.add(0, ())
    whole.retain(sequence(0))
    with pytest.raises(OutOfBlocks):
        whole.fork(0, 1)
    assert list(whole.sequences) == [0]


@pytest.mark.parametrize(("tokens", "common"), [([0, 1, 2, 9], 3), (range(8), 6), (range(6), 5), ([9, 1], 0), ([0], 0)])
def test_a_continuation_takes_over_the_tokens_in_common_but_for_its_own_last(tokens, common):
    cache, caches = retained()
    new = sequence(5, token_ids=list(tokens), continues_from=3)
    assert caches.trim_to_common(new) == 3
    assert (cache.computed_length(3), caches.hand_over(3, new)) == (common, common)
    assert (list(caches.sequences), 3 in cache, cache.computed_length(5)) == ([1], False, common)


@pytest.mark.parametrize("options", [{}, {"continues_from": 9}, {"continues_from": 3, "salt": "x"}])
def test_what_continues_nothing_cuts_nothing(options):
    cache, caches = retained()
    assert caches.trim_to_common(sequence(5, token_ids=[9, 9], **options)) is None
    assert cache.computed_length(3) == 6


def test_containers_are_of_one_cache_and_one_configuration():
    cache, config = PagedKvCache(4, 2), SchedulerConfig(order="priority", num_host_blocks=7)
    containers = Containers.empty(cache, config)
    for seq_id in range(2):
        containers.queue.add(sequence(seq_id, priority=-seq_id, prefix_keys=(4,)))
    assert [one.seq_id for one in containers.queue] == [1, 0]
    assert containers.planner.num_worth_caching(sequence(2, prefix_keys=(4, 5))) == 1
    assert (containers.host_pool.num_free, containers.cache, containers.running) == (7, cache, {})
