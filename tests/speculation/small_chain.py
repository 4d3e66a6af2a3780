"""A target and drafts over a vocabulary of eight tokens, in which the last token decides what may follow.

So what a position's token is distributed like can be computed exactly, by multiplying matrices.
"""

from dataclasses import dataclass

import numpy as np

from forge.engine.proposer import Proposal
from forge.engine.rng import DrawName, Purpose
from forge.engine.sampling import choose, distribution
from forge.engine.sampling_params import SamplingParams
from forge.model.model import Draw
from forge.speculation.verification import Verification, verify_drafts
from tests.speculation.requests import tokens_of

VOCAB = 8
FIRST = 0
"""The prompt."""


@dataclass(frozen=True)
class Chain:
    """float32 `[VOCAB, VOCAB]`: the logits after each token."""

    logits: np.ndarray

    @classmethod
    def random(cls, seed: int, spread: float = 1.5) -> "Chain":
        return cls((spread * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB))).astype(np.float32))

    def near(self, seed: int, noise: float) -> "Chain":
        """A draft that nearly agrees."""
        return Chain(self.logits + noise * Chain.random(seed, 1.0).logits)

    def hostile(self) -> "Chain":
        """A draft that likes best what this one likes least."""
        return Chain(-self.logits)

    def transitions(self, params: SamplingParams) -> np.ndarray:
        """float64 `[VOCAB, VOCAB]`: how likely each token is drawn after each."""
        out = np.zeros((VOCAB, VOCAB))
        for token_id, logits in enumerate(self.logits):
            found = distribution(logits, params)
            out[token_id, found.token_ids] = found.probabilities
        return out

    def proposal(self, tokens: list[int], k: int, params: SamplingParams, seed: int, branch: int = 0) -> Proposal:
        """`k` tokens drawn one after another, with the odds of each."""
        drawn, odds = list(tokens), []
        for _ in range(k):
            odds.append(distribution(self.logits[drawn[-1]], params))
            drawn.append(odds[-1].draw(DrawName(seed, 0, len(drawn), Purpose.PROPOSE, branch)))
        return Proposal(tuple(drawn[len(tokens) :]), tuple(odds))

    def chosen(self, tokens: list[int], k: int, params: SamplingParams, seed: int) -> Proposal:
        """`k` tokens chosen one after another as the target chooses, by the same noise."""
        return Proposal(tuple(continued(self, tokens, k, params, seed)[len(tokens) :]))


def verify(logits, proposal: Proposal, draw: Draw) -> Verification:
    """Decide about one proposal, by rejection where it has distributions."""
    return verify_drafts([logits], [proposal], draw, acceptance="rejection")


def verify_chosen(logits, proposal: Proposal, draw: Draw) -> Verification:
    """Decide about one proposal by the default rule."""
    return verify_drafts([logits], [proposal], draw)


def speculate(target: Chain, proposing, num_tokens: int, params: SamplingParams, seed: int, rule=verify) -> list[int]:
    """The first `num_tokens` tokens after `FIRST`. `proposing(tokens, seed)` gives each cycle's proposal."""
    tokens = [FIRST]
    while len(tokens) <= num_tokens:
        proposal = proposing(tokens, seed)
        rows = target.logits[[tokens[-1], *proposal.token_ids]]
        tokens += tokens_of(rule(rows, proposal, Draw(params, seed, 0, tokens)))
    return tokens[1 : num_tokens + 1]


def speculate_with_several(target: Chain, proposing, num_tokens: int, params: SamplingParams, seed: int) -> list[int]:
    """The same where `proposing(tokens, seed)` gives a list of proposals, one per draft."""
    tokens = [FIRST]
    while len(tokens) <= num_tokens:
        proposals = proposing(tokens, seed)
        rows = [target.logits[[tokens[-1], *proposal.token_ids]] for proposal in proposals]
        tokens += tokens_of(verify_drafts(rows, proposals, Draw(params, seed, 0, tokens), acceptance="rejection"))
    return tokens[1 : num_tokens + 1]


def continued(chain: Chain, tokens: list[int], num_tokens: int, params: SamplingParams, seed: int) -> list[int]:
    """`tokens` and `num_tokens` more, each chosen by itself."""
    tokens = list(tokens)
    for _ in range(num_tokens):
        tokens.append(choose(chain.logits[tokens[-1]], Draw(params, seed, 0, tokens)).token_id)
    return tokens


def sample_plainly(target: Chain, num_tokens: int, params: SamplingParams, seed: int) -> list[int]:
    return continued(target, [FIRST], num_tokens, params, seed)[1:]


def chi_squared_deviation(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic lies above what chance gives.

    Bins with fewer than 5 expected are merged, the rarest first, and the statistic is brought to a normal one by Wilson
    and Hilferty (1931). Raises AssertionError where something was drawn that cannot be.
    """
    assert not counts[probabilities == 0].any(), "a token was drawn that has no probability"
    order = np.argsort(probabilities)
    expected, observed = probabilities[order] * counts.sum(), counts[order]
    bins: list[list[float]] = [[0.0, 0.0]]
    for each_expected, each_observed in zip(expected, observed, strict=True):
        if bins[-1][0] >= 5:
            bins.append([0.0, 0.0])
        bins[-1][0] += each_expected
        bins[-1][1] += each_observed
    if len(bins) < 2:
        return 0.0
    merged = np.array(bins)
    degrees = len(merged) - 1
    statistic = ((merged[:, 1] - merged[:, 0]) ** 2 / merged[:, 0]).sum()
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5
