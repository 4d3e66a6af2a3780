"""Code of a tile by AMX (`amx.py`): 16 rows of activations at a time, a multiple of 16 in all.

A tile's lines of a group lie in memory as AMX wants them (`tiles.py`). So one instruction multiplies the activations of
16 rows in a group with the tile's weights. The sums go to memory, and from there on everything is as in a tile: the
same scales, in the same order. So the bits are the same.

First the tile's weights are unpacked, once for all rows, to signed bytes, w - bias: then no sum has to begin with the
bias. While a group's sums are scaled, those of the next are on their way to memory, and the products of the one after
it are computed, from 16 rows to the next 16, too: a store whose register is not ready yet, or a load of what has not
reached the cache, holds up everything behind it. So this code is for two groups and more.

Ledger, a core with AMX, Q8_0, 16 rows of 16 products with 32 inputs: 19 ns; a pair of tiles takes 36. The products
alone take 4, their way to memory 4. Scaling takes 12, with no AMX beside it 7: within some 500 cycles of an instruction
on tiles, a core multiplies float32 in one of its two units, and there each sum is converted, its scale multiplied, and
the product of both added.
"""

from llvmlite import ir

from forge.backends.cpu import amx
from forge.backends.cpu.llvm_code import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    TOP_BITS,
    V_F32,
    V_I32,
    call_intrinsic,
    constant,
    in_registers,
    load,
    loop,
    opaque,
    prefetch_line,
    splat,
    store,
)
from forge.backends.cpu.tiles import AMX_ROWS, GROUP, LINE, TileCode

_SUMS, _X, _WEIGHTS = range(3)
"""Tile registers of a group's first part; those of the second are the next three."""
_SUMS_BYTES = 4 * AMX_ROWS * AMX_ROWS
_UNPACKED_BYTES = GROUP // 4 * LINE
"""Of a group's unpacked weights."""
_VECTOR = 4 * LANES
_SCALES_AT_ONCE = LANES // 2
"""Groups whose scales and offsets are a vector."""
_IN_ORDER = 2
"""Rows that are scaled before the next ones: LLVM would convert all 16 first, and have no registers for the totals."""
_LINE = ir.VectorType(I8, LINE)


