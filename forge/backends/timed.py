"""A backend that keeps time: another backend with a clock around every operation.

Used where a chapter asks "where does the time go?". It calls the wrapped backend's operations unchanged, so what the
model says is unchanged too.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

from forge.backends.backend import Array, Backend, Tensor
from forge.cache.kv_storage import KvLayout, KvStorage


@dataclass(frozen=True)
class OperationTime:
    """How long one operation took in one layer, summed over all forwards since the model was loaded."""

    layer: int
    """-1 for what comes before the first layer or after the last."""
    operation: str
    """`attention`, `rope`, …; for a matrix product the weight's name, such as `ffn_gate`."""
    ms: float
    calls: int


class TimedBackend(Backend):
    """Every operation of the seam, timed under its name; `linear` under the name of its weight."""

    def __init__(self, inner: Backend):
        self.inner = inner
        self.name = inner.name
        self.description = inner.description
        self._layer = -1
        self._seconds: dict[tuple[int, str], float] = defaultdict(float)
        self._calls: dict[tuple[int, str], int] = defaultdict(int)
        self._matrix_names: dict[int, str] = {}

    def times(self) -> tuple[OperationTime, ...]:
        """In the order in which the operations first ran."""
        return tuple(
            OperationTime(layer, operation, seconds * 1e3, self._calls[layer, operation])
            for (layer, operation), seconds in self._seconds.items()
        )

    def load_matrix(self, tensor: Tensor) -> Array:
        matrix = self.inner.load_matrix(tensor)
        self._matrix_names[id(matrix)] = tensor.name.removesuffix(".weight").split(".")[-1]
        return matrix

    def load_vector(self, tensor: Tensor) -> Array:
        return self.inner.load_vector(tensor)

    def new_storage(self, layout: KvLayout) -> KvStorage:
        return self.inner.new_storage(layout)

    def begin_layer(self, index: int) -> None:
        self._layer = index
        self.inner.begin_layer(index)

    def embed(self, *arguments):
        return self._timed("embed", self.inner.embed, *arguments)

    def rms_norm(self, *arguments):
        return self._timed("rms_norm", self.inner.rms_norm, *arguments)

    def head_norm(self, *arguments):
        return self._timed("head_norm", self.inner.head_norm, *arguments)

    def rope(self, *arguments):
        return self._timed("rope", self.inner.rope, *arguments)

    def write_kv(self, *arguments):
        return self._timed("write_kv", self.inner.write_kv, *arguments)

    def attention(self, *arguments):
        return self._timed("attention", self.inner.attention, *arguments)

    def swiglu(self, *arguments):
        return self._timed("swiglu", self.inner.swiglu, *arguments)

    def add(self, *arguments):
        return self._timed("add", self.inner.add, *arguments)

    def take_rows(self, *arguments):
        return self._timed("take_rows", self.inner.take_rows, *arguments)

    def to_numpy(self, *arguments):
        return self._timed("to_numpy", self.inner.to_numpy, *arguments)

    def linear(self, x: Array, matrix: Array) -> Array:
        name = self._matrix_names[id(matrix)]
        return self._timed("output head" if name == "token_embd" else name, self.inner.linear, x, matrix)

    def _timed(self, operation: str, function, *arguments):
        started = time.perf_counter()
        result = function(*arguments)
        self._seconds[self._layer, operation] += time.perf_counter() - started
        self._calls[self._layer, operation] += 1
        return result
