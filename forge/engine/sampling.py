"""From a row of logits to a token.

The order is the one of the field's libraries: bias, penalties, temperature, top-k, top-p, min-p. Then one draw from the
tokens that are left: each gets Gumbel noise of its own (`rng`), and the greatest sum is the token (Gumbel-max).

    token = argmax over the kept tokens of (logit / temperature + gumbel(seed, sample, position, token id))

That has the softmax distribution, and it is one definition for the target, for draft models and for every device. The
noise belongs to a token at a position, so a draft that draws with the same noise mostly draws the same token. Equal
values are ranked by token id, lower first, so that a result never depends on how a selection algorithm orders them.

A vocabulary has 150,000 entries, and sixteen sequences draw in every step, so a row is never sorted (8 ms): the top k
are split off by partitioning, before anything is computed of the rest; for top-p all that is too small to matter is
left out first, and at most 256 of the others are sorted to find its boundary.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from forge.engine.rng import DrawName, gumbel_argmax
from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import MatcherError
from forge.errors import ForgeError
from forge.model.model import Draw

_SORTABLE = 256
"""How many weights top-p sorts at most. More are halved by partitioning until its boundary lies in so few."""

_SUMMED_TOGETHER = 1 << 15
"""Logits of which `log_sum_exp` takes the exponentials at once."""

_GREATEST = float(np.finfo(np.float32).max)


class BrokenLogits(ForgeError):
    """The model's logits are not numbers; most likely the file is damaged."""


@dataclass(frozen=True)
class Distribution:
    """The tokens that may be drawn: ids ascending, int64 `[n]`, and their probabilities, float64 `[n]`, summing to
    1."""

    token_ids: np.ndarray
    probabilities: np.ndarray

    def draw(self, name: DrawName) -> int:
        """Draw a token with its probability, by Gumbel-max with the noise of that name."""
        return gumbel_argmax(self.token_ids, np.log(self.probabilities), name)

    def probability(self, token_id: int) -> float:
        """Return a token's probability: 0 if it may not be drawn."""
        index = int(np.searchsorted(self.token_ids, token_id))
        held = index < len(self.token_ids) and self.token_ids[index] == token_id
        return float(self.probabilities[index]) if held else 0.0


class SampledToken(NamedTuple):
    """One chosen token."""

    token_id: int
    probability: float | None
    """softmax of the raw logits at the token; None unless it was requested."""
    logprobs: tuple[tuple[int, float], ...] | None
    """The top tokens by raw logits with their log probabilities, the chosen one last if it is not among them."""


def choose(logits: np.ndarray, draw: Draw, wants_probability: bool = True, argmax: int | None = None) -> SampledToken:
    """Choose the next token of a text.

    logits: float32 `[vocab]`. wants_probability: compute the token's probability, which takes longer than a greedy
    choice itself; with `SamplingParams.logprobs` it is computed in any case. argmax: that of `logits`, or their first
    NaN, where it is known. Raises `BrokenLogits` if the logits hold a NaN or +infinity, and `MatcherError`.
    """
    token_id = choose_token(logits, draw, argmax)
    if not wants_probability and draw.params.logprobs is None:
        return SampledToken(token_id, None, None)
    return sampled_token(logits, log_sum_exp(logits, float(logits.max())), token_id, draw.params)


def choose_token(logits: np.ndarray, draw: Draw, argmax: int | None = None) -> int:
    """Choose as `choose` does, and return the token id alone."""
    if argmax is None:
        argmax = int(logits.argmax())
    check_max_logit(float(logits[argmax]))
    params: SamplingParams = draw.params
    scores = penalized(logits, draw)
    if draw.matcher is not None:
        mask = draw.matcher.mask(draw.output)
        if params.greedy and scores is logits and mask[argmax]:
            return argmax
        allowed, scores = allowed_tokens(scores, mask)
        if params.greedy:
            return int(allowed[scores.argmax()])
        kept, scores = filtered(scores, params)
        return gumbel_argmax(allowed[kept], scores, DrawName.of(draw))
    if not params.greedy:
        return gumbel_argmax(*filtered(scores, params), DrawName.of(draw))
    return argmax if scores is logits else int(scores.argmax())


