"""The four checks of a pair hold for a sound one, and name the place where they do not."""

from dataclasses import replace

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.experiments.speculation import pins
from forge.llm import LLM

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("hash", kv="paged", k=3, speculate_fixed=True)


def test_a_sound_pair_holds_and_says_what_was_compared(llm):
    found = pins.check_pins(llm, ["hash:0.6"], PARAMS)
    assert [pin.failure for pin in found] == [None] * 4
    assert found[0].compared.endswith("draft tokens accepted") and found[1].compared == "72 rows of logits, all bits"
    assert found[3].compared == "72 tokens of 3 prompts" and not llm.engine.speculation.proposers


def test_a_draft_that_is_not_the_target_fails_the_first_check_at_a_position(llm, monkeypatch):
    real = llm.speculate_with
    other = {"draft": ["hash:0.3"], "off": []}
    monkeypatch.setattr(llm, "speculate_with", lambda mode, draft=(): real(mode, other[mode]))
    itself, *others = pins.check_pins(llm, ["hash"], PARAMS)
    assert "prompt 1, position " in itself.failure and "the draft says token" in itself.failure
    assert [pin.failure for pin in others] == [None] * 3


def test_other_tokens_other_bits_and_a_slot_too_many_are_found_where_they_are(llm):
    llm.speculate_with("off")
    plain = pins._run(llm, "a", PARAMS)
    llm.speculate_with("draft", ["hash:0.6"])
    run = pins._run(llm, "a", PARAMS)
    llm.speculate_with("off")
    tokens = (*run.token_ids[:4], run.token_ids[4] + 1, *run.token_ids[5:])
    assert pins._same_output([plain], [replace(run, token_ids=tokens)]).failure == "prompt 1: output token 5 differs"
    logits = [one + (place == 2) for place, one in enumerate(run.logits)]
    assert pins._batched([plain], [replace(run, logits=logits)]).failure.startswith("prompt 1, output token 3: a logit")
    cached = [{seq_id: length + step for seq_id, length in one.items()} for step, one in enumerate(run.cached)]
    assert "were emitted and the cache grew by" in pins._advances([replace(run, cached=cached)]).failure
