"""Room for draft tokens, without a scheduler: what is wanted, as far as a step, a cache and a request have room."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.host_pool import Swap
from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import BlockCopy
from forge.cache.paged import PagedKvCache
from forge.engine.draft_slots import DraftSlots
from forge.engine.step_plan import PlanBuilder, PlanItem
from tests.engine.schedules import sequence

LENGTH = 6
"""Tokens of a sequence that decodes, the last not yet computed; 4 are its prompt's."""


def decoding(
    cache: KvCache, plan: PlanBuilder, seq_id: int, length: int = LENGTH, max_tokens: int = 20, **item
) -> None:
    """Let a sequence be in the plan with its last token."""
    cache.add(seq_id, ())
    cache.reserve(seq_id, length)
    cache.commit(seq_id, range(length - 1))
    one = sequence(seq_id, tokens=4, token_ids=list(range(length)), max_tokens=max_tokens)
    options: dict[str, Any] = {"phase": "decode"} | item
    table = cache.block_table(seq_id)
    plan.items[seq_id] = PlanItem(seq_id, one, length - 1, 1, range(1), True, block_table=table, **options)


def slots_for(cache: KvCache, drafts: int = 2, forks: int = 0) -> DraftSlots:
    speculation: Any = SimpleNamespace(wanted=lambda sequence: drafts, wanted_forks=lambda sequence: forks)
    return DraftSlots(cache, speculation)


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_as_many_draft_tokens_as_are_wanted_and_fit(num_blocks):
    for wanted, max_tokens, budget, taken in product((-1, 0, 1, 3, 9), (2, 3, 4, 6, 20), (0, 1, 2, 9), (0, 1)):
        cache, plan = PagedKvCache(num_blocks, 4), PlanBuilder(99, budget)
        decoding(cache, plan, 0, max_tokens=max_tokens)
        if taken and cache.num_available:
            cache.add(1, ())
            cache.reserve(1, 1)
        most = min(wanted, max_tokens - 2 - 1, budget, 4 * (2 + cache.num_available) - LENGTH)
        slots_for(cache, wanted).reserve(plan)

        item, number = plan.items[0], max(0, most)
        assert (item.num_draft_slots, item.logit_rows, plan.budget) == (number, range(1 + number), budget - number)
        assert (item.block_table, cache.reserved_length(0)) == (cache.block_table(0), LENGTH + number)
        assert item.forks == () and plan.copies == []


def test_all_decodes_of_a_step_share_its_room_and_prompts_have_no_drafts():
    cache, plan = PagedKvCache(16, 4), PlanBuilder(99, 5)
    decoding(cache, plan, 0, remaining=3)
    decoding(cache, plan, 1, length=4)
    for seq_id in (2, 3, 4, 5):
        decoding(cache, plan, seq_id, max_tokens=3 if seq_id == 3 else 9)
    slots_for(cache).reserve(plan)
    assert [item.num_draft_slots for item in plan.items.values()] == [0, 0, 2, 0, 2, 1]
    assert list(plan.items) == [0, 1, 2, 3, 4, 5] and plan.budget == 0


@pytest.mark.parametrize(("budget", "num_forks"), [(4, 0), (5, 1), (7, 1), (8, 2), (99, 3)])
def test_each_further_draft_takes_a_fork_and_its_rows_once_more(budget, num_forks):
    cache, plan = PagedKvCache(16, 4), PlanBuilder(99, budget)
    decoding(cache, plan, 0)
    slots_for(cache, forks=3).reserve(plan)
    item = plan.items[0]

    assert [fork.seq_id for fork in item.forks] == [-1, -2, -3][:num_forks]
    assert plan.budget == budget - 2 - 3 * num_forks
    assert plan.copies == [BlockCopy(1, 2 + place) for place in range(num_forks)], "of the block with computed tokens"
    for fork in item.forks:
        assert (fork.block_table, cache.reserved_length(fork.seq_id)) == (cache.block_table(fork.seq_id), LENGTH + 2)


@pytest.mark.parametrize(("phase", "swap_ins", "drafts"), [("prefill", (), 2), ("decode", (0,), 2), ("decode", (), 0)])
def test_what_is_swapped_in_or_computed_again_or_has_no_draft_has_no_further_ones(phase, swap_ins, drafts):
    cache, plan = PagedKvCache(16, 4), PlanBuilder(99, 99, swap_ins=[Swap(seq_id, ()) for seq_id in swap_ins])
    decoding(cache, plan, 0, phase=phase)
    slots_for(cache, drafts, forks=3).reserve(plan)
    assert (plan.items[0].num_draft_slots, plan.items[0].forks, plan.budget) == (drafts, (), 99 - drafts)


def test_no_draft_token_stands_past_the_longest_sequence():
    cache, plan = BasicKvCache(1, LENGTH + 1, 4), PlanBuilder(99, 99)
    decoding(cache, plan, 0)
    slots_for(cache, 9).reserve(plan)
    assert plan.items[0].num_draft_slots == 1


@pytest.mark.parametrize("cache", [PagedKvCache(3, 4), BasicKvCache(2, 16, 4), PagedKvCache(4, 3)], ids=str)
def test_a_fork_that_finds_no_room_leaves_nothing(cache):
    plan = PlanBuilder(99, 99)
    decoding(cache, plan, 0)
    slots_for(cache, forks=9).reserve(plan)
    assert len(plan.items[0].forks) == (1 if cache.block_size == 4 else 0)
    assert -2 not in cache and plan.budget == 99 - 2 - 3 * len(plan.items[0].forks)
    cache.check_invariants()


@pytest.mark.parametrize("owner", [0, -1, -2])
def test_the_winners_blocks_become_the_sequences_own(owner):
    cache, plan = PagedKvCache(16, 4), PlanBuilder(99, 99)
    decoding(cache, plan, 0)
    slots = slots_for(cache, forks=2)
    slots.reserve(plan)
    cache.commit(owner, range(2))
    table = cache.block_table(owner)

    assert slots.end_forks(plan.items[0], owner) == ()
    assert (cache.block_table(0), cache.computed_length(0)) == (table, LENGTH + 1)
    assert -1 not in cache and -2 not in cache and cache.num_available == 14
    cache.check_invariants()


def test_where_forks_are_copied_the_winner_is_too():
    cache, plan = BasicKvCache(2, 16, 4), PlanBuilder(99, 99)
    decoding(cache, plan, 0)
    slots = slots_for(cache, forks=1)
    slots.reserve(plan)
    assert plan.copies == [BlockCopy(0, 4), BlockCopy(1, 5)]
    cache.commit(-1, range(1))
    assert slots.end_forks(plan.items[0], -1) == (BlockCopy(4, 0), BlockCopy(5, 1))
    assert cache.num_available == 4
