"""The awkward cases of scheduling, each by its name. No model: plans, reasons, blocks. Blocks have four slots."""

import pytest

from forge.cache.host_pool import Swap
from forge.cache.kv_storage import BlockCopy
from forge.cache.paged import PagedKvCache
from forge.engine.containers import Containers
from forge.engine.policies import VICTIM_POLICIES, SchedulerConfig
from forge.engine.preemption import Preemption
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.step_plan import PlanBuilder, StepPlan
from forge.reasons import HostPoolFull, MaxNumSeqs, NoBlocks, NoBudget, PoolExhausted
from forge.trace.records import PreemptRecord, Queues, WaitRecord
from tests.engine.schedules import admitted, new_scheduler, outcomes_of, sequence, step, waiting


def running(*lengths: int, num_blocks: int, **config) -> Scheduler:
    """Sequences 0, 1, … with prompts of these lengths, each after its first token. Their prompts are all different."""
    scheduler = new_scheduler(num_blocks, **config)
    for seq_id, length in enumerate(lengths):
        scheduler.add(sequence(seq_id, length, 99, token_ids=[1000 * seq_id + place for place in range(length)]))
    assert admitted(step(scheduler)) == tuple(range(len(lengths)))
    return scheduler


def shares(plan: StepPlan) -> list[tuple[int, str, int, int]]:
    """Who computes what: (sequence, phase, start, tokens)."""
    return [(item.seq_id, item.phase, item.start, item.num_tokens) for item in plan.items]


def run_to_the_end(scheduler: Scheduler, lengths: dict[int, int]) -> list[StepPlan]:
    """Step until each sequence has ended at its length."""
    plans = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        ending = tuple(
            item.seq_id
            for item in plan.items
            if item.chooses_token and len(item.sequence.token_ids) + 1 == lengths[item.seq_id]
        )
        scheduler.commit(plan, outcomes_of(scheduler, plan, ending))
        scheduler.check_invariants()
        plans.append(plan)
        assert len(plans) < 500, "it does not end"
    assert scheduler.cache.stats().used_blocks == 0
    return plans


# Admission


def test_admission_blocks_when_prompt_does_not_fit():
    scheduler = running(10, num_blocks=4)
    late = sequence(1, tokens=5)
    scheduler.add(late)

    plan = step(scheduler)

    assert plan.waiting == (WaitRecord(1, NoBlocks(needed=2, free=1)),)
    assert (plan.admitted, plan.preempted) == ((), ())
    assert waiting(scheduler) == [late]
    assert 1 not in scheduler.cache
    step(scheduler, ending=(0,))
    assert admitted(step(scheduler)) == (1,)


def test_what_the_running_need_in_this_step_counts_as_taken():
    scheduler = running(4, num_blocks=2)  # one block is free, and the next token needs it
    scheduler.add(sequence(1, tokens=3))

    plan = step(scheduler)

    assert plan.waiting == (WaitRecord(1, NoBlocks(needed=1, free=0)),)
    assert shares(plan) == [(0, "decode", 4, 1)]
    assert plan.preempted == ()


def test_nobody_overtakes_the_first_in_line():
    scheduler = running(4, num_blocks=4)
    for seq_id, tokens in ((1, 12), (2, 1)):
        scheduler.add(sequence(seq_id, tokens))

    plan = step(scheduler)

    assert plan.waiting == (WaitRecord(1, NoBlocks(needed=3, free=2)),), "those behind it wait for it"
    assert admitted(plan) == ()


def test_a_failed_admission_leaves_counts_index_and_eviction_order_untouched():
    scheduler = new_scheduler(6, kv="prefix")
    cache = scheduler.cache
    for seq_id, first in ((0, 10), (1, 20)):
        scheduler.add(sequence(seq_id, 9, token_ids=list(range(first, first + 9))))
        step(scheduler, ending=(seq_id,))
    scheduler.add(sequence(2, 9, token_ids=[99] * 9))
    step(scheduler)
    before = list(cache.pool.reference_counts), list(cache.pool.cached), dict(cache.index.node_of), cache.stats()

    scheduler.add(sequence(3, 16, token_ids=[*range(10, 18), *range(8)]))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan.waiting == (WaitRecord(3, NoBlocks(needed=3, free=2)),), (
            "its own hits count neither as needed nor as free"
        )
        after = list(cache.pool.reference_counts), list(cache.pool.cached), dict(cache.index.node_of), cache.stats()
        assert after == before


