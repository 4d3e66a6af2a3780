"""Code of tiles by AMX (`amx.py`): 16 rows of activations at a time, a multiple of 16 in all.

A tile's lines of a group lie in memory as AMX wants them (`tiles.py`). So one instruction multiplies the activations of
16 rows in a group with the tile's weights. The sums go to memory, and from there on everything is as in a tile: the
same scales, in the same order. So the bits are the same.

Weights of eight bits are taken as they lie in memory, w + bias, and a second product, of the same activations with
minus the bias, leaves the product with w. Others are unpacked first, once for all rows, to signed bytes w. While a
group's sums are scaled, those of the next are on their way to memory, and the products of the one after it are
computed, from 16 rows to the next 16, too: a store whose register is not ready yet, or a load of what has not reached
the cache, holds up everything behind it. So this code is for two groups and more.

Memory is asked for the next tile's weights line by line between the rows, and for this tile's again shortly before they
are used. Ledger, a stream of 512 bytes for 16 rows of 16 products with 32 inputs, on both cores: 45 ns as a burst at
the beginning of a group, 41 between the rows, 32 with the second request; memory alone 28.

Ledger, a core with AMX, Q8_0, 16 rows of 16 products with 32 inputs: 19 ns; a pair of tiles takes 36. The products
alone take 4, their way to memory 4. Scaling takes 12, with no AMX beside it 7: within some 500 cycles of an instruction
on tiles, a core multiplies float32 in one of its two units, and there each sum is converted, its scale multiplied, and
the product of both added. Q4_K, which adds its minimums there too: 28 ns, and 24 with `INTEGER_BASE`.
"""

from copy import copy
from typing import Any

from llvmlite import ir

