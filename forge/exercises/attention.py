"""Exercise 2: causal attention in NumPy, held against the reference backend's own; then the bundled model with it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.backends.reference import ReferenceOperations, _attend
from forge.cache.kv_storage import NumpyKvStorage
from forge.exercises.exercise import Cost, Exercise, Part, Rule, Trial
from forge.model.forward_batch import ForwardBatch

RULES = {
    "shape": Rule("The result has the shape of q.", "Which axis is summed over?"),
    "weights": Rule(
        "The weights of the values sum to 1: a softmax over the positions.", "Over which axis do the weights sum to 1?"
    ),
    "scaled": Rule("Scores are q · k / sqrt(head_dim).", "By what is a score divided, for vectors of 16 numbers?"),
    "overflow": Rule(
        "Large scores give no NaN and no infinity.",
        "What can be taken away from all scores without changing a softmax?",
    ),
    "head": Rule("One head's result is the weighted sum of the values.", "What is weighted: keys, or values?"),
    "future": Rule("A row sees nothing behind its own position.", "Which keys does the row at position p see?"),
    "itself": Rule("A row sees its own position.", "Is position p itself among the keys that row p sees?"),
    "chunk": Rule(
        "A row's position in the text decides what it sees, not its place in the chunk.",
        "What does the first row of a chunk see, if the chunk begins at position 5?",
    ),
    "groups": Rule(
        "Neighbouring query heads share a key/value head.", "Which key/value head do query heads 0 and 1 of 4 read?"
    ),
    "dtype": Rule("The result is float32, as the arguments are.", "Which number makes float64 of it?"),
}


class AttentionTrial(Trial):
    """Compares the reader's attention with the reference, at every position."""

    def __init__(self, piece: ModuleType):
        super().__init__(piece, "import numpy as np; random = np.random.default_rng(0).standard_normal")
        self.piece = piece
        self.setup = len(self.calls)
        self.random = np.random.default_rng(0)

    def arrays(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(np.float32)

    def head(self, rule: str, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        del self.calls[self.setup :]
        shown = (
            f"random({array.shape})" if array.size > 8 else f"np.array({array.tolist()})" for array in (q, keys, values)
        )
        output = self.call(f"piece.attend({', '.join(shown)})", self.piece.attend, q, keys, values)
        expected = _attend(q[None], keys[:, None], values[:, None])[0]
        self._same(rule, output, expected)

    def rows(self, rule: str, heads: int, kv_heads: int, positions: list[int], further: int = 2) -> None:
        """Check rows at these positions. further: number of keys behind the last position."""
        del self.calls[self.setup :]
        n, dim = max(positions) + 1 + further, 8
        q, keys, values = (
            self.arrays(len(positions), heads, dim),
            self.arrays(n, kv_heads, dim),
            self.arrays(n, kv_heads, dim),
        )
        shapes = ", ".join(f"random({array.shape})" for array in (q, keys, values))
        line = f"piece.attention({shapes}, np.array({positions}))"
        output = self.call(line, self.piece.attention, q, keys, values, np.array(positions))
        expected = _all_rows(q, keys, values, [position + 1 for position in positions])
        seen_instead = {
            "all positions": ("future", [n] * len(positions)),
            "one position too many": ("future", [position + 2 for position in positions]),
            "one position too few": ("itself", [max(1, position) for position in positions]),
            "as many positions as its place in the chunk says": ("chunk", [row + 1 for row in range(len(positions))]),
        }
        for visible, (mistake, seen) in seen_instead.items():
            if max(seen) > n:
                continue
            mistaken = _all_rows(q, keys, values, seen)
            is_mistaken = np.shape(output) == q.shape and np.allclose(output, mistaken, atol=1e-4)
            self.require(
                np.allclose(mistaken, expected, atol=1e-4) or not is_mistaken, mistake, f"each row sees {visible}"
            )
        self._same(rule, output, expected)

    def _same(self, rule: str, output: Any, expected: np.ndarray) -> None:
        shape = getattr(output, "shape", None)
        self.require(shape == expected.shape, "shape", f"its shape is {shape}, and should be {expected.shape}")
        self.require(output.dtype == np.float32, "dtype", f"its dtype is {output.dtype}")
        self.require(np.isfinite(output).all(), "overflow", "it holds NaN or infinity")
        close = np.allclose(output, expected, rtol=1e-3, atol=1e-4)
        most = float(np.abs(np.asarray(output, np.float64) - expected).max())
        self.require(close, rule, f"it differs from the reference by up to {most:.3g}")


def _all_rows(q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: list[int]) -> np.ndarray:
    """Compute the reference's attention, row r over the first `seen[r]` positions."""
    return np.array([_attend(row, keys[:number], values[:number]) for row, number in zip(q, seen, strict=True)])


def _check_attend(piece: ModuleType) -> None:
    trial = AttentionTrial(piece)
    query, two = np.array([1.0, 0.0], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    same_values = np.ones((2, 2), np.float32)
    trial.head("head", query, two[:1], two[1:])
    trial.head("weights", query, two, same_values)
    trial.head("scaled", trial.arrays(16), trial.arrays(5, 16), trial.arrays(5, 16))
    trial.head("scaled", trial.arrays(3), trial.arrays(16, 3), trial.arrays(16, 3))
    for number, large in ((5, 100), (2, 1000), (9, -300)):
        trial.head("overflow", large * trial.arrays(16), 100 * trial.arrays(number, 16), trial.arrays(number, 16))


def _check_attention(piece: ModuleType) -> None:
    trial = AttentionTrial(piece)
    trial.rows("future", 1, 1, [0, 1, 2, 3])
    trial.rows("chunk", 1, 1, [5, 6, 7])
    trial.rows("chunk", 2, 1, [9, 2, 4])
    trial.rows("chunk", 1, 1, [4, 4, 0], further=0)
    trial.rows("groups", 4, 2, [0, 1, 2])
    trial.rows("groups", 6, 2, [7])
    trial.rows("groups", 6, 3, [3, 4], further=0)
    trial.rows("groups", 3, 3, [2, 3])
    trial.rows("groups", 8, 1, [1], further=5)


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    def attention(
        operations: ReferenceOperations, q: np.ndarray, storage: NumpyKvStorage, layer: int, batch: ForwardBatch
    ) -> np.ndarray:
        out = np.empty_like(q)
        for sequence in range(batch.num_sequences):
            rows = slice(batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1])
            keys, values = storage.gather(layer, batch.block_tables[sequence], int(batch.context_lens[sequence]))
            heads = q[rows].reshape(rows.stop - rows.start, -1, storage.layout.head_dim)
            output = np.asarray(piece.attention(heads, keys, values, batch.positions[rows]))
            out[rows] = output.reshape(rows.stop - rows.start, -1)
        return out

    with patch.object(ReferenceOperations, "attention", attention):
        yield _OPTIONS


def _costs(piece: ModuleType) -> list[Cost]:
    costs = []
    for length in (64, 256, 1024):
        random = np.random.default_rng(0)
        q, keys, values = (
            random.standard_normal((n, h, 64), np.float32) for n, h in ((8, 8), (length, 4), (length, 4))
        )
        positions = np.arange(length - 8, length)
        seen = (positions + 1).tolist()
        yours = partial(piece.attention, q, keys, values, positions)
        costs.append(Cost(f"8 rows at a context of {length:,}", yours, partial(_all_rows, q, keys, values, seen)))
    return costs


_OPTIONS = {"kv": "paged", "device": "reference"}

EXERCISE = Exercise(
    parts=(Part(("attend",), _check_attend), Part(("attention",), _check_attention)),
    rules=RULES,
    hints=(
        "attend is four lines: scores, exponentials, their sum, the weighted sum. keys @ q has a score per position.",
        "exp overflows above 88 in float32. Take the largest score away first: a softmax does not change.",
        "attention: for each row, cut keys and values after its position; for each head, choose the key/value head.",
        "With heads // kv_heads query heads to a group, query head h reads key/value head h // group.",
    ),
    solution=("forge.backends.reference._attend", "forge.backends.reference.ReferenceOperations.attention"),
    differs="The engine's own takes all query heads that share a key/value head at once, so each key is read once for "
    "the group. It is the reference; the CPU's kernel also goes over the keys in chunks of 64 and merges them, and "
    "never holds a whole row of scores.",
    next_question="A decode step has one row. How many bytes of keys and values does it read, and how many does a "
    "prefill of 512 rows read for each row?",
    costs=_costs,
    engine=engine,
    reference=_OPTIONS,
    params=({"max_tokens": 24, "ignore_eos": True},),
)
