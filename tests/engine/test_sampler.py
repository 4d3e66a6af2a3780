"""From a step's rows of logits to outcomes and records, item by item: without an engine or a model."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from forge.engine import sampler as module
from forge.engine.output_text import OutputText
from forge.engine.proposer import NO_DRAFTS, Proposal, StepDrafts, Verification
from forge.engine.readout import SeparateResult
from forge.engine.sampler import LaunchedStep, Sampler, StepLogits, argmax_rows
from forge.engine.sampling import BrokenLogits, SampledToken
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence
from forge.engine.step_plan import ForkSlots, Outcome, PlanItem, StepPlan
from forge.engine.structured_output import MatcherError
from forge.engine.task import NO_READOUT, Readout, Task
from forge.reasons import PoolExhausted
from forge.trace.records import TokenRecord
from tests.engine.schedules import sequence

EOS, VOCAB, LETTERS = 0, 9, "_abcdefgh"


def one_sequence(seq_id: int, **options: Any) -> Sequence:
    """Three prompt tokens. A token's text is its letter, and a text that ends leaves a dot."""
    params = options.setdefault("params", SamplingParams())
    one = sequence(seq_id, token_ids=[1, 2, 3], **options)
    detokenizer: Any = SimpleNamespace(push=lambda token_id: LETTERS[token_id], flush=lambda: "." if seq_id else "")
    one.output_text = OutputText(detokenizer, params.stop, params.include_stop_str_in_output)
    return one


def item(one: Sequence, rows: int = 1, chooses_token: bool = True, **more: Any) -> PlanItem:
    return PlanItem(one.seq_id, one, 0, 3, range(rows), chooses_token, "decode", (), **more)


def saying(*token_ids: int, top: float = 5.0) -> np.ndarray:
    """Rows of logits whose greatest are those of these tokens."""
    return np.where(np.arange(VOCAB) == np.array(token_ids)[:, None], top, 0).astype(np.float32)


def launched(plan: StepPlan, rows: Any, drafts: StepDrafts, separate: Any) -> LaunchedStep:
    return LaunchedStep(plan, drafts, None, rows, separate, 0.0, 0.0)


def test_each_item_has_its_own_rows_and_drafts_are_judged_by_those_behind_the_last_known_token():
    items = [item(one_sequence(seq_id)) for seq_id in range(3)]
    items[0] = items[0]._replace(logit_rows=range(2, 4))
    items[1] = items[1]._replace(logit_rows=range(5), num_draft_slots=3, forks=(ForkSlots(-7, ()), ForkSlots(-8, ())))
    proposals, rows, seen = (Proposal((4, 5)), Proposal((6,))), saying(8, 1, 7, 2, 3, 4, 5, 6, 1), []
    tokens = tuple(SampledToken(token_id, None, None) for token_id in (6, 2))
    speculation = Mock(verify=Mock(return_value=Verification(tokens, ((), ()), 1)))
    drafts = StepDrafts({1: proposals, 2: proposals})
    found = Sampler(frozenset([EOS]), speculation.verify, [lambda *row: seen.append(row), Mock()])
    results = found.sample(launched(StepPlan(tuple(items)), rows, drafts, ()))

    assert [outcome[:3] for outcome in results.outcomes] == [(0, 3, (1,)), (1, 3, (6, 2)), (2, 3, (1,))]
    assert [(outcome.num_accepted, outcome.winner) for outcome in results.outcomes] == [(0, None), (1, -7), (0, None)]
    placed = ((0, 3, 1), (1, 3, 6), (1, 4, 2), (2, 3, 1))
    assert results.tokens == [TokenRecord(i, position, token, LETTERS[token]) for i, position, token in placed]
    one, given, logits, spans, wants = speculation.verify.call_args.args
    assert (one, given, spans, wants) == (items[1].sequence, proposals, [slice(3, 6), slice(6, 8)], False)
    assert (logits.rows is rows, logits.argmax) == (True, [8, 1, 7, 2, 3, 4, 5, 6, 1])
    assert results.verified == {1: speculation.verify.return_value}
    assert [(seq_id, row.argmax()) for seq_id, row in seen] == [(0, 1), (1, 5), (1, 6), (2, 1)]
    assert not any(np.shares_memory(row, rows) for _, row in seen)


