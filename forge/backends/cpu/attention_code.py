"""The inner loops of attention: a few queries against the keys of a chunk, and their weights against its values.

A key in float32 or float16 is widened once for up to four queries, which a loop of Numba's could not keep in
registers. Sixteen sums are reduced together: four queries times four keys, two times eight or one times sixteen. As
many of them run at a time as the instruction set has registers for (`sums_at_once`): with AVX-512 all, else four,
because a sum that is kept in memory costs a load and a store each time that something is added. Of values four queries
run with 64 elements there, else with 16. How many go together cannot be seen in a result: each pair of a query and a
key has its own sum (16 lanes, dimensions ascending, then the tree of `sum16`), and each element of an output has its
own (positions ascending).

Keys and values in bfloat16 and int8 are packed, in the order in which they are multiplied: a vector holds two or four
dimensions of 16 keys, or 16 elements of two or four values. So nothing is added across lanes. Blocks of a multiple of
16 tokens are stored packed; of other blocks each chunk is packed first (`pack_keys`, `pack_values`). In int8 both sums
are of integers, which have no order. An int8 key is multiplied by a query in int8, with the instruction set's own
product (`processor.py`); a value by weights in int16, with its product of pairs.

Rows of keys are given by a list of their offsets, int64, because two neighbours may lie in different blocks.
"""

from collections.abc import Callable
from functools import partial, reduce

from llvmlite import ir
from numba import types

from forge.backends.cpu.compilation import instruction_set
from forge.backends.cpu.llvm_code import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STORED,
    TOP_BITS,
    V_F32,
    V_I32,
    Values,
    call_intrinsic,
    constant,
    fused_multiply_add,
    load,
    loop,
    prefetch_line,
    reduce_each,
    shuffle,
    splat,
    store,
    transpose,
    widen,
)
from forge.backends.cpu.op_layout import BFLOAT16, CHUNK, FLOAT16, FLOAT32, INT8
from forge.backends.cpu.vectors import emits, exp_code, maximum_code, rounded_code, without_tiny_code

_UNPACKED = {FLOAT32: "f32", FLOAT16: "f16"}
_PACKED = {BFLOAT16: "bf16", INT8: "int8"}
"""Kinds of which two or four numbers, a lane of 32 bits, are multiplied at once (`CpuKvStorage`)."""
_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1, "widened": 2}
_POSITIONS = {"f32": 1, "f16": 1, "bf16": 2, "int8": 4, "widened": 4}
"""Positions whose values lie together."""
_V_I16 = ir.VectorType(I16, 2 * LANES)
LOWEST, MOST_WEIGHT = -3.0e38, 32767.0
BY_AMX = INT8 + 1
"""Kind of scores in int32 that `dot_keys_by_amx` left, and of weights as `add_values_by_amx` takes them."""
WIDENED = INT8 + 2
"""Kind of values in int8 that `prepare_values` has widened."""
LOW_BYTES, HIGH_BYTES = 0, CHUNK
"""Where the two bytes of a query's weights lie, for AMX (`amx_attention.py`)."""
_IN_QUAD = (0, 2, 1, 3)
"""The order of a quad's weights in int16: even positions are multiplied together, then odd ones (`add_values`)."""
_ONES, _ZEROS, _INTEGER_ZEROS = constant(V_F32, 1.0), constant(V_F32, 0.0), constant(V_I32, 0)


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


def _for_each_kind(
    b: ir.IRBuilder, kinds: dict[int, str], kind: ir.Value, together: ir.Value, emit: Callable[[str, int], None]
) -> None:
    """Emit code for each of some kinds of stored numbers and every number of queries together."""

    def of_kind(name: str) -> Callable[[], None]:
        return lambda: _each(b, together, {count: partial(emit, name, count) for count in (1, 2, 4)})

    _each(b, kind, {number: of_kind(name) for number, name in kinds.items()})


def row_at(b: ir.IRBuilder, base: ir.Value, rows: ir.Value, number: ir.Value) -> ir.Value:
    return b.add(base, load(b, b.add(rows, b.mul(number, I64(8))), I64))


def fetch(b: ir.IRBuilder, address: ir.Value, size: int) -> None:
    """Prefetch `size` bytes into the second-level cache."""
    for line in range(0, size, 64):
        prefetch_line(b, b.add(address, I64(line)))


