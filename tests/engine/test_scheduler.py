"""Who runs in a step, with no model: plans, the reasons to wait, what is kept and what is given up."""

from unittest.mock import Mock

import pytest

from forge.cache.basic import BasicKvCache
from forge.cache.factory import CacheSize, create_kv_cache
from forge.cache.host_pool import HostEntry
from forge.cache.kv_cache import KvCache
from forge.cache.off import OffKvCache
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import ForkSlots, Outcome, StepPlan
from forge.reasons import MaxNumSeqs, NoBlocks, NoBudget
from forge.trace.records import WaitRecord
from tests.engine.schedules import admitted, new_scheduler, outcomes_of, sequence, step, waiting


def by_arrival(sequence) -> tuple[int, ...]:
    return (sequence.arrival,)


def basic(num_runs: int = 4, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(BasicKvCache(num_runs, 32, 4), SchedulerConfig(max_num_seqs))


def test_a_plan_says_what_is_computed_and_which_rows_need_logits():
    scheduler = basic()
    scheduler.add(sequence(0, tokens=6))

    (prefill,) = step(scheduler).items
    (decode,) = step(scheduler).items

    assert (prefill.start, prefill.num_tokens, prefill.logit_rows, prefill.phase) == (0, 6, range(5, 6), "prefill")
    assert (decode.start, decode.num_tokens, decode.logit_rows, decode.phase) == (6, 1, range(1), "decode")
    assert prefill.chooses_token
    assert decode.chooses_token
    assert prefill.block_table == decode.block_table == (0, 1)


def test_with_the_cache_off_every_plan_computes_all_tokens():
    scheduler = Scheduler(OffKvCache(32, 4), SchedulerConfig(4))
    scheduler.add(sequence(0, tokens=6))

    items = [step(scheduler).items[0] for _ in range(3)]

    assert [(item.start, item.num_tokens, item.phase) for item in items] == [
        (0, 6, "prefill"),
        (0, 7, "decode"),
        (0, 8, "decode"),
    ]
    assert [list(item.logit_rows) for item in items] == [[5], [6], [7]]


def test_a_prompt_with_too_many_rows_of_logits_has_a_forward_of_its_own():
    scheduler = Scheduler(BasicKvCache(4, 32, 4), SchedulerConfig(4), max_logit_rows=5)
    for seq_id, tokens in enumerate((6, 5)):
        scheduler.add(sequence(seq_id, tokens, params=SamplingParams(prompt_logprobs=0)))
    plan = scheduler.schedule()

    assert ([item.seq_id for item in plan.separate], [item.seq_id for item in plan.items]) == ([0], [1])


def test_the_map_of_all_blocks_is_kept_where_it_is_asked_for():
    scheduler = basic()
    scheduler.add(sequence(0, tokens=3))
    step(scheduler)
    assert scheduler.block_map is None
    scheduler.keep_block_map = True
    step(scheduler)
    assert scheduler.block_map == scheduler.cache.block_map()


def test_begun_again_a_sample_without_output_does_not_wait_in_one_that_has_some():
    scheduler, first, second = basic(), sequence(0, token_ids=[1, 2, 3, 7]), sequence(1)
    second.request_id = first.request_id
    scheduler.restart([first, second], num_finished=0)

    assert (waiting(scheduler), first.waiting_samples) == ([first, second], [])
    third = sequence(2)
    third.request_id = second.request_id
    scheduler.restart([second, third], num_finished=0)
    assert (waiting(scheduler), second.waiting_samples) == ([second], [third])


def with_samples(scheduler: Scheduler, number: int) -> list[Sequence]:
    """A sequence in which further samples wait."""
    first, *samples = [sequence(seq_id) for seq_id in range(number)]
    first.waiting_samples = list(samples)
    scheduler.add(first)
    return [first, *samples]


def test_an_exhausted_sequence_whose_last_text_was_a_stop_string_ends_as_stop():
    scheduler, (one,) = basic(), [sequence(0)]
    scheduler.add(one)
    step(scheduler)
    scheduler.commit(StepPlan((), exhausted=(one,)), [Outcome(0, 4, (), "stop", "x")])
    assert (one.finish_reason, one.stop_reason, scheduler.running) == ("stop", "x", {})


def test_samples_begin_with_their_prompt_but_for_those_that_end_with_their_first_token():
    scheduler = basic()
    first, second, *_ = with_samples(scheduler, 4)
    plan = scheduler.schedule()
    copies = scheduler.commit(plan, outcomes_of(scheduler, plan, ending=(1,)))

    assert [(copy.source, copy.destination) for copy in copies] == [(0, 8), (0, 16)]
    assert (list(scheduler.running), second.finish_reason, scheduler.queues.finished) == ([0, 2, 3], "length", 1)
    assert first.waiting_samples == []
    scheduler.check_invariants()


def test_what_another_engine_has_computed_waits_on_the_host_if_it_fits_and_is_used():
    for num_tokens, prefill_only, is_used in ((5, False, True), (6, False, False), (0, False, False), (5, True, False)):
        scheduler = new_scheduler(8, num_host_blocks=2)
        scheduler.add(sequence(0, tokens=6, prefill_only=prefill_only), HostEntry(2, num_tokens))
        assert list(scheduler.host_pool.entries) == [0] * is_used
        scheduler.add(sequence(1, tokens=6), HostEntry(1 if not is_used else 3, 5))
        assert (1 in scheduler.host_pool.entries) != is_used


@pytest.mark.parametrize(("num_accepted", "reason", "computed"), [(1, None, 5), (3, None, 7), (1, "error", 3)])
@pytest.mark.parametrize("winner", [None, -1])
def test_rejected_draft_tokens_leave_the_cache_and_broken_ones_never_enter(num_accepted, reason, computed, winner):
    scheduler = new_scheduler(8)
    scheduler.add(sequence(0))
    step(scheduler)
    scheduler.draft_slots = Mock(end_forks=Mock(return_value=("copy",)))
    (item,) = scheduler.schedule().items
    scheduler.cache.reserve(0, 3)
    owner = winner or 0
    if winner:
        scheduler.cache.rename(0, winner)
    item = item._replace(num_draft_slots=3, forks=(ForkSlots(-1, ()),) if winner else ())
    tokens = (7,) * (num_accepted + 1)
    outcome = Outcome(0, 4, tokens, None, num_accepted=num_accepted, winner=winner)
    item.sequence.token_ids += tokens
    copies = scheduler._commit_draft_tokens(item, outcome._replace(finish_reason=reason))

    kept = (scheduler.cache.computed_length(owner), scheduler.cache.reserved_length(owner))
    assert kept == (computed, 4 + num_accepted) and copies == (("copy",) if winner else ())
    assert not winner or scheduler.draft_slots.end_forks.call_args.args == (item, winner)


def test_a_prompt_whose_rest_leaves_room_is_passed_by_none():
    scheduler = behind_long_prompts(long=21)
    for seq_id in (2, 3):
        scheduler.retire(scheduler.queue.sequences[seq_id], "abort")
    assert [(item.seq_id, item.num_tokens) for item in step(scheduler).items] == [(0, 1), (4, 3), (1, 12)]
    scheduler.add(sequence(5, tokens=2))
    assert [(item.seq_id, item.num_tokens) for item in step(scheduler).items] == [(0, 1), (4, 1), (1, 9), (5, 2)]


def test_one_that_gives_way_itself_keeps_no_other_from_its_token():
    scheduler = new_scheduler(2, order="priority")
    for seq_id, priority in ((0, 5), (1, 0)):
        scheduler.add(sequence(seq_id, tokens=4, priority=priority))
    step(scheduler)
    scheduler.running[1] = scheduler.running.pop(1)  # the worst placed was admitted first
    plan = step(scheduler)
    assert [(one.seq_id, one.victim_of) for one in plan.preempted] == [(0, 0)]
    assert [item.seq_id for item in plan.items] == [1]


def test_what_stands_behind_a_victim_gets_its_token():
    scheduler = new_scheduler(3, order="priority")
    for seq_id, (tokens, priority) in enumerate(((4, 0), (4, 9), (3, 1))):
        scheduler.add(sequence(seq_id, tokens=tokens, priority=priority))
    step(scheduler)
    scheduler.running[2] = scheduler.running.pop(2)
    plan = step(scheduler)
    assert [one.seq_id for one in plan.preempted] == [1]
    assert [item.seq_id for item in plan.items] == [0, 2]


def test_a_scheduler_begins_with_what_its_cache_has_and_without_scratch_blocks():
    scheduler = basic()
    assert (scheduler.stats, len(scheduler.prefill_only.scratch)) == (scheduler.cache.stats(), 0)


def test_prompt_logprobs_need_the_logits_of_every_prompt_row_once():
    scheduler = basic()
    scheduler.add(sequence(0, tokens=6, params=SamplingParams(prompt_logprobs=0)))

    assert step(scheduler).items[0].logit_rows == range(6)
    assert step(scheduler).items[0].logit_rows == range(1)


def test_admission_is_first_come_first_served_and_says_who_waits_and_why():
    scheduler = basic(num_runs=4, max_num_seqs=2)
    for seq_id in range(4):
        scheduler.add(sequence(seq_id))

    plan = step(scheduler)

    assert admitted(plan) == (0, 1)
    assert plan.waiting == (WaitRecord(2, MaxNumSeqs(limit=2)),)
    plan = step(scheduler, ending=(0,))
    assert (admitted(plan), plan.waiting) == ((), (WaitRecord(2, MaxNumSeqs(limit=2)),))
    plan = step(scheduler)
    assert [item.seq_id for item in plan.items] == [1, 2]
    assert admitted(plan) == (2,)


def behind_long_prompts(*, long: int = 30, short: int = 3, **config) -> Scheduler:
    """A sequence that decodes (0), three long prompts (1 to 3) and a short one (4); a step has 16 tokens."""
    config = {"num_blocks": 64, "max_num_seqs": 9, "max_num_batched_tokens": 16} | config
    scheduler = new_scheduler(**config)
    scheduler.add(sequence(0, tokens=3, max_tokens=29))
    step(scheduler)
    for seq_id in (1, 2, 3):
        scheduler.add(sequence(seq_id, tokens=long, max_tokens=1))
    scheduler.add(sequence(4, tokens=short))
    return scheduler


@pytest.mark.parametrize("order", ["fcfs", "sjf-aged"])
def test_a_short_prompt_passes_long_ones_that_would_take_whole_steps(order):
    scheduler = behind_long_prompts(order=order)

    plan = step(scheduler)

    assert [(item.seq_id, item.num_tokens) for item in plan.items] == [(0, 1), (4, 3), (1, 12)]
    assert plan.waiting == (WaitRecord(2, NoBudget(16)),)
    scheduler.add(sequence(5, tokens=4))
    plan = step(scheduler)
    assert {item.seq_id: item.num_tokens for item in plan.items} == {0: 1, 4: 1, 5: 4, 1: 10}
    assert [item.seq_id for item in step(scheduler).items][:3] == [0, 4, 5]


def test_short_prompts_take_a_quarter_of_a_step_at_most():
    scheduler, progress = behind_long_prompts(), 0
    for _ in range(3):
        for _ in range(4):
            scheduler.add(sequence(scheduler._num_arrived, tokens=2, max_tokens=1))
        plan = step(scheduler, ending=tuple(seq_id for seq_id in scheduler.running if seq_id > 3))
        progress += sum(item.num_tokens for item in plan.items if item.seq_id in (1, 2, 3))
        assert sum(item.num_tokens for item in plan.items) <= 16
    assert progress >= 3 * (16 - 4 - 4)


@pytest.mark.parametrize(
    "why",
    [{"num_blocks": 9}, {"max_num_seqs": 2}, {"order": "priority"}, {"order": by_arrival}, {"long": 14}, {"short": 5}],
    ids=["blocks", "slots", "priority", "an order of one's own", "nothing long", "nothing short"],
)
def test_a_short_prompt_passes_none_that_would_wait_for_more_than_tokens(why):
    plan = step(behind_long_prompts(**why))
    assert [item.seq_id for item in plan.items][:2] == [0, 1]
    assert 4 not in admitted(plan)


@pytest.mark.parametrize("num_scratch", [8, 9])
def test_a_short_prefill_only_request_leaves_scratch_blocks_to_the_long_one_that_it_passes(num_scratch):
    cache = create_kv_cache("paged", CacheSize(32, 4, 4, 8, 64))
    config = SchedulerConfig(4, 16, prefill_only_tokens=20)
    scheduler = Scheduler(cache, config, scratch=range(64, 64 + num_scratch))
    for seq_id, tokens in enumerate((30, 4)):
        scheduler.add(sequence(seq_id, tokens=tokens, max_tokens=1, prefill_only=True))
    assert [item.seq_id for item in step(scheduler, ending=(0, 1)).items] == ([0] if num_scratch == 8 else [1, 0])


def test_without_room_a_sequence_waits_with_the_numbers():
    scheduler = basic(num_runs=1)
    scheduler.add(sequence(0))
    scheduler.add(sequence(1))

    plan = step(scheduler)

    assert plan.waiting == (WaitRecord(1, NoBlocks(needed=8, free=0)),)
    step(scheduler, ending=(0,))
    assert admitted(step(scheduler)) == (1,)


def test_a_sequence_that_ended_leaves_nothing():
    scheduler = basic()
    for seq_id in range(3):
        scheduler.add(sequence(seq_id))
    step(scheduler, ending=(0, 1, 2))

    assert not scheduler.has_unfinished()
    assert scheduler.cache.stats().used_blocks == 0


def test_aborting_finds_a_sequence_wherever_it_is():
    scheduler = basic(max_num_seqs=1)
    running, waiting = sequence(0), sequence(1)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)

    for one in (waiting, running):
        scheduler.retire(one, "abort")
    assert scheduler.num_finished == 2
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    scheduler.check_invariants()
    assert not scheduler.has_unfinished()
    assert scheduler.cache.stats().used_blocks == 0