from forge.backends.cpu import amx
from forge.backends.cpu.llvm_code import (
    F32,
    I8,
    I32,
    I64,
    INTEGER_BASE,
    LANES,
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

_SUMS, _X, _WEIGHTS, _BIAS = range(4)
"""Tile registers of a group's first part; those of the second are the next three. `_BIAS` holds
minus the bias where weights are bytes, which have a single part."""
_SUMS_BYTES = 4 * AMX_ROWS * AMX_ROWS
_GROUP_BYTES = GROUP // 4 * LINE
"""Of a group's weights as AMX takes them."""
_VECTOR = 4 * LANES
_SCALES_AT_ONCE = LANES // 2
"""Groups whose scales and offsets are a vector."""
_IN_ORDER = 2
"""Rows that are scaled before the next ones: LLVM would convert all 16 first, and have no registers for the totals."""
_STEPS = AMX_ROWS // _IN_ORDER
_NEAR = 8 * _GROUP_BYTES
"""How far ahead a tile's weights are fetched into the first-level cache."""
_LINE = ir.VectorType(I8, LINE)


class AmxTileCode(TileCode):
    """Emits the code of adjacent tiles by AMX, for a multiple of 16 rows. Read `emit` first, then `sixteen`."""

    weights: ir.Value
    """Where a tile's weights lie as AMX takes them."""
    next_weights: ir.Value
    """The same of the tile whose products come behind the last rows."""
    ahead: ir.Value
    """Where the weights lie that are fetched meanwhile."""
    share: ir.Value
    """Bytes of them for each group of 16 rows."""
    sums: ir.Value
    """Where the sums of two groups lie."""
    base: ir.Value
    """Where `INTEGER_BASE` lies, 16 times."""
    scales: ir.Value
    """Where the rows' scales lie (`copy_scales`)."""

    @property
    def parts(self) -> int:
        return GROUP // self.layout.group

    @property
    def has_bytes(self) -> bool:
        """Whether the weights lie in memory as AMX takes them."""
        return self.layout.bits == 8

    @property
    def begins_at_base(self) -> bool:
        """Whether sums begin with `INTEGER_BASE`, so that a subtraction converts them, which either unit does. Where
        there is one scale for 32 inputs and no minimum, the loads that it takes cost more than the conversions."""
        return self.layout.has_minimum or self.parts > 1

    def emit(self) -> None:
        b, arg, inputs = self.b, self.arg, self.layout.group
        of_weights = (inputs // 4, LINE)  # four inputs in each line
        shapes = [(AMX_ROWS, 4 * AMX_ROWS), (AMX_ROWS, inputs), of_weights] * self.parts
        amx.configure(b, [*shapes, of_weights] if self.has_bytes else shapes)
        if self.has_bytes:
            line = amx.on_stack(b, I64(1), LINE)
            store(b, line, constant(_LINE, -self.layout.bias))
            amx.load_register(b, _BIAS, line, I64(0))  # the same line 8 times
        else:
            self.weights = amx.on_stack(b, arg["num_groups"], _GROUP_BYTES)
        if self.begins_at_base:
            self.base = amx.on_stack(b, I64(1), LINE)
            store(b, self.base, constant(V_F32, INTEGER_BASE))
        self.sums = amx.on_stack(b, I64(2), self.parts * _SUMS_BYTES)
        self.scales = amx.on_stack(b, b.mul(arg["rows"], self.scales_step()), 1)
        self.share = b.udiv(I64(AMX_ROWS * self.layout.bytes_per_group), arg["rows"])
        loop(b, arg["rows"], AMX_ROWS, [], self.copy_scales)
        self.emit_tiles()
        amx.release(b)

    def emit_tiles(self) -> None:
        """Emit tile after tile. Each fetches the next. Behind its last products come the first of the next, unless that
        has to be unpacked before."""
        b, arg, layout, groups = self.b, self.arg, self.layout, self.arg["num_groups"]
        of_weights, of_scales = (
            b.mul(groups, I64(size)) for size in (layout.bytes_per_group, layout.scale_bytes_per_group)
        )
        steps = {"weights": of_weights, "scales": of_scales, "minimums": of_scales, "out": I64(4 * LANES)}

        def tile(number: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
            places, begun = values[: len(steps)], values[len(steps) :]
            following = [b.add(place, step) for place, step in zip(places, steps.values(), strict=True)]
            code = self.changed(arg=arg | dict(zip(steps, places, strict=True)))
            is_last = b.icmp_signed("==", b.add(number, I64(1)), arg["tiles"])
            fetches = b.icmp_signed("!=", arg["ahead_low"], I64(0))
            code.ahead = b.select(fetches, b.select(is_last, arg["ahead_low"], following[0]), places[0])
            if self.has_bytes:
                code.weights, code.next_weights = places[0], b.select(is_last, places[0], following[0])
            else:
                code.next_weights = self.weights
                loop(b, groups, 1, [], code.unpack)
                begun = code.begin()
            begun = loop(b, arg["rows"], AMX_ROWS, begun, code.sixteen)
            return [*following, *begun] if self.has_bytes else following

        begun = self.changed(weights=arg["weights"]).begin() if self.has_bytes else []
        loop(b, arg["tiles"], 1, [*(arg[name] for name in steps), *begun], tile)

    def changed(self, **attributes: Any) -> "AmxTileCode":
        """Return the same code with other attributes."""
        code = copy(self)
        vars(code).update(attributes)
        return code

    def unpack(self, index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Emit the unpacking of a group's weights, unsigned w + bias, to signed bytes w."""
        b, bias, to = self.b, constant(_LINE, self.layout.bias), self.place(self.weights, index, _GROUP_BYTES)
        for number, line in enumerate(self.weight_lines(index)):
            store(b, b.add(to, I64(LINE * number)), b.sub(b.bitcast(line(), _LINE), bias))
        return []

    def begin(self) -> list[ir.Value]:
        """Emit the products of two groups with the first 16 rows, and the store of the first group's sums. Returns what
        `sixteen` begins with."""
        b, x, weights = self.b, self.arg["x"], self.weights
        self.multiply(x, weights)
        self.store_sums(self.sums)
        x, weights = b.add(x, I64(GROUP)), b.add(weights, I64(_GROUP_BYTES))
        self.multiply(x, weights)
        return [x, weights, self.sums, b.add(self.sums, I64(self.parts * _SUMS_BYTES))]

    def sixteen(self, first: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
        """Emit 16 rows. Behind their last group come products of the next 16 rows, or of the next tile.

        values: where the activations and weights of the second group lie, whose products are in the registers; where
        the sums of the first lie, and where those of the second go.
        """
        b, groups = self.b, self.arg["num_groups"]
        after = b.add(first, I64(AMX_ROWS))
        has_rows = b.icmp_signed("<", after, self.arg["rows"])
        rows, next_rows = self.from_row(first), self.from_row(b.select(has_rows, after, I64(0)))
        passed = b.mul(b.udiv(first, I64(AMX_ROWS)), groups)
        rows.ahead = self.place(self.ahead, passed, self.share)
        next_weights = b.select(has_rows, self.weights, self.next_weights)
        next_out = b.select(has_rows, next_rows.arg["out"], b.add(self.arg["out"], I64(4 * LANES)))

        def group(index: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
            x, weights, sums, next_sums, *totals = values
            row = b.and_(index, I64(AMX_ROWS - 1))
            upcoming = b.add(next_out, b.mul(row, b.mul(self.arg["out_stride"], I64(4))))
            prefetch_line(b, upcoming, level=1, is_written=True)
            self.store_sums(next_sums)
            wraps = b.icmp_signed("==", b.add(index, I64(2)), groups)
            x = b.select(wraps, next_rows.arg["x"], b.add(x, I64(GROUP)))
            weights = b.select(wraps, next_weights, b.add(weights, I64(_GROUP_BYTES)))
            self.multiply(x, weights)
            for part in range(self.parts):
                totals = rows.scaled_from(sums, index, part, totals)
            return [x, weights, next_sums, sums, *totals]

        zeros = [constant(V_F32, 0.0) for _ in self.rows]
        values = loop(b, groups, 1, [*values, *zeros], group)
        rows.write(values[4:])
        return values[:4]

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
        return self.changed(arg=arg | moved, scales=self.place(self.scales, first, self.scales_step()))

    def multiply(self, x: ir.Value, weights: ir.Value) -> None:
        """Emit the products of a group's weights with 16 rows from x on, for each part in its register."""
        b, inputs = self.b, self.layout.group
        for part in range(self.parts):
            sums, of_x, of_weights = (3 * part + register for register in (_SUMS, _X, _WEIGHTS))
            if self.begins_at_base:
                amx.load_register(b, sums, self.base, I64(0))
            else:
                amx.clear(b, sums)
            amx.load_register(b, of_x, b.add(x, I64(part * inputs)), self.arg["x_stride"])
            amx.load_register(b, of_weights, b.add(weights, I64(part * inputs // 4 * LINE)), I64(LINE))
            if self.has_bytes and self.layout.bias != 0:
                amx.multiply(b, sums, of_x, _BIAS)
            amx.multiply(b, sums, of_x, of_weights, "su" if self.has_bytes else "ss")

    def store_sums(self, place: ir.Value) -> None:
        """Emit the way of a group's sums to memory: int32 `[parts, 16 rows, 16]`."""
        for part in range(self.parts):
            at = self.b.add(place, I64(part * _SUMS_BYTES))
            amx.store_register(self.b, 3 * part + _SUMS, at, I64(4 * AMX_ROWS))

    def scaled_from(self, sums: ir.Value, index: ir.Value, part: int, totals: list[ir.Value]) -> list[ir.Value]:
        """Emit `scaled` for a part's sums in memory, row by row, and what is fetched between the rows."""
        b, factors = self.b, self.group_scales(index, part)
        self.group_x_scales = opaque(b, self.place_of_scales(index))
        results: list[ir.Value] = []
        for row in self.rows:
            integer = load(b, b.add(sums, I64(part * _SUMS_BYTES + _VECTOR * row)), V_I32, align=_VECTOR)
            results.append(self.scaled_row(row, index, part, integer, factors, totals[row]))
            if len(results) % _IN_ORDER == 0:
                results[-_IN_ORDER:] = in_registers(b, results[-_IN_ORDER:])
                self.fetch(index, part * _STEPS + row // _IN_ORDER)
        return results

    def to_float(self, integer: ir.Value) -> ir.Value:
        if not self.begins_at_base:
            return super().to_float(integer)
        b = self.b  # the difference in this order, whose second number comes from memory
        return b.fneg(b.fsub(constant(V_F32, INTEGER_BASE), b.bitcast(integer, V_F32)))

    def fetch(self, index: ir.Value, step: int) -> None:
        """Prefetch some of a group's lines: of the tile ahead into the second-level cache; and of bytes, from this tile
        into the first.

        step: which of the `_STEPS` for each part. All passes of 16 rows share the tile ahead equally. A pass prefetches
        as many lines as a group has, from where its share begins, though its share may be fewer: to prefetch a line
        twice costs little.
        """
        b, bits = self.b, self.layout.bits
        ahead = self.place(self.ahead, index, self.share)
        near = b.add(self.place(self.arg["weights"], index, self.layout.bytes_per_group), I64(_NEAR))
        for line in range(bits):
            if line * self.parts * _STEPS // bits == step:
                prefetch_line(b, b.add(ahead, I64(LINE * line)))
                if self.has_bytes:
                    prefetch_line(b, b.add(near, I64(LINE * line)), level=1)

    def copy_scales(self, first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        """Copy the scales and offsets of 16 rows. They then lie a vector apart, which LLVM knows, and no row's address
        takes a register."""
        b, groups, rows = self.b, self.arg["num_groups"], self.from_row(first)

        def some_groups(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            left = b.trunc(b.mul(b.sub(groups, index), I64(2)), I32)
            mask = b.icmp_signed("<", ir.Constant(V_I32, list(range(LANES))), splat(b, left))
            to = rows.place_of_scales(index)
            for row in self.rows:
                pointer = b.inttoptr(rows.row_address("x_scales", row, 16, index, 8), V_F32.as_pointer())
                zeros = constant(V_F32, 0.0)
                vector = call_intrinsic(b, "llvm.masked.load.v16f32.p0", V_F32, pointer, I32(4), mask, zeros)
                store(b, b.add(to, I64(_VECTOR * row)), vector)
            return []

        loop(b, groups, _SCALES_AT_ONCE, [], some_groups)
        return []

    def scales_step(self) -> ir.Value:
        """Return the bytes of a row's scales."""
        b = self.b
        whole = b.and_(b.add(self.arg["num_groups"], I64(_SCALES_AT_ONCE - 1)), I64(-_SCALES_AT_ONCE))
        return b.mul(whole, I64(8))

    def place_of_scales(self, index: ir.Value) -> ir.Value:
        """Return where the first row's scale of a group lies on the stack: `[groups / 8, 16 rows, 8 groups, 2]`."""
        b = self.b
        together = b.and_(index, I64(-_SCALES_AT_ONCE))
        at = b.mul(b.sub(index, together), I64(8))
        return b.add(self.place(self.scales, together, AMX_ROWS * _VECTOR // _SCALES_AT_ONCE), at)

    def x_scale(self, row: int, index: ir.Value) -> ir.Value:
        return load(self.b, self.b.add(self.group_x_scales, I64(_VECTOR * row)), F32)

    def x_offset(self, row: int, index: ir.Value) -> ir.Value:
        return load(self.b, self.b.add(self.group_x_scales, I64(_VECTOR * row + 4)), F32)

    def place(self, room: ir.Value, number: ir.Value, size: int | ir.Value) -> ir.Value:
        size = I64(size) if isinstance(size, int) else size
        return self.b.add(room, self.b.mul(number, size))
