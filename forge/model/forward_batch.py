"""One forward's input: every row of every sequence in the step, flattened (the field's "varlen" form).

A prefill, a chunk of a prefill, a decode and a verification of K guesses are the same thing here with other numbers:
a run of rows of one sequence that starts at some position. Nothing is padded: rows of all sequences lie end to end.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ForwardBatch:
    """T rows of S sequences, R of which need logits. All arrays are int32 and C-contiguous."""

    token_ids: np.ndarray
    """`[T]` the token of each row."""
    positions: np.ndarray
    """`[T]` the absolute position of each row in its own sequence, counted from 0."""
    cu_seqlens: np.ndarray
    """`[S + 1]` where each sequence's rows start: sequence s owns rows `cu_seqlens[s]` up to `cu_seqlens[s + 1]`."""
    slot_mapping: np.ndarray
    """`[T]` where each row's key and value are written: `block * block_size + offset`, or -1 for "nowhere"."""
    block_tables: np.ndarray
    """`[S, max_blocks]` the blocks that hold positions 0, block_size, 2 * block_size, … of each sequence."""
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
