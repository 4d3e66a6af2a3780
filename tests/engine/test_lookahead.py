"""Steps planned and launched before the tokens of the step before them are known: same tokens, nothing lost, and truly
ahead. Random operations are in `test_random_scheduling`."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from forge.cache.host_pool import Swap
from forge.engine.async_scheduling import AsyncEngine, _ends_with, _is_plain, _prepare_masks
from forge.engine.engine import Engine
from forge.engine.sampler import LaunchedStep
from forge.engine.sampling_params import SamplingParams
from forge.engine.step_plan import PlanItem, StepPlan
from forge.engine.structured_output import MatcherError
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.model.hash_model import HashModel
from forge.reasons import Deferred
from forge.run import Run
from forge.speculation.leases import lease_model
from forge.trace.codec import codec_of
from forge.trace.records import StepRecord
from tests.engine.late_model import LateLogits
from tests.engine.random_cases import MAX_MODEL_LEN, Case, new_engine, new_speculator
from tests.engine.schedules import sequence
from tests.engine.scripted import assert_nothing_held, run_all
from tests.engine.test_interruption import interrupted_at, lines_of, results
from tests.slow import every

KV = pytest.mark.parametrize("kv", ["basic", "paged", "prefix"])
ON = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = {"a": (1, 2), "b": (2, 2, 1, 3), "c": (3,)}


def engine_of(runs_ahead: bool = True, **case) -> Engine:
    return new_engine(Case(runs_ahead=runs_ahead, **{"num_blocks": 65} | case))  # three runs, where they are whole


def in_flight(engine: Engine) -> LaunchedStep | None:
    return engine._in_flight if isinstance(engine, AsyncEngine) else None


def start(engine: Engine, params: SamplingParams = ON, prompts=PROMPTS) -> Run:
    return Run(engine, [(name, engine.add_request(name, prompt, params)) for name, prompt in prompts.items()])


def outputs(runs_ahead: bool, params: SamplingParams = ON, **case) -> tuple[list, list[StepRecord]]:
    engine = engine_of(runs_ahead, **case)
    run = start(engine, params)
    records = []
    for record in run:
        engine.scheduler.check_invariants()
        records.append(record)
    assert_nothing_held(engine)
    assert in_flight(engine) is None
    return results(run), records


@KV
def test_a_batch_that_only_decodes_is_planned_ahead_from_its_second_decode_on(kv):
    plain, records = outputs(False, kv=kv)
    ahead, records_ahead = outputs(True, kv=kv)

    assert ahead == plain
    assert not any(record.planned_ahead for record in records)
    assert [record.planned_ahead for record in records_ahead] == [False, False, *[True] * 10]
    assert all(record.discarded == 0 for record in records_ahead), "who ends by its length is left out in time"
    assert [record.tokens for record in records_ahead] == [record.tokens for record in records]
    assert [record.items for record in records_ahead] == [record.items for record in records]


@KV
@pytest.mark.parametrize("params", [SamplingParams(max_tokens=22), SamplingParams(max_tokens=20, stop=["bc", "cab"])])
def test_a_sequence_that_ends_of_itself_has_one_row_computed_in_vain(kv, params):
    plain, _ = outputs(False, params, kv=kv)
    ahead, records = outputs(True, params, kv=kv)

    assert ahead == plain
    assert any(record.planned_ahead for record in records)
    early = sum(len(tokens) < params.max_tokens for tokens, *_ in ahead)
    assert 0 < sum(record.discarded for record in records) <= early


@KV
def test_an_abort_leaves_the_row_in_flight_to_be_thrown_away(kv):
    whole, _ = outputs(False, kv=kv)
    engine = engine_of(kv=kv)
    run = start(engine)
    for _ in range(4):
        engine.step()
    engine.abort("b")
    engine.scheduler.check_invariants()
    record = engine.step()

    assert record.planned_ahead and record.discarded == 1
    assert [item.seq_id for item in record.items] == [0, 2] == [token.seq_id for token in record.tokens]
    assert record.tokens_computed == 2
    list(run)
    said = [one.token_ids for output in run.outputs for one in output.outputs]
    assert said == [whole[0][0], whole[1][0][:4], whole[2][0]]
    assert_nothing_held(engine)


def test_when_all_are_aborted_the_step_in_flight_is_dropped():
    engine = engine_of()
    start(engine)
    for _ in range(4):
        engine.step()
    assert in_flight(engine) is not None
    for name in PROMPTS:
        engine.abort(name)

    assert in_flight(engine) is None and not engine.has_unfinished()
    engine.add_request("next", (1, 1), ON)
    records = run_all(engine)
    assert [record.discarded for record in records[:2]] == [3, 0]
    assert not records[0].planned_ahead


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_who_arrives_is_admitted_by_the_first_step_that_is_planned_after(kv):
    engine = engine_of(kv=kv)
    start(engine)
    for _ in range(4):
        engine.step()
    (new,) = engine.add_request("new", (1, 1, 2), ON)
    in_flight, next_one = engine.step(), engine.step()

    assert in_flight.planned_ahead and not in_flight.admitted
    assert not next_one.planned_ahead and [one.seq_id for one in next_one.admitted] == [new]
    records = run_all(engine)
    assert records[1].planned_ahead, "and then ahead again"


@pytest.mark.parametrize(
    "case", [{"max_num_seqs": 2}, {"num_blocks": 9, "block_size": 4}, {"kv": "basic", "num_blocks": 1}]
)
def test_who_cannot_be_admitted_anyway_does_not_keep_others_from_being_planned_ahead(case):
    engine = engine_of(**case)
    run = start(engine, prompts={"a": (1, 2, 3, 1, 2, 2), "b": (2, 2, 1, 3, 1, 1), "c": (3,) * 12})
    records = run_all(engine)

    waiting = [record for record in records if record.queues.waiting]
    assert len(waiting) > 8 and sum(record.planned_ahead for record in waiting) >= len(waiting) - 3
    reasons = {type(one.reason).__name__ for record in records for one in record.waiting}
    assert reasons == {"MaxNumSeqs" if "max_num_seqs" in case else "NoBlocks"}
    plain = engine_of(False)
    expected = start(plain, prompts={"a": (1, 2, 3, 1, 2, 2), "b": (2, 2, 1, 3, 1, 1), "c": (3,) * 12})
    run_all(plain)
    assert results(run) == results(expected)


DRAWN = [
    SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.7, seed=2**64 - 1, top_k=3, n=2, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.5, seed=3, top_p=0.8, min_p=0.05, ignore_eos=True),
    SamplingParams(max_tokens=12, repetition_penalty=1.5, ignore_eos=True),
    SamplingParams(
        max_tokens=12,
        temperature=1,
        seed=4,
        frequency_penalty=2,
        presence_penalty=1,
        logit_bias={4: 3},
        ignore_eos=True,
    ),
]


@KV
@pytest.mark.parametrize("params", DRAWN)
def test_tokens_that_the_device_chooses_are_planned_ahead_and_are_the_hosts(kv, params):
    plain, _ = outputs(False, params, kv=kv, max_num_seqs=6)
    ahead, records = outputs(True, params, kv=kv, max_num_seqs=6)

    assert ahead == plain
    assert len({tokens for tokens, *_ in ahead}) > 1
    assert sum(record.planned_ahead for record in records) >= 10


@KV
def test_drawn_and_greedy_sequences_share_a_step_that_is_planned_ahead(kv):
    def results_of(runs_ahead: bool) -> tuple[list, list[StepRecord]]:
        engine = engine_of(runs_ahead, kv=kv)
        for name, (prompt, params) in enumerate(zip(PROMPTS.values(), (ON, *DRAWN[2:4]), strict=True)):
            engine.add_request(str(name), prompt, params)
        records = run_all(engine)
        return [engine.output(str(name)).outputs[0].token_ids for name in range(3)], records

    ahead, records = results_of(True)
    assert ahead == results_of(False)[0]
    assert sum(record.planned_ahead for record in records) == 10


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8, logprobs=1),
        SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0),
        SamplingParams(max_tokens=8, temperature=1.0, seed=1, min_tokens=2),
    ],
)
def test_tokens_of_which_more_is_asked_are_waited_for(params):
    assert outputs(True, params)[0] == outputs(False, params)[0]
    assert not any(record.planned_ahead for record in outputs(True, params)[1])


def test_a_model_that_runs_ahead_with_logits_on_the_host_plans_only_greedy_steps_ahead():
    for params, ahead in ((ON, True), (DRAWN[0], False)):
        engine = engine_of()
        engine.model = HashModel(5, emitted=range(1, 5), eos_token_id=0, runs_ahead=True)
        start(engine, params)
        assert any(record.planned_ahead for record in run_all(engine)) == ahead


def test_broken_logits_of_a_step_whose_tokens_were_drawn_end_their_sequence_alone():
    plain, _ = outputs(False, DRAWN[0])
    engine = engine_of()
    run, forward = start(engine, DRAWN[0]), engine.model.forward
    steps = []

    def broken(batch, storage):
        logits = forward(batch, storage)
        steps.append(batch)
        if len(steps) == 5:
            logits._rows[1] = np.inf
        return logits

    engine.model.forward = broken
    run_all(engine)

    said = [(one.token_ids, one.finish_reason) for output in run.outputs for one in output.outputs]
    assert said == [(plain[0][0], "length"), (plain[1][0][:4], "error"), (plain[2][0], "length")]


@pytest.mark.parametrize("params", [ON, DRAWN[0]])
@pytest.mark.parametrize("attribute, value", [("report_probabilities", True), ("on_logits", [lambda *_: None])])
def test_who_wants_to_see_logits_gets_them_step_by_step(attribute, value, params):
    engine = engine_of()
    run = start(engine, params)
    for _ in range(4):
        engine.step()
    setattr(engine, attribute, value)
    records = run_all(engine)

    assert [record.planned_ahead for record in records] == [True] + [False] * (len(records) - 1)
    assert results(run) == outputs(False, params)[0]


def test_broken_logits_of_a_step_after_which_another_was_launched_end_their_sequence_alone():
    plain, _ = outputs(False)
    engine = engine_of()
    run, forward = start(engine), engine.model.forward
    steps = []

    def broken(batch, storage):
        logits = forward(batch, storage)
        steps.append(batch)
        if len(steps) == 5:
            logits._rows[1] = np.nan
        return logits

    engine.model.forward = broken
    run_all(engine)

    said = [(one.token_ids, one.finish_reason) for output in run.outputs for one in output.outputs]
    assert said == [(plain[0][0], "length"), (plain[1][0][:4], "error"), (plain[2][0], "length")]


def test_logits_of_a_step_in_flight_can_still_be_kept():
    engine, seen = engine_of(), []
    start(engine)
    for _ in range(4):
        engine.step()
    engine.on_logits.append(lambda seq_id, logits: seen.append((seq_id, int(logits.argmax()))))
    record = engine.step()

    assert record.planned_ahead
    assert seen == [(token.seq_id, token.token_id) for token in record.tokens]


def test_where_somebody_guesses_nothing_is_planned_ahead():
    engine = new_engine(Case(runs_ahead=True, drafts=(0.8,)))
    run = start(engine)
    assert not any(record.planned_ahead for record in run_all(engine))
    assert results(run) == outputs(False)[0]


def test_guessing_can_begin_while_a_step_is_in_flight():
    engine = engine_of()
    run = start(engine)
    for _ in range(4):
        engine.step()
    engine.speculation = new_speculator(Case(drafts=(0.8,)))
    records = run_all(engine)

    assert records[0].planned_ahead and any(record.cycles for record in records)
    assert results(run) == outputs(False)[0]


def test_without_blocks_for_all_nothing_is_looked_ahead_and_somebody_is_preempted_as_ever():
    plain, records = outputs(False, num_blocks=7, block_size=4)
    ahead, records_ahead = outputs(True, num_blocks=7, block_size=4)

    assert ahead == plain
    assert any(record.planned_ahead for record in records_ahead)
    assert any(record.preempted for record in records)
    assert [record.preempted for record in records_ahead] == [record.preempted for record in records]


def test_the_step_after_a_preemption_admits_what_its_blocks_leave_room_for():
    for runs_ahead in (False, True):
        engine = engine_of(runs_ahead, num_blocks=6, block_size=4, order="priority")
        engine.add_request("a", (1, 2), replace(ON, max_tokens=20), priority=1)
        engine.add_request("b", (2,) * 9, ON, priority=3)
        for _ in range(3):
            engine.step()
        (third,) = engine.add_request("c", (1,) * 11, ON, priority=2)
        records = run_all(engine)
        after = [next_one for one, next_one in pairwise(records) if one.preempted and one.preempted[0].seq_id != third]
        assert [one.seq_id for one in after[0].admitted] == [third] and not after[0].planned_ahead


def test_the_time_that_the_host_waits_for_the_device_is_the_forwards(monkeypatch):
    engine, seconds, argmax_rows = engine_of(), 0.0, LateLogits.argmax_rows

    def computed(logits):
        nonlocal seconds
        seconds += 0 if logits._is_read else 0.25
        return argmax_rows(logits)

    monkeypatch.setattr(LateLogits, "argmax_rows", computed)
    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    start(engine)
    assert {(one.schedule_ms, one.forward_ms, one.sample_ms) for one in run_all(engine)} == {(0, 250, 0)}


def test_when_the_next_forward_begins_only_the_tokens_of_the_last_are_wanted(monkeypatch):
    engine, given = engine_of(), []
    forward = engine.model.forward

    def noted(batch, storage):
        assert not (given and batch.token_ids.min() < 0) or (given[-1]._are_wanted, given[-1].sampled) == (False, False)
        given.append(forward(batch, storage))
        return given[-1]

    engine.model.forward = noted
    start(engine)
    assert any(record.planned_ahead for record in run_all(engine))


def test_a_revoked_lease_ends_everybody_with_the_next_step():
    engine = engine_of()
    run = start(engine)
    for _ in range(4):
        engine.step()
    lease = lease_model(engine, "target")
    lease.revoke()
    record = engine.step()

    assert {one.reason for one in record.finished} == {"error"} and len(record.finished) == 3
    assert [len(one[0]) for one in results(run)] == [4, 4, 4]
    assert lease.wait_released(0)
    assert_nothing_held(engine)


def test_an_error_while_a_step_in_flight_is_read_fails_none_that_came_after_it():
    engine = engine_of()
    start(engine)
    while in_flight(engine) is None:
        engine.step()
    engine.add_request("late", (3, 1), ON)

    def fail(*arguments):
        raise ArithmeticError

    commit, engine.scheduler.commit = engine.scheduler.commit, fail
    with pytest.raises(ArithmeticError):
        engine.step()
    engine.scheduler.commit = commit

    assert engine.fail_step() == tuple(PROMPTS)
    run_all(engine)
    alone = engine_of(False)
    alone.add_request("late", (3, 1), ON)
    run_all(alone)
    assert engine.output("late").outputs[0].token_ids == alone.output("late").outputs[0].token_ids


def test_an_error_while_the_device_chooses_tokens_fails_none_that_waits():
    engine = engine_of(max_num_seqs=2)
    run = start(engine, DRAWN[0])
    while in_flight(engine) is None:
        engine.step()
    in_flight(engine).logits.sample = Mock(side_effect=ArithmeticError)
    with pytest.raises(ArithmeticError):
        engine.step()

    assert engine.fail_step() == ("a", "b")
    run_all(engine)
    assert results(run)[2] == outputs(False, DRAWN[0])[0][2]


def test_a_kept_cache_is_continued_where_its_sequence_ended_with_a_row_in_flight():
    engine, first_prompt = engine_of(), (2, 1)
    (kept,) = engine.add_request("first", first_prompt, SamplingParams(max_tokens=22), retain_cache=True)
    first = run_all(engine)
    said = engine.output("first").outputs[0].token_ids
    assert engine.output("first").outputs[0].finish_reason == "stop" and first[-1].discarded == 1
    prompt = (*first_prompt, *said, 2)
    engine.add_request("second", prompt, ON, continues_from=kept)
    second = run_all(engine)

    assert second[0].admitted[0].num_cached >= len(prompt) - 2
    other = engine_of(False)
    other.add_request("second", prompt, ON)
    run_all(other)
    assert engine.output("second").outputs[0].token_ids == other.output("second").outputs[0].token_ids


@KV
@every(30, 5)
@pytest.mark.parametrize("steps, temperature", [(1, 0), (2, 0), (4, 0), (4, 1)])
def test_interrupted_anywhere_it_goes_on_as_if_nothing_had_happened(kv, steps, temperature, stride):
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=8)
    expected = outputs(False, params, kv=kv)[0]

    def busy() -> tuple[Engine, Run]:
        engine = engine_of(kv=kv)
        run = start(engine, params)
        for _ in range(steps):
            engine.step()
        return engine, run

    for line in range(steps, lines_of(busy()[0].step), stride):
        engine, run = busy()
        assert interrupted_at(line, engine.step)
        for _ in run:
            engine.scheduler.check_invariants()
        assert results(run) == expected, f"line {line}"
        assert_nothing_held(engine)
        assert in_flight(engine) is None


@KV
def test_interrupted_again_and_again_it_still_comes_to_the_same_end(kv):
    expected, name = outputs(False, kv=kv)[0], next(iter(PROMPTS))
    for seed in range(8):
        rng = np.random.default_rng(seed)
        engine = engine_of(kv=kv)
        run = start(engine)
        while engine.has_unfinished():
            while interrupted_at(int(rng.integers(4000)), engine.step) and engine.has_unfinished():
                interrupted_at(int(rng.integers(600)), partial(engine.output, name))  # while it recovers
            engine.output(name)
            engine.scheduler.check_invariants()
        assert results(run) == expected, f"seed {seed}"
        assert_nothing_held(engine)


def test_an_interrupted_abort_can_be_repeated():
    def busy() -> Engine:
        engine = engine_of()
        start(engine)
        for _ in range(4):
            engine.step()
        return engine

    def abort_all(engine: Engine) -> None:
        for name in PROMPTS:
            engine.abort(name)

    for line in range(lines_of(partial(abort_all, busy()))):
        engine = busy()
        assert interrupted_at(line, partial(abort_all, engine))
        abort_all(engine)
        assert not engine.has_unfinished() and in_flight(engine) is None
        assert engine.cache.stats().used_blocks == 0


def test_the_record_says_that_it_was_planned_ahead_and_a_plain_one_says_nothing():
    codec = codec_of(StepRecord)
    _, records = outputs(True)
    written = [codec.encode(record) for record in records]

    assert [one.get("planned_ahead", False) for one in written] == [record.planned_ahead for record in records]
    assert "planned_ahead" not in written[0] and "discarded" not in written[0]
    assert [codec.decode(one, "") for one in written] == records


def test_a_token_below_0_is_the_likeliest_of_a_row_of_the_forward_before_on_that_storage():
    model = HashModel(runs_ahead=True)
    storages = [model.new_storage(model.kv_layout(4, 8)) for _ in range(2)]
    texts = [[5, 6, 7], [9]]
    parts = [SequenceRows(text, 0, (index,), range(len(text) - 1, len(text))) for index, text in enumerate(texts)]
    chosen = model.forward(flat_batch(parts, 8), storages[0]).argmax(axis=1).tolist()
    model.forward(flat_batch(parts[:1], 8), storages[1])  # on another storage: no matter
    named = [SequenceRows([-1 - row], len(texts[row]), (row,), range(1)) for row in (1, 0)]
    found = model.forward(flat_batch(named, 8), storages[0])

    whole = [
        SequenceRows([*texts[row], chosen[row]], 0, (row,), range(len(texts[row]), 1 + len(texts[row])))
        for row in (1, 0)
    ]
    assert np.array_equal(found, model.forward(flat_batch(whole, 8), storages[1]))


def test_the_longest_sequences_are_planned_ahead_up_to_their_last_token():
    for kv in ("basic", "paged", "prefix"):
        case = Case(kv=kv, runs_ahead=True)
        engine = new_engine(case)
        engine.add_request("long", PROMPTS["a"], SamplingParams(max_tokens=99, ignore_eos=True))
        records = run_all(engine)
        assert len(engine.output("long").outputs[0].token_ids) == MAX_MODEL_LEN - 2 + 1
        assert records[-1].planned_ahead and sum(record.discarded for record in records) == 0


# Whether the next step may admit a sequence


def test_a_refused_sequence_is_tried_again_only_after_an_arrival_or_an_end():
    engine = engine_of(max_num_seqs=2)
    start(engine)
    assert engine.may_admit()
    engine.step()
    assert not engine.may_admit()
    engine.abort("a")
    assert engine.may_admit()
    engine.step()
    assert not engine.may_admit(), "the last one runs"
    engine.add_request("d", (1,), ON)
    assert engine.may_admit()
    engine.step()
    assert not engine.may_admit()
    engine.abort("d")
    assert not engine.may_admit(), "none waits"
    run_all(engine)


def test_a_sequence_that_waits_for_the_budget_or_for_a_prefix_owner_may_be_admitted_by_the_next_step():
    engine = engine_of(max_num_batched_tokens=4)
    start(engine, prompts={"a": (1,) * 9, "b": (2,) * 9})
    engine.step()
    assert engine.may_admit()
    engine = engine_of(kv="prefix", prefix_planning=True)
    start(engine, prompts={"a": (1,) * 9, "b": (1,) * 9})
    assert isinstance(engine.step().waiting[0].reason, Deferred)
    assert engine.may_admit()


def test_a_step_is_followed_by_one_planned_ahead_if_it_is_nothing_but_decodes_that_the_device_can_choose():
    one = sequence(0, tokens=3, token_ids=[1, 2, 3, 4])
    decode = PlanItem(0, one, 3, 1, range(1), True, "decode", (0,))
    assert _is_plain(StepPlan((decode, decode)), can_draw=False)
    parts: list[dict[str, Any]] = [{"separate": (decode,)}, {"swap_ins": (Swap(0, ()),)}, {"exhausted": (0,)}]
    changes: list[dict[str, Any]] = [{"phase": "prefill"}, {"num_tokens": 2}, {"logit_rows": range(2)}]
    parts += [
        {"items": (decode, decode._replace(**c))} for c in (*changes, {"chooses_token": False}, {"num_draft_slots": 1})
    ]
    assert not any(_is_plain(replace(StepPlan((decode,)), **part), can_draw=True) for part in parts)
    for params, can_draw in ((SamplingParams(temperature=1.0), True), (SamplingParams(logprobs=1), False)):
        other = decode._replace(sequence=sequence(1, params=params))
        assert [_is_plain(StepPlan((decode, other)), draws) for draws in (False, True)] == [False, can_draw]
    for max_tokens, is_last in ((1, True), (2, True), (3, False)):
        one.max_output_tokens = max_tokens
        assert _ends_with(decode) == is_last


def test_masks_are_prepared_for_all_that_sample_and_raise_nothing():
    fails, works, unused = Mock(mask=Mock(side_effect=MatcherError("no"))), Mock(), Mock()
    first, plain, waits = sequence(0, matcher=fails), sequence(1), sequence(2, matcher=unused)
    plain.waiting_samples = [sequence(3, token_ids=[1, 2, 3, 9], matcher=works)]
    rows = (0, 1, range(1), True, "decode", ())
    items = [
        PlanItem(0, first, *rows),
        PlanItem(1, plain, *rows),
        PlanItem(2, waits, *rows)._replace(chooses_token=False),
    ]
    _prepare_masks(items)
    fails.mask.assert_called_once_with([])
    works.mask.assert_called_once_with([9])
    unused.mask.assert_not_called()


def test_a_step_without_one_of_the_running_sequences_is_followed_by_none_planned_ahead():
    engine: Any = engine_of()
    start(engine)
    while not in_flight(engine):
        engine.step()
    plan = in_flight(engine).plan
    assert engine._plan_next(replace(plan, items=plan.items[1:]), False) is None
    assert engine._plan_next(plan, False) is not None
