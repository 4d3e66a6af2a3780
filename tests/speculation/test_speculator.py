"""The speculator without an engine: how many draft tokens it asks of whom, when of none, and what it learns from steps
whose times are given."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, Mock, call

import numpy as np
import pytest

from forge.engine.proposer import NO_DRAFTS, Proposal, Proposer, StepDrafts, Verification
from forge.engine.sampler import LaunchedStep, StepLogits, StepResults
from forge.engine.sampling import SampledToken
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence
from forge.engine.step_plan import ForkSlots, Outcome, PlanItem, StepPlan
from forge.errors import ForgeError
from forge.speculation.controller import Costs
from forge.speculation.leases import LeaseRevoked
from forge.speculation.speculator import Speculator
from forge.trace.records import SpecCycle, Undrafted
from tests.engine.schedules import sequence
from tests.speculation.proposers import FREE

VOCAB = 10


class Told(Proposer):
    """Proposes the tokens that it is told to. Its proposals take a second each by the clock of `times`."""

    def __init__(self, name: str = "told", *token_ids: int, error: ForgeError | None = None):
        self.name, self.token_ids, self.error = name, token_ids, error
        self.asked: list[tuple[int, int]] = []
        """(sequence id, number of tokens) of each request."""
        self.forgotten: list[int] = []
        self.requests: list = []

    def propose(self, requests):
        times.now += 1.0
        self.requests = requests
        self.asked += [(request.seq_id, request.max_tokens) for request in requests]
        if self.error is not None:
            raise self.error
        return [Proposal(self.token_ids, cached=(3, 4)) for _ in requests]

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


times = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: times.now)


def speculator(*proposers: Proposer, costs: Costs = FREE, **options) -> Speculator:
    return Speculator([(each, costs) for each in proposers], vocab_size=VOCAB, **{"max_k": 3, "fixed": True} | options)


def metered(*proposers: Proposer, **options) -> tuple[Speculator, Mock]:
    """A speculator and the meter of its first proposer, which knows what a plain step takes."""
    speculation, meter = speculator(*proposers, **options), Mock(plain_forwards_left=0)
    meter.costs.return_value = FREE
    speculation._meters[proposers[0].name] = meter
    return speculation, meter


def long(seq_id: int = 0, **options) -> Sequence:
    return sequence(seq_id, max_tokens=9999, **options)


def plan_of(speculation: Speculator, *sequences: Sequence) -> StepPlan:
    """Decode each sequence, with slots for what it wants."""
    items = []
    for one in sequences:
        wanted = speculation.wanted(one)
        forks = tuple(ForkSlots(-1 - index, ()) for index in range(speculation.wanted_forks(one) if wanted else 0))
        item = PlanItem(one.seq_id, one, len(one.token_ids) - 1, 1, range(1 + wanted), True, "decode", ())
        items.append(item._replace(num_draft_slots=wanted, forks=forks))
    return StepPlan(tuple(items))


def learn(
    speculation: Speculator, plan: StepPlan, drafts: StepDrafts, num_rows: int, accepted: int = 0, winner: int = 0
) -> StepResults:
    """Learn from a step of 10 ms in which `accepted` tokens of each sequence's draft number `winner` were accepted."""
    sampled, verified, outcomes = (SampledToken(7, None, None),) * (accepted + 1), {}, []
    for item in plan.items:
        proposals = drafts.proposals.get(item.seq_id, ())
        if proposals:
            verified[item.seq_id] = Verification(sampled, ((),) * len(proposals), winner)
        tokens = (7,) * (accepted + 1 if proposals else 1)
        outcomes.append(Outcome(item.seq_id, len(item.sequence.token_ids), tokens, None))
    batch, logits = Mock(num_rows=num_rows) if num_rows else None, np.empty((0, 1), np.float32)
    launched = LaunchedStep(plan, drafts, batch, logits, [], 0.0, forward_ms=5.0)
    results = StepResults(outcomes, verified=verified)
    speculation.learn(launched, results, 0.01 + drafts.total_ms / 1e3)
    for item, outcome in zip(plan.items, outcomes, strict=True):
        item.sequence.token_ids += outcome.token_ids
    return results


def step(speculation: Speculator, *sequences: Sequence, num_rows: int | None = None, **learned) -> StepResults:
    plan = plan_of(speculation, *sequences)
    rows = len(sequences) if num_rows is None else num_rows
    return learn(speculation, plan, speculation.propose(plan), rows, **learned)


# How many draft tokens, and when none


