"""Speculation in the engine changes when tokens come, and never which: for every proposer, cache, batch and ending."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from forge.engine import readout
from forge.engine.engine import Engine
from forge.engine.proposer import NO_PROPOSAL, Proposal, Proposer
from forge.engine.sampling_params import SamplingParams
from forge.errors import UsageError
from forge.speculation.controller import Costs
from forge.speculation.leases import Lease, LeaseRevoked, lease_model
from forge.speculation.lookup import NgramProposer, ReplayProposer
from forge.speculation.speculator import Speculator
from forge.trace.records import StepRecord
from tests.engine.scripted import EOS, assert_nothing_held, complete, letters, muddled, new_engine, run_all, saying
from tests.speculation.proposers import FREE, VOCAB, scripted_draft, speculator, texts_of, wrong_now_and_then

KINDS = ["off", "basic", "paged", "prefix"]
KV = pytest.mark.parametrize("kv", KINDS)

REQUESTS = {
    "plain": ("ab", SamplingParams(max_tokens=17, ignore_eos=True)),
    "long": ("hello hello hello", SamplingParams(max_tokens=12)),
    "scored": ("abc", SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)),
    "penalized": ("xyxy", SamplingParams(max_tokens=14, repetition_penalty=1.4, ignore_eos=True)),
    "stops": ("abab", SamplingParams(max_tokens=20, stop=["e", "qa"], ignore_eos=True)),
    "samples": ("ab", SamplingParams(max_tokens=8, temperature=0.9, seed=5, n=3, ignore_eos=True)),
}
TINY = {"paged": {"num_blocks": 9}, "prefix": {"num_blocks": 9}}
"""So few blocks that sequences are preempted."""


def run_requests(engine: Engine, names=REQUESTS) -> dict[str, list]:
    """What each request brings, all of them run together with invariants checked."""
    for name in names:
        text, params = REQUESTS[name]
        engine.add_request(name, letters(text), params)
    return finish(engine, names)


def finish(engine: Engine, names=REQUESTS) -> dict[str, list]:
    while engine.has_unfinished():
        engine.step()
        check(engine)
    found = {name: results(engine.output(name)) for name in names}
    for name in names:
        engine.forget(name)
    assert_nothing_held(engine)
    for proposer in engine.proposers:
        if getattr(proposer, "cache", None):
            assert proposer.cache.stats().used_blocks == 0
    assert engine.speculation is None or engine.speculation._states == {}
    return found


def results(output) -> list:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, output.prompt_logprobs)
        for one in output.outputs
    ]


def check(engine: Engine) -> None:
    engine.scheduler.check_invariants()
    for seq_id, sequence in engine.scheduler.running.items():
        if engine.cache.persistent and sequence.num_output_tokens:
            assert engine.cache.computed_length(seq_id) in (len(sequence.token_ids) - 1, 0)
            assert engine.cache.reserved_length(seq_id) <= len(sequence.token_ids)


@pytest.fixture(scope="module")
def plain() -> dict[str, list]:
    """What the target says alone."""
    return run_requests(new_engine(muddled, max_num_seqs=8))


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """The same, to be replayed."""
    engine = new_engine(muddled, max_num_seqs=8)
    for name, (text, params) in REQUESTS.items():
        engine.add_request(name, letters(text), params)
    run_all(engine)
    return texts_of([engine.output(name) for name in REQUESTS])


def proposers(name: str, answers) -> list[Proposer]:
    return {
        "itself": lambda: [scripted_draft()],
        "nearly": lambda: [scripted_draft(wrong_now_and_then())],
        "ngram": lambda: [NgramProposer(1, 3)],
        "replay": lambda: [ReplayProposer(answers, VOCAB)],
        "half right": lambda: [ReplayProposer(answers, VOCAB, 0.5)],
        "hostile": lambda: [ReplayProposer(answers, VOCAB, 0.0)],
        "two drafts": lambda: [scripted_draft(wrong_now_and_then(every=n), name=f"draft {n}") for n in (3, 4)],
        "ngram and drafts": lambda: [
            NgramProposer(1, 2),
            scripted_draft(wrong_now_and_then(every=3, offset=1)),
            ReplayProposer(answers, VOCAB, 0.7),
        ],
    }[name]()


NAMES = ["itself", "nearly", "ngram", "replay", "half right", "hostile", "two drafts", "ngram and drafts"]
SINGLE = [name for name in REQUESTS if name != "samples"]
"""The requests of one sequence."""


# The tokens


@KV
@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("name", NAMES)
def test_speculative_decode_greedy_matches_target_only_greedy(kv, k, name, plain, answers):
    speculation = speculator(*proposers(name, answers), k=k)
    engine = new_engine(muddled, kv=kv, max_num_seqs=8, speculation=speculation)

    found = run_requests(engine)

    assert found == plain


@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["itself", "nearly", "ngram", "hostile", "two drafts"])
def test_greedy_tokens_stay_the_same_when_sequences_are_preempted(kv, mode, name, plain, answers):
    preempted = []
    for k in (1, 3, 6):
        engine = new_engine(
            muddled, kv=kv, preemption=mode, speculation=speculator(*proposers(name, answers), k=k), **TINY[kv]
        )
        for name_of, (text, params) in REQUESTS.items():
            engine.add_request(name_of, letters(text), params)
        while engine.has_unfinished():
            preempted += engine.step().preempted
            check(engine)
        found = {request: results(engine.output(request)) for request in REQUESTS}
        assert found == plain
    assert preempted


@KV
@pytest.mark.parametrize("budget", [8, 11, 20])
def test_a_budget_that_leaves_little_for_guesses_changes_no_token(kv, budget, plain, answers):
    speculation = speculator(*proposers("two drafts", answers), k=6)
    engine = new_engine(muddled, kv=kv, max_num_seqs=8, max_num_batched_tokens=budget, speculation=speculation)

    assert run_requests(engine) == plain
    if kv != "off":
        assert max(map(sum, engine.model.forwards)) <= budget


@KV
@pytest.mark.parametrize("name", ["ngram", "replay", "half right", "hostile"])
def test_under_rejection_draft_tokens_without_a_distribution_change_no_token(kv, name, plain, answers):
    speculation = speculator(*proposers(name, answers), acceptance="rejection")
    engine = new_engine(muddled, kv=kv, max_num_seqs=8, speculation=speculation)

    assert run_requests(engine, ["samples"])["samples"] == plain["samples"]


@KV
def test_under_rejection_with_a_fixed_k_a_run_is_the_same_in_another_batch_and_on_another_cache(kv, plain, answers):
    drafts = [speculator(*proposers("nearly", answers), acceptance="rejection") for _ in range(2)]
    alone = run_requests(new_engine(muddled, speculation=drafts[0]), ["samples"])

    beside = run_requests(new_engine(muddled, kv=kv, max_num_seqs=8, speculation=drafts[1]))

    assert beside["samples"] == alone["samples"] != plain["samples"]
    assert {name: beside[name] for name in SINGLE} == {name: plain[name] for name in SINGLE}


def test_the_controller_changes_no_token(plain, answers):
    for name in NAMES:
        speculation = speculator(*proposers(name, answers), k=5, fixed=False)
        found = run_requests(new_engine(muddled, max_num_seqs=8, speculation=speculation))
        assert found == plain


def test_logits_are_kept_for_every_emitted_token_and_have_the_same_bits(answers):
    def logits(speculation: Speculator | None) -> list[bytes]:
        kept = []
        engine = new_engine(muddled, speculation=speculation)
        engine.on_logits.append(lambda seq_id, row: kept.append(row.tobytes()))
        run_requests(engine, ["plain"])
        return kept

    assert logits(speculator(*proposers("nearly", answers))) == logits(None)


# How a run of guesses ends


def replaying(text: str, **options) -> Engine:
    """An engine whose target says a text after "xy", and a proposer that knows it and what would come after."""
    said = [*letters("xy"), *letters(text), *[EOS] * 9]
    return new_engine(saying(letters(text), 2), speculation=speculator(ReplayProposer([said], VOCAB), k=4), **options)


@KV
@pytest.mark.parametrize("length", range(1, 8))
def test_eos_inside_a_run_ends_there(kv, length):
    output = complete(replaying("abcdefg"[:length], kv=kv), "xy", max_tokens=20)

    assert (output.text, output.finish_reason) == ("abcdefg"[:length], "stop")
    assert output.token_ids == (*letters("abcdefg"[:length]), EOS)


@KV
@pytest.mark.parametrize("stop", ["b", "cd", "de", "g"])
def test_a_stop_string_inside_a_run_ends_there(kv, stop):
    output = complete(replaying("abcdefgh", kv=kv), "xy", max_tokens=20, stop=[stop])

    assert (output.text, output.stop_reason) == ("abcdefgh".partition(stop)[0], stop)
    assert output.token_ids == tuple(letters("abcdefgh".partition(stop)[0] + stop))


@KV
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_run_goes_past_max_tokens(kv, max_tokens):
    engine = replaying("abcdefghij", kv=kv)
    output = complete(engine, "xy", max_tokens=max_tokens)

    assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")


@KV
@pytest.mark.parametrize("length", range(2, 9))
def test_no_run_goes_past_the_context(kv, length):
    engine = replaying("abcdefghij", kv=kv, max_model_len=length)
    output = complete(engine, "xy", max_tokens=50)

    assert (len(output.token_ids), output.finish_reason) == (length - 1, "length")


def test_a_kept_cache_ends_where_one_without_speculation_would():
    lengths = []
    for engine in (replaying("abcd"), new_engine(saying(letters("abcd"), 2))):
        (seq_id,) = engine.add_request("r", letters("xy"), SamplingParams(max_tokens=9), retain_cache=True)
        run_all(engine)
        lengths.append(engine.cache.computed_length(seq_id))

    assert lengths == [6, 6]


# What a step does


def cycles_of(records: list[StepRecord]) -> list:
    return [cycle for record in records for cycle in record.cycles]


def test_speculative_decode_kv_position_advances_by_emitted_count(answers):
    engine = new_engine(muddled, speculation=speculator(*proposers("half right", answers), k=4))
    (seq_id,) = engine.add_request("plain", letters("ab"), SamplingParams(max_tokens=17, ignore_eos=True))
    engine.step()
    accepted = set()
    while True:
        before = engine.cache.computed_length(seq_id)
        (cycle,) = engine.step().cycles or [None]
        if not engine.has_unfinished() or cycle is None:
            break
        assert engine.cache.computed_length(seq_id) - before == len(cycle.emitted) == cycle.num_accepted + 1
        assert engine.cache.reserved_length(seq_id) == engine.cache.computed_length(seq_id)
        accepted.add(cycle.num_accepted)

    assert len(accepted) > 1


def test_a_run_that_always_agrees_takes_one_forward_for_k_and_1_tokens(answers):
    engine = new_engine(muddled, speculation=speculator(*proposers("replay", answers), k=4))
    run_requests(engine, ["plain"])

    assert engine.model.forwards == [[2], [5], [5], [5], [1]]


def test_a_cycle_says_what_was_proposed_accepted_and_emitted(answers):
    engine = new_engine(muddled, speculation=speculator(*proposers("nearly", answers), k=3))
    engine.report_probabilities = True
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    records = run_all(engine)
    (said,) = engine.output("plain").outputs

    cycles = cycles_of(records)
    assert cycles
    tokens = [*letters("ab"), *said.token_ids]
    for cycle in cycles:
        assert (cycle.proposer, cycle.seq_id) == ("draft", 0)
        assert list(cycle.emitted) == tokens[cycle.start : cycle.start + len(cycle.emitted)]
        assert [verdict.token_id for verdict in cycle.verdicts] == list(cycle.proposed[: len(cycle.verdicts)])
        assert all(0 <= verdict.target_probability <= 1 for verdict in cycle.verdicts)
        assert all(verdict.accepted == (verdict.token_id == verdict.target_argmax) for verdict in cycle.verdicts)
        assert cycle.decision.reason == "fixed"
    assert [token.position for record in records for token in record.tokens] == list(range(2, len(tokens)))


def test_rows_of_guesses_are_counted_as_computed(answers):
    engine = new_engine(muddled, speculation=speculator(*proposers("two drafts", answers), k=3))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    records = run_all(engine)

    assert [record.tokens_computed for record in records] == [sum(rows) for rows in engine.model.forwards]
    assert sum(engine.output("plain").metrics.forward_tokens) == sum(map(sum, engine.model.forwards))


@pytest.mark.parametrize("kv", KINDS)
def test_of_several_drafts_the_one_that_goes_on_agreeing_wins(kv, plain):
    def other(tokens):
        return muddled(tokens) if len(tokens) % 3 == 0 else -muddled(tokens)

    drafts = [scripted_draft(wrong_now_and_then(every=3), name="one"), scripted_draft(other, name="other")]
    engine = new_engine(muddled, kv=kv, speculation=speculator(*drafts, k=1))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])

    cycles = cycles_of(run_all(engine))

    won = [(cycle.proposer, cycle.num_accepted) for cycle in cycles if cycle.won]
    assert {proposer for proposer, _ in won} == {"one", "other"}
    assert all(accepted == 1 for _, accepted in won), "one of the two is always right"
    assert results(engine.output("plain")) == plain["plain"]


def test_sequences_of_one_batch_may_be_guessed_for_by_different_drafts(plain):
    drafts = [scripted_draft(name="one"), scripted_draft(wrong_now_and_then(), name="other")]
    engine = new_engine(muddled, max_num_seqs=8, speculation=speculator(*drafts))
    for name, own in (("plain", ("one",)), ("long", ("other",)), ("penalized", ()), ("scored", None)):
        engine.add_request(name, letters(REQUESTS[name][0]), replace(REQUESTS[name][1], drafts=own))
    ids = {"one": 0, "other": 1, "neither": 2, "both": 3}

    cycles = cycles_of(run_all(engine))

    by = {who: {cycle.proposer for cycle in cycles if cycle.seq_id == seq_id} for who, seq_id in ids.items()}
    assert by == {"one": {"one"}, "other": {"other"}, "neither": set(), "both": {"one", "other"}}
    assert all(results(engine.output(name)) == plain[name] for name in ("plain", "long", "penalized", "scored"))


def test_requests_of_one_batch_have_draft_lengths_of_their_own_and_no_draft_that_is_not_there(plain):
    engine = new_engine(muddled, max_num_seqs=8, speculation=speculator(scripted_draft(name="one"), k=4))
    names = ("plain", "long", "penalized")
    for name, number in zip(names, (2, 0, 9), strict=True):
        engine.add_request(name, letters(REQUESTS[name][0]), replace(REQUESTS[name][1], num_speculative_tokens=number))
    with pytest.raises(UsageError, match="this engine has no 'two'; it has one"):
        engine.add_request("x", letters("ab"), SamplingParams(drafts="two"))
    cycles = cycles_of(run_all(engine))
    most = {
        seq_id: max((len(one.proposed) for one in cycles if one.seq_id == seq_id), default=0) for seq_id in range(3)
    }
    assert most == {0: 2, 1: 0, 2: 4}
    assert all(results(engine.output(name)) == plain[name] for name in names)


def test_fewer_guesses_than_there_is_room_for_have_fewer_rows():
    class One(Proposer):
        name = "one"

        def propose(self, requests):
            return [Proposal((1,)) if len(request.token_ids) % 2 else NO_PROPOSAL for request in requests]

    engine = new_engine(muddled, kv="paged", speculation=speculator(One(), k=4))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    records = run_all(engine)

    assert {sum(rows) for rows in engine.model.forwards[1:]} == {1, 2}
    assert {len(cycle.proposed) for cycle in cycles_of(records)} == {1}


def test_tokens_that_are_none_of_the_targets_vocabulary_are_never_verified(plain):
    class Wild(Proposer):
        name = "wild"

        def propose(self, requests):
            return [Proposal((1, -1, VOCAB, 10**9)[: request.max_tokens]) for request in requests]

    engine = new_engine(muddled, speculation=speculator(Wild(), k=4))

    assert run_requests(engine, ["plain"])["plain"] == plain["plain"]


def test_rejected_rows_never_reach_the_prefix_index(answers):
    engine = new_engine(
        muddled, kv="prefix", block_size=2, max_num_seqs=8, speculation=speculator(*proposers("two drafts", answers))
    )
    whole = []
    for name in ("plain", "long", "scored", "penalized"):
        engine.add_request(name, letters(REQUESTS[name][0]), REQUESTS[name][1])
    run_all(engine)
    whole = texts_of([engine.output(name) for name in ("plain", "long", "scored", "penalized")])

    indexed = 0
    for node in engine.cache.index.node_of.values():
        tokens: list[int] = []
        while node.parent is not None:
            tokens[:0] = node.token_ids
            node = node.parent
        assert any(text[: len(tokens)] == tokens for text in whole)
        indexed += 1
    assert indexed > 10


# Turning itself down and off


def costing(speculation: Speculator, costs: Costs) -> Speculator:
    """With times that are given, because those of a model without weights say nothing."""
    for meter in speculation._meters.values():
        meter.costs = lambda num_sequences: costs
    return speculation


def test_a_useless_draft_is_switched_off_and_says_so():
    hostile = scripted_draft(lambda tokens: -muddled(tokens))
    speculation = costing(speculator(hostile, k=4, fixed=False), Costs(0.2, 0.1))
    engine = new_engine(muddled, speculation=speculation)
    engine.add_request("r", letters("ab"), SamplingParams(max_tokens=30, ignore_eos=True))

    cycles = cycles_of(run_all(engine))

    assert (cycles[-1].then.k, cycles[-1].then.reason, cycles[-1].then.retry_in) == (0, "loses", 64)
    assert len(cycles) < 6


@pytest.mark.parametrize("batch", [1, 4])
def test_a_batch_speculates_once_plain_steps_are_known(batch, plain):
    engine = new_engine(muddled, speculation=costing(speculator(scripted_draft(), k=4, fixed=False), FREE))
    for index in range(batch):
        engine.add_request(f"{index}", letters("ab"), REQUESTS["plain"][1])
    records = run_all(engine)

    assert [len(record.cycles) for record in records[:10]] == [0] * 9 + [batch]
    assert all(results(engine.output(f"{index}")) == plain["plain"] for index in range(batch))


def test_one_that_cannot_win_never_begins_and_says_so():
    draft = scripted_draft()
    engine = new_engine(muddled, speculation=speculator(draft, fixed=False, costs=Costs(2.0)))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])

    records = run_all(engine)

    undrafted = [undrafted for record in records for undrafted in record.undrafted]
    assert len(undrafted) == len(records) - 1 and cycles_of(records) == []
    assert {(told.reason, told.decision.k, told.decision.reason) for told in undrafted} == {("off", 0, "cannot_win")}


def test_a_step_of_separate_forwards_alone_says_nothing_of_what_a_row_costs():
    engine = new_engine(muddled, speculation=speculator(scripted_draft(), fixed=False))
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    with patch.multiple(readout, SLICE_BYTES=0, MIN_SLICE_ROWS=2):
        engine.scheduler._max_logit_rows = 2
        engine.add_request("before", letters("ab"), replace(REQUESTS["plain"][1], num_speculative_tokens=1))
        run_all(engine)
        for number in range(20):
            engine.add_request(f"separate {number}", letters("abcdef"), params)
            engine.step()
        assert engine.speculation._batch == 1, "costs are asked for a batch of none"
        engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
        run_all(engine)
    assert engine.output("plain").outputs[0].finish_reason == "length"


def test_a_decision_not_to_begin_is_recorded_beside_a_prefill_only_request():
    engine = new_engine(muddled, speculation=speculator(scripted_draft(), fixed=False, costs=Costs(2.0)))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    engine.step()
    engine.add_request("prefill-only", letters("abc"), SamplingParams(max_tokens=1))

    record = engine.step()

    (undrafted,) = record.undrafted
    assert (undrafted.seq_id, undrafted.decision.reason) == (0, "cannot_win")
    assert [item.phase for item in record.items] == ["decode", "prefill_only"]
    run_all(engine)


# Leases and other failures


def revoking(draft, number: int) -> Lease:
    """The draft's lease, revoked during its forward of that number."""
    model = draft.model
    forward, lease = model.forward, lease_model(draft, "draft")

    def counting(batch, storage):
        nonlocal number
        number -= 1
        if number < 0:
            lease.revoke()
        return forward(batch, storage)

    model.forward = counting
    return lease


