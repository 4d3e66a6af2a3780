"""What happened to each sequence, from records: the engine's own figures, and the reason of every wait."""

import signal
import sys
from dataclasses import replace

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.reasons import Deferred, MaxNumSeqs, NoBlocks
from forge.trace import timeline as timeline_module
from forge.trace.records import (
    AdmitRecord,
    ArriveRecord,
    CacheRecord,
    EndRecord,
    FinishRecord,
    ItemRecord,
    PreemptRecord,
    RequestMetrics,
    SpecCycle,
    StepRecord,
    TokenRecord,
    TokenVerdict,
    WaitRecord,
)
from forge.trace.timeline import Cause, Timeline, timeline_of
from tests.engine.schedules import waiting
from tests.engine.scripted import muddled, new_engine, run_all
from tests.trace.runs import crowded


def step(number: int, running=(), arrived=(), finished=(), **decided) -> StepRecord:
    """A step of half a second in which `running` decode; those that arrived just now are admitted by it."""
    decided = {"admitted": tuple(AdmitRecord(one, "new", 0, 1) for one in running if one in arrived)} | decided
    return StepRecord(
        number,
        tuple(ItemRecord(seq_id, "decode", 4, 1) for seq_id in running),
        tuple(TokenRecord(seq_id, 5, 1, "a") for seq_id in running),
        tuple(FinishRecord(seq_id, "length") for seq_id in finished),
        CacheRecord("paged", 16, 4, 1, 5, 0, 0),
        0.0,
        7.0,
        0.0,
        started=float(number),
        ended=number + 0.5,
        arrived=tuple(arrival(one, number - 0.5) for one in arrived),
        **decided,
    )


def arrival(seq_id: int, at: float = 0.5, samples: int = 1, name: str | None = None) -> ArriveRecord:
    return ArriveRecord(name or f"r{seq_id}", tuple(range(seq_id, seq_id + samples)), 4, 9, at)


def waits_of(steps, seq_id):
    return timeline_of(steps).request(seq_id).waits


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_metrics_are_those_that_the_engine_reports(mode, kv, n):
    run = crowded(mode, kv, n)
    timeline = timeline_of(run.steps, run.ends)
    requests = {one.request_id: one for step in run.steps for one in step.arrived}
    assert sum(len(one.preempted) for one in run.steps) > 0
    for request_id, output in run.outputs.items():
        for seq_id, sample in zip(requests[request_id].seq_ids, output.outputs, strict=True):
            one, own = timeline.request(seq_id), sample.metrics
            assert timeline.metrics(seq_id) == own
            assert (one.request_id, one.sample, one.finish_reason) == (request_id, sample.index, sample.finish_reason)
            for name in ("num_prompt_tokens", "num_output_tokens", "tokens_cached", "tokens_computed"):
                assert getattr(one, name) == getattr(own, name)
            for name in ("queue_ms", "time_to_first_token_ms", "end_to_end_ms", "times_preempted", "tokens_recomputed"):
                assert getattr(one, name) == getattr(own, name)
            assert one.time_per_output_token_ms == pytest.approx(own.time_per_output_token_ms)
    assert sum(one.tokens_computed for one in timeline.requests()) == sum(one.tokens_computed for one in run.steps)


def test_metrics_of_prefill_only_requests_are_those_that_the_engine_reports():
    engine = new_engine(muddled, kv="prefix", max_num_seqs=2, block_size=2, num_blocks=16, max_num_batched_tokens=16)
    timeline = Timeline()
    for number in range(9):
        engine.add_request(f"r{number}", [1, 2, 3, 4, 5, 6, number % 3], SamplingParams(max_tokens=1, ignore_eos=True))
    engine.add_request("long", [1, 2, 3, 4], SamplingParams(max_tokens=4, ignore_eos=True))
    requests = {}
    while engine.has_unfinished():
        record = engine.step()
        requests |= {one.request_id: one.seq_ids[0] for one in record.arrived}
        timeline.add(record)
    assert len(requests) == 10
    for request_id, seq_id in requests.items():
        assert timeline.metrics(seq_id) == engine.output(request_id).outputs[0].metrics
    assert any(wait.causes for one in timeline.requests() for wait in one.waits)
    assert timeline.running == () and timeline.queue() == ()


def test_a_prefill_only_request_waits_for_nothing_in_the_step_that_answers_it():
    engine = new_engine(muddled, kv="paged", prefill_only_tokens=8)
    for number in range(9):
        engine.add_request(f"r{number}", [1, 2, 3, 4], SamplingParams(max_tokens=1, ignore_eos=True))
    steps = run_all(engine)
    waits = [wait for request in timeline_of(steps).requests() for wait in request.waits]
    assert len(waits) == 7 and max(wait.num_steps for wait in waits) == 4
    for wait in waits:
        assert sum(cause.num_steps for cause in wait.causes) == wait.num_steps


