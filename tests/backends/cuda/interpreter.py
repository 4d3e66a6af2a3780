"""Triton's interpreter, made to compute what a device does.

A device rounds float32 to bfloat16 to the nearest, ties to even; the interpreter cuts bits off. And with newer NumPy,
loop bounds that are arrays of one number do not become numbers any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def repaired_interpreter() -> Iterator[None]:
    """Within this context, kernels that were defined under TRITON_INTERPRET=1 round and loop as compiled ones do."""
    import triton.language as tl
    from triton.runtime import interpreter

    from forge.cache.kv_storage import rounded

    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def nearest(values, from_type, to_type, mode):
        if (from_type, to_type) == (tl.float32, tl.bfloat16):
            return (rounded(values, "bfloat16").view(np.uint32) >> 16).astype(np.uint16)
        return convert(values, from_type, to_type, mode)

    def with_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._convert_float, interpreter._patch_lang_tensor = nearest, with_index
    try:
        yield
    finally:
        interpreter._convert_float, interpreter._patch_lang_tensor = convert, patch_tensor
