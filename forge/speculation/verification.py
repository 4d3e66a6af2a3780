"""Verification: which draft tokens stand, so that speculation never changes what a model says.

The target has computed its logits after the last token of a sequence and after each of K draft tokens, K + 1 rows in
one forward. From the first row on, each decides about the draft token after it. After the first that is rejected the
target's own token follows, and after the last accepted one a token more, the bonus token.

`gumbel`, the default: a draft token stands if and only if it is the token that the target chooses there, greedy or
sampled. So the output is what the target alone would have said, token by token, whatever was proposed. Under sampling a
choice is the argmax of logits plus noise that belongs to (seed, sample, position, token id), and a draft model that
draws with the same noise mostly chooses the same token (Daliri et al. 2024, drafter-invariant speculation).

`rejection` (Leviathan et al. 2023; Chen et al. 2023): a token drawn from q, independently of the target, stands with
probability min(1, p / q), p being the target's distribution after the same filters; in place of the first rejected one,
a token is drawn from the positive part of p - q, normalized. What is emitted has the distribution p, whatever q is, and
more tokens are accepted. But which token is emitted depends on how many were proposed: only a fixed K is reproducible.
Where no draft token at a position has a q, `gumbel` decides; beside one that has, a token without counts as certain.

Several proposers may propose for one sequence, each a draft of its own, computed in a fork of the cache. Position by
position, the drafts that hold what was emitted so far take part. The one that agrees longest wins. Under `rejection`
their tokens are tried in turn, each against what the ones before have left of p (recursive rejection: Miao et al. 2024,
SpecInfer), which needs drafts that draw independently.

Everything here is a pure function.
"""

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from forge.engine.proposer import Proposal, Verification
from forge.engine.rng import DrawName, Purpose, uniform
from forge.engine.sampling import (
    BrokenLogits,
    Distribution,
    SampledToken,
    check_logits,
    check_max_logit,
    choose,
    distribution,
    log_sum_exp,
    masked,
    penalized,
    sampled_token,
)
from forge.engine.structured_output import MatcherError
from forge.model.model import Draw
from forge.trace.records import TokenVerdict

Acceptance = Literal["gumbel", "rejection"]


class _DraftToken(NamedTuple):
    """The token of one draft at one position."""

    draft: int
    token_id: int
    q: Distribution | None


Decide = Callable[[int, int, Sequence[_DraftToken]], tuple[SampledToken, list[TokenVerdict]]]
"""From (a draft that holds all emitted tokens, a row of it, the draft tokens there) to the token to emit, and a verdict
per draft token."""


def verify_argmax(
    argmax: Sequence[Sequence[int]], max_logits: Sequence[Sequence[float]], proposals: Sequence[Proposal]
) -> Verification:
    """Verify as `verify_drafts` does, for plain greedy decoding without probabilities: microseconds, as no row is
    looked at.

    argmax, max_logits: `[K + 1]` for each proposal, of each of its rows the token with the greatest logit, and that
    logit.
    """

    def decide(draft: int, index: int, proposed: Sequence[_DraftToken]) -> tuple[SampledToken, list[TokenVerdict]]:
        check_max_logit(max_logits[draft][index])
        token_id = argmax[draft][index]
        verdicts = [TokenVerdict(token.token_id, token.token_id == token_id, token_id) for token in proposed]
        return SampledToken(token_id, None, None), verdicts

    return _verify(proposals, decide)


