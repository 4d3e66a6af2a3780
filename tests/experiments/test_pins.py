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
    assert found[3].compared == "72 tokens of 3 prompts" and not llm.engine.proposers


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


SAMPLED = replace(PARAMS, temperature=1.0)


def test_lengths_and_seeds_are_all_run(llm):
    prompts = pins.prompts_of(llm, [1, 40])
    assert [len(prompt) for prompt in prompts] == [1, 40]
    found = pins.check_pins(llm, ["hash:0.6"], SAMPLED, prompts, seeds=[0, 1, 2])
    assert [pin.failure for pin in found] == [None] * 4 and found[3].compared == "144 tokens of 6 prompts"


@pytest.fixture(scope="module")
def rejecting() -> LLM:
    return LLM("hash", kv="paged", k=3, speculate_fixed=True, acceptance="rejection")


def test_by_rejection_the_distribution_is_compared_with_the_targets_own(rejecting):
    found = pins.check_pins(rejecting, ["hash:0.6"], SAMPLED, rejection=True)
    assert [pin.failure for pin in found] == [None] * 3
    assert found[2].name == "the distribution is that of the target alone" and "600 samples each" in found[2].compared


def test_another_distribution_is_found(rejecting, monkeypatch):
    real = pins._samples
    colder = lambda llm, prompt, params, seed: real(llm, prompt, replace(params, temperature=1 - seed / 2), seed)  # noqa: E731
    monkeypatch.setattr(pins, "_samples", colder)
    *_, last = pins.check_pins(rejecting, ["hash:0.6"], SAMPLED, rejection=True)
    assert "chi-squared" in last.failure


def test_chi_squared_of_two_samples():
    same, degrees = pins.chi_squared(pins.Counter({1: 50, 2: 50}), pins.Counter({1: 50, 2: 50}))
    other, _ = pins.chi_squared(pins.Counter({1: 80, 2: 20}), pins.Counter({1: 20, 2: 80}))
    assert (same, degrees) == (0.0, 1) and other == pytest.approx(72)
    assert (
        pins.chi_squared(pins.Counter({1: 5, 2: 1, 3: 95}), pins.Counter({4: 4, 3: 96}))[1] == 1
    )  # the rare share one
