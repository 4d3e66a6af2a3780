"""What the engine needs of a model. Two kinds are in forge: `Qwen3`, and `HashModel`, which has no weights.

The result of a forward pass is logits `[rows, vocabulary]`. On the CPU they are a NumPy array. A device that computes
while the host works returns `DeviceLogits`: the numbers stay on the device, and only the rows that are asked for are
copied. Greedy sampling needs one token and one logit of each row, and `argmax_rows` copies no more: 8 bytes a row
instead of 600,000.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage, NumpyKvStorage
from forge.errors import ForgeError, UsageError
from forge.model.forward_batch import ForwardBatch
from forge.model.operation_time import OperationTime


class Draw(NamedTuple):
    """What decides a token, beside its row of logits (`forge.engine.sampling.choose_token`)."""

    params: Any
    """`SamplingParams`; the engine imports this package, and not the reverse."""
    seed: int
    """Below 2^64."""
    sample_index: int
    history: Sequence[int]
    """The tokens before it, prompt included: their number is the position of the draw."""
    num_prompt_tokens: int = 0
    """How many tokens of `history` are the prompt's."""
    matcher: Any = None
    """The `Matcher` that says which tokens may be chosen; None allows all. Probabilities are the model's own all the
    same. A device does not ask it."""

    @property
    def position(self) -> int:
        return len(self.history)

    @property
    def output(self) -> Sequence[int]:
        """The output tokens before it."""
        return self.history[self.num_prompt_tokens :]


@runtime_checkable
class DeviceLogits(Protocol):
    """Logits on a device, of a step that may still be running. `argmax_rows` waits for that step and no later one;
    reading a row waits for everything that was launched.

    They can be read at any time: a later step that would overwrite them copies them first.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and the vocabulary. Waits for nothing, as `len` does."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: int | slice) -> np.ndarray:
        """Return one row, float32 `[vocab]`, or several, `[n, vocab]`: a copy that the caller owns."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all rows."""

    sampled: bool
    """True once `sample` has been called."""

    def argmax_rows(self) -> tuple[list[int], list[float]]:
        """Return what `forge.engine.sampler.argmax_rows` does; after `sample`, the tokens that it chose and their
        logits, with the maximum in place of the logit if that is not finite."""

    def sample(self, draws: Sequence[Draw]) -> None:
        """Choose a token for each row on the device, as `choose_token` does. The next step may take it as its input.
        Waits for nothing. Called at most once, before the next step is launched and before `argmax_rows`."""

    def release(self) -> None:
        """Note that no row will be read any more, only `argmax_rows`: a later step need not copy them."""


Logits = np.ndarray | DeviceLogits
"""The result of `Model.forward`: float32 `[R, vocab]`."""


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
    """A classifier's labels, one per logit; empty for other models. With one label there are two logits: its score, and
    0."""
    runs_ahead: bool = False
    """Whether `forward` returns before it has computed, and takes input tokens from the forward before."""

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvLayout:
        """Return the layout of a storage that fits this model."""

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
        return

    def forward(self, batch: ForwardBatch, storage: KvStorage) -> Logits:
        """Write this batch's keys and values into `storage`; return logits, float32 `[R, vocab_size]`."""

    def hidden(self, batch: ForwardBatch, storage: KvStorage) -> np.ndarray:
        """Run the forward pass without the output head; return the last hidden states, float32 `[R, hidden]`."""
        raise UsageError("this model has no hidden states: take a real one for embeddings")

    def temporary_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        """Estimate how many bytes a forward of so many rows needs beside weights and storage."""
        return 4 * (num_rows + num_logit_rows * self.vocab_size)