def test_an_arrival_that_was_told_at_once_is_not_counted_again():
    run = crowded("recompute", "prefix", 2)
    timeline = Timeline()
    for record in run.steps:
        timeline.journal.extend((*record.arrived, record))
        timeline.read()
    timeline.end_requests(run.ends)
    assert timeline.requests() == timeline_of(run.steps, run.ends).requests()


def test_a_request_that_ended_before_any_step_stays_forgotten():
    timeline = Timeline()
    timeline.journal.append(arrival(0, samples=2))
    timeline.read()
    for seq_id in (0, 1):
        timeline.end(seq_id, "abort")
        timeline.forget(seq_id)
    timeline.journal.append(replace(step(1), arrived=(arrival(0, samples=2),)))
    assert timeline.requests() == () and timeline.queue() == ()


def test_before_it_runs_a_request_has_metrics_and_a_wait():
    timeline = timeline_of([step(1, (0,), arrived=(0,))])
    timeline.journal.append(arrival(1, 1.6))
    assert timeline.metrics(1) == RequestMetrics(4, 0, 1.6, None, None)
    assert timeline.queue() == (1,) and timeline.request(1).waits == []
    timeline.add(step(2, (0,), waiting=(WaitRecord(1, MaxNumSeqs(1)),)))
    (wait,) = timeline.request(1).waits
    assert (wait.first_step, wait.num_steps, wait.ended) == (2, 1, False)


def test_what_is_forgotten_takes_no_memory():
    run, timeline = crowded("recompute", "prefix", 3), Timeline()
    for record in run.steps:
        timeline.add(record)
        for finish in record.finished:
            timeline.forget(finish.seq_id)
            assert finish.seq_id not in timeline
    for one in timeline.requests():
        timeline.end(one.seq_id, "abort")
        timeline.forget(one.seq_id)
    for name in ("_sequences", "_waiting", "_running", "_refused"):
        assert not getattr(timeline, name), name


def test_an_id_that_an_old_trace_uses_twice_has_the_timeline_of_its_last_request():
    steps = [
        step(1, (0,), arrived=(0,), finished=(0,)),
        step(2, arrived=()),
        replace(step(3, (0,), finished=(0,)), arrived=(arrival(0, 2.5, name="again"),)),
    ]
    (found,) = timeline_of(steps, [EndRecord("r0", ("length",), ()), EndRecord("again", ("length",), ())]).requests()
    assert found.request_id == "again" and found.num_output_tokens == 1 and found.finish_reason == "length"


def test_a_plain_step_calls_one_function():
    called, plain = [], step(2, (0, 1))

    def trace(frame, event, argument):
        code = frame.f_code
        if event == "call" and "forge" in code.co_filename and code.co_name not in ("__init__", "<listcomp>"):
            called.append(code.co_name)

    timeline = timeline_of([step(1, (0, 1), arrived=(0, 1))])
    sys.setprofile(trace)
    try:
        timeline.add(plain)
    finally:
        sys.setprofile(None)
    assert called == ["add"]


def test_every_output_token_has_its_step_and_every_forward_its_rows():
    found = timeline_of([step(1, (0,), arrived=(0,)), step(2), step(3, (0,))]).request(0)
    assert [one.step for one in found.token_steps] == [one.step for one in found.forwards] == [1, 3]
    assert found.rows == [1, 1] and found.token_steps[1].forward_ms == 7.0 and found.token_steps[1].ended == 3.5


def test_draft_cycles_are_kept_in_numbers():
    verdicts = (TokenVerdict(7, True, 7), TokenVerdict(8, False, 9))
    cycle = SpecCycle(0, "draft", 5, (7, 8), verdicts, (7, 9), 1.0, 2.0)
    (found,) = timeline_of([step(1, (0,), arrived=(0,), cycles=(cycle,))]).request(0).cycles
    assert (found.step, found.proposer, found.num_proposed, found.num_accepted, found.num_emitted) == (
        1,
        "draft",
        2,
        1,
        2,
    )


def test_rows_beyond_prompt_and_output_are_those_computed_again():
    run = crowded()
    for one in timeline_of(run.steps, run.ends).requests():
        if one.finish_reason == "length":
            assert one.tokens_computed == one.num_prompt_tokens + one.num_output_tokens - 1 + one.tokens_recomputed


def test_the_queue_after_each_step_is_the_engines():
    run, timeline = crowded(), Timeline()
    aborted = next(one.seq_ids[0] for step in run.steps for one in step.arrived if one.request_id == "aborted")
    for record in run.steps:
        timeline.add(record)
        known = [seq_id for seq_id in timeline.queue() if seq_id != aborted]  # it left the queue between two steps
        if record.step > 3:
            assert len(known) == record.queues.waiting + record.queues.swapped
            assert len(timeline.running) == record.queues.running


