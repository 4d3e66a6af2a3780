"""Exercise 2: causal attention in NumPy, held against the reference backend's own; then the bundled model with it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.backends.reference import ReferenceOperations, _attend
from forge.cache.kv_storage import NumpyKvStorage
from forge.exercises.exercise import Exercise, Rule, Trial
from forge.model.forward_batch import ForwardBatch

RULES = {
    "shape": Rule("The result has the shape and the dtype of q.", "Which axis is summed over?"),
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
    "unchanged": Rule("Keys and values are read and not changed.", "Which line writes into its argument?"),
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
        shown = (f"random({one.shape})" if one.size > 8 else f"np.array({one.tolist()})" for one in (q, keys, values))
        found = self.call(f"piece.attend({', '.join(shown)})", self.piece.attend, q, keys, values)
        expected = _attend(q[None], keys[:, None], values[:, None])[0]
        self._same(rule, found, expected)

    def rows(self, rule: str, heads: int, kv_heads: int, positions: list[int]) -> None:
        del self.calls[self.setup :]
        n, dim = max(positions) + 3, 8
        q, keys, values = (
            self.arrays(len(positions), heads, dim),
            self.arrays(n, kv_heads, dim),
            self.arrays(n, kv_heads, dim),
        )
        given = keys.copy(), values.copy()
        shapes = ", ".join(f"random({one.shape})" for one in (q, keys, values))
        line = f"piece.attention({shapes}, np.array({positions}))"
        found = self.call(line, self.piece.attention, q, keys, values, np.array(positions))
        same = all((one == other).all() for one, other in zip(given, (keys, values), strict=True))
        self.require(same, "unchanged", "keys or values are others now")
        expected = _all_rows(q, keys, values, [position + 1 for position in positions])
        seen_instead = {
            "all positions": ("future", [n] * len(positions)),
            "one position too many": ("future", [position + 2 for position in positions]),
            "one position too few": ("itself", [max(1, position) for position in positions]),
            "as many positions as its place in the chunk says": ("chunk", [row + 1 for row in range(len(positions))]),
        }
        for what, (mistake, seen) in seen_instead.items():
            other = _all_rows(q, keys, values, seen)
            is_other = np.shape(found) == q.shape and np.allclose(found, other, atol=1e-4)
            self.require(np.allclose(other, expected, atol=1e-4) or not is_other, mistake, f"each row sees {what}")
        self._same(rule, found, expected)

    def _same(self, rule: str, found: Any, expected: np.ndarray) -> None:
        self.require(
            getattr(found, "shape", None) == expected.shape, "shape", f"its shape is {getattr(found, 'shape', None)}"
        )
        self.require(np.isfinite(found).all(), "overflow", "it holds NaN or infinity")
        close = np.allclose(found, expected, rtol=1e-3, atol=1e-4)
        most = float(np.abs(np.asarray(found, np.float64) - expected).max())
        self.require(close, rule, f"it differs from the reference by up to {most:.3g}")


def _all_rows(q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: list[int]) -> np.ndarray:
    """The reference's result where each row sees so many positions."""
    return np.array([_attend(row, keys[:number], values[:number]) for row, number in zip(q, seen, strict=True)])


def check(piece: ModuleType) -> None:
    trial = AttentionTrial(piece)
    one, two = np.array([1.0, 0.0], np.float32), np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    ones = np.ones((2, 2), np.float32)
    trial.head("head", one, two[:1], two[1:])
    trial.head("weights", one, two, ones)
    trial.head("scaled", trial.arrays(16), trial.arrays(5, 16), trial.arrays(5, 16))
    trial.head("overflow", 100 * trial.arrays(16), 100 * trial.arrays(5, 16), trial.arrays(5, 16))
    trial.rows("future", 1, 1, [0, 1, 2, 3])
    trial.rows("chunk", 1, 1, [5, 6, 7])
    trial.rows("groups", 4, 2, [0, 1, 2])
    trial.rows("groups", 6, 2, [7])


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
            out[rows] = piece.attention(heads, keys, values, batch.positions[rows]).reshape(rows.stop - rows.start, -1)
        return out

    with patch.object(ReferenceOperations, "attention", attention):
        yield _OPTIONS


_OPTIONS = {"kv": "paged", "device": "reference"}

EXERCISE = Exercise(
    names=("attend", "attention"),
    rules=RULES,
    hints=(
        "attend is four lines: scores, exponentials, their sum, the weighted sum. keys @ q has a score per position.",
        "exp overflows above 88 in float32. Take the largest score away first: a softmax does not change.",
        "attention: for each row, cut keys and values after its position; for each head, choose the key/value head.",
        "With heads // kv_heads query heads to a group, query head h reads key/value head h // group.",
    ),
    solution=("forge.backends.reference._attend", "forge.backends.reference.ReferenceOperations.attention"),
    check=check,
    engine=engine,
    own=_OPTIONS,
    params={"max_tokens": 24, "ignore_eos": True},
)
