"""Code of the block: 16 rows of activations at a time times a tile, by AMX (`amx.py`).

A tile's lines of a group lie in memory as AMX wants them (`tiles.py`). So one instruction multiplies the activations of
16 rows in a group with the tile's weights. The sums go to memory, and from there on everything is as in a tile: the
same scales, in the same order. So the bits are the same.

First the tile's weights are unpacked, once for all rows, to signed bytes, w - bias: then no sum has to begin with the
bias. The products are `AHEAD` groups ahead of the sums that are scaled, which by then have reached the cache.

Ledger, a core at 3.3 GHz with AMX, Q8_0, 16 rows of 16 products with 32 inputs: a pair of tiles 36 ns, a block 28. The
products alone take 5, their way to memory 4 and scaling them 8 or 9; the core does little of one beside another.
"""

from llvmlite import ir

from forge.backends.cpu import amx
from forge.backends.cpu.llvm_code import I8, I64, TOP_BITS, V_F32, V_I32, constant, load, loop, store
from forge.backends.cpu.tiles import BLOCK_ROWS, GROUP, LINE, TileCode

AHEAD = 1
_PLACES = 2
"""Groups whose sums have a place in memory: a power of two above `AHEAD`."""
_SUMS, _X, _WEIGHTS = range(3)
"""Tile registers of a group's first part; those of the second are the next three."""
_SUMS_BYTES = 4 * BLOCK_ROWS * BLOCK_ROWS
_LINE = ir.VectorType(I8, LINE)


class BlockCode(TileCode):
    """Emits the code of a block, for a multiple of 16 rows. Read `emit` first."""

    def emit(self) -> None:
        b, parts = self.b, GROUP // self.layout.group
        inputs = self.layout.group  # of a part: bytes of a row of activations, and four in each line of weights
        shapes = [(BLOCK_ROWS, 4 * BLOCK_ROWS), (BLOCK_ROWS, inputs), (inputs // 4, LINE)]
        amx.configure(b, shapes * parts)
        self.unpacked = amx.on_stack(b, self.arg["num_groups"], GROUP // 4 * LINE)
        self.sums = amx.on_stack(b, I64(_PLACES), parts * _SUMS_BYTES)
        loop(b, self.arg["num_groups"], 1, [], self.unpack)
        loop(b, self.arg["rows"], BLOCK_ROWS, [], self.block)
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

    def block(self, first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Emit 16 rows. The first 16 prefetch the tile ahead."""
        b, groups = self.b, self.arg["num_groups"]
        rows = self.from_row(first)
        for number in range(AHEAD):
            rows.multiply(I64(number))

        def group(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            rows.prefetch(index)
            rows.multiply(b.add(index, I64(AHEAD)))
            for part in range(GROUP // self.layout.group):
                from_ = rows.sums_of(index, part)
                integers = [load(b, b.add(from_, I64(4 * BLOCK_ROWS * row)), V_I32, align=64) for row in self.rows]
                totals = rows.scaled(index, part, integers, totals)
            return totals

        rows.write(loop(b, groups, 1, [constant(V_F32, 0.0) for _ in self.rows], group))
        return []

    def from_row(self, first: ir.Value) -> "BlockCode":
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
        rows = BlockCode(b, self.isa, self.layout, BLOCK_ROWS, arg | moved)
        rows.unpacked, rows.sums = self.unpacked, self.sums
        return rows

    def multiply(self, index: ir.Value) -> None:
        """Emit the products of a group, and their way to memory. Behind the last group it is the last once more."""
        b, last = self.b, self.b.sub(self.arg["num_groups"], I64(1))
        group = b.select(b.icmp_signed("<", index, last), index, last)
        weights, x = self.place(self.unpacked, group, GROUP // 4 * LINE), self.x_address(0, group)
        for part in range(GROUP // self.layout.group):
            sums, of_x, of_weights = (3 * part + register for register in (_SUMS, _X, _WEIGHTS))
            of_part = b.add(weights, I64(part * self.layout.group // 4 * LINE))
            amx.clear(b, sums)
            amx.load_register(b, of_x, b.add(x, I64(part * self.layout.group)), self.arg["x_stride"])
            amx.load_register(b, of_weights, of_part, I64(LINE))
            amx.multiply(b, sums, of_x, of_weights)
            amx.store_register(b, sums, self.sums_of(index, part), I64(4 * BLOCK_ROWS))

    def sums_of(self, index: ir.Value, part: int) -> ir.Value:
        """Return where the sums of a part of a group lie: int32 `[16 rows, 16]`."""
        number = self.b.and_(index, I64(_PLACES - 1))
        group = self.place(self.sums, number, GROUP // self.layout.group * _SUMS_BYTES)
        return self.b.add(group, I64(part * _SUMS_BYTES))

    def place(self, room: ir.Value, number: ir.Value, size: int) -> ir.Value:
        return self.b.add(room, self.b.mul(number, I64(size)))
