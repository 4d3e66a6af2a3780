"""What became of each sequence, from records: the engine's own account of times, and the reason of every wait."""

import pytest

from forge.trace.lives import Lives, lives_of, percentile, preemption_line, wait_line, why
from forge.trace.records import (
    AdmitRecord,
    ArriveRecord,
    CacheRecord,
    EndRecord,
    FinishRecord,
    ItemRecord,
    MaxNumSeqs,
    NoBlocks,
    PreemptRecord,
    StepRecord,
    TokenRecord,
    WaitRecord,
)
from forge.trace.totals import totals_of
from tests.trace.runs import crowded


def step(number: int, running=(), arrived=(), finished=(), **decided) -> StepRecord:
    """A step of one second in which `running` decode."""
    return StepRecord(
        number,
        tuple(ItemRecord(seq_id, "decode", 4, 1) for seq_id in running),
        tuple(TokenRecord(seq_id, 5, 1, "a") for seq_id in running),
        tuple(FinishRecord(seq_id, "length") for seq_id in finished),
        CacheRecord("paged", 16, 4, 1, 5, 0, 0),
        0.0,
        0.0,
        0.0,
        started=float(number),
        ended=number + 0.5,
        arrived=tuple(ArriveRecord(f"r{one}", (one,), 4, 9, number - 0.5) for one in arrived),
        **decided,
    )


def life(steps, seq_id):
    return next(one for one in lives_of(steps) if one.seq_id == seq_id)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("n", [1, 2])
def test_times_and_tokens_are_those_that_the_engine_reports(mode, kv, n):
    run = crowded(mode, kv, n)
    found = {one.seq_id: one for one in lives_of(run.steps, run.ends)}
    requests = {one.request_id: one for step in run.steps for one in step.arrived}
    assert sum(len(one.preempted) for one in run.steps) > 0
    for request_id, output in run.outputs.items():
        for seq_id, sample in zip(requests[request_id].seq_ids, output.outputs, strict=True):
            one, own = found[seq_id], sample.metrics
            assert (one.request_id, one.sample, one.reason) == (request_id, sample.index, sample.finish_reason)
            assert one.num_prompt_tokens == own.num_prompt_tokens and one.num_output_tokens == own.num_output_tokens
            assert one.queue_ms == own.queue_ms
            assert one.time_to_first_token_ms == own.time_to_first_token_ms
            assert one.end_to_end_ms == own.end_to_end_ms
            assert one.time_per_output_token_ms == pytest.approx(own.time_per_output_token_ms)
            assert one.times_preempted == own.times_preempted
            assert one.tokens_computed == own.tokens_computed
            if kv == "paged":
                assert one.tokens_recomputed == own.tokens_recomputed
    assert sum(one.tokens_computed for one in found.values()) == sum(one.tokens_computed for one in run.steps)


def test_rows_beyond_prompt_and_output_are_those_computed_again():
    run = crowded()
    for one in lives_of(run.steps, run.ends):
        if one.reason == "length":
            needed = one.num_prompt_tokens + one.num_output_tokens - 1
            assert one.tokens_computed == needed + one.tokens_recomputed, why(one)


def test_the_queue_after_each_step_is_the_engines():
    run, lives = crowded(), Lives()
    aborted = next(one.seq_ids[0] for step in run.steps for one in step.arrived if one.request_id == "aborted")
    for record in run.steps:
        lives.feed(record)
        known = [seq_id for seq_id in lives.queue() if seq_id != aborted]  # it left the queue between two steps
        if record.step > 3:
            assert len(known) == record.queues.waiting + record.queues.swapped
            assert len(lives.running) == record.queues.running


def test_one_behind_the_head_waits_for_the_head():
    refused = (WaitRecord(1, NoBlocks(8, 2)),)
    steps = [
        step(1, (0,), arrived=(0, 1, 2), waiting=refused),
        step(2, (0,), waiting=refused),
        step(3, (0, 1), admitted=(AdmitRecord(1, "new", 0, 8),), waiting=(WaitRecord(2, NoBlocks(3, 1)),)),
        step(4, (0, 1, 2), admitted=(AdmitRecord(2, "new", 0, 3),)),
    ]
    assert why(life(steps, 1)) == ("waited 2 steps (2,500.0 ms): it needed 8 blocks and 2 were free",)
    (line,) = why(life(steps, 2))
    assert line == (
        "waited 3 steps (3,500.0 ms): for 2 steps behind 1, which needed 8 blocks and 2 were free; "
        "for 1 step it needed 3 blocks and 1 was free"
    )
    assert why(life(steps, 0)) == ()


