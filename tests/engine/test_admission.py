"""Who begins and who waits, where two lanes, slots, tokens and blocks each end exactly: no model."""

import pytest

from forge.cache.factory import CacheSize, create_kv_cache
from forge.cache.host_pool import HostEntry
from forge.engine.admission import AdmissionCost, generation_item
from forge.engine.policies import SchedulerConfig
from forge.engine.scheduler import Scheduler
from forge.engine.step_plan import PlanBuilder
from forge.reasons import NoBlocks, NoBudget, PoolExhausted
from forge.trace.records import WaitRecord
from tests.engine.schedules import admitted, sequence, step
from tests.engine.test_scheduler import behind_long_prompts


def both_lanes(num_blocks: int, kv: str = "paged", **config) -> Scheduler:
    """A scheduler with scratch blocks, so that there are prefill-only sequences."""
    cache = create_kv_cache(kv, CacheSize(64, 4, 4, 8, num_blocks))
    scheduler = Scheduler(cache, SchedulerConfig(**config), range(num_blocks, num_blocks + 20))
    scheduler.prefill_only.temporary_bytes = lambda *rows: sum(rows)
    return scheduler


def one_pass(seq_id: int, tokens: int = 3, **options):
    return sequence(seq_id, tokens, 1, prefill_only=True, **options)


def test_a_lane_that_is_blocked_blocks_no_other_and_what_waits_beside_a_running_one_does_not_end():
    scheduler = both_lanes(2)
    scheduler.add(sequence(0, tokens=4))
    step(scheduler)
    waits = sequence(1, tokens=9)
    for one in (waits, one_pass(2), sequence(3, tokens=1), one_pass(4)):
        scheduler.add(one)
    plan = step(scheduler)

    assert [item.seq_id for item in plan.items] == [0, 2, 4]
    assert (plan.waiting, plan.exhausted, waits.length_limit) == ((WaitRecord(1, NoBlocks(3, 0)),), (), None)
    plan = step(scheduler, ending=(0,))
    plan = step(scheduler)
    assert (plan.waiting, plan.exhausted) == ((WaitRecord(1, NoBlocks(3, 2)),), (waits,))
    assert waits.length_limit == PoolExhausted(8) and admitted(step(scheduler)) == (3,)


def test_after_a_preemption_the_first_generation_that_is_no_victim_waits_and_the_other_lane_goes_on():
    scheduler = both_lanes(3)
    for seq_id in (0, 1):
        scheduler.add(sequence(seq_id, tokens=4))
    step(scheduler)
    for one in (one_pass(2), sequence(3, tokens=5), sequence(4)):
        scheduler.add(one)
    plan = step(scheduler)

    assert [preempted.seq_id for preempted in plan.preempted] == [1]
    assert [item.seq_id for item in plan.items] == [0, 2]
    assert plan.waiting == (WaitRecord(3, NoBlocks(2, 0)),)


def test_what_is_on_the_host_or_retained_costs_its_blocks_and_no_computing():
    scheduler = both_lanes(8, "prefix")
    scheduler.host_pool.add(3, HostEntry(2, 6))
    assert scheduler.admission.cost(sequence(3, tokens=9), None) == AdmissionCost(6, 3, 0)
    del scheduler.host_pool.entries[3]
    scheduler.add(sequence(0, tokens=8, retain_cache=True))
    step(scheduler, ending=(0,))
    assert scheduler.admission.cost(sequence(4, tokens=18, token_ids=[9] * 18), 0) == AdmissionCost(8, 3, 0)
    assert scheduler.admission.cost(sequence(4, tokens=9), None) == AdmissionCost(8, 1, 0)
    scheduler.retained.release(0)
    assert scheduler.admission.cost(sequence(4, tokens=9), None) == AdmissionCost(8, 3, 2)


@pytest.mark.parametrize(("second", "third"), [(4, 1), (5, 4)])
def test_without_chunks_prompts_fill_a_step_to_its_last_token_and_cached_ones_do_not_count(second, third):
    scheduler = both_lanes(16, "prefix", chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=4)
    scheduler.add(sequence(0, tokens=8))
    step(scheduler, ending=(0,))
    lengths = {1: (4, 50), 2: (8 + second, 100), 3: (third, 70)}
    for seq_id, (tokens, first) in lengths.items():
        scheduler.add(sequence(seq_id, tokens, token_ids=list(range(first, first + tokens))))
    plan = step(scheduler)

    assert [(item.seq_id, item.num_tokens) for item in plan.items] == [(1, 4), (2, 4)][: 1 + (second == 4)]
    assert plan.waiting == (WaitRecord(3 if second == 4 else 2, NoBudget(8)),)


def test_a_short_prompt_passes_where_the_long_one_keeps_a_slot_and_never_without_chunks():
    plan = step(behind_long_prompts(max_num_seqs=3))
    assert [(item.seq_id, item.num_tokens) for item in plan.items] == [(0, 1), (4, 3), (1, 12)]
    assert 4 not in admitted(step(behind_long_prompts(chunked_prefill=False)))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_without_output_needs_no_logits(max_tokens):
    cache = create_kv_cache("paged", CacheSize(32, 4, 4, 8, 8))
    cache.add(0, ())
    item = generation_item(cache, sequence(0, tokens=3, max_tokens=max_tokens), 0, 3)
    assert (item.chooses_token, item.logit_rows) == (bool(max_tokens), range(3 - max_tokens, 3))


def test_a_prefill_only_sequence_leaves_the_queue_and_begins_with_whole_cached_blocks():
    scheduler = both_lanes(8, "prefix")
    scheduler.add(sequence(0, tokens=10))
    step(scheduler)
    scheduler.add(one_pass(1, 9, token_ids=[*range(100, 106), 1, 2, 3]))
    plan = scheduler.schedule()
    assert [(item.seq_id, item.start, item.num_tokens) for item in plan.items] == [(0, 10, 1), (1, 4, 5)]
    assert [*scheduler.queue] == []


def test_one_that_passes_another_leaves_it_scratch_blocks_beside_those_that_are_taken():
    scheduler = both_lanes(8)
    for taken, has_room in ((15, True), (16, False)):
        plan = PlanBuilder(9, 9, num_scratch_blocks=taken)
        assert scheduler.prefill_only.has_room(one_pass(0, 5), one_pass(1, 9), plan) == has_room
