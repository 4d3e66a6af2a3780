"""What the engine needs of a model. Two kinds are in forge: `Qwen3`, and `HashModel`, which has no weights."""

from typing import Protocol

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage, NumpyKvStorage
from forge.errors import ForgeError, UsageError
from forge.model.backend import OperationTime
from forge.model.forward_batch import ForwardBatch
from forge.model.logits import Logits


class ModelUnavailable(ForgeError):
    """The model can compute no more, for instance because it was taken back."""


class Model(Protocol):
    """The interface that the engine needs of a model.

    One that derives from it and computes with NumPy needs its sizes, `kv_layout` and `forward`; the rest is here.
    """

    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    """Tokens of the longest sequence that it can compute."""
    embeds: bool = False
    """Whether it has hidden states, for embeddings."""
    generates: bool = True
    """Whether its logits are those of the next token."""
    labels: tuple[str, ...] = ()
    """What its logits are for, where it is a classifier. With one label there are two: its score, and 0."""
    runs_ahead: bool = False
    """Whether `forward` returns before it has computed, and takes input tokens from the forward before."""

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvLayout:
        """Return the layout of a storage that fits this model."""
        ...

    def new_storage(self, layout: KvLayout) -> KvStorage:
        """Create the arrays for keys and values. Raises `MemoryError` if there is no room."""
        return NumpyKvStorage(layout)

    def prepare(self, layout: KvLayout) -> None:
        """Do now what the first forward would otherwise do before it computes, such as compiling."""
        return

    def time_operations(self) -> None:
        """Measure time per layer and operation from now on. Costs time itself, and changes no result."""
        return

    def operation_times(self) -> tuple[OperationTime, ...]:
        """Return the times measured so far, in the order in which the operations first ran."""
        return ()

    def check_available(self) -> None:
        """Raise `ModelUnavailable` if it can no longer compute. A model that can always compute does nothing."""
        return None

    def forward(self, batch: ForwardBatch, storage: KvStorage) -> Logits:
        """Write this batch's keys and values into `storage`; return logits, float32 `[R, vocab_size]`."""
        ...

    def hidden(self, batch: ForwardBatch, storage: KvStorage) -> np.ndarray:
        """Run the forward pass without the output head; return the last hidden states, float32 `[R, hidden]`."""
        raise UsageError("this model has no hidden states: take a real one for embeddings")

    def temporary_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        """Estimate how many bytes a forward of so many rows needs beside weights and storage."""
        return 4 * (num_rows + num_logit_rows * self.vocab_size)
