"""Answering requests that keep nothing: from the rows of a forward pass to what each of them asked for.

Most are rows beside others in the step's one forward. Two kinds have passes of their own: embeddings, which end before
the output head, and prompts whose every token is scored, where the logits of all rows at once would take gigabytes
(4,096 rows of a 151,936-token vocabulary: 2.5 GB). Those come in slices, each a forward over some rows, with the bits
that a single one would give.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forge.cache.kv_storage import KvStorage
from forge.engine.oneshot import OneShotItem, OneShotRequest
from forge.engine.sampling import SampledToken, check_logits, choose, log_sum_exp, top_logprobs
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.model.model import Model

SLICE_BYTES = 32 << 20
"""Logits that a slice of a scored prompt may take."""

Logprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class OneShotResult:
    """What a request asked for; the rest is empty."""

    choice: SampledToken | None = None
    """The token that was sampled."""
    candidates: tuple[float, ...] = ()
    """Natural log probabilities of the candidates to come next."""
    scores: tuple[Logprobs, ...] = ()
    """For each scored prompt token the likeliest tokens there and their log probabilities, itself always among them."""
    embedding: np.ndarray | None = None
    """float32 `[hidden]`, of length 1."""
    error: str | None = None
    """Why there is no answer."""


def rows_of(one: OneShotItem) -> SequenceRows:
    """An item's rows for a batch."""
    start = one.item.start
    return SequenceRows(one.request.token_ids[start:], start, one.item.block_table, one.item.logit_rows)


def joins_batch(one: OneShotItem, max_rows: int) -> bool:
    """Whether an item's rows go into the step's own forward: where it takes no more rows of logits than a slice has."""
    task = one.request.task
    return task.pooling is None and (task.score_from is None or len(one.item.logit_rows) <= max_rows)


def max_slice_rows(vocab_size: int) -> int:
    """Rows of logits that fit into a slice."""
    return max(16, SLICE_BYTES // (4 * vocab_size))


def wants_likeliest(request: OneShotRequest, on_logits: Callable | None, probabilities: bool) -> bool:
    """Whether its answer is the likeliest token after its last, and nobody looks at the logits themselves."""
    task = request.task
    plain = task.sample and not task.candidates and task.score_from is None and request.params.plain_greedy
    return plain and on_logits is None and not probabilities


def answer(
    request: OneShotRequest, rows: np.ndarray, on_logits: Callable | None = None, probabilities: bool = True
) -> OneShotResult:
    """The answer from the logits of `task.logit_rows`, float32 `[rows, vocab]`. `probabilities`: whether somebody wants
    to know how likely a token that is simply the likeliest was."""
    task, scores = request.task, ()
    if task.score_from is not None:
        scores = score(request, task.score_from, rows)
    return _with_next_token(request, scores, rows[-1] if len(rows) else None, on_logits, probabilities)


def answer_in_slices(
    one: OneShotItem,
    model: Model,
    storage: KvStorage,
    on_logits: Callable | None = None,
    probabilities: bool = True,
) -> OneShotResult:
    """The same for a prompt with too many rows for one array of logits: several forwards over parts of it."""
    request, item = one.request, one.item
    size = max_slice_rows(model.vocab_size)
    scores: tuple[Logprobs, ...] = ()
    last = None
    for first in range(0, item.num_tokens, size):
        start, end = item.start + first, item.start + min(first + size, item.num_tokens)
        wanted = range(max(0, item.logit_rows.start - first), min(end - start, item.logit_rows.stop - first))
        part = SequenceRows(request.token_ids[start:end], start, item.block_table, wanted)
        rows = np.asarray(model.forward(flat_batch([part], storage.layout.block_size), storage))
        if len(rows):
            scores += score(request, start + wanted.start + 1, rows)
            last = rows[-1]
    return _with_next_token(request, scores, last, on_logits, probabilities)


def embed(items: list[OneShotItem], model: Model, storage: KvStorage) -> list[OneShotResult]:
    """Embeddings of several requests from one pass that ends in hidden states."""
    hidden = model.hidden(flat_batch([rows_of(one) for one in items], storage.layout.block_size), storage)
    results, first = [], 0
    for one in items:
        rows = hidden[first : first + len(one.item.logit_rows)]
        first += len(rows)
        pooled = rows.mean(axis=0, dtype=np.float64) if one.request.task.pooling == "mean" else rows[-1]
        vector = pooled.astype(np.float64)
        norm = float(np.sqrt((vector * vector).sum()))
        results.append(OneShotResult(embedding=(vector / (norm or 1.0)).astype(np.float32)))
    return results


def score(request: OneShotRequest, position: int, rows: np.ndarray) -> tuple[Logprobs, ...]:
    """Log probabilities of the prompt tokens from `position` on; row i of `rows` precedes token `position + i`."""
    found = []
    for logits, token_id in zip(rows, request.token_ids[position : position + len(rows)], strict=False):
        log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
        found.append(top_logprobs(logits, log_total, request.task.top, token_id))
    return tuple(found)


def _with_next_token(
    request: OneShotRequest,
    scores: tuple[Logprobs, ...],
    logits: np.ndarray | None,
    on_logits: Callable | None,
    probabilities: bool,
) -> OneShotResult:
    task, length = request.task, len(request.token_ids)
    choice, candidates = None, ()
    if task.candidates:
        log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
        candidates = tuple(float(logits[token_id]) - log_total for token_id in task.candidates)
    if task.sample:
        if on_logits is not None:
            on_logits(request.seq_id, logits.copy())
        if request.params.plain_greedy and not probabilities:
            choice = SampledToken(check_logits(logits), None, None)
        else:
            choice = choose(logits, request.params, request.token_ids, request.seed, 0, length, length, probabilities)
    return OneShotResult(choice, candidates, scores)