def test_a_sequence_behind_the_front_of_the_queue_waits_for_it():
    refused = (WaitRecord(1, NoBlocks(8, 2)),)
    steps = [
        step(1, (0,), arrived=(0, 1, 2), waiting=refused),
        step(2, (0,), waiting=refused),
        step(3, (0, 1), admitted=(AdmitRecord(1, "new", 0, 8),), waiting=(WaitRecord(2, NoBlocks(3, 1)),)),
        step(4, (0, 1, 2), admitted=(AdmitRecord(2, "new", 0, 3),)),
    ]
    (first,), (second,) = waits_of(steps, 1), waits_of(steps, 2)
    assert (first.num_steps, first.seconds, first.causes) == (2, 2.5, (Cause(NoBlocks(8, 2), 1, 2),))
    assert (second.num_steps, second.seconds) == (3, 3.5)
    assert second.causes == (Cause(NoBlocks(8, 2), 1, 2), Cause(NoBlocks(3, 1), 2, 1))
    assert waits_of(steps, 0) == []


def test_a_deferred_sequence_holds_up_no_other_and_waits_for_its_owner_alone():
    deferred = WaitRecord(1, Deferred(0, 4))
    steps = [
        step(1, (0,), arrived=(0, 1, 2, 3), waiting=(deferred, WaitRecord(2, NoBlocks(8, 2)))),
        step(2, (0,), waiting=(deferred,)),
        step(3, (0,), waiting=(WaitRecord(1, NoBlocks(2, 1)),)),
    ]
    assert waits_of(steps, 1)[0].causes == (Cause(Deferred(0, 4), 1, 2), Cause(NoBlocks(2, 1), 1, 1))
    assert waits_of(steps, 2)[0].causes == (Cause(NoBlocks(8, 2), 2, 1), Cause(NoBlocks(2, 1), 1, 1))
    (last,) = waits_of(steps, 3)
    assert (last.num_steps, last.causes) == (3, (Cause(NoBlocks(2, 1), 1, 2, others_before=True),))


def test_causes_stand_in_the_order_in_which_they_last_held_and_say_who_was_in_front_before():
    def refused(seq_id: int, reason) -> dict:
        return {"waiting": (WaitRecord(seq_id, reason),)}

    steps = [
        step(1, (0,), arrived=(0, 1), **refused(1, NoBlocks(8, 2))),
        step(2, (0,), arrived=(2, 3), **refused(1, NoBlocks(8, 2))),
        step(3, (0,), **refused(1, MaxNumSeqs(1))),
        step(4, (0, 1), admitted=(AdmitRecord(1, "new", 0, 8),), **refused(2, NoBlocks(3, 1))),
    ]
    (wait,) = waits_of(steps, 3)
    assert wait.causes == (Cause(MaxNumSeqs(1), 1, 1), Cause(NoBlocks(3, 1), 2, 2, others_before=True))


def test_refusals_are_kept_as_long_as_a_sequence_may_ask_for_them():
    refused = (WaitRecord(1, MaxNumSeqs(1)),)
    steps = [
        step(1, (0,), arrived=(0, 1), waiting=refused),
        step(2, (0,), waiting=refused),
        step(3, (1, 2), arrived=(2,), admitted=(AdmitRecord(1, "new", 0, 1), AdmitRecord(2, "new", 0, 1))),
    ]
    timeline = timeline_of(steps)
    timeline.forget(0)
    assert timeline.request(1).waits[0].causes == (Cause(MaxNumSeqs(1), 1, 2),)
    timeline.forget(1)
    assert not timeline._refused and timeline.request(2).waits == []


def test_what_a_preemption_cost_is_known_at_the_next_admission():
    lost = PreemptRecord(1, 0, 1, 0, "lifo", "recompute", 37, 3)
    steps = [
        step(1, (0, 1), arrived=(0, 1)),
        step(2, (0,), preempted=(lost,)),
        step(3, (0,), waiting=(WaitRecord(1, NoBlocks(3, 0)),), finished=(0,)),
        step(4, (1,), admitted=(AdmitRecord(1, "recompute", 32, 3),)),
    ]
    assert timeline_of(steps[:3]).request(1).tokens_recomputed == 0
    found = timeline_of(steps).request(1)
    assert (found.times_preempted, found.tokens_recomputed, found.steps_waited) == (1, 5, 2)
    assert [(wait.preemption, wait.first_step, wait.num_steps) for wait in found.waits] == [(lost, 2, 2)]
    assert [(number, admission.how) for number, admission in found.admissions] == [(1, "new"), (4, "recompute")]


