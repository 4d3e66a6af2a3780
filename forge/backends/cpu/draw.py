"""A draw in machine code: the kernel of `draw_code.py` as Python calls it. `forge.engine.rng` says what a draw is."""

import ctypes
from collections.abc import Callable

import numpy as np

from forge.backends.cpu import kernel_table
from forge.backends.cpu.op_layout import DRAW_SCRATCH_BYTES

CompiledDraw = Callable[[np.ndarray, np.ndarray, int, int, int, int], int | None]
"""From token ids, scores, seed, position, sample index and the counter's last word to the token, or to None where two
tokens are so near to each other that NumPy must decide."""

_INT64 = ctypes.c_int64


def load_draw() -> CompiledDraw:
    """Compile the kernel, or take its code from the cache folder. Raises `ForgeError` if that cannot be done here."""
    # It holds the interpreter's lock: a draw takes microseconds, and to get the lock back may take milliseconds.
    function = ctypes.PYFUNCTYPE(_INT64, *[_INT64] * 9)(kernel_table.draw.address)
    scratch = np.empty(DRAW_SCRATCH_BYTES, np.uint8)  # every caller's, for the same reason

    def draw(
        token_ids: np.ndarray, scores: np.ndarray, seed: int, position: int, sample_index: int, purpose: int
    ) -> int | None:
        ids, values = np.ascontiguousarray(token_ids, np.int64), np.ascontiguousarray(scores, np.float64)
        leader, name = int(values.argmax()), (seed, int(position), int(sample_index), int(purpose))
        index = function(ids.ctypes.data, values.ctypes.data, len(values), leader, *name, scratch.ctypes.data)
        return int(ids[index]) if index >= 0 else None

    return draw
