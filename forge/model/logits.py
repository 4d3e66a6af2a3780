"""The result of a forward pass: logits `[rows, vocabulary]`, on the host or still on a device.

On the CPU they are a NumPy array. A device that computes while the host works returns `DeviceLogits`: the numbers stay
on the device, and only the rows that are asked for are copied. Greedy sampling needs one token and one logit of each
row, and `argmax_rows` copies no more: 8 bytes a row instead of 600,000.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's choice of a token: the arguments of `forge.engine.sampling.choose_token`."""

    params: Any
    """`SamplingParams`; the engine imports this package, and not the reverse."""
    seed: int
    """Below 2^64."""
    sample_index: int
    history: Sequence[int]
    """The tokens before it, prompt included: their number is the position of the draw."""
    num_prompt_tokens: int


@runtime_checkable
class DeviceLogits(Protocol):
    """Logits on a device, of a step that may still be running. `argmax_rows` waits for that step and no later one;
    reading a row waits for everything that was launched.

    They can be read at any time: a later step that would overwrite them copies them first.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and the vocabulary. Waits for nothing, as `len` does."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: int | slice) -> np.ndarray:
        """Return one row, float32 `[vocab]`, or several, `[n, vocab]`: a copy that the caller owns."""
        ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all rows."""
        ...

    sampled: bool
    """True once `sample` has been called."""

    def argmax_rows(self) -> tuple[list[int], list[float]]:
        """Return what `forge.engine.sampler.argmax_rows` does; after `sample`, the tokens that it chose and their
        logits, with the maximum in place of the logit if that is not finite."""
        ...

    def sample(self, draws: Sequence[Draw]) -> None:
        """Choose a token for each row on the device, as `choose_token` does. The next step may take it as its input.
        Waits for nothing. Called at most once, before the next step is launched and before `argmax_rows`."""
        ...

    def release(self) -> None:
        """Note that no row will be read any more, only `argmax_rows`: a later step need not copy them."""
        ...


Logits = np.ndarray | DeviceLogits
"""What `Model.forward` returns: float32 `[R, vocab]`."""