def test_an_abort_between_steps_ends_a_timeline():
    steps = [step(1, (0,), arrived=(0, 1), waiting=(WaitRecord(1, MaxNumSeqs(1)),)), step(2, (0,))]
    timeline = timeline_of(steps, [EndRecord("r1", ("abort",), ()), EndRecord("unknown", ("abort",), ())])
    assert [one.finish_reason for one in timeline.requests()] == [None, "abort"]
    assert timeline.request(1).first_token is None and timeline.request(1).queue_ms is None
    assert timeline.queue() == ()
    timeline.end(1, "error")
    assert timeline.request(1).finish_reason == "abort"


def test_a_steps_record_says_more_of_an_end_than_was_known_between_steps():
    timeline, told = timeline_of([step(1, (0,), arrived=(0,))]), FinishRecord(0, "error", error="the model is gone")
    timeline.end(0, "error")
    timeline.add(replace(step(2), finished=(told,)))
    assert timeline.request(0).finish == told


def test_records_that_begin_in_the_middle_of_a_run_are_no_trouble():
    run = crowded()
    found = timeline_of(run.steps[4:], run.ends).requests()
    assert any(one.request_id is None and one.arrived is None for one in found)
    assert {item.seq_id for step in run.steps[4:] for item in step.items} <= {one.seq_id for one in found}


def test_every_prefix_of_a_run_can_be_read():
    run = crowded("swap", "prefix", 2)
    for length in range(1, len(run.steps)):
        for one in timeline_of(run.steps[:length]).requests():
            assert one.steps_waited >= 0 and one.tokens_computed >= 0


@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_step_of_a_wait_has_its_reason(mode, kv):
    """Counted anew, step by step, for every sequence in the queue."""
    run = crowded(mode, kv, requests=10)
    timeline = Timeline()
    counted: dict[int, dict[tuple[type, bool], int]] = {}
    for record in run.steps:
        before = dict.fromkeys(timeline.queue())
        timeline.add(record)
        admitted = {one.seq_id for one in record.admitted}
        preempted = [one.seq_id for one in record.preempted]
        arrived = [one.seq_ids[0] for one in record.arrived]
        front = next((one for one in record.waiting if not isinstance(one.reason, Deferred)), None)
        own = {one.seq_id: one for one in record.waiting}
        for seq_id in dict.fromkeys((*before, *arrived, *preempted)):
            reason = own.get(seq_id, front)
            if reason is not None and (seq_id not in admitted or seq_id in preempted):
                kinds = counted.setdefault(seq_id, {})
                key = type(reason.reason), reason.seq_id == seq_id
                kinds[key] = kinds.get(key, 0) + 1
    assert len(counted) > 5
    assert kv == "paged" or any(kind is Deferred for kinds in counted.values() for kind, _ in kinds)
    for one in timeline.requests():
        told: dict[tuple[type, bool], int] = {}
        for wait in one.waits:
            for cause in wait.causes:
                key = type(cause.reason), cause.seq_id == one.seq_id
                told[key] = told.get(key, 0) + cause.num_steps
            assert sum(cause.num_steps for cause in wait.causes) <= wait.num_steps
        assert told == counted.get(one.seq_id, {})


def test_the_queue_is_shown_in_the_order_of_the_scheduler():
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM

    for order, expected in (("sjf", (2, 3, 1, 0)), ("sjf-aged", (2, 1, 3, 0)), ("fcfs", (0, 1, 2, 3))):
        engine = LLM("hash", kv="paged").new_engine(order=order)
        for seq_id, length in enumerate((90, 20, 3, 6)):
            engine.add_request(str(seq_id), [97], SamplingParams(length))
        assert engine.timeline.queue(order) == tuple(one.seq_id for one in waiting(engine.scheduler)) == expected


def test_ctrl_c_at_any_line_while_the_journal_is_read_loses_nothing():
    entries = [
        arrival(0, name="r0"),
        step(1, running=(0,), arrived=(0,)),
        step(2, running=(0, 1), arrived=(1,), finished=(0,)),
        FinishRecord(1, "abort"),
    ]

    def read(line: int) -> tuple[tuple, bool]:
        """What a timeline holds that is interrupted before this line, and whether there is such a line."""
        timeline, left = Timeline(), line
        timeline.journal.extend(entries)

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename != timeline_module.__file__:
                return None
            left -= event == "line"
            if left < 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            timeline.read()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return timeline.requests(), left < 0

    expected, was_interrupted = read(sys.maxsize)
    assert not was_interrupted and [request.tokens_computed for request in expected] == [2, 1]
    line = 0
    while was_interrupted or not line:
        found, was_interrupted = read(line)
        assert found == expected, f"line {line}"
        line += 1
    assert line > 100 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