def verify_drafts(
    logits: Sequence[np.ndarray],
    proposals: Sequence[Proposal],
    draw: Draw,
    wants_probabilities: bool = True,
    acceptance: Acceptance = "gumbel",
) -> Verification:
    """Decide about the proposals for one sequence, each with its own rows of logits.

    logits: float32 `[K + 1, vocab]` for a proposal of K tokens, the target's after the sequence's last token and after
    each draft token. Under `rejection` a proposal's place in the list is the branch of its acceptance draws. draw: the
    sequence's next one; its matcher is asked for every row that is needed, with the tokens emitted so far. Without
    draft tokens the emitted token is `choose`'s.

    Raises `BrokenLogits` if the first row holds a NaN or +infinity, `MatcherError` if the matcher fails there, and
    ValueError for a draft token outside the vocabulary or one that cannot have come from the distribution beside it.
    """
    for rows, proposal in zip(logits, proposals, strict=True):
        _check_proposal(rows, proposal)
    tokens = list(draw.history)
    draw, params = draw._replace(history=tokens), draw.params

    def decide(draft: int, index: int, proposed: Sequence[_DraftToken]) -> tuple[SampledToken, list[TokenVerdict]]:
        row = logits[draft][index]
        if not params.greedy and acceptance == "rejection" and any(token.q is not None for token in proposed):
            sampled, verdicts = _accept_or_resample(row, proposed, draw)
        else:
            sampled = choose(row, draw, wants_probabilities)
            verdicts = _agreement(row, proposed, sampled, draw)
        tokens.append(sampled.token_id)  # and `draw` is that of the next position
        return sampled, verdicts

    return _verify(proposals, decide)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Return the positive part of p - q, normalized: what a token in place of a rejected one is drawn from.

    A token is rejected only where q is above p, so elsewhere p is above q. The two may be so close that rounding leaves
    nothing of the difference; then either serves as the other, and the answer is p.
    """
    dense = np.zeros(int(max(p.token_ids[-1], q.token_ids[-1])) + 1)
    dense[q.token_ids] = q.probabilities
    excess = p.probabilities - dense[p.token_ids]
    kept = excess > 0
    total = excess[kept].sum()
    return Distribution(p.token_ids[kept], excess[kept] / total) if total > 0 else p


def _verify(proposals: Sequence[Proposal], decide: Decide) -> Verification:
    """Emit tokens for as long as they are the tokens of some draft."""
    emitted: list[SampledToken] = []
    verdicts: list[list[TokenVerdict]] = [[] for _ in proposals]
    agreeing = list(range(len(proposals)))  # the drafts that hold all emitted tokens
    for index in count():
        winner = agreeing[0]  # the others have the same rows: they hold the same tokens
        proposed = [_draft_token(draft, proposals[draft], index) for draft in agreeing if index < len(proposals[draft])]
        try:
            sampled, judged = decide(winner, index, proposed)
        except (BrokenLogits, MatcherError):
            if not emitted:
                raise
            break  # the tokens before stand; the next step computes this row again, and the sequence ends there
        emitted.append(sampled)
        for token, verdict in zip(proposed, judged, strict=True):
            verdicts[token.draft].append(verdict)
        agreeing = [token.draft for token in proposed if token.token_id == sampled.token_id]
        if not agreeing:
            break
    return Verification(tuple(emitted), tuple(map(tuple, verdicts)), winner)


def _draft_token(draft: int, proposal: Proposal, index: int) -> _DraftToken:
    q = None if proposal.distributions is None else proposal.distributions[index]
    return _DraftToken(draft, proposal.token_ids[index], q)


def _agreement(
    logits: np.ndarray, drafts: Sequence[_DraftToken], sampled: SampledToken, draw: Draw
) -> list[TokenVerdict]:
    """`gumbel`: accept a draft token if it is the token that the target chose."""
    if not drafts:
        return []
    chosen, verdicts = sampled.token_id, []
    argmax = chosen if draw.params.greedy else int(masked(penalized(logits, draw), draw).argmax())
    for draft in drafts:
        probability = None
        if sampled.probability is not None:
            probability = sampled.probability * math.exp(float(logits[draft.token_id]) - float(logits[chosen]))
        verdicts.append(TokenVerdict(draft.token_id, draft.token_id == chosen, argmax, probability))
    return verdicts


def _accept_or_resample(
    logits: np.ndarray, drafts: Sequence[_DraftToken], draw: Draw
) -> tuple[SampledToken, list[TokenVerdict]]:
    """`rejection`: try the draft tokens in turn; if none is accepted, draw from what they left of p."""
    argmax = check_logits(logits)
    scores = masked(penalized(logits, draw), draw)
    best = argmax if scores is logits else int(scores.argmax())
    log_total = log_sum_exp(logits, float(logits[argmax]))
    left, taken = distribution(scores, draw.params), None
    trials: list[tuple[float, float, float, float | None]] = []  # of each draft token: probability, p, q, draw
    for draft, token_id, proposed in drafts:
        q = proposed or Distribution(np.array([token_id]), np.ones(1))
        p_token, q_token = left.probability(token_id), q.probability(token_id)
        u = None if taken is not None else uniform(DrawName.of(draw, Purpose.ACCEPT, draft))
        trials.append((math.exp(float(logits[token_id]) - log_total), p_token, q_token, u))
        if u is not None and u * q_token < p_token:
            taken = token_id
        elif u is not None:
            left = residual(left, q)
    emitted = left.draw(DrawName.of(draw, Purpose.RESAMPLE)) if taken is None else taken
    verdicts = [
        TokenVerdict(draft.token_id, draft.token_id == emitted, best, *trial)
        for draft, trial in zip(drafts, trials, strict=True)
    ]
    return sampled_token(logits, log_total, emitted, draw.params), verdicts


def _check_proposal(logits: np.ndarray, proposal: Proposal) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows != len(proposal) + 1:
        raise ValueError(f"{num_rows} rows of logits for a proposal of {len(proposal)} tokens, which needs one more")
    for index, token_id in enumerate(proposal.token_ids):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"proposed token {token_id} is outside the vocabulary of {vocab_size} tokens")
        if proposal.distributions is not None and not proposal.distributions[index].probability(token_id) > 0:
            raise ValueError(f"proposed token {token_id} cannot have been drawn from its distribution")
