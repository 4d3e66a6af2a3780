"""The seam between the model and a device: the operations of the forward pass on arrays of that device.

`Qwen3.forward` is written once against this class. A backend decides how an array is represented, how a weight is laid
out, and how an operation is computed; it never decides *what* is computed. `reference` is the plain meaning of every
operation, one row at a time, and is what the others are tested against.

Arrays pass through the model untouched, so a backend may use any type for them; the shapes below are what they stand
for. T is the number of rows in the batch and R the number of rows that need logits.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage
from forge.model.forward_batch import ForwardBatch

Array = Any
"""An array of the backend's own kind."""


class Tensor(Protocol):
    """A named weight as a `WeightSource` offers it, before any backend has seen it."""

    name: str
    shape: tuple[int, ...]

    def dequantize(self) -> np.ndarray:
        """Its values as float32 of `shape`."""
        ...


class Backend(ABC):
    """The model's operations on one device."""

    name: str
    """What `--device` calls it."""
    description: str
    """What a person is told about it: the instruction set and thread count, say."""

    # Loading

    @abstractmethod
    def load_matrix(self, tensor: Tensor) -> Array:
        """A weight matrix `[rows, columns]` in the layout in which this backend multiplies."""

    @abstractmethod
    def load_vector(self, tensor: Tensor) -> Array:
        """A norm's weight `[n]` in float32."""

    @abstractmethod
    def new_storage(self, layout: KvLayout) -> KvStorage:
        """Arrays for keys and values, all zero."""

    # The forward pass

    def begin_layer(self, index: int) -> None:  # noqa: B027 (optional: only who keeps time per layer cares)
        """Called before the operations of layer `index`, and with -1 before those after the last layer."""

    @abstractmethod
    def embed(self, table: Array, token_ids: np.ndarray) -> Array:
        """Rows of the embedding table: `[T, hidden]`."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x²) + eps) * weight over the last axis: `[T, n]` → `[T, n]` (Zhang and Sennrich 2019)."""

    @abstractmethod
    def linear(self, x: Array, matrix: Array) -> Array:
        """x · matrixᵀ: `[T, columns]` → `[T, rows]`. No bias; Qwen3 has none."""

    @abstractmethod
    def head_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm of each head by itself: `[T, heads * head_dim]` with a weight `[head_dim]`."""

    @abstractmethod
    def rope(self, x: Array, positions: np.ndarray, head_dim: int, theta: float) -> Array:
        """Rotary position embedding, element i of a head paired with i + head_dim / 2 (Su et al. 2021).

        The pair turns by `position * theta ** (-2 i / head_dim)`. `[T, heads * head_dim]` → the same shape.
        """

    @abstractmethod
    def write_kv(self, storage: KvStorage, layer: int, batch: ForwardBatch, keys: Array, values: Array) -> None:
        """Store each row's key and value `[T, kv_heads * head_dim]` in its slot, rounded to the storage's dtype."""

    @abstractmethod
    def attention(self, q: Array, storage: KvStorage, layer: int, batch: ForwardBatch) -> Array:
        """Grouped-query causal attention over the stored keys: `[T, heads * head_dim]` → the same shape.

        A row at position p attends to positions 0 to p of its own sequence, read through its block table. Query head
        h reads key/value head `h // (heads / kv_heads)` (Ainslie et al. 2023).
        """

    @abstractmethod
    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up, silu(g) = g / (1 + exp(-g)): `[T, ffn]` → `[T, ffn]` (Shazeer 2020)."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """The residual connection: x + y."""

    @abstractmethod
    def take_rows(self, x: Array, rows: np.ndarray) -> Array:
        """The rows that go on: `[T, hidden]` → `[R, hidden]`."""

    @abstractmethod
    def to_numpy(self, x: Array) -> np.ndarray:
        """The result on the host, float32."""
