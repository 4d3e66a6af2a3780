"""Which proposed tokens stand: the rule that keeps speculation from changing what a model says.

The target has computed its logits after the last token of a sequence and after each of K proposed ones, K + 1 rows in
one forward. From the first row on, each decides about the token proposed after it.

Greedy: a token stands if it is the one that the target takes. After the first that does not, the target's own follows,
and after the last of them one more (the bonus token). So what is emitted is what the target alone would have emitted.

Sampling (Leviathan et al. 2023; Chen et al. 2023): a token drawn from q stands with probability min(1, p / q), p being
the target's distribution after the same temperature, filters and penalty; in place of the first that does not, one is
drawn from the positive part of p - q, normalized. What is emitted then has the distribution p, whatever q is.

A guess without odds is the case q = 1, where the rule says: it stands with probability p, and in place of it comes
anything but itself, as p has it. Drawing from p and looking whether it is the guess does just that, and with the draw
that plain sampling makes at that position. So with such guesses sampling emits the very tokens that it emits without
speculation.

Everything here is a pure function; its draws are named by (seed, sample index, position, purpose).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge.engine.draws import Purpose, uniform
from forge.engine.sampling import (
    Choice,
    Distribution,
    check_logits,
    choice_of,
    choose,
    distribution,
    log_sum_exp,
    penalized,
)
from forge.engine.sampling_params import SamplingParams
from forge.speculation.proposer import Proposal
from forge.trace.records import TokenVerdict


@dataclass(frozen=True)
class Verification:
    """What one cycle emits, and why."""

    choices: tuple[Choice, ...]
    """The tokens emitted: those accepted, and one of the target's own."""
    verdicts: tuple[TokenVerdict, ...]
    """One for each proposed token up to the first that was rejected."""

    @property
    def num_accepted(self) -> int:
        return len(self.choices) - 1

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(choice.token_id for choice in self.choices)


def verify(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    history: Sequence[int],
    seed: int,
    sample_index: int,
) -> Verification:
    """Decide about a proposal of K tokens.

    logits: float32 `[K + 1, vocab]`, the target's after the last token of `history` and after each proposed one.
    history: the sequence's tokens so far, prompt included. With an empty proposal the token emitted is `choose`'s.

    Raises `BrokenLogits` if a row that is needed holds a NaN or +infinity, and ValueError for a proposed token outside
    the vocabulary or one that cannot have come from the distribution beside it.
    """
    _check_proposal(logits, proposal)
    tokens = list(history)
    choices: list[Choice] = []
    verdicts: list[TokenVerdict] = []
    for index, token_id in enumerate(proposal.token_ids):
        q = None if proposal.distributions is None else proposal.distributions[index]
        choice, verdict = _judge(logits[index], token_id, q, params, tokens, (seed, sample_index, len(tokens)))
        choices.append(choice)
        verdicts.append(verdict)
        if not verdict.accepted:
            return Verification(tuple(choices), tuple(verdicts))
        tokens.append(token_id)
    choices.append(choose(logits[-1], params, tokens, seed, sample_index, len(tokens)))
    return Verification(tuple(choices), tuple(verdicts))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The positive part of p - q, normalized: what a token in place of a rejected one is drawn from.

    A token is rejected only where q is above p, so elsewhere p is above q. The two may be so close that rounding leaves
    nothing of the difference; then either serves as the other, and the answer is p.
    """
    dense = np.zeros(int(max(p.token_ids[-1], q.token_ids[-1])) + 1)
    dense[q.token_ids] = q.probabilities
    excess = p.probabilities - dense[p.token_ids]
    kept = excess > 0
    total = excess[kept].sum()
    return Distribution(p.token_ids[kept], excess[kept] / total) if total > 0 else p


def _judge(
    logits: np.ndarray,
    proposed: int,
    q: Distribution | None,
    params: SamplingParams,
    history: Sequence[int],
    name: tuple[int, int, int],
) -> tuple[Choice, TokenVerdict]:
    """The token to emit at one position, and whether it is the proposed one. `name` is that of the position's draws."""
    likeliest = check_logits(logits)
    scores = penalized(logits, history, params.repetition_penalty)
    argmax = likeliest if scores is logits else int(scores.argmax())
    log_total = log_sum_exp(logits, float(logits[likeliest]))
    odds: dict[str, float] = {}
    if params.greedy:
        token_id = argmax
    else:
        p = distribution(scores, params)
        token_id, draw = _draw(p, proposed, q, name)
        odds = {"p": p.probability(proposed), "q": 1.0 if q is None else q.probability(proposed), "draw": draw}
    own = math.exp(float(logits[proposed]) - log_total)
    verdict = TokenVerdict(proposed, token_id == proposed, argmax, own, **odds)
    return choice_of(logits, log_total, token_id, params), verdict


def _draw(p: Distribution, proposed: int, q: Distribution | None, name: tuple[int, int, int]) -> tuple[int, float]:
    """The token to emit under sampling, and the draw that decided whether it is the proposed one."""
    if q is None:
        draw = uniform(*name, Purpose.SAMPLE)
        return p.draw(draw), draw
    draw = uniform(*name, Purpose.ACCEPT)
    if draw * q.probability(proposed) < p.probability(proposed):
        return proposed, draw
    return residual(p, q).draw(uniform(*name, Purpose.RESAMPLE)), draw


def _check_proposal(logits: np.ndarray, proposal: Proposal) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows != len(proposal) + 1:
        raise ValueError(f"{num_rows} rows of logits for a proposal of {len(proposal)} tokens, which needs one more")
    for index, token_id in enumerate(proposal.token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"proposed token {token_id} is outside the vocabulary of {vocab_size} tokens")
        if proposal.distributions is not None and not proposal.distributions[index].probability(token_id) > 0:
            raise ValueError(f"proposed token {token_id} cannot have been drawn from its distribution")
