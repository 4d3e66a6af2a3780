"""From a row of logits to a token.

The order is the one of the field's libraries: bias, penalties, temperature, top-k, top-p, min-p, then one draw by
inverse cumulative probability over what is left. Equal values are ranked by token id, lower first, so that a result
never depends on how a selection algorithm happens to order them.

A vocabulary has 150,000 entries, and sixteen sequences draw in every step, so nothing here goes through a whole row
more often than it must. A row is never sorted (8 ms at that size): the top k are split off by partitioning, before
anything is computed of the rest; for top-p all that is too small to matter is left out first, and at most 256 of the
others are sorted to find its boundary; a draw adds up blocks of 512 probabilities, and one by one only those of a
single block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from forge.engine.draws import Purpose, uniform
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError

_SORTABLE = 256
"""How many weights top-p sorts at most. More are halved by partitioning until its boundary lies in so few."""

_BLOCK = 512
"""Probabilities that a draw adds up together."""

_SUMMED_TOGETHER = 1 << 15
"""Logits of which `log_sum_exp` takes the exponentials at once."""

_GREATEST = float(np.finfo(np.float32).max)


class BrokenLogits(ForgeError):
    """The model's logits are not numbers: a damaged file, most likely."""


@dataclass(frozen=True)
class Distribution:
    """What may be drawn: token ids ascending, int64 `[n]`, and their probabilities, float64 `[n]`, summing to 1."""

    token_ids: np.ndarray
    probabilities: np.ndarray

    def draw(self, u: float) -> int:
        """The token at which the cumulative probability first exceeds `u` in [0, 1)."""
        blocks = np.cumsum(np.add.reduceat(self.probabilities, np.arange(0, len(self.probabilities), _BLOCK)))
        wanted = u * blocks[-1]
        block = min(int(np.searchsorted(blocks, wanted, side="right")), len(blocks) - 1)
        first = block * _BLOCK
        within = np.cumsum(self.probabilities[first : first + _BLOCK])
        missing = wanted - blocks[block - 1] if block else wanted
        index = min(int(np.searchsorted(within, missing, side="right")), len(within) - 1)  # two sums, rounded apart
        return int(self.token_ids[first + index])

    def probability(self, token_id: int) -> float:
        """0 for a token that may not be drawn."""
        index = int(np.searchsorted(self.token_ids, token_id))
        held = index < len(self.token_ids) and self.token_ids[index] == token_id
        return float(self.probabilities[index]) if held else 0.0


class SampledToken(NamedTuple):
    """One chosen token."""

    token_id: int
    probability: float | None
    """softmax of the raw logits at the token; None where nobody asked for it."""
    logprobs: tuple[tuple[int, float], ...] | None
    """The likeliest tokens by raw logits with their log probabilities, the chosen one last if it is not among them."""


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    history: Sequence[int],
    seed: int,
    sample_index: int,
    position: int,
    num_prompt_tokens: int | None = None,
    wants_probability: bool = True,
) -> SampledToken:
    """Choose the token at `position`.

    logits: float32 `[vocab]`. history: the token ids before `position`, prompt included, for the penalties, and
    num_prompt_tokens how many of them are the prompt's, needed where `params.penalizes_output`.
    wants_probability: whether the choice has its probability, which takes longer than a greedy choice itself; with
    `params.logprobs` it has in any case. Raises `BrokenLogits` if the logits hold a NaN or +infinity.
    """
    likeliest = check_logits(logits)
    scores = penalized(logits, history, params, num_prompt_tokens)
    if not params.greedy:
        token_id = distribution(scores, params).draw(uniform(seed, sample_index, position, Purpose.SAMPLE))
    elif scores is logits:
        token_id = likeliest
    else:
        token_id = int(scores.argmax())
    if not wants_probability and params.logprobs is None:
        return SampledToken(token_id, None, None)
    return choice_of(logits, log_sum_exp(logits, float(logits[likeliest])), token_id, params)


def choice_of(logits: np.ndarray, log_total: float, token_id: int, params: SamplingParams) -> SampledToken:
    """The choice of `token_id` from a row whose `log_sum_exp` is `log_total`."""
    probability = math.exp(float(logits[token_id]) - log_total)
    return SampledToken(token_id, probability, top_logprobs(logits, log_total, params.logprobs, token_id))


def check_logits(logits: np.ndarray) -> int:
    """The token with the greatest logit, the lowest id of equals.

    Raises `BrokenLogits` if that is not finite or any logit is NaN (-infinity is a valid "never").
    """
    likeliest = int(logits.argmax())  # the first NaN, if there is one
    check_greatest(logits[likeliest])
    return likeliest


