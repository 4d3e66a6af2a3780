"""Small random models on the `cpu` backend, without a file, and forward passes of one operation."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge.gguf import GGMLType, dequantize, row_nbytes
from forge.gguf.writer import NewTensor
from forge.model.backend import Backend
from forge.model.config import Qwen3Config
from forge.model.loader import load_qwen3
from forge.model.qwen3 import Qwen3
from tests.small_models import array_tensor, small_config, small_tensors

try:
    from forge.backends.cpu.backend import CpuBackend
except ModuleNotFoundError:  # without Numba, for tests of other backends
    CpuBackend = object

ROOT = Path(__file__).parents[3]

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "IQ3_S", "IQ4_XS")
QUANTIZED = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL", *K_TYPES)
FLOATS = ("F32", "F16", "BF16")
WHOLE_BLOCKS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64} | {
    "intermediate_size": 512
}
"""Sizes whose every matrix has rows of whole blocks of 256, as the K types want them."""


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor as a file would offer it."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    bytes_: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.bytes_.size

    def raw(self) -> np.ndarray:
        return self.bytes_.reshape(-1)

    def dequantize(self) -> np.ndarray:
        return dequantize(self.ggml_type, self.raw(), self.shape)


def memory_tensor(name: str, ggml_type: GGMLType | str, data: np.ndarray) -> MemoryTensor:
    """A float array, encoded; or raw blocks, uint8 `[rows, bytes of a row]`."""
    ggml_type = GGMLType[ggml_type] if isinstance(ggml_type, str) else ggml_type
    return in_memory(array_tensor(name, ggml_type, data))


def in_memory(tensor: NewTensor) -> MemoryTensor:
    (raw,) = tensor.pieces()
    return MemoryTensor(tensor.name, tensor.shape, tensor.ggml_type, raw)


class ThreadedBackend(CpuBackend):
    """`cpu`, with all of its threads at work however small the model, which would run on one of them otherwise."""

    def _runs_single_threaded(self, program, batch) -> bool:
        assert hasattr(CpuBackend, "_runs_single_threaded"), "this overrides nothing any more"
        return False


class MemorySource:
    """A `WeightSource` in memory."""

    path = None

    def __init__(self, config: Qwen3Config, tensors: list[NewTensor]):
        self.config = config
        self.tensors = {tensor.name: in_memory(tensor) for tensor in tensors}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def tensor(self, name: str) -> MemoryTensor:
        return self.tensors[name]

    def release(self, name: str) -> None:
        pass


def small_model(backend: Backend, tensor_type: str, seed: int = 0, **sizes) -> Qwen3:
    """The model that `write_small_qwen3` would write, on `backend`."""
    if tensor_type in K_TYPES:
        sizes = WHOLE_BLOCKS | sizes
    config = small_config(**sizes)
    return load_qwen3(MemorySource(config, small_tensors(config, GGMLType[tensor_type], seed)), backend)


def random_bytes(tensor_type: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bytes, uint8 `[rows, bytes of a row]`, whose scales are finite."""
    rows, columns = shape
    raw = rng.integers(0, 256, (rows, row_nbytes(GGMLType[tensor_type], columns)), dtype=np.uint8)
    for offset in range(0, raw.shape[1], 2) if tensor_type in FLOATS else ():
        raw[:, offset + 1] &= 0xBF  # magnitudes below 2, so that no exponent is all ones
    return raw


def run_python(code_or_file: list[str], **environment: str) -> subprocess.CompletedProcess:
    """Another Python process in the repository's root, with its output captured."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    return subprocess.run(
        [sys.executable, *code_or_file],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=inherited | environment,
        timeout=900,
    )


def poison(storage) -> None:
    """Make every slot hold what is not a number, as if it had never been written; padding inside a head stays zero."""
    for array in (storage.keys, storage.values):
        numbers = array[..., : storage.layout.head_dim]
        if storage.layout.kv_dtype == "int8":
            numbers[:], array[..., storage.width :] = 1, np.frombuffer(np.float32(np.nan).tobytes(), np.int8)
        else:
            numbers[:] = 0x7FC0 if storage.layout.kv_dtype == "bfloat16" else np.nan
