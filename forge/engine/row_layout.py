"""From a plan and the guesses in it to one flat batch: which row is whose, and where its logits are.

An item's rows are its known tokens and behind them the guesses of one run. Each further run has rows of its own, which
begin with the known tokens again, because a fork's blocks hold nothing of this step yet. Guesses that nobody made have
no rows, whatever the plan had room for.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from forge.engine import answers
from forge.engine.oneshot import OneShotItem
from forge.engine.proposer import NO_PROPOSAL, Proposal
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem, StepPlan
from forge.model.forward_batch import ForwardBatch, SequenceRows, flat_batch

Runs = Items[Proposal]
"""The runs of guesses of one item: the first is computed in its own blocks, the others in those of its forks."""
_NO_GUESSES: Runs = (NO_PROPOSAL,)


class _Rows(NamedTuple):
    """A run of rows that one block table serves."""

    block_table: tuple[int, ...]
    guesses: tuple[int, ...]
    logit_rows: range


def rows_of(item: PlanItem, runs: Runs) -> list[_Rows]:
    """An item's rows, run by run. Of a fork's rows those from the last known token on have logits."""
    if not item.num_guesses:
        return [_Rows(item.block_table, (), item.logit_rows)]
    last = item.num_tokens - 1
    own = range(item.logit_rows.start, item.logit_rows.stop - item.num_guesses + len(runs[0]))
    rows = [_Rows(item.block_table, runs[0].token_ids, own)]
    for fork, proposal in zip(item.forks, runs[1:], strict=False):
        rows.append(_Rows(fork.block_table, proposal.token_ids, range(last, last + len(proposal) + 1)))
    return rows


class RowLayout:
    """Lays plans out. Remembers the block tables as arrays: they change once in a block's worth of tokens."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def forget(self, seq_id: int) -> None:
        self._tables.pop(seq_id, None)

    def batch(
        self,
        plan: StepPlan,
        running: Mapping[int, Sequence],
        guesses: Mapping[int, Runs],
        joining: Items[OneShotItem] = (),
    ) -> ForwardBatch:
        """The plan's rows end to end. `guesses`: the runs of each sequence that has any. `joining`: requests that keep
        nothing, whose rows come last."""
        parts = []
        for item in plan.items:
            if item.follows is not None:
                known = (-1 - item.follows,)
            else:
                known = running[item.seq_id].token_ids[item.start : item.start + item.num_tokens]
            if not item.num_guesses:
                parts.append(SequenceRows(known, item.start, self._array(item, item.block_table), item.logit_rows))
                continue
            for rows in rows_of(item, guesses.get(item.seq_id, _NO_GUESSES)):
                table = self._array(item, rows.block_table)
                parts.append(SequenceRows([*known, *rows.guesses], item.start, table, rows.logit_rows))
        parts += [answers.rows_of(one) for one in joining]
        return flat_batch(parts, self.block_size)

    def _array(self, item: PlanItem, block_table: tuple[int, ...]) -> np.ndarray | tuple[int, ...]:
        if block_table is not item.block_table:
            return block_table  # a fork's, which lasts for one step
        known = self._tables.get(item.seq_id)
        if known is None or known[0] is not block_table:
            known = self._tables[item.seq_id] = block_table, np.array(block_table, np.int32)
        return known[1]