def test_a_preempted_one_says_for_whom_what_it_lost_and_how_long_it_waited():
    lost = PreemptRecord(1, 0, 1, 0, "lifo", "recompute", 37, 3)
    steps = [
        step(1, (0, 1), arrived=(0, 1)),
        step(2, (0,), preempted=(lost,)),
        step(3, (0,), waiting=(WaitRecord(1, NoBlocks(3, 0)),), finished=(0,)),
        step(4, (1,), admitted=(AdmitRecord(1, "recompute", 0, 3),)),
    ]
    found = life(steps, 1)
    assert (found.times_preempted, found.tokens_recomputed, found.steps_waited) == (1, 37, 2)
    assert why(found) == (
        "preempted at step 2 for 0: needed 1 block, free 0; lifo; 37 tokens computed again",
        "waited again 2 steps (2,000.0 ms): it needed 3 blocks and 0 were free",
    )


def test_tokens_that_the_cache_still_had_are_not_computed_again():
    lost = PreemptRecord(1, 0, 1, 0, "lifo", "recompute", 37, 3)
    steps = [
        step(1, (0, 1), arrived=(0, 1)),
        step(2, (0,), preempted=(lost,)),
        step(3, (0, 1), admitted=(AdmitRecord(1, "recompute", 32, 3),)),
    ]
    found = life(steps, 1)
    assert found.tokens_recomputed == 5
    assert preemption_line(found.preemptions[0]).endswith("37 tokens lost, 5 computed again")


def test_a_swapped_one_computes_nothing_again():
    swapped = PreemptRecord(1, 0, 1, 0, "lifo", "swap", 0, 3)
    steps = [step(1, (0, 1), arrived=(0, 1)), step(2, (0,), preempted=(swapped,))]
    found = life(steps, 1)
    assert found.tokens_recomputed == 0 and "swapped to the host's pool" in why(found)[0]
    assert why(found)[1].startswith("has waited again 1 step ")


def test_the_limit_of_sequences_is_named():
    steps = [step(1, (0,), arrived=(0, 1, 2), waiting=(WaitRecord(1, MaxNumSeqs(1)),))]
    assert "1 sequences ran, as many as may (--max-num-seqs)" in wait_line(life(steps, 1).waits[0], 1)
    assert "behind 1, and 1 sequences ran" in wait_line(life(steps, 2).waits[0], 2)


def test_an_abort_between_steps_ends_a_life():
    steps = [step(1, (0,), arrived=(0, 1), waiting=(WaitRecord(1, MaxNumSeqs(1)),)), step(2, (0,))]
    found = lives_of(steps, [EndRecord("r1", ("abort",), ())])
    assert [one.reason for one in found] == [None, "abort"]
    assert found[1].first_token is None and found[1].queue_ms is None


def test_records_that_begin_in_the_middle_of_a_run_are_no_trouble():
    run = crowded()
    found = lives_of(run.steps[4:])
    assert any(one.request_id is None and one.arrived is None for one in found)
    for one in found:
        why(one)


def test_every_prefix_of_a_run_can_be_read():
    run = crowded("swap")
    for length in range(1, len(run.steps)):
        assert all(why(one) is not None for one in lives_of(run.steps[:length]))


def test_the_totals_of_a_run():
    run = crowded()
    lives = lives_of(run.steps, run.ends)
    totals = totals_of(run.steps, lives)
    assert sum(totals.steps_by_class.values()) == totals.num_steps == len(run.steps)
    assert totals.output_tokens == sum(len(one.tokens) for one in run.steps)
    assert totals.ended == {"length": 6, "abort": 1} and totals.rejected == 1
    assert totals.preemptions == sum(life.times_preempted for life in lives) > 0
    assert totals.tokens_recomputed > 0 and totals.swaps == 0
    assert totals.end_to_end.count == 6 and totals.end_to_end.p50 <= totals.end_to_end.p99 <= totals.end_to_end.maximum
    with pytest.raises(ValueError):
        totals_of([], [])


def test_percentiles_lie_between_neighbours():
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([5], 0.99) == 5 and percentile([], 0.5) is None
    assert percentile(range(101), 0.9) == 90


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_step_of_a_wait_has_its_reason(mode):
    """Counted anew, step by step, for everyone in the queue."""
    run = crowded(mode, requests=10)
    lives = Lives()
    counted: dict[int, dict[tuple[type, bool], int]] = {}
    for record in run.steps:
        before = dict.fromkeys(lives.queue())
        lives.feed(record)
        admitted = {one.seq_id for one in record.admitted}
        new = [one.seq_ids[0] for one in record.arrived] + [one.seq_id for one in record.preempted]
        for seq_id in dict.fromkeys((*before, *new)):
            if record.waiting and (seq_id not in admitted or seq_id in new[len(record.arrived) :]):
                head = record.waiting[0]
                of = counted.setdefault(seq_id, {})
                key = type(head.reason), head.seq_id == seq_id
                of[key] = of.get(key, 0) + 1
    assert len(counted) > 5
    for one in lives.lives():
        told: dict[tuple[type, bool], int] = {}
        for wait in one.waits:
            for cause in wait.causes:
                key = type(cause.reason), cause.head == one.seq_id
                told[key] = told.get(key, 0) + cause.num_steps
            assert sum(cause.num_steps for cause in wait.causes) <= wait.num_steps
        assert told == counted.get(one.seq_id, {})
