"""The batch builder: from a plan and its draft tokens to one flat batch.

An item's rows are its known tokens and behind them the draft tokens of one proposal. Each further proposal has rows of
its own, which begin with the known tokens again, because a fork's blocks hold nothing of this step yet. Slots for draft
tokens that were not proposed have no rows.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from forge.engine.proposer import Proposal
from forge.engine.step_plan import PlanItem
from forge.model.forward_batch import ForwardBatch, SequenceRows, flat_batch

Drafts = Mapping[int, tuple[Proposal, ...]]
"""By sequence id: its proposals. The first is verified in the sequence's own blocks, others in its forks' blocks."""


class BatchBuilder:
    """Builds the `ForwardBatch` of a step. Caches block tables as arrays: they change once per block of tokens."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def forget(self, seq_id: int) -> None:
        """Drop the cached block table of a sequence that has ended."""
        self._tables.pop(seq_id, None)

    def build(self, items: Items[PlanItem], drafts: Drafts) -> ForwardBatch:
        """Build the batch: the rows of all items end to end, with the drafts of each sequence that has any."""
        parts, tables = [], self._tables
        for item in items:
            table = item.block_table
            cached = tables.get(item.seq_id)
            if cached is None or cached[0] is not table:  # a table that grew is another tuple
                cached = tables[item.seq_id] = table, np.array(table, np.int32)
            if item.follows is not None:
                known = [-1 - item.follows]  # below 0: the token of that row of the previous forward
            else:
                known = item.sequence.token_ids[item.start : item.start + item.num_tokens]
            if item.num_draft_slots:
                parts += _with_draft_tokens(item, known, cached[1], drafts.get(item.seq_id, ()))
            else:
                parts.append(SequenceRows(known, item.start, cached[1], item.logit_rows))
        return flat_batch(parts, self._block_size)


def _with_draft_tokens(
    item: PlanItem, known: list[int], table: np.ndarray, proposals: tuple[Proposal, ...]
) -> list[SequenceRows]:
    """Return one part per proposal. Of a fork's rows, those from the last known token on have logits."""
    first = proposals[0].token_ids if proposals else ()
    logit_rows = range(item.logit_rows.start, item.logit_rows.stop - item.num_draft_slots + len(first))
    parts = [SequenceRows([*known, *first], item.start, table, logit_rows)]
    last = item.num_tokens - 1
    further = proposals[1:]
    for fork, proposal in zip(item.forks[: len(further)], further, strict=True):
        rows = range(last, last + len(proposal) + 1)
        parts.append(SequenceRows([*known, *proposal.token_ids], item.start, fork.block_table, rows))
    return parts