@KV
@pytest.mark.parametrize("number", range(0, 12))
def test_a_draft_revoked_at_any_point_costs_no_token_and_is_noted(kv, number, plain):
    draft = scripted_draft(wrong_now_and_then())
    lease = revoking(draft, number)
    engine = new_engine(muddled, kv=kv, max_num_seqs=8, speculation=speculator(draft, k=3))
    for name in SINGLE:
        engine.add_request(name, letters(REQUESTS[name][0]), REQUESTS[name][1])

    cycles = cycles_of(run_all(engine))

    failed = [cycle for cycle in cycles if cycle.error]
    assert failed
    assert all("draft model was revoked" in cycle.error and cycle.release_ms is not None for cycle in failed)
    assert all(not cycle.proposed for cycle in failed)
    assert engine.proposers == ()
    noted = {seq_id for cycle in failed for seq_id in [cycle.seq_id]}
    for seq_id, name in enumerate(SINGLE):
        output = engine.output(name)
        assert results(output) == plain[name]
        assert len(output.outputs[0].errors) == (seq_id in noted)
    assert lease.wait_released(0)


def test_a_new_draft_can_be_set_later(plain):
    first, second = scripted_draft(name="first"), scripted_draft(name="second")
    engine = new_engine(muddled, speculation=speculator(first, k=2))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    engine.step()
    engine.step()
    lease_model(first, "draft").revoke()
    engine.step()
    engine.speculation = speculator(second, k=2)
    records = run_all(engine)

    assert {cycle.proposer for cycle in cycles_of(records)} == {"second"}
    assert results(engine.output("plain")) == plain["plain"]


