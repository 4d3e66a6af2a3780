"""A forward pass as data: operations over buffers, and the memory that they are placed in.

The recorder writes a `Recording`: what is to be done, in names. `allocate` makes a `Program` of it for batches of up to
some number of rows: a table of numbers and addresses that the threads go through (`thread_pool.py`).

`Traffic` counts what an operation reads and writes, by its arguments and the batch: for `forge kernels --layer`. A
buffer has two forms. Its float32 values are 4 bytes an element; quantized, its int8 quants with their scales and
sums are 1.5. Each byte counts once, however often threads read it.
"""

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from forge.backends.cpu import kernel_table as k
from forge.backends.cpu.compilation import Kernel, TileSet, tile_set
from forge.backends.cpu.kernel_table import OperationKernel
from forge.backends.cpu.op_layout import CONTEXT, LINE_BYTES, OPERATION_BYTES, structure
from forge.backends.cpu.packing import Arena, FloatMatrix, PackedMatrix, QuantizedMatrix, aligned_empty, padded
from forge.backends.cpu.tiles import AMX_ROWS, GROUP
from forge.model.operation_time import Operand
from forge.model.rope import Rope

SMALLEST_LENT = 1 << 17
"""Bytes from which a result is lent to its caller and not copied (`Program.take_logits`)."""
MOST_SPARE = 2
"""Results whose memory is kept for later passes."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """float32 `[rows of the batch, width]`."""

    width: int
    count: str = "num_rows"
    """The field of the context that counts its rows."""

    @property
    def columns(self) -> int:
        """The width, padded with zeros to a multiple of 32."""
        return padded(self.width, GROUP)

    @property
    def stride(self) -> int:
        """Elements from a row to the next: an odd multiple of 64. A tile reads, and writes, the same columns of 16 rows
        one after the other: rows a power of two apart share a set of a cache, which has fewer ways."""
        return padded(self.columns - 64, 128) + 64


@dataclass(frozen=True, eq=False)
class Matrix:
    """A loaded weight matrix under its name in the file."""

    name: str
    packed: PackedMatrix


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """A matrix `[rows, columns]` for each expert, packed one under the other, each padded to whole tiles."""

    name: str
    packed: PackedMatrix
    num_experts: int
    rows: int


@dataclass(frozen=True, eq=False)
class Vector:
    """A loaded norm weight: float32, padded with zeros to a multiple of 32."""

    values: np.ndarray
    width: int


@dataclass
class Operation:
    """One entry of the program. Its arguments have the names of its kernel's layout, and may be numbers, buffers,
    matrices, or arrays whose address is meant."""

    kernel: OperationKernel
    arguments: dict[str, Any]
    layer: int
    name: str
    """Its name in a timing."""
    waits: bool = False

    @property
    def buffers(self) -> list[Buffer]:
        return [argument for argument in self.arguments.values() if isinstance(argument, Buffer)]


@dataclass
class Recording:
    """The operations of a recorded pass, and the weights and buffers that they use."""

    operations: list[Operation] = field(default_factory=list)
    quantized: set[Buffer] = field(default_factory=set)
    matrices: list[Matrix | ExpertMatrices] = field(default_factory=list)
    output: Buffer | None = None
    """The buffer that the result is in."""
    rope: Rope | None = None
    heads_per_kv_head: int = 1
    experts_per_row: int = 0
    """Experts that a row uses; 0 for a dense model."""

    @property
    def logits(self) -> Buffer:
        """The buffer that the pass ends in."""
        assert self.output is not None, "a recording ends with a result"
        return self.output

    def shape(self, buffer: Buffer) -> tuple[int, str, bool, bool]:
        """Return what buffers must have in common to share memory."""
        return buffer.width, buffer.count, buffer in self.quantized, buffer in self.with_values

    @cached_property
    def with_values(self) -> set[Buffer]:
        """The buffers that keep float32 values. A buffer keeps none if all that read it read its quantized form, and
        its kernel can leave the values out."""
        needless = {
            operation.arguments["out"]
            for operation in self.operations
            if operation.kernel in (*_WRITE_BOTH, k.gate_up_swiglu) and operation.arguments["out"] in self.quantized
        } - {self.logits}
        for operation in self.operations:
            named = ((name, a) for name, a in operation.arguments.items() if isinstance(a, Buffer) and name != "out")
            needless -= {buffer for name, buffer in named if _forms_read(operation, name, self.quantized)[0]}
        return {buffer for operation in self.operations for buffer in operation.buffers} - needless

    @property
    def widest_without_values(self) -> int:
        """Columns of the widest buffer without values: a thread keeps a row's in its scratch until it is quantized."""
        buffers = (buffer for operation in self.operations for buffer in operation.buffers)
        return max((buffer.columns for buffer in buffers if buffer not in self.with_values), default=0)

    def kernels(self) -> list[Kernel | TileSet]:
        """Return the kernels that must be compiled before the program can run."""
        tiles = [tile_set(m.packed.layout) for m in self.matrices if isinstance(m.packed, QuantizedMatrix)]
        return [*(operation.kernel for operation in self.operations), *tiles]


