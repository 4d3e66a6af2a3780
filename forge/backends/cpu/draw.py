"""A draw in machine code: the kernel of `draw_code.py` as Python calls it. `forge.engine.rng` says what a draw is."""

import ctypes
import threading

import numpy as np

from forge.backends.cpu import kernel_table
from forge.backends.cpu.op_layout import DRAW_SCRATCH_BYTES


class CompiledDraw:
    """Draws tokens in machine code. Making one compiles the kernel, or takes its code from the cache folder; raises
    `ForgeError` if that cannot be done here."""

    def __init__(self) -> None:
        # It keeps the interpreter's lock: a draw takes microseconds, and to get the lock back may take milliseconds.
        self._function = kernel_table.draw.function(ctypes.PYFUNCTYPE)
        self._scratch = np.empty(DRAW_SCRATCH_BYTES, np.uint8)
        self._scratch_address = self._scratch.ctypes.data
        self._lock = threading.Lock()
        self._make_room(4096)

    def _make_room(self, count: int) -> None:
        """Allocate room for token ids and scores, which are copied to it: finding an array's address takes longer."""
        self._token_ids, self._scores = np.empty(count, np.int64), np.empty(count, np.float64)
        self._addresses = self._token_ids.ctypes.data, self._scores.ctypes.data

    def __call__(
        self, token_ids: np.ndarray, scores: np.ndarray, seed: int, position: int, sample_index: int, purpose: int
    ) -> int | None:
        """Return the token that `forge.engine.rng.numpy_argmax` draws, or None if two sums are too near to each other
        to decide. purpose: the counter's last word."""
        count, first = len(scores), int(token_ids[0])
        name = seed, int(position), int(sample_index), purpose
        with self._lock:
            if count > len(self._scores):
                self._make_room(2 * count)
            self._scores[:count] = scores
            id_address, score_address = self._addresses
            if int(token_ids[-1]) - first + 1 == count:
                id_address = 0
            else:
                self._token_ids[:count] = token_ids
            row = id_address, first, score_address, count, int(scores.argmax())
            index = self._function(*row, *name, self._scratch_address)
        return int(token_ids[index]) if index >= 0 else None