def test_a_hit_is_counted_once_though_admission_was_tried_again_and_again():
    scheduler = new_scheduler(3, kv="prefix")
    scheduler.add(sequence(0, 9, token_ids=list(range(9))))
    step(scheduler)
    scheduler.add(sequence(1, 12, token_ids=[*range(8), *range(50, 54)]))
    for _ in range(2):
        assert step(scheduler).waiting
        assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (9, 0)
    step(scheduler, ending=(0,))

    (admission,) = step(scheduler).admitted

    assert admission.num_cached == 8
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (9 + 12, 8)


@pytest.mark.parametrize("length", [8, 9])
def test_a_prompt_that_is_wholly_cached_computes_exactly_one_token(length):
    scheduler = new_scheduler(8, kv="prefix")
    for seq_id in range(2):
        scheduler.add(sequence(seq_id, length, token_ids=list(range(length))))
        plan = step(scheduler, ending=(seq_id,))

    assert plan.admitted[0].num_cached == length - 1
    assert shares(plan) == [(1, "prefill", length - 1, 1)]


def test_a_prompt_whose_log_probabilities_are_wanted_takes_no_hit():
    scheduler = new_scheduler(8, kv="prefix")
    for seq_id, params in enumerate((SamplingParams(), SamplingParams(prompt_logprobs=1))):
        scheduler.add(sequence(seq_id, 9, token_ids=list(range(9)), params=params))
        plan = step(scheduler, ending=(seq_id,))

    assert (plan.admitted[0].num_cached, plan.items[0].logit_rows) == (0, range(9))


def test_samples_have_their_slots_from_admission_on():
    scheduler = new_scheduler(32, max_num_seqs=3)
    first, second = sequence(0), sequence(1)
    first.waiting_samples = [second]
    for one in (first, sequence(2), sequence(3)):
        scheduler.add(one)

    plan = step(scheduler)

    assert admitted(plan) == (0, 2)
    assert plan.waiting == (WaitRecord(3, MaxNumSeqs(3)),)
    assert list(scheduler.running) == [0, 2, 1]


def test_of_more_samples_than_slots_those_that_wait_come_before_later_requests():
    scheduler = new_scheduler(32, max_num_seqs=2)
    samples = [sequence(seq_id) for seq_id in range(3)]
    samples[0].waiting_samples = samples[1:]
    for one in (samples[0], sequence(3)):
        scheduler.add(one)

    assert admitted(step(scheduler)) == (0,)
    assert list(scheduler.running) == [0, 1]
    step(scheduler, ending=(0,))
    assert admitted(step(scheduler)) == (2,)


# Chunked prefill


def test_a_long_prompt_takes_what_the_decodes_leave_of_the_budget():
    scheduler = running(3, 3, num_blocks=16, max_num_batched_tokens=6)
    scheduler.add(sequence(2, tokens=9))
    scheduler.add(sequence(3, tokens=2))

    plans = [step(scheduler) for _ in range(3)]

    assert shares(plans[0]) == [(0, "decode", 3, 1), (1, "decode", 3, 1), (2, "prefill", 0, 4)]
    assert shares(plans[1]) == [(0, "decode", 4, 1), (1, "decode", 4, 1), (2, "prefill", 4, 4)]
    assert shares(plans[2])[2:] == [(2, "prefill", 8, 1), (3, "prefill", 0, 2)]
    assert [plan.items[2].remaining for plan in plans] == [5, 1, 0]
    assert [plan.items[2].chooses_token for plan in plans] == [False, False, True], (
        "only a whole prompt has a next token"
    )
    assert plans[0].waiting == (WaitRecord(3, NoBudget(limit=6)),)
    assert {plan.execution_class for plan in plans} == {"mixed"}
    assert all(sum(item.num_tokens for item in plan.items) <= 6 for plan in plans)


