"""Operations that keep time: other operations with a clock around each.

Used where a chapter asks "where does the time go?". It calls the wrapped operations unchanged, so what the
model says is unchanged too. Those on NumPy arrays are also counted: which bytes each operation reads and writes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from forge.model.backend import Array, Batch, Operations, Storage
from forge.model.operation_time import Operand, OperationTime


class OperationClock:
    """Seconds, calls and operands for each operation, by its place in a layer."""

    def __init__(self) -> None:
        self._layer, self._place = -1, 0
        self._times: dict[tuple[int, int, str], OperationTime] = {}

    def begin_layer(self, index: int) -> None:
        self._layer, self._place = index, 0

    def add(self, name: str, seconds: float, reads: Iterable[Operand], writes: Iterable[Operand]) -> None:
        """Count one run of the operation at the next place of the layer."""
        key = self._layer, self._place, name
        self._place += 1
        before = self._times.get(key)
        ms, calls = (before.ms, before.calls) if before is not None else (0.0, 0)
        self._times[key] = OperationTime(self._layer, name, ms + seconds * 1e3, calls + 1, tuple(reads), tuple(writes))

    def times(self) -> tuple[OperationTime, ...]:
        """Return the times in the order in which the operations first ran."""
        return tuple(self._times.values())


class StepClock(OperationClock):
    """Times the fused steps of a device, by waiting for it before and after each."""

    def __init__(self, synchronize: Callable[[], None]):
        super().__init__()
        self._synchronize = synchronize

    @contextmanager
    def step(self, name: str, layer: int) -> Iterator[None]:
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self.begin_layer(layer)
        self.add(name, time.perf_counter() - started, (), ())


def _timed_operation(name: str) -> Callable[..., Any]:
    def operation(self: "TimedOperations", *arguments: Any) -> Any:
        return self._timed(name, getattr(self.inner, name), *arguments)

    return operation


class TimedOperations(Operations):
    """Times every operation under its name; `linear` under the name of its weight."""

    def __init__(self, inner: Operations, matrix_names: dict[int, str]):
        """`matrix_names` maps the id of each loaded matrix to its tensor's name."""
        self.inner = inner
        self.clock = OperationClock()
        self._matrix_names = matrix_names

    def begin_layer(self, index: int) -> None:
        self.clock.begin_layer(index)
        self.inner.begin_layer(index)

    embed, rms_norm, head_norm, rope = map(_timed_operation, ("embed", "rms_norm", "head_norm", "rope"))
    write_kv, attention, swiglu = map(_timed_operation, ("write_kv", "attention", "swiglu"))
    experts, add, logit_rows, result = map(_timed_operation, ("experts", "add", "logit_rows", "result"))

    def linear(self, x: Array, matrix: Array) -> Array:
        name = short_name(self._matrix_names[id(matrix)])
        return self._timed(name, self.inner.linear, x, matrix)

    def _timed(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        reads: Sequence[Operand] | None = None,
        writes: Sequence[Operand] | None = None,
    ) -> Any:
        """Call and clock it. Without `reads` and `writes` they are the NumPy arrays among arguments and results."""
        started = time.perf_counter()
        result = function(*arguments)
        seconds = time.perf_counter() - started
        reads = _operands(*arguments) if reads is None else reads
        self.clock.add(name, seconds, reads, _operands(result) if writes is None else writes)
        return result


class TimedNumpyOperations(TimedOperations):
    """Times operations on NumPy arrays, and counts what each reads and writes."""

    def embed(self, table: Array, batch: Batch) -> Array:
        return self._timed("embed", self.inner.embed, table, batch, reads=[_rows(table, batch.num_rows)])

    def write_kv(self, storage: Storage, layer: int, batch: Batch, keys: Array, values: Array) -> None:
        written = _slots(storage, int((batch.slot_mapping >= 0).sum()))
        self._timed("write_kv", self.inner.write_kv, storage, layer, batch, keys, values, writes=written)

    def attention(self, q: Array, storage: Storage, layer: int, batch: Batch) -> Array:
        reads = [*_operands(q), *_slots(storage, int(batch.context_lens.sum()))]
        return self._timed("attention", self.inner.attention, q, storage, layer, batch, reads=reads)

    def experts(self, *arguments: Any) -> Array:
        x, router, *matrices, num_used, _ = arguments
        most = min(len(matrices[0]), len(x) * num_used)  # as many if no two rows use the same one
        reads = [*_operands(x, router), *(_rows(of_experts, most) for of_experts in matrices)]
        return self._timed("experts", self.inner.experts, *arguments, reads=reads)

    def logit_rows(self, x: Array, batch: Batch) -> Array:
        return self._timed("logit_rows", self.inner.logit_rows, x, batch, reads=[_rows(x, len(batch.logit_rows))])

    def result(self, x: Array) -> Array:
        return self._timed("result", self.inner.result, x, reads=(), writes=())


def _operands(*values: Any) -> list[Operand]:
    """Return an operand for each NumPy array among `values`: each is read or written as a whole."""
    return [Operand(value.shape, value.nbytes) for value in values if isinstance(value, np.ndarray)]


def _rows(array: np.ndarray, count: int) -> Operand:
    """Return `count` rows of an array as an operand."""
    return Operand((count, *array.shape[1:]), count * array[0].nbytes)


def _slots(storage: Storage, count: int) -> list[Operand]:
    """Return the keys and the values of `count` tokens in one layer as operands."""
    return [
        Operand((count, *array.shape[3:]), count * array[0, 0, 0].nbytes) for array in (storage.keys, storage.values)
    ]


def short_name(tensor_name: str) -> str:
    """Shorten `blk.3.ffn_gate.weight` to `ffn_gate`; the output matrix, tied or not, is the `output head`."""
    name = tensor_name.removesuffix(".weight").split(".")[-1]
    return "output head" if name in ("output", "token_embd") else name