def sampled_token(logits: np.ndarray, log_total: float, token_id: int, params: SamplingParams) -> SampledToken:
    """Return `token_id` with its probability in a row whose `log_sum_exp` is `log_total`."""
    probability = math.exp(float(logits[token_id]) - log_total)
    return SampledToken(token_id, probability, top_logprobs(logits, log_total, params.logprobs, token_id))


def check_logits(logits: np.ndarray) -> int:
    """Return the token with the greatest logit, the lowest id of equals.

    Raises `BrokenLogits` if that is not finite or any logit is NaN (-infinity is a valid "never").
    """
    argmax = int(logits.argmax())  # the first NaN, if there is one
    check_max_logit(float(logits[argmax]))
    return argmax


def check_max_logit(logit: float) -> None:
    """Raise `BrokenLogits` if the greatest logit of a row, or its first NaN, is no number."""
    if not math.isfinite(logit):
        raise BrokenLogits("the model's logits are not finite: its file is damaged, or its weights overflow")


def penalized(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Apply the bias and the penalties of `draw.params`; return the same array if there are none.

    First the bias is added. Then the repetition penalty is applied to every token of `draw.history` once. Then each
    token that occurs c > 0 times in the output loses c times the frequency penalty and once the presence penalty: the
    definition of OpenAI's API.
    """
    params: SamplingParams = draw.params
    if not params.changes_logits:
        return logits
    bias = dict(params.logit_bias or ())
    biased, earlier = np.array([*bias], np.int64), np.asarray(draw.history, np.int64)
    touched = np.union1d(biased, earlier)
    values = logits[touched].astype(np.float64)
    values[np.searchsorted(touched, biased)] += [*bias.values()]
    if params.repetition_penalty != 1:
        seen = np.isin(touched, earlier) & (values > -np.inf)
        penalty = params.repetition_penalty
        with np.errstate(over="ignore"):  # what overflows becomes the greatest float32, which is still a number
            values[seen] = np.where(values[seen] > 0, values[seen] / penalty, values[seen] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        token_ids, counts = np.unique(earlier[draw.num_prompt_tokens :], return_counts=True)
        values[np.searchsorted(touched, token_ids)] -= params.frequency_penalty * counts + params.presence_penalty
    out = logits.copy()
    out[touched] = np.where(values > -np.inf, values.clip(-_GREATEST, _GREATEST), -np.inf)
    return out


def masked(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Copy a row with -infinity for every token that the matcher refuses; return the same array without a matcher."""
    if draw.matcher is None:
        return logits
    allowed, kept = allowed_tokens(logits, draw.matcher.mask(draw.output))
    scores = np.full_like(logits, -np.inf)
    scores[allowed] = kept
    return scores


def allowed_tokens(logits: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that may come, ascending, and their logits. Mostly they are few."""
    allowed = np.flatnonzero(mask)
    kept = logits[allowed]
    if not kept.max(initial=-np.inf) > -np.inf:
        raise MatcherError("the tokens that may come have no probability here")
    return allowed, kept


def filtered(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that `params` keep of a row of (penalized) logits, and their logits / temperature, less the
    greatest.

    Token ids are int64 `[n]`, ascending, scores float64 `[n]`. The temperature must be above 0.
    """
    token_ids = _every_id(len(logits))
    if 0 < params.top_k < len(logits):
        token_ids = _top(logits, params.top_k)
        logits = logits[token_ids]
    scores = logits.astype(np.float64)
    scores -= scores.max()  # before the division: whatever the temperature, the greatest stays finite
    if params.temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature makes -infinity of all but the greatest, as it should
            scores /= params.temperature
    if params.top_p < 1:
        kept = _nucleus(np.exp(scores), params.top_p)
        token_ids, scores = token_ids[kept], scores[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(scores >= math.log(params.min_p))  # the greatest score is 0
        token_ids, scores = token_ids[kept], scores[kept]
    return token_ids, scores


def distribution(logits: np.ndarray, params: SamplingParams) -> Distribution:
    """Return the probabilities that `params` leave of a row of (penalized) logits. Its temperature must be above 0."""
    token_ids, scores = filtered(logits, params)
    weights = np.exp(scores)
    if not weights.all():  # too small for a float64
        kept = np.flatnonzero(weights)
        token_ids, weights = token_ids[kept], weights[kept]
    return Distribution(token_ids, weights / weights.sum())


@cache
def _every_id(size: int) -> np.ndarray:
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


def _nucleus(weights: np.ndarray, share: float) -> np.ndarray:
    """Return the indices, ascending, of the fewest tokens, largest first, whose weights reach `share` of the whole.

    All n weights below (1 - share) / n of the whole are together less than what may be left out. So none of them is
    needed, and mostly that is nearly all.
    """
    missing = share * weights.sum()
    # Below the bound by more than sums are rounded; without one, above 0: what cannot be drawn is not kept.
    bound = 0.999 * (1 - share) / len(weights) * weights.sum() if len(weights) > _SORTABLE else 0.0
    large = np.flatnonzero(weights > bound)
    weights = weights[large]
    return np.take(large, _top(weights, _num_reaching(weights, missing)))


def _num_reaching(weights: np.ndarray, missing: float) -> int:
    """Return how many of the largest weights it takes for their sum to reach `missing`; at least one.

    The larger half is taken or the smaller one left, again and again, until what is undecided is few enough to sort.
    """
    num_taken, undecided, num_larger = 0, weights, _SORTABLE
    while len(undecided) > _SORTABLE:
        parted = np.partition(undecided, len(undecided) - num_larger)
        smaller, larger = parted[:-num_larger], parted[-num_larger:]
        if larger.sum() >= missing:
            undecided = larger
        else:
            num_taken += num_larger
            missing -= larger.sum()
            undecided = smaller
        num_larger = max(1, len(undecided) // 2)
    needed = int(np.searchsorted(np.cumsum(np.sort(undecided)[::-1]), missing)) + 1
    return min(num_taken + needed, len(weights))  # rounding may leave the whole sum a hair below its share


def _top(values: np.ndarray, k: int) -> np.ndarray:
    """Return the indices, ascending, of the k largest values; of equal ones at the edge those with the lowest index.

    `argpartition` alone would pick arbitrarily among values equal to the k-th, so those are chosen by index.
    """
    if k >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    chosen = values > threshold
    equal = np.flatnonzero(values == threshold)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest values, largest first, equal ones by ascending index. Sorts k values."""
    top = _top(values, k)
    return top[np.argsort(-values[top], kind="stable")]


def log_sum_exp(logits: np.ndarray, top: float) -> float:
    """Return the log of the sum of exp over a row whose greatest logit is `top`.

    In parts that stay in the second-level cache, without a row of temporaries: a whole vocabulary takes 115 µs, 158 in
    one piece. A part's sum is NumPy's pairwise one in float32 (1e-7), the parts' sum float64.
    """
    total = 0.0
    for first in range(0, len(logits), _SUMMED_TOGETHER):
        part = logits[first : first + _SUMMED_TOGETHER] - np.float32(top)
        total += float(np.exp(part, out=part).sum())
    return top + math.log(total)


def top_logprobs(
    logits: np.ndarray, log_total: float, count: int | None, token_id: int
) -> tuple[tuple[int, float], ...] | None:
    """Return the top `count` tokens with their log probabilities, and `token_id` too; None when `count` is None."""
    if count is None:
        return None
    ids = _largest(logits, count).tolist() if count else []
    if token_id not in ids:
        ids.append(token_id)
    return tuple((int(i), float(logits[i]) - log_total) for i in ids)