def test_the_last_two_tokens_of_a_prompt_keep_to_the_budget_as_well():
    scheduler = running(1, 1, num_blocks=16, max_num_batched_tokens=3, max_num_seqs=3)
    scheduler.add(sequence(2, tokens=4))

    assert [shares(step(scheduler))[2:] for _ in range(4)] == [[(2, "prefill", start, 1)] for start in range(4)]


def test_without_chunks_a_step_is_all_prompts_or_all_decodes():
    scheduler = running(3, 3, num_blocks=16, chunked_prefill=False)
    scheduler.add(sequence(2, tokens=9))

    plans = [step(scheduler) for _ in range(2)]

    assert shares(plans[0]) == [(2, "prefill", 0, 9)], "the prompt stalls the others"
    assert [share[:2] for share in shares(plans[1])] == [(0, "decode"), (1, "decode"), (2, "decode")]


def test_without_chunks_what_was_swapped_in_sits_out_a_step_of_prompts():
    scheduler = running(4, 4, num_blocks=3, chunked_prefill=False, preemption="swap")
    assert step(scheduler).preempted[0].seq_id == 1
    scheduler.add(sequence(2, tokens=2))
    step(scheduler, ending=(0,))

    plan, following = step(scheduler), step(scheduler)

    assert ([swap.seq_id for swap in plan.swap_ins], admitted(plan)) == ([1], (1, 2))
    assert shares(plan) == [(2, "prefill", 0, 2)]
    assert shares(following) == [(1, "decode", 4, 1), (2, "decode", 2, 1)], "what came back is not computed again"


# Preemption


def test_preempts_when_blocks_run_out():
    scheduler = running(4, 4, 3, num_blocks=4)  # one is free, and two sequences need one

    plan = step(scheduler)

    record = PreemptRecord(2, 1, 1, 0, preempt="lifo", preemption="recompute", tokens_lost=3, blocks_freed=1)
    assert plan.preempted == (record,)
    assert shares(plan) == [(0, "decode", 4, 1), (1, "decode", 4, 1)], "the victim is not in the plan"
    assert [one.seq_id for one in waiting(scheduler)] == [2]
    assert scheduler.queues == Queues(waiting=1, running=2, swapped=0, finished=0)


def test_lifo_preempts_the_newest_also_when_it_is_the_one_that_asks():
    scheduler = running(4, 4, num_blocks=3)

    (preemption,) = step(scheduler).preempted

    assert (preemption.seq_id, preemption.victim_of) == (1, 1)


def holding(num_blocks: int, *lengths: tuple[int, int], **config) -> tuple[Containers, Preemption, PlanBuilder]:
    """Running sequences 0, 1, … with so many slots, so many of them computed, without a scheduler."""
    containers = Containers.empty(PagedKvCache(num_blocks, 4), SchedulerConfig(**config))
    for seq_id, (reserved, computed) in enumerate(lengths):
        containers.cache.add(seq_id, ())
        containers.cache.reserve(seq_id, reserved)
        containers.cache.commit(seq_id, range(computed))
        containers.running[seq_id] = sequence(seq_id)
    return containers, Preemption(containers), PlanBuilder(99, 99)


def test_retained_caches_go_before_victims_and_one_that_runs_alone_learns_its_limit():
    containers, preemption, plan = holding(4, (5, 5), (4, 4), (4, 4))
    for seq_id in (1, 2):
        containers.retained.retain(containers.running.pop(seq_id))
    assert preemption.reserve(containers.running[0], 4, plan) and list(containers.retained.sequences) == [2]
    assert not preemption.reserve(containers.running[0], 8, plan) and not containers.retained.sequences
    assert (plan.exhausted, plan.preempted) == ([containers.running[0]], [])
    assert containers.running[0].length_limit == PoolExhausted(16)


