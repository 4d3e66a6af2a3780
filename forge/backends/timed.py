"""Operations that keep time: other operations with a clock around each.

Used where a chapter asks "where does the time go?". It calls the wrapped operations unchanged, so what the
model says is unchanged too.
"""

import time
from collections import defaultdict

from forge.model.backend import Array, Operations, OperationTime


class TimedOperations(Operations):
    """Times every operation under its name; `linear` under the name of its weight."""

    def __init__(self, inner: Operations, matrix_names: dict[int, str]):
        """`matrix_names` maps the id of each loaded matrix to its tensor's name."""
        self.inner = inner
        self._layer = -1
        self._seconds: dict[tuple[int, str], float] = defaultdict(float)
        self._calls: dict[tuple[int, str], int] = defaultdict(int)
        self._matrix_names = matrix_names

    def times(self) -> tuple[OperationTime, ...]:
        """The times, in the order in which the operations first ran."""
        return tuple(
            OperationTime(layer, operation, seconds * 1e3, self._calls[layer, operation])
            for (layer, operation), seconds in self._seconds.items()
        )

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

    def experts(self, *arguments):
        return self._timed("experts", self.inner.experts, *arguments)

    def add(self, *arguments):
        return self._timed("add", self.inner.add, *arguments)

    def logit_rows(self, *arguments):
        return self._timed("logit_rows", self.inner.logit_rows, *arguments)

    def to_numpy(self, *arguments):
        return self._timed("to_numpy", self.inner.to_numpy, *arguments)

    def linear(self, x: Array, matrix: Array) -> Array:
        name = short_name(self._matrix_names[id(matrix)])
        return self._timed(name, self.inner.linear, x, matrix)

    def _timed(self, operation: str, function, *arguments):
        started = time.perf_counter()
        result = function(*arguments)
        self._seconds[self._layer, operation] += time.perf_counter() - started
        self._calls[self._layer, operation] += 1
        return result


def short_name(tensor_name: str) -> str:
    """Shorten `blk.3.ffn_gate.weight` to `ffn_gate`; the output matrix, tied or not, is the `output head`."""
    name = tensor_name.removesuffix(".weight").split(".")[-1]
    return "output head" if name in ("output", "token_embd") else name
