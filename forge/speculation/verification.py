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

Several drafts may guess for one sequence, each with a run of its own: a fork. Position by position, the forks that hold
what was emitted so far have a say. Greedy, the one that goes on agreeing longest wins. Under sampling their tokens are
tried in turn, each against what the ones before have left of p (recursive rejection: Miao et al. 2024, SpecInfer),
which needs drafts that draw independently.

Everything here is a pure function; its draws are named by (seed, sample index, position, purpose, branch).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forge.engine.draws import Purpose, uniform
from forge.engine.proposer import Proposal, Verification
from forge.engine.sampling import (
    SampledToken,
    Distribution,
    check_greatest,
    check_logits,
    choice_of,
    choose,
    distribution,
    log_sum_exp,
    penalized,
)
from forge.engine.sampling_params import SamplingParams
from forge.trace.records import TokenVerdict


def verify_forks(
    logits: Sequence[np.ndarray],
    proposals: Sequence[Proposal],
    params: SamplingParams,
    history: Sequence[int],
    seed: int,
    sample_index: int,
    num_prompt_tokens: int | None = None,
) -> Verification:
    """Decide about proposals for one sequence, each with its own rows of logits.

    logits: float32 `[K + 1, vocab]` for a proposal of K tokens, the target's after the last token of `history` and
    after each proposed one. A proposal's place in the list is the branch that names its draws. history: the sequence's
    tokens so far, prompt included, of which the first num_prompt_tokens are the prompt's (needed where
    `params.penalizes_output`). With empty proposals the token emitted is `choose`'s.

    Raises `BrokenLogits` if a row that is needed holds a NaN or +infinity, and ValueError for a proposed token outside
    the vocabulary or one that cannot have come from the distribution beside it.
    """
    for rows, proposal in zip(logits, proposals, strict=True):
        _check_proposal(rows, proposal)
    tokens, choices = list(history), []
    verdicts: list[list[TokenVerdict]] = [[] for _ in proposals]
    agreeing = list(range(len(proposals)))  # the forks that hold what was emitted so far
    for index in range(max(map(len, proposals)) + 1):
        winner = agreeing[0]
        row = logits[winner][index]  # the others have the same: they followed the same tokens
        guesses = [_guess_of(fork, proposals[fork], index) for fork in agreeing if index < len(proposals[fork])]
        if not guesses:
            choices.append(choose(row, params, tokens, seed, sample_index, len(tokens), num_prompt_tokens))
            break
        choice, judged = _judge(row, guesses, params, tokens, num_prompt_tokens, (seed, sample_index, len(tokens)))
        choices.append(choice)
        for guess, verdict in zip(guesses, judged, strict=True):
            verdicts[guess.fork].append(verdict)
        agreeing = [guess.fork for guess in guesses if guess.token_id == choice.token_id]
        if not agreeing:
            break
        tokens.append(choice.token_id)
    return Verification(tuple(choices), tuple(map(tuple, verdicts)), winner)


def verify_likeliest(
    likeliest: Sequence[Sequence[int]], greatest: Sequence[Sequence[float]], proposals: Sequence[Proposal]
) -> Verification:
    """`verify_forks` where the likeliest token is the choice and nobody asks how likely it was.

    likeliest, greatest: `[K + 1]` for each proposal, of each of its rows the token with the greatest logit, and that
    logit. So this takes microseconds, where a row's probabilities would take as long as a small forward.
    """
    choices: list[SampledToken] = []
    verdicts: list[list[TokenVerdict]] = [[] for _ in proposals]
    agreeing = list(range(len(proposals)))
    for index in range(max(map(len, proposals)) + 1):
        winner = agreeing[0]
        token_id = likeliest[winner][index]
        check_greatest(greatest[winner][index])
        choices.append(SampledToken(token_id, None, None))
        guessing = [fork for fork in agreeing if index < len(proposals[fork])]
        agreeing = []
        for fork in guessing:
            guess = proposals[fork].token_ids[index]
            verdicts[fork].append(TokenVerdict(guess, guess == token_id, token_id))
            if guess == token_id:
                agreeing.append(fork)
        if not agreeing:
            break
    return Verification(tuple(choices), tuple(map(tuple, verdicts)), winner)


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


class _Guess(NamedTuple):
    """One fork's token at one position."""

    fork: int
    token_id: int
    q: Distribution | None


class _Trial(NamedTuple):
    """How a guess fared under sampling: the fields of `TokenVerdict`."""

    p: float | None = None
    q: float | None = None
    draw: float | None = None


def _guess_of(fork: int, proposal: Proposal, index: int) -> _Guess:
    q = None if proposal.distributions is None else proposal.distributions[index]
    return _Guess(fork, proposal.token_ids[index], q)


def _judge(
    logits: np.ndarray,
    guesses: Sequence[_Guess],
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int | None,
    name: tuple[int, int, int],
) -> tuple[SampledToken, list[TokenVerdict]]:
    """The token to emit at one position, and what that says of each guess. `name` is that of the position's draws."""
    likeliest = check_logits(logits)
    scores = penalized(logits, history, params, num_prompt_tokens)
    argmax = likeliest if scores is logits else int(scores.argmax())
    log_total = log_sum_exp(logits, float(logits[likeliest]))
    if params.greedy:
        token_id, trials = argmax, [_Trial()] * len(guesses)
    else:
        token_id, trials = _draw(distribution(scores, params), guesses, name)
    verdicts = [
        TokenVerdict(
            guess.token_id,
            guess.token_id == token_id,
            argmax,
            math.exp(float(logits[guess.token_id]) - log_total),
            *trial,
        )
        for guess, trial in zip(guesses, trials, strict=True)
    ]
    return choice_of(logits, log_total, token_id, params), verdicts


def _draw(p: Distribution, guesses: Sequence[_Guess], name: tuple[int, int, int]) -> tuple[int, list[_Trial]]:
    """The token to emit under sampling, and how each guess fared."""
    if all(guess.q is None for guess in guesses):
        draw = uniform(*name, Purpose.SAMPLE)
        return p.draw(draw), [_Trial(p.probability(guess.token_id), 1.0, draw) for guess in guesses]
    taken, left, trials = None, p, []
    for fork, token_id, odds in guesses:
        q = odds or Distribution(np.array([token_id]), np.ones(1))
        chance, odds_of_it = left.probability(token_id), q.probability(token_id)
        draw = None if taken is not None else uniform(*name, Purpose.ACCEPT, fork)
        trials.append(_Trial(chance, odds_of_it, draw))
        if draw is None:
            continue
        if draw * odds_of_it < chance:
            taken = token_id
        else:
            left = residual(left, q)
    return left.draw(uniform(*name, Purpose.RESAMPLE)) if taken is None else taken, trials


def _check_proposal(logits: np.ndarray, proposal: Proposal) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows != len(proposal) + 1:
        raise ValueError(f"{num_rows} rows of logits for a proposal of {len(proposal)} tokens, which needs one more")
    for index, token_id in enumerate(proposal.token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"proposed token {token_id} is outside the vocabulary of {vocab_size} tokens")
        if proposal.distributions is not None and not proposal.distributions[index].probability(token_id) > 0:
            raise ValueError(f"proposed token {token_id} cannot have been drawn from its distribution")