@pytest.mark.parametrize(
    ("computed", "num_host_blocks", "lost", "fallback"),
    [(6, 2, 0, None), (6, 1, 6, HostPoolFull(2, 1)), (0, 2, 0, None)],
)
def test_what_a_victim_has_computed_goes_to_the_host_if_all_of_it_fits(computed, num_host_blocks, lost, fallback):
    config = {"preemption": "swap", "num_host_blocks": num_host_blocks}
    containers, preemption, plan = holding(6, (5, 5), (6, computed), **config)
    assert preemption.reserve(containers.running[0], 12, plan)
    is_swapped = computed and not lost
    how = "swap" if is_swapped else "recompute"
    assert plan.preempted == [PreemptRecord(1, 0, 3, 2, "lifo", how, lost, 2, fallback)]
    assert (list(containers.host_pool.entries), plan.swap_outs) == (
        ([1], [Swap(1, (2, 3))]) if is_swapped else ([], [])
    )


def test_what_is_swapped_out_is_read_where_its_content_is_before_the_copies():
    containers, preemption, plan = holding(6, (5, 5), (6, 6), preemption="swap")
    plan.copies = [BlockCopy(0, 4), BlockCopy(4, 2), BlockCopy(5, 4)]
    assert preemption.reserve(containers.running[0], 12, plan)
    assert plan.swap_outs == [Swap(1, (0, 3))]


def test_a_queued_request_is_not_skipped_after_a_preemption():
    scheduler = running(4, 4, 3, num_blocks=4)
    scheduler.add(sequence(3, tokens=1))
    plan = step(scheduler)
    assert [one.seq_id for one in plan.preempted] == [2]
    assert plan.waiting == (WaitRecord(3, NoBlocks(needed=1, free=0)),), "the first that is no victim"
    assert [one.seq_id for one in waiting(scheduler)] == [2, 3], "who ran before is in front"
    step(scheduler, ending=(0, 1))

    assert admitted(step(scheduler)) == (2, 3)


def test_a_resumed_sequence_carries_its_prompt_and_its_output():
    scheduler = running(4, 4, 2, num_blocks=4)
    step(scheduler)  # sequence 2 is preempted after its first token
    victim = waiting(scheduler)[0]
    assert (victim.token_ids, victim.times_preempted) == ([2000, 2001, 7], 1)
    step(scheduler, ending=(0, 1))

    plan = step(scheduler)

    assert (plan.admitted[0].how, plan.admitted[0].num_cached) == ("recompute", 0)
    assert shares(plan) == [(2, "prefill", 0, 3)]
    assert plan.items[0].logit_rows == range(2, 3)
    assert victim.token_ids == [2000, 2001, 7, 7]


def test_what_the_prefix_cache_still_has_of_a_victim_need_not_be_computed_again():
    scheduler = running(4, 4, 7, num_blocks=5, kv="prefix")
    assert [one.seq_id for one in step(scheduler).preempted] == [2]
    step(scheduler, ending=(0, 1))

    plan = step(scheduler)

    assert (plan.admitted[0].how, plan.admitted[0].num_cached) == ("recompute", 4)
    assert shares(plan) == [(2, "prefill", 4, 4)]


def test_least_progressed_takes_the_fewest_output_tokens_and_of_equals_the_last():
    scheduler = running(2, num_blocks=4, preempt="least-progressed")
    for _ in range(2):
        step(scheduler)  # sequence 0 has three output tokens, and its next one needs a block
    for seq_id in (1, 2, 3):
        scheduler.add(sequence(seq_id, tokens=2))
    step(scheduler, ending=())
    assert [one.num_output_tokens for one in scheduler.running.values()] == [4, 1, 1]  # 0 has the fourth block
    for _ in range(2):
        step(scheduler)

    plan = step(scheduler)

    assert [(one.seq_id, one.preempt) for one in plan.preempted] == [(2, "least-progressed")]


def test_least_progressed_spares_the_one_that_asks():
    scheduler = running(6, num_blocks=4, preempt="least-progressed")
    scheduler.add(sequence(1, tokens=8))
    step(scheduler)

    (preemption,) = step(scheduler).preempted

    assert (preemption.seq_id, preemption.victim_of) == (0, 1), "two tokens against one, but the one asks"