# Kept caches


def kept_scheduler(num_runs: int = 1) -> Scheduler:
    """Sequence 0 has ended after 3 + 2 tokens, 4 of them computed, and its cache is kept."""
    scheduler = basic(num_runs)
    scheduler.add(sequence(0, retain_cache=True))
    step(scheduler)
    step(scheduler, ending=(0,))
    assert list(scheduler.retained.sequences) == [0]
    return scheduler


@pytest.mark.parametrize(
    ("token_ids", "start"),
    [
        ([100, 101, 102, 7, 7, 50], 4),  # all that was computed
        ([100, 101, 102, 7, 8, 50], 4),
        ([100, 101, 99, 7, 7, 50], 2),
        ([99, 101, 102, 7], 0),
        ([100, 101, 102], 2),  # the last prompt token is computed for its logits
        ([100], 0),
    ],
)
def test_a_continuation_computes_what_is_not_in_common(token_ids, start):
    scheduler = kept_scheduler()
    scheduler.add(sequence(1, tokens=len(token_ids), token_ids=list(token_ids), continues_from=0))
    scheduler.check_invariants()

    (item,) = step(scheduler).items

    assert (item.start, item.num_tokens, item.phase) == (start, len(token_ids) - start, "prefill")
    assert not scheduler.retained.sequences