def test_one_of_several_drafts_revoked_leaves_the_others(plain):
    drafts = [scripted_draft(name="gone"), scripted_draft(name="stays")]
    engine = new_engine(muddled, speculation=speculator(*drafts, k=2))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    engine.step()
    lease_model(drafts[0], "draft").revoke()
    records = run_all(engine)

    assert [cycle.error is not None for cycle in records[0].cycles] == [False, True]
    assert {cycle.proposer for record in records[1:] for cycle in record.cycles} == {"stays"}
    assert results(engine.output("plain")) == plain["plain"]


def test_a_draft_whose_logits_are_no_numbers_is_left_out(plain):
    broken = scripted_draft(lambda tokens: np.full(VOCAB, np.nan, np.float32))
    engine = new_engine(muddled, speculation=speculator(broken))
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    cycles = cycles_of(run_all(engine))

    assert ["not finite" in cycle.error for cycle in cycles] == [True]
    assert results(engine.output("plain")) == plain["plain"]


@KV
def test_a_revoked_target_ends_its_sequences_with_that_error_and_keeps_their_tokens(kv, plain):
    draft, names = scripted_draft(), [name for name in REQUESTS if name != "long"]
    engine = new_engine(muddled, kv=kv, max_num_seqs=3, speculation=speculator(draft, k=2))
    for name in names:
        engine.add_request(name, letters(REQUESTS[name][0]), REQUESTS[name][1])
    lease, draft_lease = lease_model(engine, "target"), lease_model(draft, "draft")
    engine.step()
    engine.step()
    lease.revoke()
    record = engine.step()

    assert {finish.reason for finish in record.finished} == {"error"}
    assert len(record.finished) == 7
    assert not engine.has_unfinished()
    for name in names:
        for one, (whole, *_) in zip(engine.output(name).outputs, plain[name], strict=True):
            assert one.finish_reason == "error"
            assert one.errors == ("the lease of the target model was revoked: it can no longer be used",)
            assert one.token_ids == whole[: len(one.token_ids)]
        engine.forget(name)
    assert_nothing_held(engine)
    assert lease.wait_released(0)
    with pytest.raises(LeaseRevoked):
        engine.add_request("late", letters("ab"), SamplingParams())
    assert not draft_lease.revoked