@pytest.mark.parametrize(
    ("victim", "expected"), [("lifo", (2, 2)), ("lifo-others", (1, 2)), ("least-progressed", (1, 2))]
)
def test_where_the_newest_asks_only_lifo_makes_it_its_own_victim(victim, expected):
    scheduler = running(3, 3, 4, num_blocks=3, preempt=victim)

    (preemption,) = step(scheduler).preempted

    assert ((preemption.seq_id, preemption.victim_of), preemption.preempt) == (expected, victim)


def test_lifo_others_takes_the_newest_other_one_however_far_it_is():
    scheduler = running(4, num_blocks=4, preempt="lifo-others")
    for _ in range(2):
        step(scheduler)
    for seq_id in (1, 2):
        scheduler.add(sequence(seq_id, tokens=4))
    step(scheduler)

    (preemption,) = step(scheduler).preempted

    assert (preemption.seq_id, preemption.victim_of, preemption.preempt) == (2, 1, "lifo-others")


def test_priority_inversion_a_worse_placed_requester_gives_way_itself():
    scheduler = new_scheduler(3, order="priority")
    scheduler.add(sequence(0, tokens=4, priority=5))
    scheduler.add(sequence(1, tokens=7, priority=0))
    step(scheduler)
    assert list(scheduler.running) == [1, 0]

    plan = step(scheduler)

    (record,) = plan.preempted
    assert (record.seq_id, record.victim_of, record.needed, record.free) == (0, 0, 1, 0)
    assert shares(plan) == [(1, "decode", 7, 1)]


def test_priority_takes_from_the_worst_placed_however_long_it_has_run():
    scheduler = new_scheduler(3, order="priority", preempt="least-progressed")
    scheduler.add(sequence(0, tokens=5, priority=5))
    for _ in range(2):
        step(scheduler)
    scheduler.add(sequence(1, tokens=4, priority=0))
    step(scheduler)

    plan = step(scheduler)

    assert [(one.seq_id, one.victim_of, one.preempt) for one in plan.preempted] == [(0, 1, "priority")]
    assert shares(plan) == [(1, "decode", 4, 1)]


def test_zero_free_blocks_with_one_running_sequence_is_no_deadlock():
    scheduler = running(7, num_blocks=2)
    step(scheduler)
    assert scheduler.cache.num_available == 0

    plan = step(scheduler)

    assert (plan.items, [one.seq_id for one in plan.exhausted], plan.preempted) == ((), [0], ())
    assert not scheduler.has_unfinished()
    assert scheduler.cache.stats().used_blocks == 0


def test_what_waits_for_more_than_the_pool_ends_and_the_next_one_begins():
    scheduler = new_scheduler(2)
    scheduler.add(sequence(0, tokens=9))
    scheduler.add(sequence(1, tokens=2))

    plan = step(scheduler)

    assert [one.seq_id for one in plan.exhausted] == [0]
    assert plan.waiting == (WaitRecord(0, NoBlocks(needed=3, free=2)),)
    assert admitted(step(scheduler)) == (1,)


@pytest.mark.parametrize("victim", VICTIM_POLICIES)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_no_cycle_of_mutual_preemption(victim, preemption, block_size):
    """Each of four sequences comes to fill the whole pool by itself."""
    scheduler = new_scheduler(
        12 // block_size, block_size=block_size, preempt=victim, preemption=preemption, num_host_blocks=8 // block_size
    )
    for seq_id in range(4):
        scheduler.add(sequence(seq_id, 2, 99, token_ids=[seq_id, 50]))

    plans = run_to_the_end(scheduler, dict.fromkeys(range(4), 13))

    assert sum(len(plan.preempted) for plan in plans) > 2
    for plan in plans:
        assert plan.items, "a step that brings nobody anything"


# Swapping


def test_swapping_out_and_in_computes_nothing_again():
    scheduler = running(4, 4, 6, num_blocks=5, preemption="swap")
    out = step(scheduler)
    assert out.swap_outs == (Swap(2, (2, 3)),)
    assert (out.preempted[0].preemption, out.preempted[0].tokens_lost) == ("swap", 0)
    assert scheduler.queues == Queues(waiting=0, running=2, swapped=1, finished=0)
    step(scheduler, ending=(0, 1))

    plan = step(scheduler)

    assert plan.swap_ins == (Swap(2, scheduler.cache.block_table(2)[:2]),)
    assert (plan.admitted[0].how, plan.admitted[0].num_cached) == ("swap", 6)
    assert shares(plan) == [(2, "decode", 6, 1)]
    assert (scheduler.host_pool.num_free, scheduler.host_pool.entries) == (scheduler.host_pool.num_blocks, {})


