"""The forward pass in plain NumPy, one row at a time: the meaning that every faster backend must reproduce.

To learn what a layer computes, read this file beside `forge/model/qwen3.py` and run it (`--device reference`):
`Qwen3.forward_pass` calls the operations in order, and each is computed here in a few lines. How `--device cpu` does
the same faster is in `chapters/reference/cpu.md`. `forge kernels --layer` shows one layer as both run it.

It keeps promise 2 (a technique changes the cost, never the
tokens) in the simplest possible way: whatever else is in the batch, a row is computed alone, from arrays of the same
shapes. NumPy's matrix-matrix product would not do: it gives a row other bits when other rows lie beside it, and its
exponential, sine and cosine may treat an array's tail differently from its body. So there is a loop over rows wherever
one of them is used.

Weights are dequantized to float32 when they are loaded. A decode step therefore reads four bytes per weight, which is
what bounds it (see the chapter on kernels for what to do about that).
"""

import numpy as np

from forge.backends.timed import TimedNumpyOperations
from forge.cache.kv_storage import KvLayout, NumpyKvStorage, rounded
from forge.model.backend import Backend, ForwardPass, Operations, Tensor
from forge.model.forward_batch import ForwardBatch
from forge.model.operation_time import OperationTime
from forge.model.rope import Rope


class ReferenceBackend(Backend):
    """Runs a model in plain NumPy, one row at a time: the oracle for the other backends."""

    name = "reference"
    description = "NumPy float32, one row at a time"

    def __init__(self):
        self._operations: Operations = ReferenceOperations()
        self._matrix_names: dict[int, str] = {}

    def load_matrix(self, tensor: Tensor) -> np.ndarray:
        matrix = np.ascontiguousarray(tensor.dequantize(), np.float32)
        self._matrix_names[id(matrix)] = tensor.name
        return matrix

    def load_experts(self, tensor: Tensor) -> np.ndarray:
        return np.ascontiguousarray(tensor.dequantize(), np.float32)

    def load_vector(self, tensor: Tensor) -> np.ndarray:
        return np.ascontiguousarray(tensor.dequantize(), np.float32)

    def new_storage(self, layout: KvLayout) -> NumpyKvStorage:
        return NumpyKvStorage(layout)

    def run(self, forward_pass: ForwardPass, batch: ForwardBatch, storage: NumpyKvStorage) -> np.ndarray:
        return forward_pass(self._operations, batch, storage)

    def time_operations(self) -> None:
        self._operations = TimedNumpyOperations(ReferenceOperations(), self._matrix_names)

    def operation_times(self) -> tuple[OperationTime, ...]:
        return self._operations.clock.times() if isinstance(self._operations, TimedNumpyOperations) else ()


class ReferenceOperations(Operations):
    """Computes every operation at once, on NumPy arrays."""

    def embed(self, table: np.ndarray, batch: ForwardBatch) -> np.ndarray:
        return table[batch.token_ids]

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(eps)) * weight

    def linear(self, x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), len(matrix)), np.float32)
        for row in range(len(x)):
            np.dot(matrix, x[row], out=out[row])
        return out

    def head_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        heads = x.reshape(len(x), -1, len(weight))
        return self.rms_norm(heads, weight, eps).reshape(x.shape)

    def rope(self, x: np.ndarray, batch: ForwardBatch, rope: Rope) -> np.ndarray:
        frequencies = rope.frequencies()  # float64 [head_dim / 2]
        out = np.empty_like(x)
        for row in range(len(x)):
            angles = batch.positions[row] * frequencies  # float64: position 40,000 keeps its fraction
            cos = (np.cos(angles) * rope.attention_factor).astype(np.float32)
            sin = (np.sin(angles) * rope.attention_factor).astype(np.float32)
            heads = x[row].reshape(-1, rope.head_dim)
            first, second = np.split(heads, 2, axis=1)
            turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
            out[row] = turned.reshape(-1)
        return out

    def write_kv(
        self, storage: NumpyKvStorage, layer: int, batch: ForwardBatch, keys: np.ndarray, values: np.ndarray
    ) -> None:
        layout = storage.layout
        written = batch.slot_mapping >= 0
        slots = batch.slot_mapping[written]
        token_shape = (-1, layout.num_kv_heads, layout.head_dim)
        for array, rows in ((storage.keys, keys), (storage.values, values)):
            # A view of the layer as one long run of token slots: slot = block * block_size + offset.
            array[layer].reshape(token_shape)[slots] = rounded(rows[written].reshape(token_shape), layout.kv_dtype)

    def attention(self, q: np.ndarray, storage: NumpyKvStorage, layer: int, batch: ForwardBatch) -> np.ndarray:
        head_dim = storage.layout.head_dim
        out = np.empty_like(q)
        for sequence in range(batch.num_sequences):
            keys, values = storage.gather(layer, batch.block_tables[sequence], int(batch.context_lens[sequence]))
            for row in range(batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1]):
                visible = int(batch.positions[row]) + 1  # causal: itself and everything before it
                heads = q[row].reshape(-1, head_dim)
                out[row] = _attend(heads, keys[:visible], values[:visible]).reshape(-1)
        return out

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        out = np.empty_like(gate)
        for row in range(len(gate)):
            with np.errstate(over="ignore"):  # exp(-g) is infinite for very negative g, and g / inf is the right 0
                out[row] = gate[row] / (1.0 + np.exp(-gate[row])) * up[row]
        return out

    def experts(
        self,
        x: np.ndarray,
        router: np.ndarray,
        gate: np.ndarray,
        up: np.ndarray,
        down: np.ndarray,
        num_used: int,
        normalize: bool,
    ) -> np.ndarray:
        out = np.zeros_like(x)
        for row in range(len(x)):
            x_row = x[row : row + 1]
            logits = self.linear(x_row, router)[0]
            shares = np.exp(logits - logits.max())
            chosen = np.sort(np.argsort(-logits, kind="stable")[:num_used])  # of equals the lower number
            total = shares[chosen].sum() if normalize else shares.sum()
            for expert in chosen:
                gated = self.swiglu(self.linear(x_row, gate[expert]), self.linear(x_row, up[expert]))
                out[row] += shares[expert] / total * self.linear(gated, down[expert])[0]
        return out

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

    def logit_rows(self, x: np.ndarray, batch: ForwardBatch) -> np.ndarray:
        return x[batch.logit_rows]

    def result(self, x: np.ndarray) -> np.ndarray:
        return x


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return softmax(q · Kᵀ / sqrt(head_dim)) · V for one row.

    q `[heads, head_dim]`; keys and values `[n, kv_heads, head_dim]` → `[heads, head_dim]`.
    """
    num_kv_heads = keys.shape[1]
    groups = q.reshape(num_kv_heads, -1, q.shape[-1])  # the query heads that read each key/value head
    out = np.empty_like(groups)
    for kv_head in range(num_kv_heads):
        out[kv_head] = attention_weights(groups[kv_head], keys[:, kv_head]) @ values[:, kv_head]
    return out.reshape(q.shape)


def attention_weights(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return softmax(q · Kᵀ / sqrt(head_dim)): what the query heads of one row take of each token.

    q `[group, head_dim]`; keys `[n, head_dim]` of the KV head that they share → `[group, n]`.
    """
    scores = q @ keys.T * np.float32(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # minus the maximum: no overflow
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
