"""Where there is no GPU, Triton's kernels run under its interpreter, which must be said before they are defined."""

import os
from importlib.util import find_spec

import numpy as np
import pytest

MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]
    HAS_GPU = False
else:
    import torch

    HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.write_line(f"left out: tests/backends/cuda ({' and '.join(MISSING)} not installed)")


@pytest.fixture(autouse=True, scope="session")
def repaired_interpreter():
    """What Triton's interpreter does otherwise than a device, or not at all with a newer NumPy.

    A device rounds float32 to bfloat16 to the nearest, ties to even; the interpreter cuts bits off. And loop bounds
    that are arrays of one number do not become numbers any more.
    """
    if HAS_GPU or MISSING:
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

    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        patch.setattr(interpreter, "_convert_float", nearest)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"
