"""From a plan and the guesses in it to one flat batch: which row is whose, and where its logits are.

An item's rows are its known tokens and behind them the guesses of one run. Each further run has rows of its own, which
begin with the known tokens again, because a fork's blocks hold nothing of this step yet. Guesses that nobody made have
no rows, whatever the plan had room for.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem, StepPlan
from forge.model.forward_batch import ForwardBatch
from forge.speculation.proposer import NO_PROPOSAL, Proposal

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

    def batch(self, plan: StepPlan, running: Mapping[int, Sequence], guesses: Mapping[int, Runs]) -> ForwardBatch:
        """The plan's rows end to end. `guesses`: the runs of each sequence that has any."""
        block_size = self.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        logit_rows: list[int] = []
        cu_seqlens = [0]
        parts = [(item, rows) for item in plan.items for rows in rows_of(item, guesses.get(item.seq_id, _NO_GUESSES))]
        tables = np.full((len(parts), max([len(rows.block_table) for _, rows in parts])), -1, np.int32)
        for table, (item, rows) in zip(tables, parts, strict=True):
            start, first_row, block_table, guessed = item.start, len(token_ids), rows.block_table, rows.guesses
            end = start + item.num_tokens
            table[: len(block_table)] = self._array(item, block_table)
            known = running[item.seq_id].token_ids
            if item.num_tokens == 1 and not guessed:
                token_ids.append(known[start])
                positions.append(start)
                slots.append(block_table[start // block_size] * block_size + start % block_size)
            else:
                token_ids += known[start:end]
                token_ids += guessed
                end += len(guessed)
                own = np.arange(start, end)
                positions += own.tolist()
                slots += (table[own // block_size] * block_size + own % block_size).tolist()
            logit_rows += [first_row + row for row in rows.logit_rows]
            cu_seqlens.append(len(token_ids))
            context_lens.append(end)
        return ForwardBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            cu_seqlens=np.array(cu_seqlens, np.int32),
            slot_mapping=np.array(slots, np.int32),
            block_tables=tables,
            context_lens=np.array(context_lens, np.int32),
            logit_rows=np.array(logit_rows, np.int32),
        )

    def _array(self, item: PlanItem, block_table: tuple[int, ...]) -> np.ndarray | tuple[int, ...]:
        if block_table is not item.block_table:
            return block_table  # a fork's, which lasts for one step
        known = self._tables.get(item.seq_id)
        if known is None or known[0] is not block_table:
            known = self._tables[item.seq_id] = block_table, np.array(block_table, np.int32)
        return known[1]
