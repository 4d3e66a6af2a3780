"""From a row of logits to a token.

The order is the one of the field's libraries: repetition penalty, temperature, top-k, top-p, min-p, then one draw by
inverse cumulative probability over what is left. Equal values are ranked by token id, lower first, so that a result
never depends on how a selection algorithm happens to order them.

A vocabulary has 150,000 entries and a filter keeps a few dozen of them, so nothing here sorts a whole row (8 ms at that
size): candidates are split off by partitioning (1 ms) and only they are sorted.
"""

from dataclasses import dataclass

import numpy as np

from forge.engine.draws import Purpose, uniform
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError

_FIRST_CANDIDATES = 256
"""How many tokens top-p looks at first; four times as many each time that they do not reach its sum."""


class BrokenLogits(ForgeError):
    """The model's logits are not numbers: a damaged file, most likely."""


@dataclass(frozen=True)
class Distribution:
    """What may be drawn: token ids ascending, int64 `[n]`, and their probabilities, float64 `[n]`, summing to 1."""

    token_ids: np.ndarray
    probabilities: np.ndarray

    def draw(self, u: float) -> int:
        """The token at which the cumulative probability first exceeds `u` in [0, 1)."""
        cumulative = np.cumsum(self.probabilities)
        index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
        return int(self.token_ids[min(index, len(self.token_ids) - 1)])


@dataclass(frozen=True)
class Choice:
    """One chosen token."""

    token_id: int
    probability: float
    """softmax of the raw logits at the token."""
    logprobs: tuple[tuple[int, float], ...] | None
    """The likeliest tokens by raw logits with their log probabilities, the chosen one last if it is not among them."""


def choose(
    logits: np.ndarray, params: SamplingParams, history: np.ndarray, seed: int, sample_index: int, position: int
) -> Choice:
    """Choose the token at `position`.

    logits: float32 `[vocab]`. history: the token ids before `position`, prompt included, for the repetition penalty.
    Raises `BrokenLogits` if the logits hold a NaN or +infinity.
    """
    check_logits(logits)
    scores = penalized(logits, history, params.repetition_penalty)
    if params.greedy:
        token_id = int(np.argmax(scores))  # the first of equals: the lowest id
    else:
        token_id = distribution(scores, params).draw(uniform(seed, sample_index, position, Purpose.SAMPLE))
    log_total = log_sum_exp(logits)
    return Choice(
        token_id,
        float(np.exp(float(logits[token_id]) - log_total)),
        top_logprobs(logits, log_total, params.logprobs, token_id),
    )


def check_logits(logits: np.ndarray) -> None:
    """Raise `BrokenLogits` unless the row has a finite maximum and no NaN (-infinity is a valid "never")."""
    if not np.isfinite(logits.max()):  # a NaN anywhere makes the maximum NaN
        raise BrokenLogits("the model's logits are not finite: its file is damaged, or its weights overflow")


def penalized(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    """Logits with the repetition penalty applied to every token of `history` once; the same array when it is 1."""
    if penalty == 1.0:
        return logits
    seen = np.unique(np.asarray(history, np.int64))
    out = logits.copy()
    values = out[seen]
    out[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    return out


def distribution(logits: np.ndarray, params: SamplingParams) -> Distribution:
    """The probabilities that `params` leave of a row of (penalized) logits. Its temperature must be above 0."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()  # before the division: a tiny temperature would overflow otherwise
    scaled /= params.temperature
    weights = np.exp(scaled)
    keep = _top_k(weights, params.top_k)
    keep = _top_p(weights, keep, params.top_p)
    if params.min_p > 0:
        kept = np.arange(len(weights)) if keep is None else keep
        keep = kept[weights[kept] >= params.min_p * weights[kept].max()]
    if keep is None:
        keep = np.nonzero(weights)[0]
    keep = np.sort(keep)
    return Distribution(keep, weights[keep] / weights[keep].sum())


def _top_k(weights: np.ndarray, k: int) -> np.ndarray | None:
    """Indices of the k largest weights, or None for all of them."""
    return None if k == 0 or k >= len(weights) else _largest(weights, k)


def _top_p(weights: np.ndarray, among: np.ndarray | None, p: float) -> np.ndarray | None:
    """Of the indices `among` (None: all), the fewest largest whose share of their sum reaches p; at least one."""
    if p >= 1.0:
        return among
    pool = weights if among is None else weights[among]
    target = p * pool.sum()
    count = min(_FIRST_CANDIDATES, len(pool))
    while True:
        candidates = _largest(pool, count)
        reached = np.nonzero(np.cumsum(pool[candidates]) >= target)[0]
        if len(reached) or count == len(pool):
            break
        count = min(4 * count, len(pool))
    last = reached[0] if len(reached) else count - 1  # rounding may leave the whole sum a hair below its target
    chosen = candidates[: last + 1]
    return chosen if among is None else among[chosen]


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest values, largest first, equal ones by ascending index.

    `argpartition` alone would pick arbitrarily among values equal to the k-th, so those are chosen by index.
    """
    if k >= len(values):
        return np.lexsort((np.arange(len(values)), -values))
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = np.nonzero(values > threshold)[0]
    equal = np.nonzero(values == threshold)[0][: k - len(above)]
    chosen = np.concatenate([above, equal])
    return chosen[np.lexsort((chosen, -values[chosen]))]


def log_sum_exp(logits: np.ndarray) -> float:
    """log of the sum of exp over a row, in float64."""
    top = float(logits.max())
    return top + float(np.log(np.sum(np.exp(logits - np.float32(top)), dtype=np.float64)))


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