def test_a_continuation_that_wants_prompt_logprobs_computes_the_whole_prompt():
    scheduler = kept_scheduler()
    wants = SamplingParams(prompt_logprobs=1)
    scheduler.add(sequence(1, tokens=5, token_ids=[100, 101, 102, 7, 7], continues_from=0, params=wants))

    assert step(scheduler).items[0].start == 0


def test_a_kept_cache_gives_way_when_a_sequence_would_find_no_room():
    scheduler = kept_scheduler(num_runs=1)
    scheduler.add(sequence(1))

    plan = step(scheduler)

    assert admitted(plan) == (1,)
    assert not scheduler.retained.sequences
    scheduler.retained.release(0)  # releasing again does nothing
    scheduler.check_invariants()


def test_the_one_that_ended_first_gives_way_first_and_no_more_than_needed():
    scheduler = basic(num_runs=3)
    for seq_id in (5, 4, 3):
        scheduler.add(sequence(seq_id, retain_cache=True))
    step(scheduler, ending=(4,))
    step(scheduler, ending=(5, 3))
    scheduler.add(sequence(9))
    step(scheduler)

    assert list(scheduler.retained.sequences) == [5, 3]


def test_a_continuation_whose_cache_gave_way_starts_from_nothing():
    scheduler = kept_scheduler(num_runs=1)
    scheduler.add(sequence(1))
    scheduler.add(sequence(2, tokens=5, token_ids=[100, 101, 102, 7, 7], continues_from=0))
    scheduler.check_invariants()
    step(scheduler, ending=(1,))

    (item,) = step(scheduler).items

    assert (item.seq_id, item.start) == (2, 0)