Parts = dict[str, np.ndarray]
"""A buffer's arrays: `values`, and where it is quantized `quants`, `scales` and `sums`."""


@dataclass
class Program:
    """A recording placed in memory for up to `max_rows` rows."""

    recording: Recording
    table: np.ndarray
    """uint8 `[operations, OPERATION_BYTES]`."""
    logits: np.ndarray
    """float32 `[max_rows of logits, stride]`."""
    logits_places: list[ctypes.Structure]
    """Where the table has the address of the logits."""
    max_rows: int
    max_logit_rows: int
    keep: list[np.ndarray]
    """Every array whose address is in the table."""

    def __post_init__(self):
        self.address: int = self.table.ctypes.data
        self._spare: list[np.ndarray] = []

    def place_logits(self) -> None:
        """Write to the table where the next pass puts its logits. Before each pass: the last one's may be lent."""
        for place in self.logits_places:
            place.values = self.logits.ctypes.data

    def take_logits(self, rows: int) -> np.ndarray:
        """Return the first rows of what a pass has computed, float32 `[rows, width]`. They are the caller's: the next
        pass writes elsewhere.

        A large result is lent, not copied: its memory comes back once the caller keeps no array of it. Ledger, 64 rows
        of 151,936 numbers: the copy took 11 ms of a step of 120.
        """
        taken, width = self.logits, self.recording.logits.width
        if taken.nbytes < SMALLEST_LENT or 2 * rows < len(taken):  # who keeps few rows must not keep memory for many
            return taken[:rows, :width].copy()
        self.logits = self._spare.pop() if self._spare else Arena().empty(taken.shape, np.float32)
        return np.asarray(_Lent(taken, self._spare))[:rows, :width]


class _Lent:
    """Memory that goes to a list of spare memory once no array uses it any more."""

    def __init__(self, memory: np.ndarray, spare: list[np.ndarray]):
        self.__array_interface__ = memory.__array_interface__
        weakref.finalize(self, _give_back, memory, spare).atexit = False


def _give_back(memory: np.ndarray, spare: list[np.ndarray]) -> None:
    if len(spare) < MOST_SPARE:
        spare.append(memory)