def test_a_target_revoked_during_a_forward_still_gets_that_forwards_tokens(plain):
    engine = new_engine(muddled)
    engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
    model = engine.model
    forward, lease = model.forward, lease_model(engine, "target")

    def revoked(batch, storage):
        lease.revoke()
        return forward(batch, storage)

    model.forward = revoked
    first = engine.step()
    last = engine.step()

    assert len(first.tokens) == 1
    assert [finish.reason for finish in last.finished] == ["error"]
    assert engine.output("plain").outputs[0].token_ids == plain["plain"][0][0][:1]


def test_another_engine_with_the_same_draft_does_not_notice_a_revoked_target(plain):
    drafts = [scripted_draft() for _ in range(2)]
    drafts[1].model = drafts[0].model
    engines = [new_engine(muddled, speculation=speculator(draft)) for draft in drafts]
    for engine in engines:
        engine.add_request("plain", letters("ab"), REQUESTS["plain"][1])
        engine.step()
    lease_model(engines[0], "target").revoke()
    run_all(engines[0])
    run_all(engines[1])

    assert results(engines[1].output("plain")) == plain["plain"]


def test_broken_logits_of_the_target_after_a_mismatch_are_never_looked_at():
    """Rows behind a rejected guess are about a text that is none of the sequence's."""

    def script(tokens):
        return np.full(VOCAB, np.nan, np.float32) if tokens[-1] == 5 else muddled(tokens)

    class Wrong(Proposer):
        name = "wrong"

        def propose(self, requests):
            return [Proposal((5, 5)[: request.max_tokens]) for request in requests]

    for params in (SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=4, logprobs=1)):
        engine = new_engine(script, speculation=speculator(Wrong(), k=2))
        engine.add_request("r", letters("ab"), params)
        run_all(engine)
        output = engine.output("r").outputs[0]
        assert output.finish_reason != "error" or 5 in output.token_ids
