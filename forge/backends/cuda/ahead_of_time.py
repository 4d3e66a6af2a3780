"""What a model would launch on a GPU that is not there.

A model of real sizes runs on torch's `meta` device, where arrays have shapes and no memory, and its launches are listed
(`launches.ListingLauncher`). So what is counted is what would run, in the same tiles and dtypes, with nothing kept in
step by hand.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from forge.backends.cuda.backend import CudaBackend
from forge.backends.cuda.launches import ListingLauncher
from forge.backends.cuda.warm_up import LaunchDescription
from forge.gguf import GGMLType
from forge.gguf.ggml_types import row_nbytes
from forge.model.config import Qwen3Config, expected_tensors
from forge.model.loader import load_qwen3
from forge.model.qwen3 import Qwen3
from forge.model.weight_source import WeightSource

_FUSED = {"NORM": "RMSNorm", "GLU": "SwiGLU", "ADD": "residual"}
"""Operations that a product may have fused into it, by the kernel constant that switches each on."""
_PLAIN_NAMES = {
    "argmax_rows": "argmax",
    "gumbel_argmax": "draw",
    "gather_rows": "embedding",
    "norm_rope_store": "head norm, RoPE, KV write",
}


def label(launch: LaunchDescription) -> str:
    """Name a launched kernel, with what it fuses."""
    name, options = launch.kernel.rpartition(".")[2], dict(launch.options)
    return " + ".join([_PLAIN_NAMES.get(name, name), *(word for flag, word in _FUSED.items() if options.get(flag))])


def weightless_model(config: Qwen3Config, tensor_type: GGMLType, launcher: ListingLauncher, **options: Any) -> Qwen3:
    """Create a model of that size on the `meta` device, whose backend hands every launch to `launcher`."""
    backend = CudaBackend("meta", launcher=launcher, **options)
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
