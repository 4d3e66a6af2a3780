"""Exercise 2: causal attention in NumPy, held against the reference backend's own; then the bundled model with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from forge.backends.reference import ReferenceOperations, _attend
from forge.cache.kv_storage import NumpyKvStorage
from forge.exercises.exercise import Costs, Exercise, Part, Trial, words_of
from forge.model.forward_batch import ForwardBatch


class AttentionTrial(Trial):
    """Compares the reader's attention with the reference, at every position."""

    def __init__(self, piece: ModuleType):
        super().__init__(piece, "import numpy as np; random = np.random.default_rng(0).standard_normal")
        self.random = np.random.default_rng(0)

    def arrays(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(np.float32)

    def head(self, rule: str, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        shown = (
            f"random({array.shape})" if array.size > 8 else f"np.array({array.tolist()})" for array in (q, keys, values)
        )
        output = self.call_anew(f"piece.attend({', '.join(shown)})", self.piece.attend, q, keys, values)
        expected = _attend(q[None], keys[:, None], values[:, None])[0]
        self._same(rule, output, expected)

    def rows(self, rule: str, heads: int, kv_heads: int, positions: list[int], further: int = 2) -> None:
        """Check rows at these positions. further: number of keys behind the last position."""
        n, dim = max(positions) + 1 + further, 8
        shapes = ((len(positions), heads, dim), (n, kv_heads, dim), (n, kv_heads, dim))
        q, keys, values = (self.arrays(*shape) for shape in shapes)
        line = f"piece.attention({', '.join(f'random({shape})' for shape in shapes)}, np.array({positions}))"
        output = self.call_anew(line, self.piece.attention, q, keys, values, np.array(positions))
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
            is_right = np.allclose(mistaken, expected, atol=1e-4)
            self.require(is_right or not is_mistaken, mistake, f"each row sees {visible}")
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
def engine(piece: ModuleType) -> Iterator[None]:
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
        yield


def _cost(piece: ModuleType | None, length: int) -> Callable[[], object]:
    random = np.random.default_rng(0)
    q, keys, values = (random.standard_normal((n, h, 64), np.float32) for n, h in ((8, 8), (length, 4), (length, 4)))
    positions = np.arange(length - 8, length)
    if piece is None:
        return partial(_all_rows, q, keys, values, (positions + 1).tolist())
    return partial(piece.attention, q, keys, values, positions)


EXERCISE = Exercise(
    **words_of("attention"),
    parts=(Part(("attend",), _check_attend), Part(("attention",), _check_attention)),
    costs=Costs("8 rows at a context of {:,}", (64, 256, 1024), _cost),
    engine=engine,
    options={"kv": "paged", "device": "reference"},
    params=({"max_tokens": 24, "ignore_eos": True},),
)