def test_after_every_two_silent_requests_the_wait_grows_by_a_token_up_to_15():
    silent = Told()
    speculation, one, asked_at = speculator(silent), long(), []
    while len(asked_at) < 36:
        length, before = len(one.token_ids), len(silent.asked)
        (undrafted,) = step(speculation, one).undrafted
        if len(silent.asked) > before:
            asked_at.append(length)
            assert undrafted == Undrafted(0, "no_proposal")
        else:
            next_one = asked_at[-1] + 1 + min((len(asked_at) - 1) // 2, 15)
            assert undrafted == Undrafted(0, "pauses", next_one - length)
    gaps = np.diff(asked_at).tolist()
    assert gaps == [min(1 + index // 2, 16) for index in range(35)]
    silent.token_ids = (1,)
    while not step(speculation, one).cycles:
        pass
    silent.token_ids, num_asked = (), len(silent.asked)
    for _ in range(2):
        step(speculation, one)
    assert len(silent.asked) == num_asked + 2, "a proposal ends the wait"


def test_a_draft_that_cannot_pay_is_off_for_longer_and_longer_and_then_one_token_is_tried():
    told = Told("told", 1, 2)
    speculation, meter = metered(told, fixed=False)
    meter.costs.return_value = Costs(2.0)
    one = long()
    assert speculation.decision(0) is None
    for pause in (64, 192):
        assert [step(speculation, one).undrafted[0].left for _ in range(pause)] == list(range(pause, 0, -1))
        (cycle,) = step(speculation, one).cycles
        assert (cycle.decision.reason, cycle.proposed) == ("probes", (1,))
        assert cycle.then == speculation.decision(0) and (cycle.then.k, cycle.then.reason) == (0, "cannot_win")
    (off,) = step(speculation, one).undrafted
    assert off == Undrafted(0, "off", 256, speculation.decision(0))


@pytest.mark.parametrize(
    "params, most", [({}, 3), ({"num_speculative_tokens": 2}, 2), ({"num_speculative_tokens": 8}, 3)]
)
def test_a_sequence_has_as_many_draft_tokens_as_the_request_and_the_engine_allow(params, most):
    told = Told("told", *range(1, 9))
    (cycle,) = step(speculator(told), long(params=SamplingParams(**params))).cycles
    assert told.asked == [(0, most)] and cycle.proposed == told.token_ids[:most]


def test_a_request_without_proposers_wants_none():
    speculation = speculator(Told("a", 1), Told("b", 1))
    ways = [{"num_speculative_tokens": 0}, {"drafts": ()}, {"drafts": ("b",)}, {"drafts": ("b", "a")}]
    sequences = [long(seq_id, params=SamplingParams(**params)) for seq_id, params in enumerate(ways)]
    assert [speculation.wanted(one) for one in sequences] == [0, 0, 3, 3]
    assert [speculation.wanted_forks(one) for one in sequences] == [0, 0, 0, 1]
    facts = step(speculation, *sequences)
    assert facts.undrafted == (Undrafted(0, "not_wanted"), Undrafted(1, "not_wanted"))
    assert [(cycle.seq_id, cycle.proposer) for cycle in facts.cycles] == [(2, "b"), (3, "a"), (3, "b")]
    assert speculator().wanted(long()) == 0


def test_steps_are_measured_before_draft_tokens_are_asked_for_unless_their_number_is_fixed():
    told = Told("told", 1)
    speculation, one = speculator(told, fixed=False), long()
    for left in range(8, 0, -1):
        assert step(speculation, one).undrafted == (Undrafted(0, "measures", left),)
    assert step(speculation, one).cycles and len(told.asked) == 1
    assert step(speculator(told), long()).cycles


def test_a_fixed_number_can_be_set_later():
    told = Told("told", 1, 2)
    speculation, one = speculator(told, fixed=False, costs=Costs(2.0)), long()
    step(speculation, one)
    speculation.fix(2)
    assert speculation.decision(0) is None
    (cycle,) = step(speculation, one).cycles
    assert told.asked == [(0, 2)] and cycle.decision.reason == "fixed"


def test_a_sequence_that_could_have_no_draft_token_says_why():
    speculation = speculator(Told("told", 1))
    sequences = [long(0), sequence(1, max_tokens=2), sequence(2, max_tokens=1), sequence(3, max_tokens=2)]
    for one in sequences:
        one.token_ids = one.token_ids + [7] * (one.seq_id == 1)
    plan = plan_of(speculation, *sequences)
    plan = StepPlan(tuple(item._replace(num_draft_slots=0, forks=()) for item in plan.items))
    assert speculation.propose(plan) is NO_DRAFTS
    prefill = plan.items[0]._replace(seq_id=9, phase="prefill")
    told = learn(speculation, StepPlan((*plan.items, prefill)), NO_DRAFTS, 3).undrafted
    reasons = enumerate(("no_room", "last_token", "last_token", "no_room"))
    assert told == tuple(Undrafted(seq_id, reason) for seq_id, reason in reasons)


# The proposals


def test_proposals_are_asked_for_with_what_their_draw_needs_and_their_times_are_added():
    for acceptance, independent in (("gumbel", False), ("rejection", True)):
        a, b = Told("a", 1, 2), Told("b", 3)
        speculation, one = speculator(a, b, acceptance=acceptance), long()
        drafts = speculation.propose(plan_of(speculation, one))
        ((first, second),) = drafts.proposals.values()
        assert first == Proposal((1, 2), cached=(3, 4), proposer="a") and (second.token_ids, second.proposer) == (
            (3,),
            "b",
        )
        assert (drafts.ms, drafts.total_ms) == ({"a": 1000.0, "b": 1000.0}, 2000.0)
        (for_a,), (for_b,) = a.requests, b.requests
        assert (for_a.branch, for_b.branch) == (0, 1) and for_a.draw == for_b.draw == one.draw
        assert for_a.independent == for_b.independent == independent


def test_only_as_many_proposers_are_asked_as_there_are_forks_for():
    proposers = [Told(name, 1) for name in "abc"]
    speculation = speculator(*proposers)
    (item,) = plan_of(speculation, long()).items
    assert len(item.forks) == 2
    drafts = speculation.propose(StepPlan((item._replace(forks=item.forks[:1]),)))
    assert [len(each.asked) for each in proposers] == [1, 1, 0] and list(drafts.ms) == ["a", "b"]


def test_draft_tokens_end_at_the_last_slot_at_the_vocabulary_and_at_what_the_grammar_refuses():
    for token_ids, num_allowed, kept in (((1, 2, 3, 4), 9, 3), ((1, VOCAB, 2), 9, 1), ((1, 2, 3), 2, 2), ((1,), 0, 0)):
        matcher = Mock(num_allowed=Mock(return_value=num_allowed))
        speculation = speculator(Told("told", *token_ids))
        drafts = speculation.propose(plan_of(speculation, long(matcher=matcher, token_ids=[1, 2, 3, 8])))
        found = [proposal.token_ids for proposals in drafts.proposals.values() for proposal in proposals]
        assert found == ([token_ids[:kept]] if kept else [])
        assert matcher.num_allowed.call_args == call([8], token_ids[: min(3, 1 if VOCAB in token_ids else 3)])


def test_of_tokens_that_were_drawn_the_first_that_the_grammar_refuses_stays_to_be_rejected():
    told, drawn = Told("told"), Proposal((1, 2, 3), distributions=(ANY, ANY, ANY))
    told.propose = lambda requests: [drawn]
    for num_allowed, kept in ((0, 1), (1, 2), (3, 3)):
        matcher = Mock(num_allowed=Mock(return_value=num_allowed))
        speculation = speculator(told)
        ((proposal,),) = speculation.propose(plan_of(speculation, long(matcher=matcher))).proposals.values()
        assert len(proposal) == len(proposal.distributions) == kept


def test_a_proposer_that_fails_is_left_out_and_the_others_go_on():
    revoked = LeaseRevoked("draft", 2.5)
    gone, stays = Told("gone", error=revoked), Told("stays", 1)
    speculation, one = speculator(gone, stays), long(5)
    (cycle, failed) = step(speculation, one, accepted=1).cycles
    assert (cycle.proposer, cycle.emitted, cycle.won, cycle.error) == ("stays", (7, 7), True, None)
    assert (failed.proposer, failed.emitted, failed.won, failed.error) == ("gone", (), False, str(revoked))
    assert (failed.release_ms, failed.draft_ms, failed.target_ms, failed.start) == (2.5, 0.0, 5.0, 3)
    assert failed.decision == cycle.decision and failed.decision.k == 3
    assert one.errors == [str(revoked)] and speculation.proposers == (stays,)
    stays.error = ForgeError("no more")
    (failed,) = (facts := step(speculation, one)).cycles
    assert (failed.emitted, failed.release_ms, facts.undrafted) == ((7,), None, ())
    assert speculation.proposers == () and speculation.wanted(one) == 0


# What it learns


def test_of_each_draft_a_record_says_what_it_cost_and_which_won():
    speculation, one = speculator(Told("a", 1, 2), Told("b", 3)), long()
    results = step(speculation, one, accepted=1, winner=1)
    decision, then = results.cycles[0].decision, speculation.decision(0)
    assert decision.accept_rate is None and then.accept_rate == 0.5, "of the longest draft"
    common: dict[str, Any] = {"target_ms": 5.0, "decision": decision, "then": then, "draft_cached": (3, 4)}
    assert results.undrafted == ()
    assert results.cycles == (
        SpecCycle(0, "a", 3, (1, 2), (), (), 1000.0, won=False, **common),
        SpecCycle(0, "b", 3, (3,), (), (7, 7), 1000.0, won=True, **common),
    )


def test_a_proposal_is_measured_and_one_that_read_a_text_as_well_is_a_bound():
    told = Told("told", 1, 2)
    speculation, meter = metered(told)
    first, second = long(0), long(1)
    step(speculation, first)
    step(speculation, first, second)
    step(speculation, first, second)
    assert meter.add_bound.call_args_list == [call(1, 2, 1000.0), call(2, 2, 1000.0)]
    assert meter.add_proposal.call_args_list == [call(2, 2, 1000.0)]
    told.token_ids = ()
    step(speculation, first, second)
    assert meter.add_bound.call_count + meter.add_proposal.call_count == 3


def test_a_step_of_decodes_is_measured_and_no_other():
    speculation, meter = metered(Told("told", 1), Told("other"))
    other = speculation._meters["other"] = Mock(costs=meter.costs)
    plan = plan_of(speculation, long(0), long(1))
    drafts = speculation.propose(plan)

    def costs(num_sequences: int) -> Costs:
        times.now += 0.25
        return FREE

    meter.costs.side_effect = costs
    learn(speculation, plan, drafts, 2)
    assert meter.add_forward.call_args_list == [call(2, pytest.approx(1010))], "four costs were asked for"
    learn(speculation, plan, NO_DRAFTS, 2)
    assert meter.add_forward.call_count == 2
    learn(speculation, plan, NO_DRAFTS, 3)
    learn(speculation, StepPlan(()), NO_DRAFTS, 0)
    mixed = StepPlan((plan.items[0], plan.items[1]._replace(phase="prefill", num_draft_slots=0)))
    learn(speculation, mixed, speculation.propose(mixed), 2)
    assert meter.add_forward.call_count == 2 and other.add_forward.call_args_list == meter.add_forward.call_args_list


def test_costs_are_those_of_a_batch_as_large_as_the_last_and_of_all_proposers_together():
    speculation, meter = metered(Told("a", 1), Told("b", 1), fixed=False)
    meter.costs.return_value = Costs(0.2, 0.1)
    other = Mock(costs=Mock(return_value=Costs(0.4, 0.3)))
    speculation._meters["b"] = other
    assert speculation._costs(long()) == Costs(pytest.approx(0.6), pytest.approx(0.4))
    assert speculation._costs(long(params=SamplingParams(drafts=("b",)))) == Costs(0.4, 0.3)
    step(speculation, long(0), long(1), long(2))
    learn(speculation, StepPlan(()), NO_DRAFTS, 0)
    speculation._costs(long())
    assert meter.costs.call_args == call(3) and meter.costs.call_args_list[0] == call(1)


def test_an_ended_sequence_is_forgotten_by_all_proposers_that_knew_it():
    a, b = Told("a", 1), Told("b", 1)
    speculation = speculator(a, b)
    step(speculation, long(0), long(1, params=SamplingParams(num_speculative_tokens=0)))
    for seq_id in (0, 0, 1, 2):
        speculation.forget(seq_id)
    assert a.forgotten == b.forgotten == [0] and speculation.decision(0) is None
    assert speculation._states == speculation._wishes == {}


def test_two_proposers_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two proposers have the same name"):
        speculator(Told("a"), Told("b"), Told("a"))


@pytest.mark.parametrize("temperature, wants, reads", [(0, False, False), (0, True, True), (1, False, True)])
def test_logits_are_read_only_where_the_argmax_does_not_decide(temperature, wants, reads):
    speculation, one = (
        speculator(Told("a", 1)),
        long(params=SamplingParams(temperature=temperature), token_ids=[1, 2, 3]),
    )
    rows = np.full((2, VOCAB), -50, np.float32)
    rows[0, 1] = rows[1, 4] = 0
    read = MagicMock(**{"__getitem__.return_value": rows})
    logits = StepLogits(read, [9, 1, 4], [0.0, 0.0, 0.0])
    found = speculation.verify(one, [Proposal((1,))], logits, [slice(1, 3)], wants)
    assert [token.token_id for token in found.sampled] == [1, 4]
    assert read.__getitem__.call_args_list == [call(slice(1, 3))] * reads
    assert (found.sampled[0].probability is not None) == wants
