"""A forward pass as data: operations over buffers, and the memory that they are placed in.

The recorder writes a `Recording`: what is to be done, in names. `place` makes a `Program` of it for batches of up to
some number of rows: a table of numbers and addresses that the threads walk (`team.py`).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge.backends.cpu import words as w
from forge.backends.cpu.compilation import Kernel, TileSet, tile_set
from forge.backends.cpu.packing import PackedMatrix, QuantizedMatrix, padded
from forge.backends.cpu.tiles import GROUP

CONTEXT_ROWS = w.CTX_ROWS
CONTEXT_LOGIT_ROWS = w.CTX_LOGIT_ROWS


@dataclass(frozen=True, eq=False)
class Buffer:
    """float32 `[rows of the batch, width]`, rows padded to a multiple of 32."""

    width: int
    rows_word: int
    """The context word that counts its rows."""

    @property
    def stride(self) -> int:
        return padded(self.width, GROUP)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A loaded weight matrix under its name in the file."""

    name: str
    packed: PackedMatrix


@dataclass(frozen=True, eq=False)
class Vector:
    """A loaded norm weight: float32, padded with zeros to a multiple of 32."""

    values: np.ndarray
    width: int


@dataclass(frozen=True, eq=False)
class Address:
    """Where a buffer, or one of the three parts of its quantized form, will lie."""

    owner: Buffer
    part: str = "values"
    """`values`, `quants`, `scales` or `sums`."""


@dataclass
class Operation:
    """One entry of the program. Words may be numbers, or things whose address is known when the program is placed."""

    kernel: Kernel
    words: dict[int, Any]
    layer: int
    name: str
    """What a timing calls it."""
    wait: bool = False


@dataclass
class Recording:
    """What was written down: operations, and the buffers that they need."""

    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    quantized: set[Buffer] = field(default_factory=set)
    matrices: list[Matrix] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    output: Buffer | None = None
    """Where `to_numpy` left the result."""
    head_dim: int = 0
    theta: float = 0.0
    heads_per_kv_head: int = 1

    @property
    def logits(self) -> Buffer:
        """What the whole pass ends in."""
        assert self.output is not None, "a recording ends with to_numpy"
        return self.output

    def kernels(self) -> list[Kernel | TileSet]:
        """Everything that must be compiled to run it."""
        tiles = [tile_set(m.packed.layout) for m in self.matrices if isinstance(m.packed, QuantizedMatrix)]
        return [operation.kernel for operation in self.operations] + tiles


@dataclass
class Program:
    """A recording placed in memory for up to `max_rows` rows."""

    table: np.ndarray
    """int64 `[operations, OP_WORDS]`."""
    logits: np.ndarray
    """float32 `[max_rows of logits, stride]`."""
    max_rows: int
    max_logit_rows: int
    keep: list[np.ndarray]
    """Every array whose address is in the table."""

    def __post_init__(self):
        self.address: int = self.table.ctypes.data


def place(recording: Recording, max_rows: int, max_logit_rows: int) -> Program:
    """Give every buffer memory and every operation its addresses.

    Buffers of the same shape that are not needed at the same time share memory: each is used from the operation that
    first names it to the one that last does.
    """
    assert recording.operations[-1].wait, "a program ends when all threads have waited for each other"
    arrays = _allocate(recording, max_rows, max_logit_rows)
    table = np.zeros((len(recording.operations), w.OP_WORDS), np.int64)
    keep: list[np.ndarray] = list(arrays.values())
    for entry, operation in zip(table, recording.operations, strict=True):
        entry[0] = operation.kernel.address
        entry[w.WAIT_WORD] = operation.wait
        for word, value in operation.words.items():
            if isinstance(value, Address):
                entry[word] = arrays[value.owner, value.part].ctypes.data
            elif isinstance(value, np.ndarray):
                entry[word] = value.ctypes.data
                keep.append(value)
            elif isinstance(value, np.float32):
                entry[word] = int(value.view(np.uint32))
            else:
                entry[word] = value or 0
    return Program(table, arrays[recording.logits, "values"], max_rows, max_logit_rows, keep)


def _allocate(recording: Recording, max_rows: int, max_logit_rows: int) -> dict[tuple[Buffer, str], np.ndarray]:
    last_use: dict[Buffer, int] = {}
    for number, operation in enumerate(recording.operations):
        for value in operation.words.values():
            if isinstance(value, Address):
                last_use[value.owner] = number
    last_use[recording.logits] = len(recording.operations)
    free: dict[tuple[int, int, bool], list[dict[str, np.ndarray]]] = {}
    done: list[Buffer] = []  # last used, but threads may still be reading until the next wait
    placed: dict[Buffer, dict[str, np.ndarray]] = {}
    for number, operation in enumerate(recording.operations):
        for owner in {value.owner for value in operation.words.values() if isinstance(value, Address)}:
            if owner not in placed:
                shape = (owner.width, owner.rows_word, owner in recording.quantized)
                spare = free.get(shape)
                rows = max_logit_rows if owner.rows_word == CONTEXT_LOGIT_ROWS else max_rows
                placed[owner] = spare.pop() if spare else _new_buffer(owner, rows, owner in recording.quantized)
        done += [owner for owner, last in last_use.items() if last == number]
        if operation.wait:
            for owner in done:
                shape = (owner.width, owner.rows_word, owner in recording.quantized)
                free.setdefault(shape, []).append(placed[owner])
            done.clear()
    return {(owner, part): array for owner, parts in placed.items() for part, array in parts.items()}


def _new_buffer(owner: Buffer, rows: int, quantized: bool) -> dict[str, np.ndarray]:
    # A row of slack: a head that is not a multiple of 16 wide is read a little past its end.
    parts = {"values": np.zeros((rows + 1, owner.stride), np.float32)}
    if quantized:
        parts |= {
            "quants": np.zeros((rows, owner.stride), np.int8),
            "scales": np.zeros((rows, owner.stride // GROUP, 2), np.float32),
            "sums": np.zeros((rows, owner.stride // 16), np.int32),
        }
    return parts
