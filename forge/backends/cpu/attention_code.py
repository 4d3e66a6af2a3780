"""The inner loops of attention: a few queries against the keys of a chunk, and their weights against its values.

A key is fetched and widened to float32 once for up to four queries, which a loop of Numba's could not keep in
registers. Sixteen sums are reduced together: four queries times four keys, two times eight or one times sixteen. As
many of them run at a time as the instruction set has registers for (`sums_at_once`): with AVX-512 all, else four,
because a sum that is kept in memory costs a load and a store each time that something is added. Of values four queries
run with 64 elements there, else with 16. How many go together cannot be seen in a result: each pair of a query and a
key has its own sum (16 lanes, dimensions ascending, then the tree of `sum16`), and each element of an output has its
own (positions ascending). Keys in int8 meet queries in int8, by the instruction set's own product
(`processor.py`): 64 dimensions where float32 has 16, and a sum of integers, which has no order.

Rows of keys are given by a list of their offsets, int64, because two neighbours may lie in different blocks.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba import types

from forge.backends.cpu.compilation import instruction_set
from forge.backends.cpu.llvm_code import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    STORED,
    V_F32,
    V_I32,
    call_intrinsic,
    fused_multiply_add,
    load,
    reduce_each,
    splat,
    store,
    widen,
)
from forge.backends.cpu.op_layout import BFLOAT16, CHUNK, FLOAT16, FLOAT32, INT8
from forge.backends.cpu.vectors import emits

_KINDS = {FLOAT32: "f32", FLOAT16: "f16", BFLOAT16: "bf16", INT8: "int8"}
_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}
_ZEROS, _INTEGER_ZEROS = ir.Constant(V_F32, [0.0] * LANES), ir.Constant(V_I32, [0] * LANES)
_TOP_BITS = ir.Constant(V_I32, [0x80808080 - (1 << 32)] * LANES)
"""128 in every byte."""

Values = list[ir.Value]
Body = Callable[[ir.Value, Values], Values]


def _loop(
    b: ir.IRBuilder, end: ir.Value, step: int, start: Values, body: Callable[[ir.Value, Values], Values]
) -> Values:
    """Emit `for index in range(0, end, step): values = body(index, values)`, run at least once. Returns the last
    values."""
    entry, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    index = b.phi(I64)
    values = [b.phi(initial.type) for initial in start]
    results = body(index, values)
    following = b.add(index, I64(step))
    index.add_incoming(I64(0), entry)
    index.add_incoming(following, b.block)
    for value, first, result in zip(values, start, results, strict=True):
        value.add_incoming(first, entry)
        value.add_incoming(result, b.block)
    b.cbranch(b.icmp_signed("<", following, end), loop, done)
    b.position_at_end(done)
    return results


def _each(b: ir.IRBuilder, number: ir.Value, cases: dict[int, Callable[[], None]]) -> None:
    """Emit a switch that runs the code of `cases` for `number`."""
    end = b.append_basic_block("end")
    switch = b.switch(number, end)
    for case, emit in cases.items():
        block = b.append_basic_block(f"case_{case}")
        switch.add_case(I64(case), block)
        b.position_at_end(block)
        emit()
        b.branch(end)
    b.position_at_end(end)


def _for_each_kind(b: ir.IRBuilder, kind: ir.Value, together: ir.Value, emit: Callable[[str, int], None]) -> None:
    """Emit code for every kind of stored number and every number of queries together."""

    def of_kind(name: str) -> Callable[[], None]:
        return lambda: _each(b, together, {count: partial(emit, name, count) for count in (1, 2, 4)})

    _each(b, kind, {number: of_kind(name) for number, name in _KINDS.items()})


def _row(b: ir.IRBuilder, base: ir.Value, rows: ir.Value, number: ir.Value) -> ir.Value:
    return b.add(base, load(b, b.add(rows, b.mul(number, I64(8))), I64))


def _stored(b: ir.IRBuilder, address: ir.Value, kind: str) -> ir.Value:
    """Load 16 stored numbers as float32; int8 without its scale."""
    if kind == "int8":
        return b.sitofp(b.sext(load(b, address, ir.VectorType(I8, LANES)), V_I32), V_F32)
    return widen(b, load(b, address, STORED[kind]), kind)


def _fetch(b: ir.IRBuilder, address: ir.Value, size: int) -> None:
    """Prefetch `size` bytes into the second-level cache."""
    for line in range(0, size, 64):
        pointer = b.inttoptr(b.add(address, I64(line)), I8.as_pointer())
        call_intrinsic(b, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(2), I32(1))


@emits(types.void, *[types.int64] * 9)
def dot_keys(b, kind, together, queries, width, keys, rows, count, scores, ahead):
    """Dot products of `together` queries (1, 2 or 4) with the first `count` keys of a chunk, to `scores`.

    queries: float32 `[together, width]`; for keys in int8 each row begins with its int8 numbers instead, zeros up to
    a multiple of 64. keys: what is added to the offsets `rows` (int64) to find a key, stored as `kind` says. scores:
    float32 `[together, CHUNK]`, written up to a multiple of 16 / together; of int8 without the scales of either side.
    ahead: what, added to the same offsets, is to be fetched meanwhile.
    """

    isa = instruction_set()

    def query_at(query: int, offset: ir.Value) -> ir.Value:
        return b.add(queries, b.add(b.mul(b.mul(I64(query), width), I64(4)), offset))

    def sums_of(addresses: Values, upcoming: Values, together: int, kind: str) -> Values:
        """Emit, for each query with each key, 16 lanes whose sum is their dot product."""
        step, item = len(addresses), I64(_ITEM_BYTES[kind])

        def dimensions(index: ir.Value, sums: Values) -> Values:
            offset = b.mul(index, item)
            with b.if_then(b.icmp_signed("==", b.and_(offset, I64(63)), I64(0))):
                for row in upcoming:
                    _fetch(b, b.add(row, offset), 64)
            key = [_stored(b, b.add(address, offset), kind) for address in addresses]
            results = []
            for query in range(together):
                q = load(b, query_at(query, b.mul(index, I64(4))), V_F32)
                mine = sums[query * step : (query + 1) * step]
                results += [fused_multiply_add(b, q, k, total) for k, total in zip(key, mine, strict=True)]
            return results

        return _loop(b, width, LANES, [_ZEROS] * (step * together), dimensions)

    def integer_sums_of(addresses: Values, upcoming: Values, together: int, start: Values) -> Values:
        """Emit the same for int8. Bytes behind the end of a key are multiplied by zeros."""
        step = len(addresses)

        def dimensions(index: ir.Value, sums: Values) -> Values:
            for row in upcoming:
                _fetch(b, b.add(row, index), 64)
            key = [load(b, b.add(address, index), V_I32) for address in addresses]
            key = key if isa.signed_weights else [b.xor(part, _TOP_BITS) for part in key]
            results = []
            for query in range(together):
                q = load(b, query_at(query, index), V_I32)
                mine = sums[query * step : (query + 1) * step]
                results += [isa.dot(b, total, k, q) for k, total in zip(key, mine, strict=True)]
            return results

        return _loop(b, width, 4 * LANES, [initial for initial in start for _ in range(step)], dimensions)

    def start_of(together: int) -> Values:
        """Emit the initial integer sums: unsigned bytes k + 128 stand for keys k, which adds 128 times a query's
        sum."""
        if isa.signed_weights:
            return [_INTEGER_ZEROS] * together

        def dimensions(index: ir.Value, sums: Values) -> Values:
            return [
                isa.dot(b, total, _TOP_BITS, load(b, query_at(query, index), V_I32)) for query, total in enumerate(sums)
            ]

        return [b.neg(total) for total in _loop(b, width, 4 * LANES, [_INTEGER_ZEROS] * together, dimensions)]

    def some_keys(kind: str, together: int, first: ir.Value, start: Values) -> None:
        """Emit the scores of 16 / together keys from number `first` on."""
        step = LANES // together
        addresses, upcoming = (
            [_row(b, base, rows, b.add(first, I64(number))) for number in range(step)] for base in (keys, ahead)
        )
        at_once, by_query = max(1, isa.sums_at_once // together), [Values() for _ in range(together)]
        for part in (slice(key, key + at_once) for key in range(0, step, at_once)):
            some, next_keys = addresses[part], upcoming[part]
            if kind == "int8":
                sums = integer_sums_of(some, next_keys, together, start)
            else:
                sums = sums_of(some, next_keys, together, kind)
            for query, totals in enumerate(by_query):
                totals += sums[query * len(some) : (query + 1) * len(some)]
        every = [total for totals in by_query for total in totals]
        result = reduce_each(b, every, b.add if kind == "int8" else b.fadd)
        result = b.sitofp(result, V_F32) if kind == "int8" else result
        for query in range(together):
            lanes = ir.Constant(ir.VectorType(I32, step), list(range(query * step, (query + 1) * step)))
            part = b.shuffle_vector(result, ir.Constant(V_F32, ir.Undefined), lanes)
            store(b, b.add(scores, b.add(I64(4 * CHUNK * query), b.mul(first, I64(4)))), part)

    def emit(kind: str, together: int) -> None:
        start = start_of(together) if kind == "int8" else []

        def block(first: ir.Value, _: Values) -> Values:
            some_keys(kind, together, first, start)
            return []

        _loop(b, count, LANES // together, [], block)

    _for_each_kind(b, kind, together, emit)


@emits(types.void, *[types.int64] * 11)
def add_values(b, kind, together, weights, count, values, rows, width, outs, states, ahead, ahead_rows):
    """out = out * keep + gain * (sum of weight[j] * value[j], j ascending) for `together` queries (1, 2 or 4).

    weights: float32 `[together, CHUNK]`, of which `count` are used; the scales of values in int8 are in them. values:
    what is added to the offsets `rows` to find a value. outs: float32 `[together, width]`. states: float32
    `[together, 4]`, whose last two are keep and gain. ahead, ahead_rows: what is to be fetched meanwhile.
    """

    isa = instruction_set()

    def columns(kind: str, together: int, column: ir.Value, vectors: int) -> None:
        """Emit the sums of `16 * vectors` columns from `column` on, and store them in the outputs."""
        item = _ITEM_BYTES[kind]
        first, next_first = (b.add(base, b.mul(column, I64(item))) for base in (values, ahead))

        def position(index: ir.Value, sums: Values) -> Values:
            row = _row(b, first, rows, index)
            _fetch(b, _row(b, next_first, ahead_rows, index), LANES * item * vectors)
            value = [_stored(b, b.add(row, I64(LANES * item * n)), kind) for n in range(vectors)]
            results = []
            for query in range(together):
                at = b.add(weights, b.add(I64(4 * CHUNK * query), b.mul(index, I64(4))))
                weight = splat(b, load(b, at, F32))
                mine = sums[query * vectors : (query + 1) * vectors]
                results += [fused_multiply_add(b, weight, v, total) for v, total in zip(value, mine, strict=True)]
            return results

        sums = _loop(b, count, 1, [_ZEROS] * (together * vectors), position)
        for query in range(together):
            kept, gained = (splat(b, load(b, b.add(states, I64(16 * query + at)), F32)) for at in (8, 12))
            for n in range(vectors):
                at = b.add(b.add(b.mul(I64(query), width), column), I64(LANES * n))
                out = b.add(outs, b.mul(at, I64(4)))
                old = b.fmul(load(b, out, V_F32), kept)
                store(b, out, fused_multiply_add(b, gained, sums[query * vectors + n], old))

    def emit(kind: str, together: int) -> None:
        most = min(4 if together == 4 else 8, max(1, isa.sums_at_once // together))
        whole = b.and_(width, I64(-most * LANES))

        def wide(column: ir.Value, _: Values) -> Values:
            columns(kind, together, column, most)
            return []

        def narrow(column: ir.Value, _: Values) -> Values:
            columns(kind, together, b.add(whole, column), 1)
            return []

        with b.if_then(b.icmp_signed(">", whole, I64(0))):
            _loop(b, whole, most * LANES, [], wide)
        with b.if_then(b.icmp_signed(">", width, whole)):
            _loop(b, b.sub(width, whole), LANES, [], narrow)

    _for_each_kind(b, kind, together, emit)
