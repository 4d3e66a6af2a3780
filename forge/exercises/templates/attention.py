"""Exercise 2: causal attention over given keys and values.

Read chapter 1 first (forge naive), and the part of chapter 3 on attention. A row's query is compared with the key of
each position that it may see: its own, and all before it. The softmax of that weighs the values.

    out = softmax(q · Kᵀ / sqrt(head_dim)) · V

Several query heads share one key/value head (grouped-query attention): with 4 query heads and 2 of keys and values,
query heads 0 and 1 read key/value head 0, query heads 2 and 3 read head 1.

Fill in the two functions. Both return arrays of float32 and change no argument. Then:

    forge build check 2      every position, against the reference
    forge build run 2        the bundled model with your attention, slowly
"""

import numpy as np


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attend with one query head of one row. Returns float32 `[head_dim]`.

    q: `[head_dim]`. keys, values: `[n, head_dim]`, the positions that the row may see. Scores may be large: exp of the
    largest must not overflow.
    """
    raise NotImplementedError("attend")


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Attend with all rows and heads of one sequence. Returns float32 `[rows, heads, head_dim]`.

    q: `[rows, heads, head_dim]`. keys, values: `[n, kv_heads, head_dim]`, of positions 0 to n - 1. positions: `[rows]`,
    where each row stands in the text, in any order: a chunk of a prompt begins anywhere. Row r may see the keys 0 to
    positions[r], and there may be keys behind them. kv_heads divides heads.
    """
    raise NotImplementedError("attention")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