@emits(types.void, *[types.int64] * 10)
def dot_keys(b, kind, together, queries, width, keys, rows, count, scores, ahead, ahead_rows):
    """Dot products of `together` queries (1, 2 or 4) with the first `count` keys of a chunk, in float32 or float16, to
    `scores`.

    queries: float32 `[together, width]`. keys: what is added to the offsets `rows` (int64) to find a key, stored as
    `kind` says. scores: float32 `[together, CHUNK]`, written up to a multiple of 16 / together. ahead: what, added to
    the offsets `ahead_rows`, is to be fetched meanwhile.
    """
    at_most = instruction_set().sums_at_once

    def sums_of(kind: str, together: int, addresses: Values, upcoming: Values) -> Values:
        """Emit, for each query with each key, 16 lanes whose sum is their dot product."""
        step, item = len(addresses), I64(_ITEM_BYTES[kind])

        def dimensions(index: ir.Value, sums: Values) -> Values:
            offset = b.mul(index, item)
            with b.if_then(b.icmp_signed("==", b.and_(offset, I64(63)), I64(0))):
                for row in upcoming:
                    fetch(b, b.add(row, offset), 64)
            key = [widen(b, load(b, b.add(address, offset), STORED[kind]), kind) for address in addresses]
            results = []
            for query in range(together):
                q = load(b, b.add(queries, b.mul(b.add(b.mul(I64(query), width), index), I64(4))), V_F32)
                mine = sums[query * step : (query + 1) * step]
                results += [fused_multiply_add(b, q, k, total) for k, total in zip(key, mine, strict=True)]
            return results

        return loop(b, width, LANES, [_ZEROS] * (step * together), dimensions)

    def emit(kind: str, together: int) -> None:
        step = LANES // together
        at_once = max(1, at_most // together)

        def some_keys(first: ir.Value, _: Values) -> Values:
            numbers = [b.add(first, I64(number)) for number in range(step)]
            by_query = [Values() for _ in range(together)]
            for part in (numbers[key : key + at_once] for key in range(0, step, at_once)):
                addresses, upcoming = (
                    [row_at(b, base, of, number) for number in part] for base, of in ((keys, rows), (ahead, ahead_rows))
                )
                sums = sums_of(kind, together, addresses, upcoming)
                for query, totals in enumerate(by_query):
                    totals += sums[query * len(part) : (query + 1) * len(part)]
            result = reduce_each(b, [total for totals in by_query for total in totals], b.fadd)
            for query in range(together):
                part = shuffle(b, result, range(query * step, (query + 1) * step))
                store(b, b.add(scores, b.add(I64(4 * CHUNK * query), b.mul(first, I64(4)))), part)
            return []

        loop(b, count, step, [], some_keys)

    _for_each_kind(b, _UNPACKED, kind, together, emit)


@emits(types.void, *[types.int64] * 2)
def running_maximum(b, numbers, results):
    """Write the largest of the first 1, 2, … `CHUNK` float32 numbers, none of them below zero, to `results`."""
    largest = _ZEROS
    for block in range(0, CHUNK, LANES):
        vector = load(b, b.add(numbers, I64(4 * block)), V_F32)
        for step in (1, 2, 4, 8):
            vector = maximum_code(b, shuffle(b, vector, [max(0, lane - step) for lane in range(LANES)]), vector)
        vector = maximum_code(b, largest, vector)
        store(b, b.add(results, I64(4 * block)), vector)
        largest = shuffle(b, vector, [LANES - 1] * LANES)


def _weight_units(
    b: ir.IRBuilder, scales: ir.Value, counts: ir.Value, together: int, sees_all: bool
) -> tuple[ir.Value, ir.Value]:
    """Emit what weights in int16 are in units of, lane i of query i % together, and 1 / it, or 0."""
    if sees_all:
        largest = splat(b, load(b, b.add(scales, I64(4 * (3 * CHUNK - 1))), F32))
    else:
        largest = _ZEROS
        for query in range(together):
            count = b.extract_element(counts, I32(query))
            last = b.sub(b.select(b.icmp_signed("<", count, I32(CHUNK)), count, I32(CHUNK)), I32(1))
            value = load(b, b.add(scales, b.mul(b.add(b.zext(last, I64), I64(2 * CHUNK)), I64(4))), F32)
            largest = b.insert_element(largest, value, I32(query))
        largest = shuffle(b, largest, [lane % together for lane in range(LANES)])
    units = b.fdiv(largest, constant(V_F32, MOST_WEIGHT))
    return units, b.select(b.fcmp_ordered(">", units, _ZEROS), b.fdiv(_ONES, units), _ZEROS)


def _bytes_of(b: ir.IRBuilder, vectors: Values, byte: int) -> ir.Value:
    """Emit the vector of a byte of each int32 in four vectors."""
    first, second, third, fourth = (b.bitcast(vector, ir.VectorType(I8, 4 * LANES)) for vector in vectors)
    numbers = range(byte, 8 * LANES, 4)
    return shuffle(b, shuffle(b, first, numbers, second), range(4 * LANES), shuffle(b, third, numbers, fourth))


@emits(types.void, *[types.int64] * 9)
def softmax_chunk(b, kind, together, weights, start, seen, factors, scales, states, room):
    """Turn products of `together` queries with the keys from `start` on into softmax numerators, in place, and update
    the queries' states.

    weights: float32 `[together, CHUNK]`. seen: int32 `[together]`, how many keys each query sees in all; products with
    others may be anything, and their numerators are zero. factors: float32 `[together]`: scores are products times
    these. states: float32 `[4, room]`, of which the first `together` columns are these queries' maximum and sum of all
    chunks so far, then what the output so far and this chunk's sum of values are to be multiplied by. The first chunk
    meets the lowest maximum there is, and exp's smallest value times nothing.

    scales: of int8 what `_gather_scales` wrote. Products are multiplied by the keys', and numerators become int16:
    times their value's scale, in units of the largest scale that the query sees / 32,767. Of bfloat16, numerators are
    rounded to it, and their sum is that of the rounded ones. `BY_AMX` is int8 with products that are int32 still, and
    with the numerators' bytes apart.

    Four queries that see the whole chunk have code of their own, in which nothing asks what a query sees. Ledger, a
    prefill of 2,048 tokens on 2 cores with AMX: attention takes 6 % less.

    Everything stays in registers between the loads and the stores, and four queries wait together for what goes across
    lanes. Ledger, 4 queries of bfloat16 on a Zen 5 at 4.4 GHz: 114 ns query by query through memory, 61 so
    (the whole with it, less the whole without).
    """
    isa = instruction_set()
    larger = partial(maximum_code, b)
    of_integers = ("int8", "amx")

    def emit(kind: str, together: int) -> None:
        if together < 4:
            emit_for(kind, together, sees_all=False)
            return
        counts = b.sub(load(b, seen, ir.VectorType(I32, together)), splat(b, b.trunc(start, I32), together))
        is_whole = b.icmp_signed(">=", counts, ir.Constant(counts.type, [CHUNK] * together))
        mask = ir.IntType(together)
        with b.if_else(b.icmp_signed("==", b.bitcast(is_whole, mask), mask(-1))) as branches:
            for branch, sees_all in zip(branches, (True, False), strict=True):
                with branch:
                    emit_for(kind, together, sees_all)

    def emit_for(kind: str, together: int, sees_all: bool) -> None:
        def of_queries(address: ir.Value, element: ir.Type) -> ir.Value:
            """Load a number for each query, and repeat them over the lanes."""
            vector = load(b, address, ir.VectorType(element, together))
            return shuffle(b, vector, [lane % together for lane in range(LANES)])

        def reduced(vectors: Values, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
            """Reduce a vector for each query, and repeat the results over the lanes."""
            return reduce_each(b, vectors * (LANES // together), combine)

        def put(address: ir.Value, vector: ir.Value) -> None:
            store(b, address, shuffle(b, vector, range(together)))

        def number(address: ir.Value, element: int) -> ir.Value:
            return load(b, b.add(address, I64(4 * element)), V_F32)

        sums, keeps, gains = (b.add(states, b.mul(I64(4 * part), room)) for part in (1, 2, 3))
        counts, factor = b.sub(of_queries(seen, I32), splat(b, b.trunc(start, I32))), of_queries(factors, F32)
        scores: list[list[tuple[int, ir.Value, ir.Value]]] = []
        for query in range(together):
            mine, count = (shuffle(b, numbers, [query] * LANES) for numbers in (factor, counts))
            scores.append([])
            for block in range(0, CHUNK, LANES):
                product = number(weights, CHUNK * query + block)
                if kind == "amx":
                    product = b.sitofp(b.bitcast(product, V_I32), V_F32)
                if kind in of_integers:
                    product = b.fmul(product, number(scales, block))
                is_seen = b.icmp_signed("<", ir.Constant(V_I32, list(range(block, block + LANES))), count)
                score = b.fmul(product, mine)
                if not sees_all:
                    score = b.select(is_seen, score, constant(V_F32, LOWEST))
                scores[query].append((block, is_seen, score))
        highest = reduced([reduce(larger, (score for _, _, score in of_query)) for of_query in scores], larger)
        old = of_queries(states, F32)
        top = larger(old, highest)
        # One exp for what is kept, lanes 0 to 7, and gained, lanes 8 to 15.
        shifts = exp_code(b, shuffle(b, b.fsub(old, top), [*range(8), *range(24, 32)], b.fsub(highest, top)))
        gained = shuffle(b, shifts, [*range(8, 16)] * 2)
        units, per_unit = _ONES, _ONES
        if kind in of_integers:
            units, per_unit = _weight_units(b, scales, counts, together, sees_all)
        totals = []
        for query, of_query in enumerate(scores):
            most, mine = (shuffle(b, numbers, [query] * LANES) for numbers in (highest, per_unit))
            total, row = _ZEROS, b.add(weights, I64(4 * CHUNK * query))
            of_row: Values = []
            for block, is_seen, score in of_query:
                value = exp_code(b, b.fsub(score, most))
                if kind == "bf16":  # where exp's smallest value, of keys that are not seen, is tiny
                    rounded = isa.to_bfloat(b, without_tiny_code(b, value))
                    store(b, b.add(row, I64(2 * block)), rounded)
                    value = widen(b, rounded, "bf16")
                elif not sees_all:
                    value = b.select(is_seen, value, _ZEROS)
                if kind in of_integers:
                    weight = b.fmul(value, b.fmul(number(scales, CHUNK + block), mine))
                    weight = rounded_code(b, weight if sees_all else b.select(is_seen, weight, _ZEROS))
                    of_row.append(weight)
                if kind == "int8":
                    numbers = b.trunc(weight, ir.VectorType(I16, LANES))
                    by_quad = [lane - lane % 4 + _IN_QUAD[lane % 4] for lane in range(LANES)]
                    store(b, b.add(row, I64(2 * block)), shuffle(b, numbers, by_quad))
                elif kind == "f32":
                    store(b, b.add(row, I64(4 * block)), value)
                total = b.fadd(total, value)
            totals.append(total)
            if kind == "amx":
                for byte, place in enumerate((LOW_BYTES, HIGH_BYTES)):
                    store(b, b.add(row, I64(place)), _bytes_of(b, of_row, byte))
        total = b.fmul(reduced(totals, b.fadd), gained)
        put(states, top)
        put(sums, b.fadd(b.fmul(of_queries(sums, F32), shifts), total))
        put(keeps, shifts)
        put(gains, b.fmul(gained, units))

    kinds = {FLOAT32: "f32", FLOAT16: "f32", BFLOAT16: "bf16", INT8: "int8"}
    if isa.has_amx:
        kinds[BY_AMX] = "amx"
    _for_each_kind(b, kinds, kind, together, emit)


def in_columns(b: ir.IRBuilder, width: ir.Value, most: int, emit: Callable[[ir.Value, int], None]) -> None:
    """Emit loops over the columns: `most` vectors of 16 at a time, and what is left one by one."""
    whole = b.and_(width, I64(-most * LANES))

    def wide(column: ir.Value, _: Values) -> Values:
        emit(column, most)
        return []

    def narrow(column: ir.Value, _: Values) -> Values:
        emit(b.add(whole, column), 1)
        return []

    with b.if_then(b.icmp_signed(">", whole, I64(0))):
        loop(b, whole, most * LANES, [], wide)
    with b.if_then(b.icmp_signed(">", width, whole)):
        loop(b, b.sub(width, whole), LANES, [], narrow)


@emits(types.void, *[types.int64] * 12)
def add_values(b, kind, together, weights, count, values, rows, width, outs, states, room, ahead, ahead_rows):
    """out = out * keep + gain * (sum of weight[j] * value[j], j ascending) for `together` queries (1, 2 or 4).

    kind: that of the values, or `WIDENED`. weights: float32 `[together, CHUNK]`, of which `count` are used; of bfloat16
    and int8 what `softmax_chunk` wrote, zeros behind those that are used. values: what is added to the offsets `rows`
    to find a value; in bfloat16 two together and in int8 four, at the offset of the first (`CpuKvStorage`). outs:
    float32 `[together, width]`. states: as of `softmax_chunk`, which left keep and gain there. ahead: what, added to
    the offsets `ahead_rows`, is to be fetched meanwhile; 0 for nothing. Sums of int8 are exact: 64 products of 15 and 7
    bits.
    """

    isa = instruction_set()

    def terms(kind: str, index: ir.Value, places: Values) -> list[Values]:
        """Emit the vectors of values at some places, each to be multiplied by a weight of its own."""
        if kind in _UNPACKED.values():
            return [[widen(b, load(b, place, STORED[kind]), kind) for place in places]]
        lines = [load(b, place, V_I32) for place in places]
        if kind == "bf16":
            # The last of an odd number meets a weight of zero: it must not be a number that no query sees.
            both_used = b.icmp_signed("<", b.add(index, I64(1)), count)
            used = splat(b, b.select(both_used, I32(-1), I32(0xFFFF)))
            return [[b.and_(line, used) for line in lines]]
        if kind == "widened":
            return [lines, [load(b, b.add(place, I64(4 * LANES)), V_I32) for place in places]]
        return [list(half) for half in zip(*(_widened(b, line) for line in lines), strict=True)]

    def columns(kind: str, together: int, column: ir.Value, vectors: int) -> None:
        """Emit the sums of `16 * vectors` columns from `column` on, and store them in the outputs."""
        positions, is_unpacked = _POSITIONS[kind], kind in _UNPACKED.values()
        size = LANES * _ITEM_BYTES[kind] * positions
        of_integers = kind in ("int8", "widened")
        multiply_add = isa.dot_pairs if of_integers else isa.dot_bfloat_pairs if kind == "bf16" else _multiply_add

        def some_positions(index: ir.Value, sums: Values) -> Values:
            at = b.mul(column, I64(_ITEM_BYTES[kind] * positions))
            with b.if_then(b.icmp_signed("!=", ahead, I64(0))):
                fetch(b, b.add(row_at(b, ahead, ahead_rows, index), at), size * vectors)
            line = b.add(row_at(b, values, rows, index), at)
            sums, numbers = list(sums), b.add(weights, b.mul(index, I64(4 if is_unpacked else 2)))
            for term, of_term in enumerate(terms(kind, index, [b.add(line, I64(size * n)) for n in range(vectors)])):
                for query in range(together):
                    number = b.add(numbers, I64(4 * (CHUNK * query + term)))
                    weight = splat(b, load(b, number, F32 if is_unpacked else I32))
                    for n, value in enumerate(of_term, query * vectors):
                        sums[n] = multiply_add(b, sums[n], value, weight)
            return sums

        start = [_INTEGER_ZEROS if of_integers else _ZEROS] * (together * vectors)
        sums = loop(b, count, positions, start, some_positions)
        for query in range(together):
            of_query = [b.add(states, b.add(b.mul(I64(4 * part), room), I64(4 * query))) for part in (2, 3)]
            kept, gained = (splat(b, load(b, address, F32)) for address in of_query)
            for n, total in enumerate(sums[query * vectors : (query + 1) * vectors]):
                total = b.sitofp(total, V_F32) if of_integers else total
                at = b.add(b.add(b.mul(I64(query), width), column), I64(LANES * n))
                out = b.add(outs, b.mul(at, I64(4)))
                store(b, out, fused_multiply_add(b, gained, total, b.fmul(load(b, out, V_F32), kept)))

    def emit(kind: str, together: int) -> None:
        most = min(4 if together == 4 else 8, max(1, isa.sums_at_once // together))
        in_columns(b, width, most, partial(columns, kind, together))

    kinds = _UNPACKED | _PACKED
    if not isa.has_amx:
        kinds[WIDENED] = "widened"
    _for_each_kind(b, kinds, kind, together, emit)


def _widened(b: ir.IRBuilder, line: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit the even and the odd bytes of each lane as two int16."""
    odd, eight = b.bitcast(line, _V_I16), constant(_V_I16, 8)
    even, odd = b.ashr(b.shl(odd, eight), eight), b.ashr(odd, eight)
    return b.bitcast(even, V_I32), b.bitcast(odd, V_I32)


def _multiply_add(b: ir.IRBuilder, total: ir.Value, value: ir.Value, weight: ir.Value) -> ir.Value:
    return fused_multiply_add(b, weight, value, total)


# Keys and values rearranged once for many queries.


def padded_64(b: ir.IRBuilder, size: ir.Value) -> ir.Value:
    return b.and_(b.add(size, I64(63)), I64(-64))


@emits(types.int32, types.int64, types.int64)
def key_offset(b, query, width):
    """Return what the sum of an int8 query's products with a key begins with. Unsigned bytes k + 128 stand for keys k,
    which adds 128 times the query's sum."""
    isa = instruction_set()
    if isa.signed_weights:
        return I32(0)

    def dimensions(index: ir.Value, sums: Values) -> Values:
        return [isa.dot(b, sums[0], TOP_BITS, load(b, b.add(query, index), V_I32))]

    (total,) = loop(b, width, 4 * LANES, [_INTEGER_ZEROS], dimensions)
    return b.neg(call_intrinsic(b, f"llvm.vector.reduce.add.v{LANES}i32", I32, total))


@emits(types.void, *[types.int64] * 7)
def pack_keys(b, keys, rows, count, size, packed, ahead, ahead_rows):
    """Write the first `count` keys of a chunk, in int8 or bfloat16, to `packed`: bytes `[CHUNK / 16, padded size / 4,
    16 keys, 4]`.

    So a vector holds four dimensions of 16 keys, or two, and their sums need not be added up across lanes. size: bytes
    of a key's numbers. Bytes behind its end come along, as far as 64. keys, rows, ahead, ahead_rows: as of `dot_keys`.
    """

    def block(first: ir.Value, _: Values) -> Values:
        addresses, upcoming = (
            [row_at(b, base, of, b.add(first, I64(number))) for number in range(LANES)]
            for base, of in ((keys, rows), (ahead, ahead_rows))
        )
        target = b.add(packed, b.mul(first, padded_64(b, size)))

        def dimensions(index: ir.Value, _: Values) -> Values:
            for row in upcoming:
                fetch(b, b.add(row, index), 64)
            lines = [load(b, b.add(address, index), V_I32) for address in addresses]
            for number, line in enumerate(transpose(b, lines)):
                store(b, b.add(target, b.add(b.mul(index, I64(LANES)), I64(4 * LANES * number))), line)
            return []

        loop(b, size, 4 * LANES, [], dimensions)
        return []

    loop(b, count, LANES, [], block)


@emits(types.void, *[types.int64] * 11)
def dot_packed_keys(b, kind, together, queries, offsets, width, keys, groups, count, scores, ahead, ahead_groups):
    """Do what `dot_keys` does, for int8 and bfloat16, with keys packed by 16.

    Each row of queries begins with its numbers in the kind of the keys. offsets: of int8, what each query's sums begin
    with (`key_offset`). keys: what is added to the offsets `groups` (int64, of which number 0, 16, … are used) to find
    16 keys as `pack_keys` writes them. scores: of int8 without the scales of either side. ahead: what, added to the
    offsets `ahead_groups`, is to be fetched meanwhile; 0 for nothing. Sums of bfloat16 have one lane each: of pairs of
    dimensions in ascending order, the second of a pair first (`InstructionSet.dot_bfloat_pairs`).
    """
    isa = instruction_set()

    def emit(kind: str, together: int) -> None:
        blocks = min(CHUNK // LANES, max(1, isa.sums_at_once // together))
        size, dot = b.mul(width, I64(_ITEM_BYTES[kind])), isa.dot
        start = [_ZEROS] * together
        if kind == "bf16":
            dot = isa.dot_bfloat_pairs
        else:
            start = [splat(b, load(b, b.add(offsets, I64(4 * query)), I32)) for query in range(together)]

        def keys_from(first: ir.Value, _: Values) -> Values:
            numbers = [b.add(first, I64(LANES * n)) for n in range(blocks)]
            starts, upcoming = (
                [row_at(b, base, of, n) for n in numbers] for base, of in ((keys, groups), (ahead, ahead_groups))
            )

            def dimensions(index: ir.Value, sums: Values) -> Values:
                at = b.mul(index, I64(LANES))
                with b.if_then(b.icmp_signed("!=", ahead, I64(0))):
                    for group in upcoming:
                        fetch(b, b.add(group, at), 4 * LANES)
                lines = [load(b, b.add(group, at), V_I32) for group in starts]
                if kind == "int8" and not isa.signed_weights:
                    lines = [b.xor(line, TOP_BITS) for line in lines]
                results = []
                for query in range(together):
                    row = b.add(queries, b.add(b.mul(I64(4 * query), width), index))
                    x, mine = splat(b, load(b, row, I32)), sums[query * blocks : (query + 1) * blocks]
                    results += [dot(b, total, line, x) for total, line in zip(mine, lines, strict=True)]
                return results

            sums = loop(b, size, 4, [initial for initial in start for _ in range(blocks)], dimensions)
            for number, total in enumerate(sums):
                at = b.add(b.mul(first, I64(4)), I64(4 * (CHUNK * (number // blocks) + LANES * (number % blocks))))
                store(b, b.add(scores, at), total if kind == "bf16" else b.sitofp(total, V_F32))
            return []

        loop(b, count, LANES * blocks, [], keys_from)

    _for_each_kind(b, _PACKED, kind, together, emit)


@emits(types.void, *[types.int64] * 8)
def pack_values(b, kind, values, rows, count, width, packed, ahead, ahead_rows):
    """Write the first `count` values of a chunk to `packed`: int8 `[CHUNK / 4, width, 4 positions]` or bfloat16
    `[CHUNK / 2, width, 2 positions]`.

    An incomplete four or two is filled up with any other values. values, rows, ahead, ahead_rows: as of `add_values`,
    but each value has its own row.
    """

    def emit(kind: str) -> None:
        positions, item = _POSITIONS[kind], _ITEM_BYTES[kind]
        stored = ir.VectorType(ir.IntType(8 * item), LANES)

        def group(index: ir.Value, _: Values) -> Values:
            numbers = [b.add(index, I64(number)) for number in range(positions)]
            addresses, upcoming = (
                [row_at(b, base, of, n) for n in numbers] for base, of in ((values, rows), (ahead, ahead_rows))
            )
            target = b.add(packed, b.mul(index, b.mul(width, I64(item))))

            def columns(column: ir.Value, vectors: int) -> None:
                for row in upcoming:
                    fetch(b, b.add(row, b.mul(column, I64(item))), LANES * item * vectors)
                for at in (b.add(column, I64(LANES * n)) for n in range(vectors)):
                    place = b.mul(at, I64(item))
                    lanes = [b.zext(load(b, b.add(row, place), stored), V_I32) for row in addresses]
                    shifted = [b.shl(lane, constant(V_I32, 8 * item * n)) for n, lane in enumerate(lanes)]
                    store(b, b.add(target, b.mul(at, I64(4))), reduce(b.or_, shifted))

            in_columns(b, width, 4, columns)
            return []

        loop(b, count, positions, [], group)

    _each(b, kind, {number: partial(emit, name) for number, name in _PACKED.items()})


@emits(types.void, *[types.int64] * 8)
def prepare_values(b, values, rows, count, width, prepared, ahead_keys, ahead_values, ahead_rows):
    """Write the first `count` packed values of a chunk in int8 to `prepared`, as many queries multiply them: for AMX as
    they are, one four behind the other; else widened, int16 `[CHUNK / 4, width / 16, 2, 16, 2 positions]`, even
    positions before odd ones.

    Fetches the next chunk's values meanwhile, and with AMX, which does not, its keys. rows, ahead_rows: as of
    `add_values`. Ledger, a prefill of 2,048 tokens with AVX-512 alone: attention takes a fifth less than with values
    that each four queries widen again.
    """
    has_amx = instruction_set().has_amx
    size = 4 * LANES if has_amx else 8 * LANES

    def quad(index: ir.Value, _: Values) -> Values:
        row, to = row_at(b, values, rows, index), b.add(prepared, b.mul(b.mul(index, width), I64(size // (4 * LANES))))
        upcoming = [row_at(b, ahead, ahead_rows, index) for ahead in [ahead_values] + [ahead_keys] * has_amx]

        def columns(column: ir.Value, vectors: int) -> None:
            at = b.mul(column, I64(4))
            for ahead in upcoming:
                fetch(b, b.add(ahead, at), 4 * LANES * vectors)
            target = b.add(to, b.mul(column, I64(size // LANES)))
            for n in range(vectors):
                line = load(b, b.add(row, b.add(at, I64(4 * LANES * n))), V_I32)
                for part, vector in enumerate([line] if has_amx else _widened(b, line)):
                    store(b, b.add(target, I64(size * n + 4 * LANES * part)), vector)

        in_columns(b, width, 8, columns)
        return []

    loop(b, count, 4, [], quad)
