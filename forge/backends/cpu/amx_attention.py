"""The inner loops of attention by AMX (`amx.py`): 16 queries at a time against a chunk's keys and values in int8.

Sums of integers have no order, so they are those of `attention_code.py`. AMX multiplies bytes: a weight of 16 bits is
256 * high + low, and so is its sum of values.

Sixteen queries begin at a multiple of 16. The first sixteen may begin before the queries that see the chunk, and the
last sixteen may end behind the last query; what is computed of such rows is not used.

Ledger, attention of a prefill of 2,048 tokens in a 0.6B model, 2 cores with AMX: 953 ms with VPDPBUSD, 578 so.
"""

from llvmlite import ir
from numba import types

from forge.backends.cpu import amx
from forge.backends.cpu.attention_code import HIGH_BYTES, LOW_BYTES, in_columns, row_at
from forge.backends.cpu.compilation import instruction_set
from forge.backends.cpu.llvm_code import (
    F32,
    I64,
    LANES,
    V_F32,
    V_I32,
    Values,
    constant,
    fused_multiply_add,
    load,
    loop,
    splat,
    store,
)
from forge.backends.cpu.op_layout import CHUNK
from forge.backends.cpu.vectors import emits

_SCORES_BYTES = 4 * CHUNK
"""Of a query: its scores, and then its weights."""
_QUERIES, _KEYS = 4, 5
"""Registers beside those of the sums with 16 keys each, 0 to 3."""
_LOW, _HIGH, _VALUES = 4, 5, 6
"""Registers beside those of the sums of low bytes, 0 and 2, and of high bytes, 1 and 3."""
_COLUMNS = 8
"""Vectors of a value that wait in memory at a time."""


@emits(types.int64)
def multiplies_by_amx(b):
    """Return 1 where the instruction set has AMX, else 0."""
    return I64(int(instruction_set().has_amx))


@emits(types.void)
def begin_amx(b):
    """Configure the thread's registers for the functions below."""
    if instruction_set().has_amx:
        amx.configure(b, [(amx.ROWS, amx.ROW_BYTES)] * 8)


@emits(types.void)
def end_amx(b):
    if instruction_set().has_amx:
        amx.release(b)


def _each_16(b: ir.IRBuilder, first: ir.Value, last: ir.Value, emit) -> None:
    """Emit `for query in range(first, last, 16): emit(query)`."""

    def sixteen(index: ir.Value, _: Values) -> Values:
        emit(b.add(first, index))
        return []

    loop(b, b.sub(last, first), amx.ROWS, [], sixteen)


@emits(types.void, *[types.int64] * 7)
def dot_keys_by_amx(b, first, last, queries, width, keys, groups, scores):
    """Do what `dot_packed_keys` does, for the queries from `first` on, a multiple of 16, and all keys of a chunk.

    Behind a chunk's last key lies anything, whose scores are not used. Bytes behind a key's end, as far as 64, are
    multiplied by zeros.
    """
    if not instruction_set().has_amx:
        return
    of_groups = [row_at(b, keys, groups, I64(LANES * number)) for number in range(CHUNK // LANES)]

    def dots(query: ir.Value) -> None:
        row = b.add(queries, b.mul(b.mul(query, width), I64(4)))
        for register in range(CHUNK // LANES):
            amx.clear(b, register)

        def dimensions(index: ir.Value, _: Values) -> Values:
            amx.load_register(b, _QUERIES, b.add(row, index), b.mul(width, I64(4)))
            for register, group in enumerate(of_groups):
                amx.load_register(b, _KEYS, b.add(group, b.mul(index, I64(LANES))), I64(amx.ROW_BYTES))
                amx.multiply(b, register, _QUERIES, _KEYS, "ss")
            return []

        loop(b, width, amx.ROW_BYTES, [], dimensions)
        to = b.add(scores, b.mul(query, I64(_SCORES_BYTES)))
        for register in range(CHUNK // LANES):
            amx.store_register(b, register, b.add(to, I64(4 * LANES * register)), I64(_SCORES_BYTES))

    _each_16(b, first, last, dots)


@emits(types.void, *[types.int64] * 10)
def add_values_by_amx(b, first, begin, last, weights, values, width, outs, states, room, sums):
    """Do what `add_values` does, for the queries from `begin` to `last` - 1, 16 at a time from `first` on.

    first: a multiple of 16. weights: the bytes that `softmax_chunk` wrote. values: int8 `[CHUNK / 4, width, 4
    positions]`. sums: room for int32 `[2, width / 16, 16 queries, 16]`, of low bytes and of high bytes.
    """
    if not instruction_set().has_amx:
        return
    lows, highs = sums, b.add(sums, b.mul(width, I64(4 * amx.ROWS)))

    def sixteen(query: ir.Value) -> None:
        row = b.add(weights, b.mul(query, I64(_SCORES_BYTES)))
        amx.load_register(b, _LOW, b.add(row, I64(LOW_BYTES)), I64(_SCORES_BYTES))
        amx.load_register(b, _HIGH, b.add(row, I64(HIGH_BYTES)), I64(_SCORES_BYTES))
        hidden = b.sub(begin, query)
        lowest = b.select(b.icmp_signed(">", hidden, I64(0)), hidden, I64(0))

        def sums_of(column: ir.Value, vectors: int) -> None:
            for n in range(vectors):
                low, high = 2 * (n % 2), 2 * (n % 2) + 1
                at = b.add(column, I64(LANES * n))
                amx.load_register(b, _VALUES, b.add(values, b.mul(at, I64(4))), b.mul(width, I64(4)))
                for total, of_weights, signs, to in ((low, _LOW, "us", lows), (high, _HIGH, "ss", highs)):
                    amx.clear(b, total)
                    amx.multiply(b, total, of_weights, _VALUES, signs)
                    amx.store_register(b, total, b.add(to, b.mul(at, I64(4 * amx.ROWS))), I64(4 * LANES))

        def of_row(index: ir.Value, _: Values) -> Values:
            number = b.add(lowest, index)
            mine = b.add(query, number)
            kept, gained = (
                splat(b, load(b, b.add(states, b.mul(b.add(b.mul(I64(part), room), mine), I64(4))), F32))
                for part in (2, 3)
            )
            of_number = b.mul(number, I64(4 * LANES))

            def add_sums(column: ir.Value, vectors: int) -> None:
                for n in range(vectors):
                    element = b.add(column, I64(LANES * n))
                    at = b.add(of_number, b.mul(element, I64(4 * amx.ROWS)))
                    low, high = (load(b, b.add(to, at), V_I32) for to in (lows, highs))
                    total = b.sitofp(b.add(b.shl(high, constant(V_I32, 8)), low), V_F32)
                    out = b.add(outs, b.mul(b.add(b.mul(mine, width), element), I64(4)))
                    store(b, out, fused_multiply_add(b, gained, total, b.fmul(load(b, out, V_F32), kept)))

            in_columns(b, width, _COLUMNS, add_sums)
            return []

        in_columns(b, width, _COLUMNS, sums_of)
        loop(b, b.sub(I64(amx.ROWS), lowest), 1, [], of_row)

    _each_16(b, first, last, sixteen)
