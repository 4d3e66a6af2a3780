"""Where there is no GPU, Triton's kernels run under its interpreter, which must be said before they are defined."""

import os

import numpy as np
import pytest

try:
    import torch
except ImportError:
    torch = None
HAS_GPU = torch is not None and torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

if torch is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def rounding_to_nearest():
    """A device rounds float32 to bfloat16 to the nearest, ties to even; Triton's interpreter cuts bits off."""
    if HAS_GPU:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    from forge.cache.kv_storage import rounded

    convert = interpreter._convert_float

    def nearest(values, from_type, to_type, mode):
        if (from_type, to_type) == (tl.float32, tl.bfloat16):
            return (rounded(values, "bfloat16").view(np.uint32) >> 16).astype(np.uint16)
        return convert(values, from_type, to_type, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", nearest)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"
