"""The interface between the model and a device, in two halves: `forge.backends` implements it.

`Operations` are the steps of a forward pass on arrays of one device. `Qwen3.forward_pass` is written once against them.
Arrays pass through the model untouched, so a device may use any type for them; the shapes below are what they stand
for. T is the number of rows in the batch and R the number of rows that need logits.

`Backend` loads weights, makes storage, and *runs* a forward pass. How is its own business: `reference` calls it with
operations that compute at once; `cpu` calls it once with operations that only write down what is to be done, and from
then on runs what was written down. A backend decides how an array is represented, how a weight is laid out and how an
operation is computed; it never decides what is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage
from forge.errors import UsageError
from forge.gguf import GGMLType
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Logits
from forge.model.operation_time import OperationTime
from forge.model.rope import Rope

NO_EXPERTS = "this device runs no mixture of experts: use --device cpu"

Array = Any
"""An array of the backend's own kind."""
Batch = Any
"""A `ForwardBatch`, or what the backend made of it for its operations."""
Storage = Any
"""A `KvStorage` that the same backend made."""


class Tensor(Protocol):
    """A named weight as a file offers it, before any backend has seen it."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ggml_type(self) -> GGMLType: ...

    def raw(self) -> np.ndarray:
        """Return its bytes, uint8, in the layout of its type."""

    def dequantize(self) -> np.ndarray:
        """Return its values as float32 of `shape`."""


class Operations(ABC):
    """The steps of a forward pass."""

    def begin_layer(self, index: int) -> None:  # noqa: B027 (optional: only who keeps time per layer cares)
        """Note that the operations of layer `index` begin; -1 for those before the first layer and after the last."""

    @abstractmethod
    def embed(self, table: Array, batch: Batch) -> Array:
        """Look up the rows of the embedding table that the batch's tokens name: `[T, hidden]`."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Compute x / sqrt(mean(x²) + eps) * weight over the last axis: `[T, n]` → `[T, n]` (Zhang and Sennrich
        2019)."""

    @abstractmethod
    def linear(self, x: Array, matrix: Array) -> Array:
        """Compute x · matrixᵀ: `[T, columns]` → `[T, rows]`. No bias; Qwen3 has none."""

    @abstractmethod
    def head_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Apply RMSNorm to each head by itself: `[T, heads * head_dim]` with a weight `[head_dim]`."""

    @abstractmethod
    def rope(self, x: Array, batch: Batch, rope: Rope) -> Array:
        """Apply rotary position embedding, element i of a head paired with i + head_dim / 2 (Su et al. 2021).

        The pair turns by `position * rope.frequencies()[i]`. `[T, heads * head_dim]` → the same shape.
        """

    @abstractmethod
    def write_kv(self, storage: Storage, layer: int, batch: Batch, keys: Array, values: Array) -> None:
        """Store each row's key and value `[T, kv_heads * head_dim]` in its slot, rounded to the storage's dtype."""

    @abstractmethod
    def attention(self, q: Array, storage: Storage, layer: int, batch: Batch) -> Array:
        """Compute grouped-query causal attention over the stored keys: `[T, heads * head_dim]` → the same shape.

        A row at position p attends to positions 0 to p of its own sequence, read through its block table. Query head h
        reads key/value head `h // (heads / kv_heads)` (Ainslie et al. 2023).
        """

    @abstractmethod
    def swiglu(self, gate: Array, up: Array) -> Array:
        """Compute silu(gate) * up, silu(g) = g / (1 + exp(-g)): `[T, ffn]` → `[T, ffn]` (Shazeer 2020)."""

    def experts(
        self, x: Array, router: Array, gate: Array, up: Array, down: Array, num_used: int, normalize: bool
    ) -> Array:
        """Compute a routed feed-forward: `[T, hidden]` → `[T, hidden]`, the weighted sum of the `num_used` experts that
        the router (`[experts, hidden]`) gives the largest logits, each down · (silu(gate · x) * (up · x)).

        The weights are the softmax over all experts, made to sum to 1 over the chosen ones if `normalize`. Experts are
        added in ascending order. (Shazeer et al. 2017)
        """
        raise UsageError(NO_EXPERTS)

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """Add the residual connection: x + y."""

    @abstractmethod
    def logit_rows(self, x: Array, batch: Batch) -> Array:
        """Select the rows that need logits: `[T, hidden]` → `[R, hidden]`."""

    @abstractmethod
    def result(self, x: Array) -> Array:
        """Note that the pass ends in x. Operations that compute at once return it on the host, float32."""


ForwardPass = Callable[[Operations, Batch, Storage], Array]
"""Calls operations in order and returns what `Operations.result` gave."""


class Backend(ABC):
    """One device: weights, storage, and a way to run the forward pass."""

    name: str
    """Its name for `--device`."""
    default_kv_dtype: str = "float32"
    """The dtype of keys and values by default."""
    runs_ahead: bool = False
    """Whether `run` returns before it has computed, and takes input tokens from the run before (`ForwardBatch`)."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A short description for people, such as the instruction set and the number of threads."""

    # Loading

    def loading(self, path: Path | None, nbytes: int) -> AbstractContextManager[object]:
        """Return a context for loading the model at `path`, whose tensors have `nbytes` bytes. path: None for a model
        in memory."""
        return nullcontext()

    @abstractmethod
    def load_matrix(self, tensor: Tensor) -> Array:
        """Load a weight matrix `[rows, columns]` in the layout in which this backend multiplies."""

    def load_experts(self, tensor: Tensor) -> Array:
        """Load the matrices `[experts, rows, columns]` of all experts."""
        raise UsageError(NO_EXPERTS)

    @abstractmethod
    def load_vector(self, tensor: Tensor) -> Array:
        """Load a norm's weight `[n]` in float32."""

    @abstractmethod
    def new_storage(self, layout: KvLayout) -> KvStorage:
        """Create arrays for keys and values, all zero. Raises `MemoryError` if there is no room."""

    # Running

    def prepare(self, forward_pass: "ForwardPass", layout: KvLayout) -> None:  # noqa: B027 (optional)
        """Do now what the first `run` would otherwise do before it computes, such as compiling."""

    @abstractmethod
    def run(self, forward_pass: "ForwardPass", batch: ForwardBatch, storage: Storage) -> Logits:
        """Run one forward pass; return its logits on the host, float32 `[R, vocab_size]`, the caller's to keep.

        A `forward_pass` must call the same operations whatever the batch. One that ends otherwise than in logits, as
        for embeddings, gives what it ends in for the same rows.
        """

    @abstractmethod
    def time_operations(self) -> None:
        """Measure time per layer and operation from now on. Costs time itself, and changes no result."""

    @abstractmethod
    def operation_times(self) -> tuple[OperationTime, ...]:
        """Return the times measured so far, one for each place in a layer, in the order in which the operations first
        ran."""