class AmxTileCode(TileCode):
    """Emits the code of a tile by AMX, for a multiple of 16 rows. Read `emit` first."""

    def emit(self) -> None:
        b, parts = self.b, GROUP // self.layout.group
        inputs = self.layout.group  # of a part: bytes of a row of activations, and four in each line of weights
        shapes = [(AMX_ROWS, 4 * AMX_ROWS), (AMX_ROWS, inputs), (inputs // 4, LINE)]
        amx.configure(b, shapes * parts)
        self.unpacked = amx.on_stack(b, self.arg["num_groups"], _UNPACKED_BYTES)
        self.sums = amx.on_stack(b, I64(2), parts * _SUMS_BYTES)
        self.x_scales = amx.on_stack(b, b.add(self.arg["num_groups"], I64(_SCALES_AT_ONCE)), AMX_ROWS * 8)
        loop(b, self.arg["num_groups"], 1, [], self.unpack)
        x, weights = self.arg["x"], self.unpacked
        self.multiply(x, weights)
        self.store_sums(self.sums)
        x, weights = b.add(x, I64(GROUP)), b.add(weights, I64(_UNPACKED_BYTES))
        self.multiply(x, weights)
        places = [self.sums, b.add(self.sums, I64(parts * _SUMS_BYTES))]
        loop(b, self.arg["rows"], AMX_ROWS, [x, weights, *places], self.sixteen)
        amx.release(b)

    def unpack(self, index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Emit the unpacking of a group's weights."""
        to = self.place(self.unpacked, index, _UNPACKED_BYTES)
        for number, line in enumerate(self.weight_lines(index)):
            store(self.b, self.b.add(to, I64(LINE * number)), self.signed(line()))
        return []

    def signed(self, line: ir.Value) -> ir.Value:
        """Return unsigned bytes w + bias as the signed bytes w."""
        if self.layout.bias == 128:
            return self.b.xor(line, TOP_BITS)
        return self.b.sub(self.b.bitcast(line, _LINE), constant(_LINE, self.layout.bias))

    def sixteen(self, first: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
        """Emit 16 rows. Behind their last group come products of the next 16 rows, or of the last again.

        values: where the activations and weights of the second group lie, whose products are in the registers; where
        the sums of the first lie, and where those of the second go.
        """
        b, groups = self.b, self.arg["num_groups"]
        after = b.add(first, I64(AMX_ROWS))
        has_rows = b.icmp_signed("<", after, self.arg["rows"])
        rows, next_rows = self.from_row(first), self.from_row(b.select(has_rows, after, first))
        next_out = b.select(has_rows, next_rows.arg["out"], b.add(self.arg["out"], I64(4 * LANES)))
        loop(b, groups, _SCALES_AT_ONCE, [], rows.copy_scales)

        def group(index: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
            x, weights, sums, next_sums, *totals = values
            self.fetch(index, first, next_out)
            self.store_sums(next_sums)
            wraps = b.icmp_signed("==", b.add(index, I64(2)), groups)
            x = b.select(wraps, next_rows.arg["x"], b.add(x, I64(GROUP)))
            weights = b.select(wraps, self.unpacked, b.add(weights, I64(_UNPACKED_BYTES)))
            self.multiply(x, weights)
            for part in range(GROUP // self.layout.group):
                totals = rows.scaled_from(sums, index, part, totals)
            return [x, weights, next_sums, sums, *totals]

        zeros = [constant(V_F32, 0.0) for _ in self.rows]
        values = loop(b, groups, 1, [*values, *zeros], group)
        rows.write(values[4:])
        return values[:4]

    def fetch(self, index: ir.Value, first: ir.Value, next_out: ir.Value) -> None:
        """Prefetch the group of the tile ahead, an equal share with each 16 rows. And the place of a row to be written
        with the next 16."""
        b, bits, ahead = self.b, self.layout.bits, self.arg["ahead_low"]
        count = b.udiv(b.add(self.arg["rows"], I64(bits * AMX_ROWS - 1)), self.arg["rows"])
        begin = b.mul(b.udiv(first, I64(AMX_ROWS)), count)
        base = b.add(ahead, b.mul(index, I64(self.layout.bytes_per_group)))

        def line(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            prefetch_line(b, b.add(base, b.mul(b.add(begin, number), I64(LINE))))
            return []

        wanted = b.icmp_signed("!=", ahead, I64(0))
        with b.if_then(b.and_(wanted, b.icmp_signed("<", begin, I64(bits)))):
            loop(b, count, 1, [], line)
        row = b.and_(index, I64(AMX_ROWS - 1))
        pointer = b.inttoptr(b.add(next_out, b.mul(row, b.mul(self.arg["out_stride"], I64(4)))), I8.as_pointer())
        call_intrinsic(b, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(1), I32(3), I32(1))

    def from_row(self, first: ir.Value) -> "AmxTileCode":
        """Return the code of 16 rows, of which this is the first."""
        b, arg = self.b, self.arg
        per_row = {
            "x": arg["x_stride"],
            "x_scales": b.udiv(arg["x_stride"], I64(4)),
            "x_sums": b.udiv(arg["x_stride"], I64(4)),
            "out": b.mul(arg["out_stride"], I64(4)),
        }
        moved = {name: b.add(arg[name], b.mul(first, step)) for name, step in per_row.items()}
        code = AmxTileCode(b, self.isa, self.layout, AMX_ROWS, arg | moved)
        code.x_scales = self.x_scales
        return code

    def multiply(self, x: ir.Value, weights: ir.Value) -> None:
        """Emit the products of a group's unpacked weights with 16 rows from x on, for each part in its register."""
        b, inputs = self.b, self.layout.group
        for part in range(GROUP // inputs):
            sums, of_x, of_weights = (3 * part + register for register in (_SUMS, _X, _WEIGHTS))
            amx.clear(b, sums)
            amx.load_register(b, of_x, b.add(x, I64(part * inputs)), self.arg["x_stride"])
            amx.load_register(b, of_weights, b.add(weights, I64(part * inputs // 4 * LINE)), I64(LINE))
            amx.multiply(b, sums, of_x, of_weights)

    def store_sums(self, place: ir.Value) -> None:
        """Emit the way of a group's sums to memory: int32 `[parts, 16 rows, 16]`."""
        for part in range(GROUP // self.layout.group):
            at = self.b.add(place, I64(part * _SUMS_BYTES))
            amx.store_register(self.b, 3 * part + _SUMS, at, I64(4 * AMX_ROWS))

    def scaled_from(self, sums: ir.Value, index: ir.Value, part: int, totals: list[ir.Value]) -> list[ir.Value]:
        """Emit `scaled` for a part's sums in memory, row by row."""
        b, factors = self.b, self.group_scales(index, part)
        self.group_x_scales = opaque(b, self.place_of_scales(index))
        results: list[ir.Value] = []
        for row in self.rows:
            integer = load(b, b.add(sums, I64(part * _SUMS_BYTES + _VECTOR * row)), V_I32, align=_VECTOR)
            results.append(self.scaled_row(row, index, part, integer, factors, totals[row]))
            if len(results) % _IN_ORDER == 0:
                results[-_IN_ORDER:] = in_registers(b, results[-_IN_ORDER:])
        return results

    def copy_scales(self, index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Copy the rows' scales and offsets of some groups, from `index` on. Rows then lie a vector apart, which LLVM
        knows, and no row's address takes a register."""
        b = self.b
        left = b.trunc(b.mul(b.sub(self.arg["num_groups"], index), I64(2)), I32)
        mask = b.icmp_signed("<", ir.Constant(V_I32, list(range(LANES))), splat(b, left))
        to = self.place_of_scales(index)
        for row in self.rows:
            pointer = b.inttoptr(self.row_address("x_scales", row, 16, index, 8), V_F32.as_pointer())
            zeros = constant(V_F32, 0.0)
            vector = call_intrinsic(b, "llvm.masked.load.v16f32.p0", V_F32, pointer, I32(4), mask, zeros)
            store(b, b.add(to, I64(_VECTOR * row)), vector)
        return []

    def place_of_scales(self, index: ir.Value) -> ir.Value:
        """Return where the first row's scale of a group lies on the stack: `[groups / 8, 16 rows, 8 groups, 2]`."""
        b = self.b
        together = b.and_(index, I64(-_SCALES_AT_ONCE))
        at = b.mul(b.sub(index, together), I64(8))
        return b.add(self.place(self.x_scales, together, AMX_ROWS * _VECTOR // _SCALES_AT_ONCE), at)

    def x_scale(self, row: int, index: ir.Value) -> ir.Value:
        return load(self.b, self.b.add(self.group_x_scales, I64(_VECTOR * row)), F32)

    def x_offset(self, row: int, index: ir.Value) -> ir.Value:
        return load(self.b, self.b.add(self.group_x_scales, I64(_VECTOR * row + 4)), F32)

    def place(self, room: ir.Value, number: ir.Value, size: int) -> ir.Value:
        return self.b.add(room, self.b.mul(number, I64(size)))
