"""Under sampling, speculation changes no distribution: chi-squared of what is emitted, position by position.

100,000 sequences in all. The draws are a function of the seed, so the statistics here are always the same numbers; the
bound is what chance exceeds once in 30,000 times. That the test can fail is seen at the rules that are nearly right.
"""

from functools import cache

import numpy as np
import pytest

from forge.engine import sampling
from forge.engine.proposer import Proposal
from forge.engine.rng import DrawName, Purpose, uniform
from forge.engine.sampling import Distribution
from forge.engine.sampling_params import SamplingParams
from forge.speculation import verification
from tests.speculation import small_chain
from tests.speculation.small_chain import (
    FIRST,
    VOCAB,
    Chain,
    chi_squared_deviation,
    sample_plainly,
    speculate,
    speculate_with_several,
    verify_chosen,
)

BOUND = 4.0
POSITIONS = 3
SAMPLES = 7_150
"""Per case below; 14 of them. Where slow tests do not run, a fifth."""

SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 1.5, top-k 5": SamplingParams(temperature=1.5, top_k=5),
    "temperature 1, top-p 0.8": SamplingParams(temperature=1.0, top_p=0.8),
    "temperature 0.8, top-k 6, top-p 0.9, min-p 0.05": SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
}
TARGET = Chain.random(1)
DRAFTS = {"good": TARGET.near(2, 0.5), "hostile": TARGET.hostile()}


