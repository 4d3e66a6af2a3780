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
from forge.engine.task import NO_READOUT, Logprobs, Readout
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.model.model import Model

SLICE_BYTES = 32 << 20
"""Bytes of logits that a slice of a scored prompt may take."""
MIN_SLICE_ROWS = 16
"""Rows that a slice has in any case."""


class SeparateResult(NamedTuple):
    """The results of one item's separate forwards."""

    readout: Readout = Readout()
    last_row: np.ndarray = np.empty((0, 1), np.float32)
    """The logits after the last token, float32 `[1, vocab]`, where the item chooses a token; else `[0, …]`."""
    error: BrokenLogits | None = None


def max_logit_rows(vocab_size: int) -> int:
    """Return how many rows of logits fit into a slice."""
    return max(MIN_SLICE_ROWS, SLICE_BYTES // (4 * vocab_size))


def read_out(item: PlanItem, rows: np.ndarray, before: Readout | None = None) -> Readout:
    """Answer the task of an item's sequence from the logits of the item's rows, float32 `[rows, vocab]`; of a prompt in
    chunks, as far as it is computed. before: the answer so far, where it is not the one of the chunks before."""
    sequence, task = item.sequence, item.sequence.task
    scores = score_tokens(sequence, item.start + item.logit_rows.start + 1, rows) if task.score_from is not None else ()
    candidates = _candidates(sequence, rows[-1]) if task.candidates and not item.remaining else ()
    return Readout(candidates, (*(before or _before(item)).scores, *scores))


def store_readout(item: PlanItem, readout: Readout) -> None:
    """Store the answer to an item's task with all samples of its prompt; of a prompt in chunks, the answer so far."""
    if item.remaining:
        item.sequence.partial = readout
    else:
        for sample in (item.sequence, *item.sequence.waiting_samples):
            sample.readout = readout


def _before(item: PlanItem) -> Readout:
    """Return what the chunks before an item gave; nothing if the item begins no later than the first row that counts,
    because then the prompt is computed for the first time, or again."""
    sequence = item.sequence
    first = sequence.task.logit_rows(0, sequence.num_prompt_tokens).start
    return sequence.partial if item.start > first else NO_READOUT


def run_separate_forwards(items: Items[PlanItem], model: Model, storage: KvStorage) -> list[SeparateResult]:
    """Run the forwards of items that need their own, and return the results in order."""
    embedded = [item for item in items if item.sequence.task.pooling]
    embeddings = iter(_embed(embedded, model, storage) if embedded else ())
    return [
        SeparateResult(next(embeddings)) if item.sequence.task.pooling else _read_out_in_slices(item, model, storage)
        for item in items
    ]


def _read_out_in_slices(item: PlanItem, model: Model, storage: KvStorage) -> SeparateResult:
    """Run several forwards over parts of a prompt that has too many rows for one array of logits."""
    readout, rows, size = _before(item), np.empty((0, 0), np.float32), max_logit_rows(model.vocab_size)
    try:
        for first in range(0, item.num_tokens, size):
            num_tokens = min(size, item.num_tokens - first)
            logit_rows = range(max(0, item.logit_rows.start - first), min(num_tokens, item.logit_rows.stop - first))
            remaining = item.remaining + item.num_tokens - first - num_tokens
            part = item._replace(
                start=item.start + first, num_tokens=num_tokens, logit_rows=logit_rows, remaining=remaining
            )
            rows = np.asarray(model.forward(flat_batch([_rows_of(part)], storage.layout.block_size), storage))
            readout = read_out(part, rows, readout)
    except BrokenLogits as error:
        return SeparateResult(error=error)
    return SeparateResult(readout, rows[-1:] if item.chooses_token else rows[:0])


def _rows_of(item: PlanItem) -> SequenceRows:
    token_ids = item.sequence.token_ids[item.start : item.start + item.num_tokens]
    return SequenceRows(token_ids, item.start, item.block_table, item.logit_rows)


def _embed(items: list[PlanItem], model: Model, storage: KvStorage) -> list[Readout]:
    """Embed several sequences in one pass that ends in hidden states."""
    hidden = model.hidden(flat_batch([_rows_of(item) for item in items], storage.layout.block_size), storage)
    readouts, first = [], 0
    for item in items:
        rows, before = hidden[first : first + len(item.logit_rows)], _before(item).embedding
        first += len(rows)
        # Row after row: the bits of a sum do not show where chunks end.
        total = (rows if before is None else np.vstack([before, rows])).sum(axis=0, dtype=np.float64)
        if not item.remaining:
            norm = float(np.sqrt((total * total).sum()))  # of a mean as of its sum
            total = (total / (norm or 1.0)).astype(np.float32)
        readouts.append(Readout(embedding=total))
    return readouts


def _candidates(sequence: Sequence, logits: np.ndarray) -> tuple[float, ...]:
    """Return the log probabilities of the task's candidates, from the row after the last token."""
    log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
    return tuple(float(logits[token_id]) - log_total for token_id in sequence.task.candidates)


def score_tokens(sequence: Sequence, position: int, rows: np.ndarray) -> tuple[Logprobs, ...]:
    """Return the log probabilities of the prompt tokens from `position` on; row i of `rows` precedes token `position +
    i`."""
    scores = []
    token_ids = sequence.token_ids[position : min(position + len(rows), sequence.num_prompt_tokens)]
    for logits, token_id in zip(rows[: len(token_ids)], token_ids, strict=True):
        log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
        scores.append(top_logprobs(logits, log_total, sequence.task.top, token_id) or ())
    return tuple(scores)
