"""Choosing tokens where the logits are: penalties, filters and the Gumbel-max draw, for all rows of a step at once.

The definition is the engine's (`forge.engine.rng`, `forge.engine.sampling`), in float64 too: the same logits give the
same token on the host and on the device, unless two tokens are as close as the last bit of a logarithm. torch has no
unsigned 64-bit products, so Philox multiplies by halves.

Nothing here waits for the device, and what no request asks for is not computed. What requests ask for is copied to the
device from pinned memory, behind the step whose tokens are chosen.

Ledger: on the host a row costs 0.26 ms, and 64 rows 17 ms beside a forward of 1 ms. Here 64 rows of 151,936 logits are
about 150 passes over 20 MB for the noise, and a sort where a row has a top-k or top-p. Not yet measured on a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forge.model.logits import Draw

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Penalties:
    """What changes each row's logits before its token is chosen."""

    bias_indices: torch.Tensor
    """int64 `[n]`: row * vocabulary + token of each entry of a bias."""
    bias: torch.Tensor
    """float64 `[n]`."""
    repetition: torch.Tensor
    """float64 `[R, 1]`; presence and frequency likewise."""
    presence: torch.Tensor
    frequency: torch.Tensor
    seen: torch.Tensor
    """bool `[R, vocabulary]`: tokens of the prompt or the output."""
    counts: torch.Tensor
    """int32 `[R, vocabulary]`: how often each is in the output."""

    @classmethod
    def of(cls, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> "Penalties":
        def flat_indices(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            found = [row * vocabulary + np.asarray(tokens, np.int64) for row, tokens in enumerate(rows)]
            return _on_device(np.concatenate(found), device)

        shape = len(draws), vocabulary
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        seen.view(-1).index_fill_(0, flat_indices([draw.history for draw in draws]), True)
        said = flat_indices([draw.history[draw.num_prompt_tokens :] for draw in draws])
        counts = torch.zeros(shape, dtype=torch.int32, device=device)
        counts.view(-1).index_add_(0, said, torch.ones_like(said, dtype=torch.int32))
        strengths = [
            (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in (d.params for d in draws)
        ]
        repetition, presence, frequency = _on_device(np.array(strengths).T, device)[:, :, None]
        biases = [dict(draw.params.logit_bias or ()) for draw in draws]
        values = np.array([value for each in biases for value in each.values()], np.float64)
        bias_indices = flat_indices([[*each] for each in biases])
        return cls(bias_indices, _on_device(values, device), repetition, presence, frequency, seen, counts)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 `[R, vocabulary]`: the bias added, then the repetition penalty, then presence and frequency."""
        values = logits.double()
        values.view(-1).index_add_(0, self.bias_indices, self.bias)
        repeated = torch.where(values > 0, values / self.repetition, values * self.repetition)
        values = torch.where(self.seen & (values > -torch.inf), repeated, values)
        values -= self.frequency * self.counts + self.presence * (self.counts > 0)
        # What overflows becomes the largest float32, which is still a number; -infinity stays "never".
        return torch.where(values > -torch.inf, values.clamp(-_LARGEST_FLOAT, _LARGEST_FLOAT), values).float()


@dataclass(frozen=True)
class SamplingRows:
    """What the requests of a step's logit rows ask for, a row each, on the device; float64 `[R, 1]` unless it says."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    """int64; the vocabulary's size keeps every token."""
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    key: tuple[torch.Tensor, torch.Tensor]
    """int64: the seed's low and high 32 bits."""
    position: torch.Tensor
    """int64."""
    sample_index: torch.Tensor
    """int64."""
    penalties: Penalties | None
    draws: bool
    """Whether any row draws; none does if all temperatures are 0."""
    sorts: bool
    """Whether any row has a top-k or top-p."""
    floors: bool
    """Whether any row has a min-p."""

    @classmethod
    def of(cls, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> "SamplingRows":
        wanted = [draw.params for draw in draws]
        drawing = [one for one in wanted if one.temperature > 0]
        integers = [
            (
                min(one.top_k or vocabulary, vocabulary),
                draw.seed & _MASK,
                draw.seed >> 32,
                len(draw.history),
                draw.sample_index,
            )
            for one, draw in zip(wanted, draws, strict=True)
        ]
        numbers = [(one.temperature, one.top_p, math.log(one.min_p) if one.min_p > 0 else -math.inf) for one in wanted]
        words = np.concatenate([np.array(integers, np.int64), np.array(numbers, np.float64).view(np.int64)], axis=1)
        columns = _on_device(words.T, device)[:, :, None]
        top_k, low, high, position, sample_index = columns[:5]
        temperature, top_p, log_min_p = columns[5:].view(torch.float64)
        return cls(
            temperature,
            top_k,
            top_p,
            log_min_p,
            (low, high),
            position,
            sample_index,
            Penalties.of(draws, vocabulary, device) if any(one.changes_logits for one in wanted) else None,
            draws=bool(drawing),
            sorts=any(one.top_p < 1 or 0 < one.top_k < vocabulary for one in drawing),
            floors=any(one.min_p > 0 for one in drawing),
        )


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The token of each row, int64 `[R]`; of equals the lowest. logits: float32 `[R, vocabulary]`, left as they are.

    Rows are drawn each by itself: what is beside them changes none of their tokens.
    """
    if rows.penalties is not None:
        logits = rows.penalties.applied(logits)
    if not rows.draws:
        return logits.argmax(1)  # the first of equals
    logits, greedy = logits.double(), rows.temperature == 0
    temperature = torch.where(greedy, 1.0, rows.temperature)
    scores = (logits - logits.amax(1, keepdim=True)) / temperature  # in this order, a tiny one overflows to -infinity
    if rows.sorts or rows.floors:
        scores = scores.masked_fill(~_allowed(logits, scores, temperature, rows) & ~greedy, -torch.inf)
    return (scores + gumbel_noise(rows, logits.shape[1]).masked_fill(greedy, 0.0)).argmax(1)


def sample_into(logits: torch.Tensor, rows: SamplingRows, samples: torch.Tensor) -> None:
    """Leave each row's token and the bits of its logit in `samples`, int32 `[R or more, 2]`, as kernel `argmax_rows`
    does. A row whose maximum is not finite gets that for its logit: so the host recognizes broken logits."""
    tokens, largest = sample(logits, rows), logits.amax(1, keepdim=True)
    chosen = torch.where(largest.isfinite(), logits.gather(1, tokens[:, None]), largest)
    samples[: len(logits), 0] = tokens.int()
    samples[: len(logits), 1:] = chosen.view(torch.int32)


def gumbel_noise(rows: SamplingRows, vocabulary: int) -> torch.Tensor:
    """float64 `[R, vocabulary]`."""
    words = philox_words(rows, vocabulary)
    return -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))


def philox_words(rows: SamplingRows, vocabulary: int) -> torch.Tensor:
    """The random 32 bits of each row and token, int64 `[R, vocabulary]`."""
    blocks = torch.arange(-(-vocabulary // 4), dtype=torch.int64, device=rows.position.device)[None]
    counter = (blocks, rows.position, rows.sample_index, torch.zeros_like(rows.position))
    words = torch.broadcast_tensors(*_philox(counter, rows.key))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocabulary]


def _philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of numbers of 32 bits in int64."""
    first, second, third, fourth = counter
    for number in range(_ROUNDS):
        keys = ((key[index] + number * _KEY_STEPS[index]) & _MASK for index in (0, 1))
        (high, low), (other_high, other_low) = (
            _product(_MULTIPLIERS[0], first),
            _product(_MULTIPLIERS[1], third),
        )
        first, second, third, fourth = other_high ^ second ^ next(keys), other_low, high ^ fourth ^ next(keys), low
    return first, second, third, fourth


def _product(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and lower 32 bits of a product of 64, which has no room in a signed integer: by halves of the word."""
    upper, lower = multiplier * (word >> 16), multiplier * (word & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & _MASK


def _allowed(logits: torch.Tensor, scores: torch.Tensor, temperature: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Which tokens top-k, top-p and min-p keep, in this order: bool `[R, vocabulary]`.

    scores: (logits - their maximum) / temperature. Of equal tokens at an edge those with the lowest ids are kept, and
    the argmax always is. Top-k looks at logits and top-p at weights, because temperatures make unequal logits equal.
    """
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if rows.sorts:
        ordered = torch.sort(logits, dim=1, descending=True).values
        rank = torch.arange(logits.shape[1], device=logits.device)[None]
        allowed = _top(logits, ordered, rows.top_k)
        weights = torch.exp((ordered - ordered[:, :1]) / temperature).masked_fill(rank >= rows.top_k, 0.0)
        sums = weights.cumsum(1)
        num_kept = 1 + (sums[:, :-1] < rows.top_p * sums[:, -1:]).sum(1, keepdim=True)
        nucleus = _top(torch.exp(scores).masked_fill(~allowed, 0.0), weights, num_kept)
        allowed &= nucleus | (rows.top_p >= 1)
    if rows.floors:
        allowed &= scores >= rows.log_min_p
    return allowed


def _top(values: torch.Tensor, ordered: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Which are the k largest of each row, of equal ones at the edge those with the lowest ids: bool like `values`.

    ordered: the values in descending order. k: int64 `[R, 1]`.
    """
    threshold = ordered.gather(1, k - 1)
    larger, equal = values > threshold, values == threshold
    return larger | equal & (equal.cumsum(1) <= k - larger.sum(1, keepdim=True))


def _on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    here = torch.from_numpy(np.ascontiguousarray(values))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
