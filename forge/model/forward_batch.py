"""One forward's input: every row of every sequence in the step, flattened (the field's "varlen" form).

A prefill, a chunk of a prefill, a decode and a verification of K draft tokens are the same thing here, with other
numbers: rows of one sequence that start at some position. Nothing is padded: rows of all sequences lie end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class ForwardBatch:
    """T rows of S sequences (a fork is one more), R of which need logits. All arrays are int32 and C-contiguous."""

    token_ids: np.ndarray
    """`[T]` the token of each row. Below 0, for models that run ahead (`Model.runs_ahead`): the token of row
    `-1 - token_ids[t]` of the forward before this one on the same storage, whether or not the host has read it: the
    argmax of that row's logits, or what `DeviceLogits.sample` chose."""
    positions: np.ndarray
    """`[T]` the absolute position of each row in its own sequence, counted from 0."""
    cu_seqlens: np.ndarray
    """`[S + 1]` where each sequence's rows start: sequence s owns rows `cu_seqlens[s]` up to `cu_seqlens[s + 1]`."""
    slot_mapping: np.ndarray
    """`[T]` where each row's key and value are written: `block * block_size + offset`, or below 0 for "nowhere"."""
    block_tables: np.ndarray
    """`[S, max_blocks]` the blocks that hold positions 0, block_size, 2 * block_size, … of each sequence, then -1."""
    context_lens: np.ndarray
    """`[S]` keys that exist for each sequence once this step's rows are written: its last position + 1."""
    logit_rows: np.ndarray
    """`[R]` the rows, ascending, for which logits are wanted."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


class SequenceRows(NamedTuple):
    """Consecutive rows of one sequence, for `flat_batch`."""

    token_ids: Sequence[int]
    """The tokens of these rows alone."""
    start: int
    """The position of the first."""
    block_table: Sequence[int] | np.ndarray
    """The blocks of positions 0 to that of the last row, at least."""
    logit_rows: range
    """The rows that need logits, counted from 0."""


def flat_batch(parts: Sequence[SequenceRows], block_size: int) -> ForwardBatch:
    """Build a batch of the rows of all parts end to end."""
    tables = np.full((len(parts), max([len(part.block_table) for part in parts])), -1, np.int32)
    token_ids: list[int] = []
    starts: list[int] = []
    logit_rows: list[int] = []
    ends = [0]
    for table, (tokens, start, block_table, rows) in zip(tables, parts, strict=True):
        table[: len(block_table)] = block_table
        first_row = ends[-1]
        token_ids += tokens
        starts.append(start)
        logit_rows += range(first_row + rows.start, first_row + rows.stop)
        ends.append(len(token_ids))
    cu_seqlens, first_positions = np.array(ends, np.int32), np.array(starts, np.int32)
    num_rows = np.diff(cu_seqlens)
    owners = np.repeat(np.arange(len(parts)), num_rows)
    positions = np.arange(len(token_ids), dtype=np.int32) + (first_positions - cu_seqlens[:-1])[owners]
    return ForwardBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        cu_seqlens=cu_seqlens,
        slot_mapping=tables[owners, positions // block_size] * block_size + positions % block_size,
        block_tables=tables,
        context_lens=first_positions + num_rows,
        logit_rows=np.array(logit_rows, np.int32),
    )