def allocate(recording: Recording, num_threads: int, max_rows: int, max_logit_rows: int) -> Program:
    """Give every buffer memory and every operation its addresses.

    Buffers of the same shape that are not needed at the same time share memory: each is used from the operation that
    first names it to the one that last does. The result's is its own, because it is lent (`Program.take_logits`).
    """
    assert recording.operations[-1].waits, "a program ends when all threads have waited for each other"
    memory = _buffer_memory(recording, max_rows, max_logit_rows)
    logits_places = []
    table = np.zeros((len(recording.operations), OPERATION_BYTES), np.uint8)
    keep = [array for parts in memory.values() for array in parts.values()]
    stretches = aligned_empty((len(table), num_threads, LINE_BYTES // 8), np.int64)
    keep.append(stretches)
    for entry, taken, operation in zip(table, stretches, recording.operations, strict=True):
        written = structure(operation.kernel.layout).from_buffer(entry)
        written.kernel, written.waits = operation.kernel.address, operation.waits
        written.stretches = taken.ctypes.data
        for name, argument in operation.arguments.items():
            if isinstance(argument, Buffer):
                _write_rows(getattr(written, name), argument, memory[argument])
                if argument is recording.logits:
                    logits_places.append(getattr(written, name))
            elif isinstance(argument, PackedMatrix):
                _write_matrix(getattr(written, name), argument)
            elif isinstance(argument, np.ndarray):
                setattr(written, name, argument.ctypes.data)
                keep.append(argument)
            else:
                setattr(written, name, argument)
    logits = memory[recording.logits]["values"]
    return Program(recording, table, logits, logits_places, max_rows, max_logit_rows, keep)


def _write_rows(written: ctypes.Structure, buffer: Buffer, parts: Parts) -> None:
    assert CONTEXT.fields is not None
    written.count, written.columns, written.stride = CONTEXT.fields[buffer.count][1], buffer.columns, buffer.stride
    for name, array in parts.items():
        setattr(written, name, array.ctypes.data)


def _write_matrix(written: ctypes.Structure, matrix: PackedMatrix) -> None:
    """Write a loaded matrix into an operation; the matrix lives as long as its recording."""
    if isinstance(matrix, QuantizedMatrix):
        written.tiles = tile_set(matrix.layout).addresses.ctypes.data
        written.weights, written.tile_bytes = matrix.quants.ctypes.data, matrix.quants[0].nbytes
        written.scales, written.scale_bytes = matrix.scales.ctypes.data, matrix.scales[0].nbytes
        written.minimums = 0 if matrix.minimums is None else matrix.minimums.ctypes.data
        written.num_groups = matrix.num_groups
    else:
        written.weights, written.tile_bytes = matrix.values.ctypes.data, matrix.values[0].nbytes


def _buffer_memory(recording: Recording, max_rows: int, max_logit_rows: int) -> dict[Buffer, Parts]:
    last_use = {buffer: number for number, operation in enumerate(recording.operations) for buffer in operation.buffers}
    last_use[recording.logits] = len(recording.operations)
    most = {
        "num_rows": max_rows,
        "num_logit_rows": max_logit_rows,
        "num_expert_rows": max_rows * recording.experts_per_row,
    }
    free: dict[tuple[int, str, bool, bool], list[Parts]] = {}
    done: list[Buffer] = []  # last used, but threads may still be reading until the next wait
    memory: dict[Buffer, Parts] = {}
    arena = Arena()  # its memory is zero, as padding has to be
    for number, operation in enumerate(recording.operations):
        for buffer in operation.buffers:
            if buffer not in memory:
                spare = [] if buffer is recording.logits else free.get(recording.shape(buffer))
                memory[buffer] = spare.pop() if spare else _new_parts(recording, buffer, most[buffer.count], arena)
        done += [buffer for buffer, last in last_use.items() if last == number]
        if operation.waits:
            for buffer in done:
                free.setdefault(recording.shape(buffer), []).append(memory[buffer])
            done.clear()
    return memory


def _new_parts(recording: Recording, buffer: Buffer, rows: int, arena: Arena) -> Parts:
    parts, rows = {}, padded(rows, AMX_ROWS)  # `kernels.rows_multiplied`
    if buffer in recording.with_values:
        # A row of slack: a head that is not a multiple of 16 wide is read a little past its end.
        parts["values"] = arena.empty((rows + 1, buffer.stride), np.float32)
    if buffer in recording.quantized:
        parts |= {
            "quants": arena.empty((rows, buffer.stride), np.int8),
            "scales": arena.empty((rows, buffer.stride // GROUP, 2), np.float32),
            "sums": arena.empty((rows, buffer.stride // 16), np.int32),
        }
    return parts


_READ_QUANTS = (k.matmul_quantized, k.gate_up_swiglu, k.experts_quantized)
"""Kernels that read the quantized form of `x`."""
_WRITE_BOTH = (k.rms_norm, k.attention, k.swiglu, k.gather)
"""Kernels that write values, the quantized form, or both: what is read."""
_WRITE_QUANTS = (k.gate_up_swiglu, k.quantize)
_IN_PLACE = {k.quantize: ("x",), k.norm_rope_store: ("q", "k")}
"""Arguments that are read and written."""
_WRITTEN = {k.route: ("experts", "shares"), k.sort_by_expert: ("places", "sources", "starts")}
"""Arguments that are written; of other kernels it is `out`."""
_EMBEDS, _ADDS = (k.embed_quantized, k.embed_float), (k.combine,)


def quantizes_heads(operation: Operation) -> bool:
    """Return whether an operation's heads, if it has any, consist of whole groups: only then can it quantize them."""
    return bool(operation.arguments.get("head_dim", GROUP) % GROUP == 0)


def _forms_read(operation: Operation, name: str, quantized: set[Buffer]) -> tuple[bool, bool]:
    """Return whether an operation reads a buffer's values, and whether it reads the quantized form."""
    if operation.kernel is k.gather and name == "x":
        return operation.arguments["copies_values"], operation.arguments["out"] in quantized
    quants = name == "x" and operation.kernel in _READ_QUANTS
    return not quants, quants


class Traffic:
    """Counts for the operations of one batch."""

    def __init__(self, context: Any, recording: Recording, num_keys: int, num_written: int):
        """context: the batch context. num_keys: positions that attention reads, of all sequences together. num_written:
        rows that have a slot."""
        self._context, self._quantized, self._with_values = context, recording.quantized, recording.with_values
        self._num_keys, self._num_written = num_keys, num_written

    def reads(self, operation: Operation) -> Iterator[Operand]:
        kernel, arguments = operation.kernel, operation.arguments
        if kernel in _EMBEDS:
            yield self._embedded(arguments)
            return
        written = _WRITTEN.get(kernel, ("out",)) if not arguments.get("adds") and kernel not in _ADDS else ()
        for name, argument in arguments.items():
            if isinstance(argument, Buffer) and name not in written:
                yield from self._forms(
                    argument, self._num_rows(operation, argument), *_forms_read(operation, name, self._quantized)
                )
            elif isinstance(argument, FloatMatrix | QuantizedMatrix):
                yield _matrix(argument, arguments)
            elif isinstance(argument, np.ndarray) and name not in written:
                yield Operand(argument.shape, argument.nbytes)
        if kernel is k.norm_rope_store:
            rows, half = self._context.num_rows, arguments["head_dim"] // 2
            yield from [Operand((rows, half), 4 * rows * half)] * 2  # cosines and sines
        if kernel is k.attention:
            yield from self._stored(arguments, self._num_keys)

    def writes(self, operation: Operation) -> Iterator[Operand]:
        kernel = operation.kernel
        for name in _IN_PLACE.get(kernel, _WRITTEN.get(kernel, ("out",))):
            argument = operation.arguments[name]
            if isinstance(argument, Buffer):
                values = kernel not in _WRITE_QUANTS and argument in self._with_values
                both = kernel in _WRITE_BOTH and argument in self._quantized
                quants = kernel in _WRITE_QUANTS or (both and quantizes_heads(operation))
                yield from self._forms(argument, self._num_rows(operation, argument), values, quants)
            else:
                yield Operand(argument.shape, argument.nbytes)
        if kernel is k.norm_rope_store:
            yield from self._stored(operation.arguments, self._num_written)

    def _num_rows(self, operation: Operation, buffer: Buffer) -> int:
        """Return a buffer's number of rows; an operation that picks rows reads as many as it writes."""
        picks = operation.kernel is k.gather or operation.arguments.get("logit_rows_only")
        return int(getattr(self._context, (operation.arguments["out"] if picks else buffer).count))

    def _forms(self, buffer: Buffer, rows: int, values: bool, quants: bool) -> Iterator[Operand]:
        shape = rows, buffer.width
        if values:
            yield Operand(shape, 4 * rows * buffer.width)
        if quants:
            yield Operand(shape, rows * (buffer.width + 8 * (buffer.columns // GROUP) + 4 * (buffer.columns // 16)))

    def _stored(self, arguments: dict[str, Any], tokens: int) -> list[Operand]:
        """Return the keys and the values of `tokens` tokens as operands."""
        shape = tokens, arguments["kv_heads"], arguments["head_dim"]
        return [Operand(shape, tokens * arguments["kv_heads"] * self._context.cache.row_bytes)] * 2

    def _embedded(self, arguments: dict[str, Any]) -> Operand:
        """Return the batch's rows of the embedding table as an operand."""
        arrays = [argument for argument in arguments.values() if isinstance(argument, np.ndarray)]
        row_bytes = sum(array.nbytes for array in arrays) // (16 * len(arguments["table"]))
        return Operand((self._context.num_rows, arguments["columns"]), self._context.num_rows * row_bytes)


def _matrix(matrix: PackedMatrix, arguments: dict[str, Any]) -> Operand:
    """Return what reading a weight matrix costs; of an expert matrix only the experts that have rows count."""
    share = 1.0
    if "tiles_each" in arguments:
        share = np.count_nonzero(np.diff(arguments["starts"])) / arguments["num_experts"]
    return Operand((round(matrix.rows * share), matrix.columns), round(matrix.nbytes * share))