def check_greatest(logit: float) -> None:
    """Raise `BrokenLogits` if the greatest logit of a row, or its first NaN, is no number."""
    if not math.isfinite(logit):
        raise BrokenLogits("the model's logits are not finite: its file is damaged, or its weights overflow")


def penalized(
    logits: np.ndarray, history: Sequence[int], params: SamplingParams, num_prompt_tokens: int | None = None
) -> np.ndarray:
    """Logits with the bias and the penalties of `params`; the same array where there is none.

    First the bias is added. Then the repetition penalty is applied to every token of `history` once. Then each token
    that occurs c > 0 times in the output, which is `history` after `num_prompt_tokens`, loses c times the frequency
    penalty and once the presence penalty: the definition of OpenAI's API.
    """
    if not params.changes_logits:
        return logits
    biased = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
    history = np.asarray(history, np.int64)
    touched = np.union1d(biased, history)
    values = logits[touched].astype(np.float64)
    values[np.searchsorted(touched, biased)] += [bias for _, bias in params.logit_bias]
    if params.repetition_penalty != 1:
        seen = np.isin(touched, history) & (values > -np.inf)
        penalty = params.repetition_penalty
        with np.errstate(over="ignore"):  # what overflows becomes the greatest float32, which is still a number
            values[seen] = np.where(values[seen] > 0, values[seen] / penalty, values[seen] * penalty)
    if params.penalizes_output:
        assert num_prompt_tokens is not None, "these penalties count output tokens: say where the output begins"
        said, counts = np.unique(history[num_prompt_tokens:], return_counts=True)
        values[np.searchsorted(touched, said)] -= params.frequency_penalty * counts + params.presence_penalty
    out = logits.copy()
    out[touched] = np.where(values > -np.inf, values.clip(-_GREATEST, _GREATEST), -np.inf)
    return out


def distribution(logits: np.ndarray, params: SamplingParams) -> Distribution:
    """The probabilities that `params` leave of a row of (penalized) logits. Its temperature must be above 0."""
    token_ids = _every_id(len(logits))
    if 0 < params.top_k < len(logits):
        token_ids = _top(logits, params.top_k)
        logits = logits[token_ids]
    weights = logits.astype(np.float64)
    weights -= weights.max()  # before the division: exp of the greatest is 1, whatever the temperature
    if params.temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature makes -infinity of all but the greatest, as it should
            weights /= params.temperature
    np.exp(weights, out=weights)
    if not weights.all():  # what has no probability must not be drawn, whatever a sum is rounded to
        token_ids, weights = _kept(weights > 0, token_ids, weights)
    if params.top_p < 1:
        token_ids, weights = _nucleus(token_ids, weights, params.top_p)
    if params.min_p > 0:
        token_ids, weights = _kept(weights >= params.min_p, token_ids, weights)  # the greatest weight is 1
    weights /= weights.sum()
    return Distribution(token_ids, weights)


@cache
def _every_id(size: int) -> np.ndarray:
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


def _kept(which: np.ndarray, token_ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.flatnonzero(which)
    return token_ids[kept], weights[kept]


def _nucleus(token_ids: np.ndarray, weights: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest tokens, largest first, whose weights reach `share` of the whole.

    All n weights below (1 - share) / n of the whole are together less than what may be left out. So none of them is
    needed, and mostly that is nearly all.
    """
    missing = share * weights.sum()
    if len(weights) > _SORTABLE:
        least = 0.999 * (1 - share) / len(weights) * weights.sum()  # below it by more than sums are rounded
        large = weights >= least
        if 4 * np.count_nonzero(large) < len(weights):
            token_ids, weights = _kept(large, token_ids, weights)
    kept = _top(weights, _num_reaching(weights, missing))
    return token_ids[kept], weights[kept]


def _num_reaching(weights: np.ndarray, missing: float) -> int:
    """How many of the largest weights it takes for their sum to reach `missing`; at least one.

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
    """Indices, ascending, of the k largest values; of equal ones at the edge those with the lowest index.

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
    """Indices of the k largest values, largest first, equal ones by ascending index. Sorts k values."""
    top = _top(values, k)
    return top[np.argsort(-values[top], kind="stable")]


def log_sum_exp(logits: np.ndarray, top: float) -> float:
    """log of the sum of exp over a row whose greatest logit is `top`.

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
    """The `count` likeliest tokens with their log probabilities, and `token_id` too; None when `count` is None."""
    if count is None:
        return None
    ids = _largest(logits, count).tolist() if count else []
    if token_id not in ids:
        ids.append(token_id)
    return tuple((int(i), float(logits[i]) - log_total) for i in ids)
