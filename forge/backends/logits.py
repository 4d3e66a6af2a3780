"""What a forward pass gives: logits `[rows, vocabulary]`, on the host or still on their way there.

On the CPU they are an array. On a device that computes while the host does something else they are `DeviceLogits`: the
numbers stay where they are, and only the rows that somebody asks for are copied. Most steps of most requests need one
token and one number of each row, which `greatest` gives for both: 8 bytes a row where a vocabulary has 600,000.
"""

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class DeviceLogits(Protocol):
    """Logits on a device, of a step that may still be running. Asking for the greatest waits for that step and no later
    one; asking for a row waits for all that was launched.

    They can be read however late: a later step that would overwrite them sets them aside first.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and vocabulary. Waits for nothing, as `len` does."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: int | slice) -> np.ndarray:
        """One row, float32 `[vocab]`, or some, `[n, vocab]`: a copy, the caller's to keep."""
        ...

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """All rows."""
        ...

    def greatest(self) -> tuple[list[int], list[float]]:
        """Of each row the token with the greatest logit (or the first NaN), and that logit."""
        ...

    def let_go(self) -> None:
        """Nobody will ask for a row any more: only for `greatest`. Then a later step need not set them aside."""
        ...


Logits = np.ndarray | DeviceLogits
"""What `Model.forward` returns: float32 `[R, vocab]`."""


def greatest(logits: Logits) -> tuple[list[int], list[float]]:
    """Of each row the token with the greatest logit (the lowest id of equals, or the first NaN), and that logit."""
    if not isinstance(logits, np.ndarray):
        return logits.greatest()
    likeliest = logits.argmax(axis=1)
    return likeliest.tolist(), logits[np.arange(len(logits)), likeliest].tolist()
