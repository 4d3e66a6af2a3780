"""A sequence that is decoded without draft tokens although there are proposers: its step's record says why."""

import json

import pytest

from forge import LLM, SamplingParams
from forge.engine.proposer import NO_PROPOSAL, Proposal, Proposer
from forge.trace.codec import codec_of
from forge.trace.explain import explain_undrafted
from forge.trace.records import SpecDecision, StepRecord, Undrafted

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Scripted(Proposer):
    """Proposes what it is told to, in order; then nothing."""

    name = "scripted"

    def __init__(self, *lengths: int):
        self.lengths = list(lengths)

    def propose(self, requests):
        return [Proposal((1,) * self.lengths.pop(0)) if self.lengths else NO_PROPOSAL for _ in requests]


def records_of(speculate, max_tokens: int = 12, prompts=([1, 2, 3],), wish: int | None = None, **options):
    llm = LLM("hash", kv="paged", speculate=speculate, **options)
    params = SamplingParams(max_tokens=max_tokens, num_speculative_tokens=wish, **GREEDY)
    return list(llm.start(list(prompts), params))


def reasons(records) -> list[str]:
    return [undrafted.reason for record in records for undrafted in record.undrafted]


def test_the_first_steps_measure_what_a_plain_one_takes():
    records = records_of(Scripted(*[1] * 20), 14)
    measured = [undrafted for record in records for undrafted in record.undrafted if undrafted.reason == "measures"]
    assert [undrafted.left for undrafted in measured] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert explain_undrafted(measured[1]) == "7 plain steps to go, to know what one takes"
    assert not records[0].undrafted, "a prefill has no draft tokens anyway"


def test_a_draft_that_cannot_win_says_so_in_every_step():
    records = records_of("draft", draft=["hash:0.52"])
    undrafted = [one for record in records for one in record.undrafted]
    assert len(undrafted) == 11 and not any(record.cycles for record in records)
    assert {one.decision.reason for one in undrafted} == {"cannot_win"}
    assert [one.left for one in undrafted] == list(range(64, 53, -1))
    assert explain_undrafted(undrafted[0]) == (
        "even accepted draft tokens would not pay (predicted 0.81 x); again in 64 tokens"
    )


def test_no_proposal_and_the_pause_after_many_of_them():
    found = reasons(records_of(Scripted(), 24, k=2, speculate_fixed=True))
    assert found[:2] == ["no_proposal"] * 2 and set(found) == {"no_proposal", "pauses"}


def test_a_step_that_has_draft_tokens_gives_no_reason():
    records = records_of(Scripted(2, 2, 2, 2, 2, 2), 6, k=2, speculate_fixed=True)
    assert all(bool(record.cycles) != bool(record.undrafted) for record in records[1:])
    assert reasons(records) == ["last_token"]


def test_a_request_that_wants_none_and_a_step_without_room():
    assert set(reasons(records_of(Scripted(1), 4, wish=0))) == {"not_wanted"}
    prompts, tight = ([1, 2], [3, 4]), {"max_num_seqs": 2, "max_num_batched_tokens": 2}
    found = reasons(records_of(Scripted(*[1] * 9), 6, prompts, k=2, speculate_fixed=True, **tight))
    assert "no_room" in found and set(found) <= {"no_room", "last_token", "no_proposal"}


def test_without_speculation_no_record_speaks_of_it():
    assert reasons(records_of("off")) == []


def test_a_record_with_reasons_is_written_and_read_back():
    decision = SpecDecision(0, "loses", 0.9, 0.2, 64)
    told = (Undrafted(3, "measures", 7), Undrafted(4, "off", 63, decision))
    (record, *_) = records_of("off", 1)
    record = StepRecord(**{**vars(record), "undrafted": told})
    codec = codec_of(StepRecord)
    assert codec.decode(json.loads(json.dumps(codec.encode(record))), "step") == record
    assert (
        explain_undrafted(told[1]) == "draft tokens do not pay (predicted 0.90 x, acceptance 20 %); again in 63 tokens"
    )


@pytest.mark.parametrize("reason", ["no_proposal", "pauses", "no_room", "last_token", "not_wanted"])
def test_every_reason_has_words(reason):
    assert explain_undrafted(Undrafted(0, reason))