@pytest.fixture(params=[SAMPLES // 5, pytest.param(SAMPLES, marks=pytest.mark.slow)])
def samples(request) -> int:
    return request.param


@pytest.fixture(autouse=True)
def few_distributions(monkeypatch):
    """There are only a few rows of logits here, so what is made of each is computed once."""

    @cache
    def of_bytes(logits: bytes, params: SamplingParams) -> Distribution:
        return sampling.distribution(np.frombuffer(logits, np.float32), params)

    for module in (verification, small_chain):
        monkeypatch.setattr(module, "distribution", lambda logits, params: of_bytes(logits.tobytes(), params))


def deviations(sequences: list[list[int]], params: SamplingParams) -> list[float]:
    """Of each position's tokens, and of all pairs of neighbours, from what plain sampling gives."""
    array = np.array(sequences)
    transitions = TARGET.transitions(params)
    marginal, found = np.eye(VOCAB)[FIRST], []
    for position in range(array.shape[1]):
        if position:
            pairs = array[:, position - 1] * VOCAB + array[:, position]
            expected = (marginal[:, None] * transitions).ravel()
            found.append(chi_squared_deviation(np.bincount(pairs, minlength=VOCAB**2), expected))
        marginal = marginal @ transitions
        found.append(chi_squared_deviation(np.bincount(array[:, position], minlength=VOCAB), marginal))
    return found


def with_draft(draft: Chain, params: SamplingParams):
    """Proposals of 1 to 3 tokens, as many as the seed says."""
    return lambda tokens, seed: draft.proposal(tokens, 1 + seed % 3, params, seed)


def without_odds(draft: Chain):
    """What the draft likes best, as n-gram lookup would propose it: with no odds."""

    def propose(tokens: list[int], seed: int) -> Proposal:
        guesses = list(tokens)
        for _ in range(1 + seed % 3):
            guesses.append(int(draft.logits[guesses[-1]].argmax()))
        return Proposal(tuple(guesses[len(tokens) :]))

    return propose


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_emitted_has_the_distribution_of_plain_sampling(draft, setting, samples):
    params = SETTINGS[setting]
    proposing = with_draft(DRAFTS[draft], params)

    sequences = [speculate(TARGET, proposing, POSITIONS, params, seed) for seed in range(samples)]

    assert max(deviations(sequences, params)) < BOUND


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", ["temperature 1", "temperature 1.5, top-k 5"])
def test_guesses_without_odds_give_the_very_tokens_of_plain_sampling(draft, setting, samples):
    params = SETTINGS[setting]

    sequences = [speculate(TARGET, without_odds(DRAFTS[draft]), POSITIONS, params, seed) for seed in range(samples)]

    assert max(deviations(sequences, params)) < BOUND
    for seed in range(0, samples, 5):
        assert sequences[seed] == sample_plainly(TARGET, POSITIONS, params, seed)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_with_shared_noise_a_draft_of_any_length_gives_the_very_tokens_of_plain_sampling(draft, setting, samples):
    params, chain = SETTINGS[setting], DRAFTS[draft]
    for seed in range(samples // 12):

        def proposing(tokens, seed):
            return chain.chosen(tokens, 1 + (seed + len(tokens)) % 4, params, seed)

        found = speculate(TARGET, proposing, 6, params, seed, verify_chosen)
        assert found == sample_plainly(TARGET, 6, params, seed)


def with_several(drafts: list[Chain | None], params: SamplingParams, branches: list[int]):
    """A proposal of every draft, of different lengths. None stands for a guess without odds."""

    def propose(tokens: list[int], seed: int) -> list[Proposal]:
        proposals = []
        for index, draft in enumerate(drafts):
            if draft is None:
                proposals += [without_odds(TARGET)(tokens, seed + index)]
            else:
                k = 1 + (seed + index) % 3
                proposals.append(draft.proposal(tokens, k, params, seed, branches[index]))
        return proposals

    return propose


SEVERAL = {
    "good and hostile": [DRAFTS["good"], DRAFTS["hostile"]],
    "two alike": [TARGET.near(4, 2.0)] * 2,
    "three, one without odds": [DRAFTS["hostile"], None, TARGET.near(3, 1.0)],
}


@pytest.mark.parametrize("drafts", SEVERAL)
@pytest.mark.parametrize("setting", ["temperature 1", "temperature 1.5, top-k 5", "temperature 1, top-p 0.8"])
def test_with_several_drafts_what_is_emitted_has_the_distribution_of_plain_sampling(drafts, setting, samples):
    params = SETTINGS[setting]
    proposing = with_several(SEVERAL[drafts], params, branches=[0, 1, 2])

    sequences = [speculate_with_several(TARGET, proposing, POSITIONS, params, seed) for seed in range(samples // 2)]

    assert max(deviations(sequences, params)) < BOUND


def test_drafts_that_draw_alike_would_be_seen():
    params = SETTINGS["temperature 1"]
    proposing = with_several(SEVERAL["two alike"], params, branches=[0, 0])

    sequences = [speculate_with_several(TARGET, proposing, POSITIONS, params, seed) for seed in range(SAMPLES // 2)]

    assert max(deviations(sequences, params)) > BOUND


def nearly_right(accepts, replacement):
    """A rule like `verify`'s: `accepts(p, q, draw)` for the proposed token, `replacement(p, q, proposed)` if not."""

    def rule(logits, proposal, draw):
        emitted, tokens = [], list(draw.history)
        params, draw = draw.params, draw._replace(history=tokens)
        for row, proposed, q in zip(logits, proposal.token_ids, proposal.distributions, strict=False):
            p = verification.distribution(row, params)
            u = uniform(DrawName.of(draw, Purpose.ACCEPT))
            if not accepts(p.probability(proposed), q.probability(proposed), u):
                emitted.append(replacement(p, q, proposed).draw(DrawName.of(draw, Purpose.RESAMPLE)))
                break
            tokens.append(proposed)
            emitted.append(proposed)
        else:
            p = verification.distribution(logits[-1], params)
            emitted.append(p.draw(DrawName.of(draw)))
        return verification.Verification(tuple(sampling.SampledToken(t, 0.0, None) for t in emitted), ((),), 0)

    return rule


def right(p: float, q: float, draw: float) -> bool:
    return draw * q < p


def without(p: Distribution, q: Distribution, proposed: int) -> Distribution:
    kept = p.token_ids != proposed
    return Distribution(p.token_ids[kept], p.probabilities[kept]) if kept.any() else p


RULES = {
    "right": nearly_right(right, lambda p, q, proposed: verification.residual(p, q)),
    "accepts all that is possible": nearly_right(lambda p, q, draw: p > 0, lambda p, q, proposed: p),
    "replaces from the whole of p": nearly_right(right, lambda p, q, proposed: p),
    "replaces from p without the token": nearly_right(right, without),
    "accepts with p": nearly_right(lambda p, q, draw: draw < p, lambda p, q, proposed: verification.residual(p, q)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_nearly_right_is_seen(name):
    params = SETTINGS["temperature 1"]
    proposing = with_draft(DRAFTS["good"], params)

    sequences = [speculate(TARGET, proposing, POSITIONS, params, seed, RULES[name]) for seed in range(2_000)]

    assert (max(deviations(sequences, params)) < BOUND) == (name == "right")


def test_the_statistic_is_a_normal_one():
    """Its deviation from chance is what it says, with bins of every size."""
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(40, 0.4))
    found = [chi_squared_deviation(rng.multinomial(2_000, probabilities), probabilities) for _ in range(2_000)]

    assert abs(np.mean(found)) < 0.1
    assert abs(np.std(found) - 1) < 0.1
