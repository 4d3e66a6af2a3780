"""Where a model's weights come from: named tensors and hyper-parameters, whatever the files look like.

Tensors go by the names of llama.cpp (`blk.0.attn_q.weight`) in every source. Opening a source checks it whole: its
hyper-parameters make sense, and it holds exactly the tensors of `forge.model.config.expected_tensors`, each in its
shape and of a type that forge computes with. So a loader has nothing left to check, and nothing is loaded from files
that contradict each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from forge.gguf import GGMLType, GGUFFile, GGUFTensor
from forge.model.backend import Tensor
from forge.model.config import Qwen3Config, check_tensors, expected_tensors
from forge.reasons import Pooling
from forge.tokenizer.spec import TokenizerSpec, spec_from_gguf

_MEAN = 1
"""llama.cpp's number for it."""
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""The sampling parameters that a model may recommend, and GGUF's name of each."""


class SizedTensor(Tensor, Protocol):
    """A tensor that knows how much of a file it takes."""

    @property
    def nbytes(self) -> int: ...


class WeightSource(ABC):
    """One sound Qwen3 model on disk. A context manager: leaving it gives up the files."""

    path: Path
    config: Qwen3Config
    nbytes: int
    """Bytes of all tensors that the model uses, as stored."""
    pooling: Pooling
    """How hidden states become an embedding: `last` unless the source says `mean`."""
    default_sampling: Mapping[str, float]
    """The `SamplingParams` that the source recommends, by name; empty where it says nothing."""

    @abstractmethod
    def tensor(self, name: str) -> SizedTensor:
        """Return the tensor that llama.cpp calls `name`, `.weight` included; one of `expected_tensors(config)`."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Give back the memory of the mapped pages that hold this tensor, which its loader no longer needs."""

    @abstractmethod
    def tokenizer_spec(self) -> TokenizerSpec:
        """Return the tokenizer beside the weights. Raises `TokenizerError` if there is none that forge supports."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class StackedTensor:
    """Tensors of one shape and type as one, such as the matrices of all experts: `[number, *shape]`."""

    name: str
    parts: Sequence[SizedTensor]

    @property
    def ggml_type(self) -> GGMLType:
        return self.parts[0].ggml_type

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def raw(self) -> np.ndarray:
        return np.concatenate([part.raw() for part in self.parts])

    def dequantize(self) -> np.ndarray:
        return np.stack([part.dequantize() for part in self.parts])


@dataclass(frozen=True)
class ArrayTensor:
    """A tensor that is in memory as float32."""

    name: str
    values: np.ndarray
    ggml_type = GGMLType.F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def raw(self) -> np.ndarray:
        return self.values.view(np.uint8).reshape(-1)

    def dequantize(self) -> np.ndarray:
        return self.values


def recommended_sampling(values: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    """Return the sampling parameters that a file recommends. `keys`: the file's name of each."""
    stated = {name: values.get(key) for name, key in keys.items()}
    return {name: value for name, value in stated.items() if isinstance(value, int | float)}


def classifier_rows(head: Tensor) -> ArrayTensor:
    """Return a classification head as a matrix of logits, one row per label, at least two.

    A head of one row gives a score. A second row of zeros makes it two logits, s and 0: their softmax is the sigmoid of
    the score, and their difference the score itself."""
    rows = head.dequantize()
    if len(rows) == 1:
        rows = np.concatenate([rows, np.zeros_like(rows)])
    return ArrayTensor(head.name, rows)


def balanced_norms(q_norm: Tensor, k_norm: Tensor) -> tuple[ArrayTensor, ArrayTensor]:
    """Return a layer's norms of queries and keys, float32 `[head_dim]`, their large weights spread over both.

    A key in int8 has one scale, so a dimension that the norm makes 16 times as large as the others leaves them 4 bits.
    Each weight of the keys is divided, and that of the queries multiplied, by the power of two nearest to the square
    root of the keys' weight over the queries': SmoothQuant's balance (Xiao et al. 2023, α = 0.5), told by the weights
    alone. Dimensions that RoPE turns into each other share a factor. With powers of two every product of a query and a
    key is the same number as before, so in float32 and bfloat16 no score changes by a bit.
    """
    q, k = q_norm.dequantize(), k_norm.dequantize()
    largest_q, largest_k = (np.abs(weights).reshape(2, -1).max(axis=0) for weights in (q, k))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log2(largest_k / largest_q) / 2
    exponents = np.tile(np.rint(np.where(np.isfinite(exponents), exponents, 0)), 2).astype(np.int32)
    return ArrayTensor(q_norm.name, np.ldexp(q, exponents)), ArrayTensor(k_norm.name, np.ldexp(k, -exponents))


class GGUFWeights(WeightSource):
    """The weights of an open GGUF file, which it closes with itself. Raises `GGUFError` unless they are sound."""

    def __init__(self, file: GGUFFile):
        self.config = Qwen3Config.from_gguf(file)
        check_tensors(file, self.config)
        self.path = file.path
        self.nbytes = sum(file.tensors[name].nbytes for name in expected_tensors(self.config))
        architecture = file.metadata["general.architecture"]
        self.pooling: Pooling = "mean" if file.metadata.get(f"{architecture}.pooling_type") == _MEAN else "last"
        self.default_sampling: Mapping[str, float] = recommended_sampling(file.metadata, SAMPLING_KEYS)
        self._file = file

    def tensor(self, name: str) -> GGUFTensor:
        return self._file.tensors[name]

    def release(self, name: str) -> None:
        self._file.release(name)

    def tokenizer_spec(self) -> TokenizerSpec:
        return spec_from_gguf(self._file)

    def close(self) -> None:
        self._file.close()