def test_a_full_host_pool_falls_back_to_recompute_with_its_reason():
    scheduler = running(4, 4, 6, num_blocks=5, preemption="swap", num_host_blocks=1)

    plan = step(scheduler)

    (record,) = plan.preempted
    assert (record.preemption, record.tokens_lost, record.fallback) == ("recompute", 6, HostPoolFull(needed=2, free=1))
    assert plan.swap_outs == ()
    assert [one.seq_id for one in waiting(scheduler)] == [2]


def test_a_swapped_sequence_keeps_its_place_before_those_that_never_ran():
    scheduler = running(4, 4, 3, num_blocks=4, preemption="swap")
    scheduler.add(sequence(3, tokens=1))
    step(scheduler)
    step(scheduler, ending=(0, 1))

    assert admitted(step(scheduler)) == (2, 3)


def test_a_salt_outlives_a_swap():
    scheduler = new_scheduler(7, kv="prefix", preemption="swap")
    for seq_id, salt in ((0, ""), (1, ""), (2, "mine")):
        scheduler.add(sequence(seq_id, 7, 99, token_ids=[10 * seq_id + place for place in range(7)], salt=salt))
        step(scheduler)
    while not scheduler.host_pool.entries:
        step(scheduler)
    assert list(scheduler.host_pool.entries) == [2]
    step(scheduler, ending=(0, 1))
    step(scheduler)
    step(scheduler, ending=(2,))

    scheduler.add(sequence(3, 7, token_ids=[20 + place for place in range(7)]))

    assert step(scheduler).admitted[0].num_cached == 0, "another salt's keys and values"


# Samples


def fork_scheduler(num_samples: int, prompt: int, **config) -> Scheduler:
    """One request after the step that computed its prompt."""
    scheduler = new_scheduler(config.pop("num_blocks", 16), **config)
    first = sequence(0, prompt)
    first.waiting_samples = [sequence(seq_id, prompt) for seq_id in range(1, num_samples)]
    scheduler.add(first)
    step(scheduler)
    return scheduler


def test_forks_share_the_prompt_and_split_the_block_that_they_write():
    scheduler = fork_scheduler(3, prompt=6)
    cache = scheduler.cache
    assert [cache.block_table(seq_id) for seq_id in range(3)] == [(0, 1)] * 3
    assert cache.stats().used_blocks == 2

    plan = step(scheduler)

    assert plan.copies == (BlockCopy(1, 2), BlockCopy(1, 3))
    assert [item.block_table for item in plan.items] == [(0, 2), (0, 3), (0, 1)], "the last one keeps the block"
    assert cache.pool.reference_counts[:4] == [3, 1, 1, 1]


def test_forks_of_a_prompt_that_fills_its_blocks_copy_nothing():
    scheduler = fork_scheduler(3, prompt=8)

    assert step(scheduler).copies == ()
    assert scheduler.cache.stats().used_blocks == 2 + 3


def test_forks_without_a_place_wait_with_their_first_token():
    scheduler = fork_scheduler(3, prompt=6, max_num_seqs=2)
    assert (list(scheduler.running), [one.seq_id for one in waiting(scheduler)]) == ([0, 1], [2])
    assert waiting(scheduler)[0].output_token_ids == [7]

    plan = step(scheduler, ending=(0,))
    assert plan.waiting == (WaitRecord(2, MaxNumSeqs(limit=2)),)
    plan = step(scheduler)

    assert admitted(plan) == (2,)
    assert shares(plan) == [(1, "decode", 7, 1), (2, "prefill", 0, 7)]


