"""Readout: from the rows of a forward pass to the answers of prefill-only requests.

Most are rows beside others in the step's one forward. Two kinds have forwards of their own: embeddings, which end
before the output head, and prompts whose every token is scored, where the logits of all rows at once would take
gigabytes (4,096 rows of a 151,936-token vocabulary: 2.5 GB). Those are read out in slices, each a forward over some
rows, with the bits that a single one would give.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from forge.cache.kv_storage import KvStorage
from forge.engine.sampling import BrokenLogits, check_logits, log_sum_exp, top_logprobs
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem
from forge.engine.task import Logprobs, Readout
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.model.model import Model

SLICE_BYTES = 32 << 20
"""Bytes of logits that a slice of a scored prompt may take."""


class SeparateResult(NamedTuple):
    """What the separate forwards of one item gave."""

    readout: Readout = Readout()
    last_row: np.ndarray | None = None
    """The logits after the last token, float32 `[vocab]`, where the item samples."""
    error: BrokenLogits | None = None


def max_logit_rows(vocab_size: int) -> int:
    """Rows of logits that fit into a slice."""
    return max(16, SLICE_BYTES // (4 * vocab_size))


def read_out(sequence: Sequence, rows: np.ndarray) -> Readout:
    """A sequence's answer from the logits of its task's rows, float32 `[rows, vocab]`."""
    task = sequence.task
    scores = () if task.score_from is None else _score(sequence, task.score_from, rows)
    return Readout(_candidates(sequence, rows[-1]) if task.candidates else (), scores)


def run_separate_forwards(items: Items[PlanItem], model: Model, storage: KvStorage) -> list[SeparateResult]:
    """The results of items that take forwards of their own, in order."""
    embedded = [item for item in items if item.sequence.task.needs_hidden]
    embeddings = iter(_embed(embedded, model, storage) if embedded else ())
    return [
        SeparateResult(next(embeddings))
        if item.sequence.task.needs_hidden
        else _read_out_in_slices(item, model, storage)
        for item in items
    ]


def _read_out_in_slices(item: PlanItem, model: Model, storage: KvStorage) -> SeparateResult:
    """Several forwards over parts of a prompt that has too many rows for one array of logits."""
    sequence, size = item.sequence, max_logit_rows(model.vocab_size)
    scores: tuple[Logprobs, ...] = ()
    rows = np.empty((0, 0), np.float32)
    try:
        for first in range(0, item.num_tokens, size):
            start, end = item.start + first, item.start + min(first + size, item.num_tokens)
            wanted = range(max(0, item.logit_rows.start - first), min(end - start, item.logit_rows.stop - first))
            part = SequenceRows(sequence.token_ids[start:end], start, item.block_table, wanted)
            rows = np.asarray(model.forward(flat_batch([part], storage.layout.block_size), storage))
            scores += _score(sequence, start + wanted.start + 1, rows)
        last_row = rows[-1] if item.samples else None
        candidates = _candidates(sequence, rows[-1]) if sequence.task.candidates else ()
    except BrokenLogits as error:
        return SeparateResult(error=error)
    return SeparateResult(Readout(candidates, scores), last_row)


def _embed(items: list[PlanItem], model: Model, storage: KvStorage) -> list[Readout]:
    """Embeddings of several sequences from one pass that ends in hidden states."""
    parts = [
        SequenceRows(item.sequence.token_ids[item.start :], item.start, item.block_table, item.logit_rows)
        for item in items
    ]
    hidden = model.hidden(flat_batch(parts, storage.layout.block_size), storage)
    readouts, first = [], 0
    for item in items:
        rows = hidden[first : first + len(item.logit_rows)]
        first += len(rows)
        pooled = rows.mean(axis=0, dtype=np.float64) if item.sequence.task.pooling == "mean" else rows[-1]
        vector = pooled.astype(np.float64)
        norm = float(np.sqrt((vector * vector).sum()))
        readouts.append(Readout(embedding=(vector / (norm or 1.0)).astype(np.float32)))
    return readouts


def _candidates(sequence: Sequence, logits: np.ndarray) -> tuple[float, ...]:
    """Log probabilities of the task's candidates, from the row after the last token."""
    log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
    return tuple(float(logits[token_id]) - log_total for token_id in sequence.task.candidates)


def _score(sequence: Sequence, position: int, rows: np.ndarray) -> tuple[Logprobs, ...]:
    """Log probabilities of the prompt tokens from `position` on; row i of `rows` precedes token `position + i`."""
    scores, top = [], sequence.task.top if sequence.prefill_only else sequence.params.prompt_logprobs or 0
    for logits, token_id in zip(rows, sequence.token_ids[position : sequence.num_prompt_tokens], strict=False):
        scores.append(score_row(logits, top, token_id))
    return tuple(scores)


def score_row(logits: np.ndarray, top: int, token_id: int) -> Logprobs:
    """The log probability of a token and of the `top` most probable ones, from float32 `[vocab]`. Raises
    `BrokenLogits`."""
    log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
    return top_logprobs(logits, log_total, top, token_id) or ()
