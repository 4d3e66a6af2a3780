"""What a model would launch on a GPU that is not there.

A model of real sizes runs on torch's `meta` device, where arrays have shapes and no memory, and hands every launch to a
listener. So what is counted is what would run, in the same tiles and dtypes, with nothing kept in step by hand.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.backends.cuda.backend import CudaBackend
from forge.gguf import GGMLType
from forge.gguf.ggml_types import row_nbytes
from forge.model.config import Qwen3Config, expected_tensors
from forge.model.loader import load_qwen3
from forge.model.qwen3 import Qwen3
from forge.model.weight_source import WeightSource

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """A kernel in one specialization."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """Argument → type, in order."""
    aligned: tuple[int, ...]
    """Arguments that are multiples of 16, or pointers to such addresses."""
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int

    @property
    def label(self) -> str:
        """The kernel, with what it fuses."""
        flags = dict(self.constants)
        parts = [word for flag, word in _FUSED.items() if flags.get(flag)]
        return " + ".join([_PLAIN_NAMES.get(self.kernel.__name__, self.kernel.__name__), *parts])

    @property
    def name(self) -> str:
        """The kernel, with what distinguishes this specialization."""
        short = {name: value for name, value in self.constants if value is not False}
        return f"{self.kernel.__name__}({', '.join(f'{name}={value}' for name, value in short.items())})"


_FUSED = {"NORM": "RMSNorm", "GLU": "SwiGLU", "ADD": "residual"}
"""Operations that a product may have fused into it, by the kernel constant that switches each on."""
_PLAIN_NAMES = {
    "argmax_rows": "argmax",
    "gumbel_argmax": "draw",
    "gather_rows": "embedding",
    "norm_rope_store": "head norm, RoPE, KV write",
}


def weightless_model(
    config: Qwen3Config, tensor_type: GGMLType, on_launch: Callable[[Launch], Any], **options: Any
) -> Qwen3:
    """Create a model of that size on the `meta` device, whose backend reports every launch and launches nothing."""
    backend = CudaBackend("meta", launcher=listener(on_launch), **options)
    return load_qwen3(cast(WeightSource, _Weightless(config, tensor_type)), backend)


class CountedProducts(TorchDispatchMode):
    """Counts, within its context, what torch itself launches: cuBLAS's products, and picking rows."""

    _NAMES: ClassVar = {"mm": "cuBLAS product", "addmm_": "cuBLAS product", "index_select": "pick logit rows"}

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = self._NAMES.get(func.overloadpacket.__name__)
        if name is not None:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


def listener(tell: Callable[[Launch], None]) -> Callable[..., None]:
    def listen(kernel, grid, *arguments, num_warps: int, num_stages: int, **constants) -> None:
        assert all(size > 0 for size in grid), (kernel, grid)
        assert grid[0] < 2**31 and all(size < 2**16 for size in grid[1:]), (kernel, grid)
        names = kernel.arg_names[: len(arguments)]
        types = tuple((name, _type_of(value)) for name, value in zip(names, arguments, strict=True))
        aligned = tuple(index for index, value in enumerate(arguments) if _is_aligned(value))
        tell(Launch(kernel, types, aligned, tuple(constants.items()), num_warps, num_stages))

    return listen


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, int):
        assert -(2**31) <= value < 2**31
        return "i32"
    return "fp32"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return isinstance(value, int) and value % 16 == 0


class _Weightless:
    """What `load_qwen3` reads of a `WeightSource`: the right shapes, all zeros that are never read."""

    path = None

    def __init__(self, config: Qwen3Config, tensor_type: GGMLType):
        self.config, self._type, self.nbytes = config, tensor_type, 0

    def tensor(self, name: str) -> "_Zeros":
        shape = expected_tensors(self.config)[name]
        return _Zeros(name, shape, GGMLType.F32 if len(shape) == 1 else self._type)

    def release(self, name: str) -> None:
        pass


@dataclass(frozen=True)
class _Zeros:
    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    nbytes: int = 0

    def raw(self) -> np.ndarray:
        rows = int(np.prod(self.shape[:-1]))
        return np.zeros(rows * row_nbytes(self.ggml_type, self.shape[-1]), np.uint8)

    def dequantize(self) -> np.ndarray:
        return np.zeros(self.shape, np.float32)