def test_where_blocks_cannot_be_shared_a_fork_without_a_run_waits():
    scheduler = fork_scheduler(3, prompt=6, kv="basic", num_blocks=16)  # two runs of eight blocks

    assert (list(scheduler.running), [one.seq_id for one in waiting(scheduler)]) == ([0, 1], [2])


# Without chunks


def test_without_chunks_a_step_of_prompts_keeps_the_token_budget():
    scheduler = new_scheduler(200, max_num_seqs=16, max_num_batched_tokens=64, chunked_prefill=False)
    for seq_id in range(8):
        scheduler.add(sequence(seq_id, tokens=30))

    plans = [step(scheduler) for _ in range(4)]

    assert [[item.seq_id for item in plan.items] for plan in plans] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(sum(item.num_tokens for item in plan.items) <= 64 for plan in plans)
    assert plans[0].waiting == (WaitRecord(2, NoBudget(limit=64)),)


def test_without_chunks_a_prompt_larger_than_the_budget_is_computed_alone():
    scheduler = new_scheduler(200, max_num_seqs=16, max_num_batched_tokens=16, chunked_prefill=False)
    for seq_id, tokens in enumerate((5, 30, 5)):
        scheduler.add(sequence(seq_id, tokens=tokens))

    plans = [step(scheduler) for _ in range(3)]

    prefills = [[item.seq_id for item in plan.items if item.phase == "prefill"] for plan in plans]
    assert prefills == [[0], [1], [2]]


# Samples


def test_the_last_sample_writes_in_place_so_that_three_samples_need_two_copies():
    scheduler = new_scheduler(5, block_size=4, max_num_seqs=4)
    parent = sequence(0, tokens=10)
    parent.waiting_samples = [sequence(seq_id, tokens=10) for seq_id in (1, 2)]
    scheduler.add(parent)
    step(scheduler)

    plan = step(scheduler)

    assert not plan.preempted
    assert len(plan.copies) == 2
    assert [item.seq_id for item in plan.items] == [0, 1, 2]


# A long queue


def test_a_step_looks_only_at_the_head_of_a_long_queue():
    scheduler = new_scheduler(8, max_num_seqs=2)
    for seq_id in range(2000):
        scheduler.add(sequence(seq_id))
    looked_at = []
    lookup = scheduler.cache.lookup
    scheduler.cache.lookup = lambda *arguments: looked_at.append(1) or lookup(*arguments)

    for _ in range(5):
        step(scheduler)

    assert len(looked_at) <= 4


def test_priorities_hold_for_both_kinds_of_requests_in_one_queue():
    scheduler = Scheduler(
        PagedKvCache(64, 4), SchedulerConfig(4, order="priority", prefill_only_tokens=6), range(64, 80)
    )
    for seq_id, priority in ((0, 2), (1, 1), (2, 0)):
        scheduler.add(sequence(seq_id, tokens=5, max_tokens=1, prefill_only=True, priority=priority))

    plans = [step(scheduler) for _ in range(3)]

    assert [[item.seq_id for item in plan.items] for plan in plans] == [[2], [1], [0]]


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("sjf", [2, 3, 1, 0]), ("sjf-aged", [2, 1, 3, 0])]
)
def test_the_shortest_job_is_first_and_with_aging_later_ones_overtake_only_so_far(order, expected):
    scheduler = new_scheduler(64, order=order, max_num_seqs=1)
    for seq_id, length in enumerate((90, 20, 3, 6)):
        scheduler.add(sequence(seq_id, tokens=1, max_tokens=length))
    assert [one.seq_id for one in waiting(scheduler)] == expected


def test_under_every_order_prefill_only_sequences_are_ordered_with_the_others():
    for order in ("priority", "sjf"):
        scheduler = Scheduler(
            PagedKvCache(64, 4), SchedulerConfig(4, order=order, prefill_only_tokens=6), range(64, 80)
        )
        lengths = {0: 6, 1: 5, 2: 4}
        for seq_id, tokens in lengths.items():
            scheduler.add(sequence(seq_id, tokens=tokens, max_tokens=1, prefill_only=True, priority=-seq_id))
        assert [one.seq_id for one in waiting(scheduler)] == [2, 1, 0]
        assert shares(step(scheduler))[0][0] == 2