@pytest.mark.parametrize(
    ("params", "most", "kept", "reason", "stop", "text"),
    [
        ({}, 9, 4, None, None, "ac_d"),
        ({"ignore_eos": True}, 9, 4, None, None, "ac_d"),
        ({}, 4, 4, "length", None, "ac_d."),
        ({}, 2, 2, "length", None, "ac."),
        ({"stop_token_ids": [3]}, 2, 2, "stop", 3, "a."),
        ({"stop_token_ids": [3], "include_stop_str_in_output": True}, 9, 2, "stop", 3, "ac."),
        ({"stop": ["c"]}, 9, 2, "stop", "c", "a"),
        ({"stop_token_ids": [4]}, 9, 4, "stop", 4, "ac_."),
        ({"stop": ["c."]}, 2, 2, "stop", "c.", "a"),
    ],
)
@pytest.mark.parametrize("eos", [EOS, 8])
def test_tokens_are_emitted_until_one_ends_the_sequence(params, most, kept, reason, stop, text, eos):
    token_ids = (1, 3, EOS, 4)
    ends_at_eos = eos == EOS and not params.get("ignore_eos") and kept > 3
    if ends_at_eos:
        kept, reason, stop, text = 3, "stop", EOS, "ac."
    one = one_sequence(1, params=SamplingParams(**params), max_tokens=most)
    one.length_limit = PoolExhausted(4)
    sampled = tuple(SampledToken(token_id, 0.5, ((token_id, -1.0),)) for token_id in token_ids)
    speculation = Mock(verify=Mock(return_value=Verification(sampled, ((),), 0)))
    planned = item(one, 4, num_draft_slots=3)
    drafts = StepDrafts({1: (Proposal((1, 3, 0)),)})
    results = Sampler(frozenset([eos]), speculation.verify).sample(
        launched(StepPlan((planned,)), saying(*token_ids), drafts, ())
    )

    outcome = Outcome(1, 3, token_ids[:kept], reason, stop, num_accepted=kept - 1)
    assert results.outcomes == [outcome]
    why = one.length_limit if reason == "length" else None
    ended = [(record.reason, record.stop, record.why, record.error) for record in results.finished]
    assert ended == ([(reason, stop, why, None)] if reason else [])
    released = "".join(token.text for token in results.tokens) + "".join(record.text for record in results.finished)
    assert released == one.output_text.text == text
    assert one.logprobs == [((token_id, -1.0),) for token_id in token_ids[:kept]]
    assert [(token.position, token.probability) for token in results.tokens] == [(3 + i, 0.5) for i in range(kept)]


def sampled(planned: PlanItem, rows: np.ndarray, **options: Any):
    """The results of one item of a sampler that has no drafts."""
    separate = options.pop("separate", None)
    found = Sampler(frozenset([EOS]), None, **options)
    plan = StepPlan((), separate=(planned,)) if separate else StepPlan((planned,))
    return found.sample(launched(plan, rows, NO_DRAFTS, [separate] if separate else []))


@pytest.mark.parametrize("is_separate", [False, True])
def test_a_task_is_answered_once_and_its_samples_begin_from_its_last_row(is_separate):
    first, second = one_sequence(1, task=Task(sample=True, score_from=1)), one_sequence(2)
    first.waiting_samples = [second]
    rows, answer = saying(4, 5, 3), Readout(scores=(((1, -1.0),),))
    separate = SeparateResult(answer, rows[2:]) if is_separate else None
    results = sampled(item(first, 3), rows, separate=separate)

    assert results.outcomes == [Outcome(1, 3, (3,), None), Outcome(2, 3, (3,), None)]
    assert first.readout is second.readout is not None and (first.readout is answer) == is_separate
    assert len(first.readout.scores) == (1 if is_separate else 2)
    known = first.readout
    assert sampled(item(first), rows[:1]).outcomes[0].token_ids == (4,) and first.readout is known


