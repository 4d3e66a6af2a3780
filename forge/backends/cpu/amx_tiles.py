"""Code of a tile by AMX (`amx.py`): 16 rows of activations at a time, a multiple of 16 in all.

A tile's lines of a group lie in memory as AMX wants them (`tiles.py`). So one instruction multiplies the activations of
16 rows in a group with the tile's weights. The sums go to memory, and from there on everything is as in a tile: the
same scales, in the same order. So the bits are the same.

First the tile's weights are unpacked, once for all rows, to signed bytes, w - bias: then no sum has to begin with the
bias. The products are one group ahead of the sums that are scaled, from 16 rows to the next 16, too.

Ledger, a core at 3.3 GHz with AMX, Q8_0, 16 rows of 16 products with 32 inputs: a pair of tiles 36 ns, by AMX 28. The
products alone take 5, their way to memory 4 and scaling them 8 or 9; the core does little of one beside another.
"""

from llvmlite import ir

from forge.backends.cpu import amx
from forge.backends.cpu.llvm_code import (
    I8,
    I32,
    I64,
    TOP_BITS,
    V_F32,
    V_I32,
    call_intrinsic,
    constant,
    load,
    loop,
    store,
)
from forge.backends.cpu.tiles import AMX_ROWS, GROUP, LINE, TileCode

_SUMS, _X, _WEIGHTS = range(3)
"""Tile registers of a group's first part; those of the second are the next three."""
_SUMS_BYTES = 4 * AMX_ROWS * AMX_ROWS
_LINE = ir.VectorType(I8, LINE)


class AmxTileCode(TileCode):
    """Emits the code of a tile by AMX, for a multiple of 16 rows. Read `emit` first."""

    def emit(self) -> None:
        b, parts = self.b, GROUP // self.layout.group
        inputs = self.layout.group  # of a part: bytes of a row of activations, and four in each line of weights
        shapes = [(AMX_ROWS, 4 * AMX_ROWS), (AMX_ROWS, inputs), (inputs // 4, LINE)]
        amx.configure(b, shapes * parts)
        self.unpacked = amx.on_stack(b, self.arg["num_groups"], GROUP // 4 * LINE)
        self.sums = amx.on_stack(b, I64(2), parts * _SUMS_BYTES)
        loop(b, self.arg["num_groups"], 1, [], self.unpack)
        self.multiply(self.arg["x"], I64(0), I64(0))
        loop(b, self.arg["rows"], AMX_ROWS, [], self.sixteen)
        amx.release(b)

    def unpack(self, index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Emit the unpacking of a group's weights."""
        to = self.place(self.unpacked, index, GROUP // 4 * LINE)
        for number, line in enumerate(self.weight_lines(index)):
            store(self.b, self.b.add(to, I64(LINE * number)), self.signed(line()))
        return []

    def signed(self, line: ir.Value) -> ir.Value:
        """Return unsigned bytes w + bias as the signed bytes w."""
        if self.layout.bias == 128:
            return self.b.xor(line, TOP_BITS)
        return self.b.sub(self.b.bitcast(line, _LINE), constant(_LINE, self.layout.bias))

    def sixteen(self, first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Emit 16 rows. Behind their last group come products of the next 16 rows, or of the last again."""
        b, groups = self.b, self.arg["num_groups"]
        after, last = b.add(first, I64(AMX_ROWS)), b.sub(self.arg["rows"], I64(AMX_ROWS))
        rows = self.from_row(first)
        next_rows = self.from_row(b.select(b.icmp_signed("<", after, last), after, last))
        done = b.mul(b.udiv(first, I64(AMX_ROWS)), groups)
        rows.prefetch_out()

        def group(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            rows.prefetch(index)
            following, number = b.add(index, I64(1)), b.add(done, index)
            has_more = b.icmp_signed("<", following, groups)
            following = b.select(has_more, following, I64(0))
            x = b.select(has_more, rows.x_address(0, following), next_rows.x_address(0, following))
            self.multiply(x, following, b.add(number, I64(1)))
            for part in range(GROUP // self.layout.group):
                from_ = self.sums_of(number, part)
                integers = [load(b, b.add(from_, I64(4 * AMX_ROWS * row)), V_I32, align=64) for row in self.rows]
                totals = rows.scaled(index, part, integers, totals)
            return totals

        rows.write(loop(b, groups, 1, [constant(V_F32, 0.0) for _ in self.rows], group))
        return []

    def prefetch_out(self) -> None:
        """Prefetch what will be written: a store that misses holds up those of sums behind it."""
        b = self.b
        for row in self.rows:
            address = b.add(self.arg["out"], b.mul(I64(4 * row), self.arg["out_stride"]))
            pointer = b.inttoptr(address, I8.as_pointer())
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
        is_first = b.icmp_signed("==", first, I64(0))
        moved |= {name: b.select(is_first, arg[name], I64(0)) for name in ("ahead_low", "ahead_high")}
        return AmxTileCode(b, self.isa, self.layout, AMX_ROWS, arg | moved)

    def multiply(self, x: ir.Value, index: ir.Value, number: ir.Value) -> None:
        """Emit the products of group `index` with 16 rows from x on, and their way to the place of `number`."""
        b, weights = self.b, self.place(self.unpacked, index, GROUP // 4 * LINE)
        for part in range(GROUP // self.layout.group):
            sums, of_x, of_weights = (3 * part + register for register in (_SUMS, _X, _WEIGHTS))
            of_part = b.add(weights, I64(part * self.layout.group // 4 * LINE))
            amx.clear(b, sums)
            amx.load_register(b, of_x, b.add(x, I64(part * self.layout.group)), self.arg["x_stride"])
            amx.load_register(b, of_weights, of_part, I64(LINE))
            amx.multiply(b, sums, of_x, of_weights)
            amx.store_register(b, sums, self.sums_of(number, part), I64(4 * AMX_ROWS))

    def sums_of(self, number: ir.Value, part: int) -> ir.Value:
        """Return where the sums of a part of a group lie, in one of two places in turn: int32 `[16 rows, 16]`."""
        group = self.place(self.sums, self.b.and_(number, I64(1)), GROUP // self.layout.group * _SUMS_BYTES)
        return self.b.add(group, I64(part * _SUMS_BYTES))

    def place(self, room: ir.Value, number: ir.Value, size: int) -> ir.Value:
        return self.b.add(room, self.b.mul(number, I64(size)))
