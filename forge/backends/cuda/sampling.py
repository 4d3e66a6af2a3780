"""Choosing tokens where the logits are: penalties, filters and the Gumbel-max draw, for all rows of a step at once.

The definition is the engine's (`forge.engine.rng`, `forge.engine.sampling`), in float64 too: the same logits give the
same token on the host and on the device, unless two tokens are as close as the last bit of a logarithm.

Nothing here waits for the device, and what no request asks for is not computed. What requests ask for is copied to the
device from pinned memory, behind the step whose tokens are chosen. Penalties and filters are torch's operations; the
draw is one kernel (`kernels/argmax.py`).

Ledger: on the host a row costs 0.26 ms, and 64 rows 17 ms beside a forward of 1 ms. Here a step takes three launches;
30 more where a row has a top-k or top-p, and a sort; 20 more where one has penalties. Not yet measured on a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from forge.backends.cuda.shapes import next_power_of_2
from forge.model.model import Draw

if TYPE_CHECKING:
    from forge.backends.cuda.launches import Launcher  # defines the kernels, so only when they are wanted

FILTERED_ROWS = 32
"""Rows that are filtered together: sorting takes 40 bytes for each of their logits, 200 MB in all. Guess."""
DRAW_COLUMNS = 1024
"""Columns of a row of logits that one program draws from. Guess."""
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Penalties:
    """The changes to each row's logits before its token is chosen."""

    bias_indices: torch.Tensor
    """int64 `[n]`: row * vocabulary + token of each entry of a bias."""
    bias: torch.Tensor
    """float64 `[n]`: what each of those entries adds."""
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
            indices = [row * vocabulary + np.asarray(tokens, np.int64) for row, tokens in enumerate(rows)]
            return _on_device(np.concatenate(indices), device)

        shape = len(draws), vocabulary
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        seen.view(-1).index_fill_(0, flat_indices([draw.history for draw in draws]), True)
        output_indices = flat_indices([draw.history[draw.num_prompt_tokens :] for draw in draws])
        counts = torch.zeros(shape, dtype=torch.int32, device=device)
        counts.view(-1).index_add_(0, output_indices, torch.ones_like(output_indices, dtype=torch.int32))
        strengths = [
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            for params in (d.params for d in draws)
        ]
        repetition, presence, frequency = _on_device(np.array(strengths).T, device)[:, :, None]
        biases = [dict(draw.params.logit_bias or ()) for draw in draws]
        values = np.array([value for bias in biases for value in bias.values()], np.float64)
        bias_indices = flat_indices([[*bias] for bias in biases])
        return cls(bias_indices, _on_device(values, device), repetition, presence, frequency, seen, counts)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 `[R, vocabulary]`: the bias added, then the repetition, presence and frequency penalties
        applied."""
        values = logits.double()
        values.view(-1).index_add_(0, self.bias_indices, self.bias)
        repeated = torch.where(values > 0, values / self.repetition, values * self.repetition)
        values = torch.where(self.seen & (values > -torch.inf), repeated, values)
        values -= self.frequency * self.counts + self.presence * (self.counts > 0)
        # What overflows becomes the largest float32, which is still a number; -infinity stays "never".
        return torch.where(values > -torch.inf, values.clamp(-_LARGEST_FLOAT, _LARGEST_FLOAT), values).float()


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a step's logit rows, on the device."""

    words: torch.Tensor
    """int64 `[R, 8]`: top_k, seed, position, sample index; as the bits of float64 temperature, top_p, log(min_p)."""
    penalties: Penalties | None
    sorts: bool
    """Whether any row has a top-k or top-p."""
    floors: bool
    """Whether any row has a min-p."""

    @classmethod
    def of(cls, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> "SamplingRows":
        words = np.zeros((len(draws), 8), np.uint64)
        numbers = words.view(np.float64)
        for row, draw in enumerate(draws):
            params = draw.params
            words[row, :4] = (
                min(params.top_k or vocabulary, vocabulary),
                draw.seed,
                len(draw.history),
                draw.sample_index,
            )
            numbers[row, 4:7] = (
                params.temperature,
                params.top_p,
                math.log(params.min_p) if params.min_p > 0 else -math.inf,
            )
        drawing = [draw.params for draw in draws if draw.params.temperature > 0]
        return cls(
            _on_device(words.view(np.int64), device),
            Penalties.of(draws, vocabulary, device) if any(draw.params.changes_logits for draw in draws) else None,
            sorts=any(params.top_p < 1 or 0 < params.top_k < vocabulary for params in drawing),
            floors=any(params.min_p > 0 for params in drawing),
        )


def sample_into(logits: torch.Tensor, rows: SamplingRows, samples: torch.Tensor, launch: "Launcher") -> None:
    """Leave each row's token (of equals the lowest) and the bits of its logit in `samples`, int32 `[R or more, 2]`, as
    kernel `argmax_rows` does. A row whose maximum is not finite gets that for its logit: so the host recognizes broken
    logits.

    logits: float32 `[R, vocabulary]`, not changed. Rows are drawn each by itself: what is beside them changes none of
    their tokens.
    """
    from forge.backends.cuda.kernels.argmax import gumbel_argmax  # defines the kernel, so only when it is wanted

    scored = rows.penalties.applied(logits) if rows.penalties is not None else logits
    maxima = torch.stack([scored.amax(1), logits.amax(1)], dim=1)
    allowed = None
    if rows.sorts or rows.floors:
        runs = [slice(first, first + FILTERED_ROWS) for first in range(0, len(logits), FILTERED_ROWS)]
        masks = [_allowed(scored[run], maxima[run, :1], replace(rows, words=rows.words[run])) for run in runs]
        allowed = masks[0] if len(masks) == 1 else torch.cat(masks)
    num_rows, vocabulary = logits.shape
    part = min(DRAW_COLUMNS, max(128, next_power_of_2(vocabulary)))
    parts = -(-vocabulary // part)
    launch(
        gumbel_argmax,
        (num_rows, parts),
        scored,
        logits,
        allowed if allowed is not None else rows.words,
        maxima,
        rows.words,
        torch.empty((num_rows, parts), dtype=torch.float64, device=logits.device),
        torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device),
        samples,
        torch.zeros(num_rows, dtype=torch.int32, device=logits.device),
        vocabulary,
        MASKED=allowed is not None,
        PARTS=parts,
        PART=part,
        BLOCK_PARTS=max(32, next_power_of_2(parts)),
    )


def list_draws(vocabulary: int, device: torch.device, launch: "Launcher") -> None:
    """Hand each specialization of the draw to a launcher that launches nothing."""
    logits = torch.empty((1, vocabulary), dtype=torch.float32, device=device)
    words = torch.empty((1, 8), dtype=torch.int64, device=device)
    samples = torch.empty((1, 2), dtype=torch.int32, device=device)
    for floors in (False, True):
        sample_into(logits, SamplingRows(words, None, sorts=False, floors=floors), samples, launch)


def _allowed(scored: torch.Tensor, maxima: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return which tokens top-k, top-p and min-p keep, applied in this order: uint8 `[R, vocabulary]`. A greedy row has
    no filters.

    maxima: those of `scored`, `[R, 1]`. Of equal tokens at an edge those with the lowest ids are kept, and the argmax
    always is. Top-k looks at logits and top-p at weights, because temperatures make unequal logits equal.
    """
    top_k, numbers = rows.words[:, :1], rows.words.view(torch.float64)
    temperature, top_p, log_min_p = (numbers[:, column : column + 1] for column in (4, 5, 6))
    greedy, logits = temperature == 0, scored.double()
    temperature = torch.where(greedy, 1.0, temperature)
    scores = (logits - maxima) / temperature  # in this order, a tiny one overflows to -infinity
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if rows.sorts:
        ordered = torch.sort(logits, dim=1, descending=True).values
        rank = torch.arange(logits.shape[1], device=logits.device)[None]
        allowed = _top(logits, ordered, top_k)
        weights = torch.exp((ordered - ordered[:, :1]) / temperature).masked_fill(rank >= top_k, 0.0)
        sums = weights.cumsum(1)
        num_kept = 1 + (sums[:, :-1] < top_p * sums[:, -1:]).sum(1, keepdim=True)
        nucleus = _top(torch.exp(scores).masked_fill(~allowed, 0.0), weights, num_kept)
        allowed &= nucleus | (top_p >= 1)
    if rows.floors:
        allowed &= scores >= log_min_p
    return (allowed | greedy).view(torch.uint8)


def _top(values: torch.Tensor, ordered: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return which are the k largest of each row, of equal ones at the edge those with the lowest ids: bool like
    `values`.

    ordered: the values in descending order. k: int64 `[R, 1]`.
    """
    threshold = ordered.gather(1, k - 1)
    larger, equal = values > threshold, values == threshold
    return larger | equal & (equal.cumsum(1) <= k - larger.sum(1, keepdim=True))


def _on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Start a copy to the device without waiting for it."""
    here = torch.from_numpy(np.ascontiguousarray(values))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