@pytest.mark.parametrize("is_separate", [False, True])
def test_a_prompt_in_chunks_keeps_what_it_has_and_one_without_output_ends(is_separate):
    for remaining, params, reason in (
        (2, {}, None),
        (0, {}, "stop"),
        (0, {"max_tokens": 0, "prompt_logprobs": 1}, "length"),
    ):
        one = one_sequence(0, task=Task(score_from=1), params=SamplingParams(**params))
        answer = Readout(scores=(((1, -1.0),),))
        separate = SeparateResult(answer) if is_separate else None
        results = sampled(item(one, 2, chooses_token=False, remaining=remaining), saying(4, 5), separate=separate)
        assert results.outcomes == [Outcome(0, 3, (), reason)]
        assert (one.readout is None, one.partial is NO_READOUT) == (bool(remaining), not remaining)


@pytest.mark.parametrize("samples", [False, True])
def test_logits_that_are_no_numbers_and_a_matcher_that_fails_end_a_sequence_with_its_samples(samples):
    broken, refused = saying(1, top=np.nan), Mock(mask=Mock(side_effect=MatcherError("too much")))
    for matcher, rows, by_request in ((None, broken, False), (refused, saying(1), True)):
        for separate in (None, SeparateResult(error=BrokenLogits("late"))) if not by_request else (None,):
            params = SamplingParams(bad_words=["x"] if matcher else ())
            task = Task(sample=samples, score_from=1) if not by_request else Task(sample=True)
            first, second = one_sequence(1, params=params, matcher=matcher, task=task), one_sequence(2)
            first.waiting_samples, first.readout = [second], Readout() if by_request else None
            results = sampled(item(first, chooses_token=samples or by_request), rows, separate=separate)
            assert [record.seq_id for record in results.finished] == [1, 2]
            assert {(record.reason, record.by_request, record.text) for record in results.finished} == {
                ("error", by_request, ".")
            }
            assert {record.error for record in results.finished} == {first.errors[0]} and first.readout is None
            assert [(outcome.seq_id, outcome.finish_reason) for outcome in results.outcomes] == [
                (1, "error"),
                (2, "error"),
            ]


def test_what_has_ended_gets_no_token_and_the_pool_ends_what_it_exhausts():
    gone, alive, exhausted = (one_sequence(seq_id) for seq_id in range(3))
    gone.finish_reason = "stop"
    found = Sampler(frozenset([EOS]), None)
    results = found.sample(
        launched(StepPlan((item(gone), item(alive)), exhausted=(exhausted,)), saying(4, 5), NO_DRAFTS, ())
    )
    assert results.outcomes == [Outcome(1, 3, (5,), None), Outcome(2, 3, (), "length")]
    assert alive.readout is None
    assert sampled(item(alive), saying(1, top=np.nan)).outcomes[0].finish_reason == "error"


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}])
@pytest.mark.parametrize("reports", [False, True])
def test_a_token_is_chosen_here_unless_the_device_or_the_argmax_has(params, reports, monkeypatch):
    choose = Mock(return_value=SampledToken(7, 0.25, None))
    monkeypatch.setattr(module, "choose", choose)
    rows, one = saying(4), one_sequence(1, params=SamplingParams(**params))
    (token,) = sampled(item(one), rows, _report_probabilities=reports).tokens
    assert token.token_id == (7 if params or reports else 4)
    if choose.called:
        row, draw, wants, argmax = choose.call_args.args
        assert (row.tolist(), draw, wants, argmax) == (rows[0].tolist(), one.draw, reports, 4)
    device: Any = SimpleNamespace(sampled=True, argmax_rows=lambda: ([6], [1.0]))
    results = Sampler(frozenset(), None, (), reports).sample(launched(StepPlan((item(one),)), device, NO_DRAFTS, ()))
    assert results.outcomes[0].token_ids == (6,) and not StepLogits.of(rows).sampled
    assert argmax_rows(saying(3, 2)) == ([3, 2], [5.0, 5.0])