def test_a_continuation_that_was_swapped_out_begins_from_the_host_and_not_from_a_cache_kept_since():
    scheduler = new_scheduler(4, preemption="swap")
    scheduler.add(sequence(0, tokens=5, retain_cache=True))
    step(scheduler)
    scheduler.add(sequence(1, tokens=6, continues_from=0))  # sequence 0 still runs: it begins from nothing
    while not scheduler.host_pool.entries:
        step(scheduler)
    step(scheduler, ending=(0,))

    plan = step(scheduler)

    assert [(one.seq_id, one.how) for one in plan.admitted] == [(1, "swap")]
    assert not scheduler.retained.sequences, "the kept cache gives way"


def test_aborting_a_waiting_continuation_leaves_the_kept_cache():
    scheduler = kept_scheduler()
    continuation = sequence(1, tokens=4, continues_from=0)
    scheduler.add(continuation)
    scheduler.retire(continuation, "abort")

    assert continuation.finish_reason == "abort"
    assert list(scheduler.retained.sequences) == [0]
    scheduler.check_invariants()


def test_releasing_a_kept_cache_frees_it():
    scheduler = kept_scheduler()
    scheduler.retained.release(0)

    assert scheduler.cache.stats().used_blocks == 0


# Undoing


@pytest.mark.parametrize("make_cache", [lambda: BasicKvCache(2, 32, 4), lambda: OffKvCache(32, 4)])
def test_after_recovering_nothing_is_held_and_every_token_is_computed_again(make_cache):
    scheduler = Scheduler(make_cache(), SchedulerConfig(4))
    scheduler.add(sequence(0))
    step(scheduler)
    scheduler.add(sequence(1))
    unfinished = list(scheduler.unfinished())
    scheduler.schedule()

    scheduler.restart(unfinished, num_finished=0)
    scheduler.check_invariants()

    assert scheduler.cache.stats().used_blocks == 0
    assert [(item.seq_id, item.start, item.num_tokens) for item in step(scheduler).items] == [(0, 0, 4), (1, 0, 3)]


def test_check_invariants_sees_a_sequence_in_two_places():
    scheduler = basic()
    twice = sequence(0)
    scheduler.add(twice)
    step(scheduler)
    scheduler.queue.add(twice)

    with pytest.raises(AssertionError, match="two containers"):
        scheduler.check_invariants()


def test_check_invariants_sees_a_cache_that_is_not_at_the_next_position():
    scheduler = basic()
    scheduler.add(sequence(0))
    step(scheduler)
    cache: KvCache = scheduler.cache
    cache.truncate(0, 2)

    with pytest.raises(AssertionError, match="not all of its slots"):
        scheduler.check_invariants()


def test_check_invariants_looks_at_every_running_sequence_and_at_the_queue():
    scheduler = basic(max_num_seqs=2)
    for seq_id in range(4):
        scheduler.add(sequence(seq_id))
    step(scheduler)
    for seq_id in (0, 1):
        length, scheduler.running[seq_id].token_ids = scheduler.running[seq_id].token_ids, []
        with pytest.raises(AssertionError, match="past the known tokens"):
            scheduler.check_invariants()
        scheduler.running[seq_id].token_ids = length
    scheduler.queue._lanes[0].reverse()
    with pytest.raises(AssertionError, match="out of order"):
        scheduler.check_invariants()
