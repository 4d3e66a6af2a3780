"""Code of the tile: some rows of activations times 16 rows of a weight matrix, which takes nearly all of the time.

A tile's weights lie in the order in which they are used. Four consecutive input elements of 16 weight rows make one
64-byte line, a 32-bit lane per weight row:

    8-bit line q (inputs 4q to 4q+3)    row 0: w w w w | row 1: w w w w | … | row 15: w w w w        64 bytes
    4-bit line                          the same, with inputs 4q … in the low and 4(q + 4) … in the high halves
    6-bit lines                         four 4-bit lines, then two of upper bits: inputs 0 to 15, and 16 to 31
    2-bit line                          inputs 4q …, 4(q + 2) …, 4(q + 4) …, 4(q + 6) … from the low bits to the high
    3-bit lines                         two 2-bit lines, then one of upper bits: bit n belongs to inputs 4n to 4n+3

so one load feeds one instruction for each activation row, and the 16 results stay apart in 16 lanes from the first
product to the last store: nothing is ever added across lanes. Eight lines make a group of 32 inputs. Inside a group
the sums are integers and exact. After each group they become float32, are scaled by (weight scale x activation scale)
and added to the running sums, groups in ascending order. That order is the same for one row and for eight, so a row's
result has the same bits whatever is computed beside it.

Weights are stored unsigned, w + bias (128 for 8-bit quants, 32 for Q6_K, 8 for Q4_0), because the instructions want
one operand unsigned. The bias is paid back once per group: the sum starts at -bias * (sum of the group's activations).

Why the number of rows is fixed when the code is made: the integer sums of all rows must stay in registers, and a loop
over rows inside would spill them. Where eight rows do not fit, a group is computed for four rows after the other
(`InstructionSet.rows_at_once`). One row is bound by memory, eight rows are bound by the multiplier; see
forge/bench/RESULTS.md.

Many rows are computed by pairs of tiles, four rows at a time (`PairCode`): what is loaded of the activations serves
both. Eight rows of one tile load 96 times for 80 multiplications, and where a core starts two of either in a cycle,
they wait for loads.
"""

from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from forge.backends.cpu import amx
from forge.backends.cpu.llvm_code import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    STORED,
    TOP_BITS,
    V_F32,
    V_I32,
    constant,
    fused_multiply_add,
    load,
    loop,
    prefetch_line,
    splat,
    store,
    widen,
)
from forge.backends.cpu.processor import InstructionSet

GROUP = 32
"""Inputs that share one activation scale."""
SUPERBLOCK = 256
"""Inputs of a K type that share float16 factors."""
LINE = 64
"""Bytes of a weight line."""
MAX_ROWS = 8
PAIR_ROWS = 4
"""Rows of a pair of tiles: as many as leave all sums in registers."""
PAIR, AMX = 0, MAX_ROWS + 1
"""Where the codes of a pair and by AMX (`amx_tiles.py`) stand among those of tiles for 1 to `MAX_ROWS` rows."""
AMX_ROWS = amx.ROWS
"""Rows that a tile by AMX computes at a time."""


@dataclass(frozen=True)
class TileLayout:
    """How quantized weights lie in memory: what makes one compiled tile differ from another."""

    bits: int
    """Bits of a weight: 8, 6, 4, 3 or 2. So many 64-byte lines hold 32 inputs of 16 rows."""
    bias: int
    """The number that was added to make the quants unsigned."""
    group: int
    """Inputs that share one weight scale: 32, or 16 for Q2_K, Q3_K and Q6_K."""
    scale_kind: str
    """`f16`: a float16 number per group. `k`: as the K types have it, a small integer per group and a float16 factor
    per 256 inputs, which are multiplied when they are used."""
    has_minimum: bool
    """Whether each group also has a minimum, which is subtracted from every weight of it."""
    unit: float = 1.0
    """`k`: a power of two that all scales are multiplied by."""

    @property
    def greatest(self) -> int:
        """The greatest quant. Quants of five bits are kept in eight."""
        return 31 if self.bits == 8 and self.bias == 0 else 2**self.bits - 1

    @property
    def gains_by_pairs(self) -> bool:
        """Whether two tiles together are faster than each alone. With minimums, two scales for a group or bits that lie
        apart, four rows share too little of the other work."""
        return self.group == GROUP and not self.has_minimum and self.bits in (4, 8)

    @property
    def bytes_per_group(self) -> int:
        """Bytes of 16 weight rows per 32 inputs, quants alone."""
        return self.bits * LINE

    @property
    def scale_bytes(self) -> int:
        """Bytes of the float16 scales (or of the minimums) of 16 weight rows per 32 inputs."""
        return LANES * 2 * (GROUP // self.group)

    @property
    def factor_bytes(self) -> int:
        """`k`: bytes of a superblock's factors for 16 weight rows, float16: for scales, then for minimums."""
        return LANES * 2 * (2 if self.has_minimum else 1)

    @property
    def integer_bytes(self) -> int:
        """`k`: bytes of a group's integers for 16 weight rows, int8: scales, then minimums."""
        return LANES * (2 if self.has_minimum else 1)

    @property
    def superblock_bytes(self) -> int:
        """`k`: bytes of a superblock's factors and integers for 16 weight rows."""
        return self.factor_bytes + SUPERBLOCK // self.group * self.integer_bytes

    @property
    def scale_bytes_per_group(self) -> int:
        """Bytes of the scales of 16 weight rows per 32 inputs, with a K type's factors and minimums. Exact for whole
        superblocks."""
        return self.scale_bytes if self.scale_kind == "f16" else self.superblock_bytes * GROUP // SUPERBLOCK

    @property
    def name(self) -> str:
        minimum = "m" if self.has_minimum else ""
        unit = "" if self.unit == 1 else f"u{self.unit:g}".replace(".", "_")
        return f"q{self.bits}b{self.bias}g{self.group}{self.scale_kind}{minimum}{unit}"


def pairs_tiles(isa: InstructionSet, layout: TileLayout) -> bool:
    """Return whether many rows take the tiles of a layout in pairs."""
    return isa.pairs_tiles and layout.gains_by_pairs


TILE_ARGUMENTS = (
    "weights", "scales", "minimums", "x", "x_scales", "x_sums", "out",
    "num_groups", "x_stride", "out_stride", "add", "ahead_low", "ahead_high", "rows", "tiles",
)  # fmt: skip
"""Addresses and numbers, all int64, that a tile function takes.

weights, scales, minimums: this tile's. x: int8 `[rows, x_stride]`. x_scales: float32 `[rows, x_stride / 32, 2]`, a
group's scale and minus its scale times the sum of its quants. x_sums: int32 `[rows, x_stride / 16]`, sums of 16
consecutive quants. out: float32 `[rows, out_stride]`, of which 16 columns are written; or added to, where `add` is 1.
ahead_low, ahead_high: where a tile's weights lie, the first or the second half of each group of which is to be fetched
meanwhile, or 0; by AMX, `ahead_low` alone says what is fetched with the last tile, and 0 that no tile fetches the next.
A pair takes the addresses of its first tile.
rows, tiles: by AMX, a multiple of `AMX_ROWS`, and how many tiles lie side by side; the other codes have their own.
"""


class TileCode:
    """Emits the code of one tile. Read `emit` first; `group` is the inside of its loop."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        instruction_set: InstructionSet,
        layout: TileLayout,
        num_rows: int,
        arguments: dict[str, ir.Value],
    ):
        """The tile has exactly `num_rows` rows. `arguments` has a value for each of `TILE_ARGUMENTS`."""
        self.b, self.isa, self.layout = builder, instruction_set, layout
        self.rows, self.arg = range(num_rows), arguments

    def beside(self) -> "TileCode":
        """Return the code of the tile that lies behind this one in memory, for the same rows."""
        b, layout, groups = self.b, self.layout, self.arg["num_groups"]
        steps = {"weights": layout.bytes_per_group, "scales": layout.scale_bytes_per_group}
        moved = {name: b.add(self.arg[name], b.mul(groups, I64(step))) for name, step in steps.items()}
        moved["out"] = b.add(self.arg["out"], I64(4 * LANES))
        return TileCode(b, self.isa, layout, len(self.rows), self.arg | moved)

    def emit(self) -> None:
        """Emit `for group in range(num_groups): sums = group(sums)`, then the stores of the sums."""
        zeros = [constant(V_F32, 0.0) for _ in self.rows]
        self.write(loop(self.b, self.arg["num_groups"], 1, zeros, self.group))

    def group(self, index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Emit one group of 32 inputs for all rows: exact integer sums, then one scaled addition (two if by 16)."""
        b, layout = self.b, self.layout
        self.prefetch(index)
        lines = self.weight_lines(index)
        parts = GROUP // layout.group
        per_part = len(lines) // parts
        inputs = self.isa.inputs_of(b, [self.x_address(row, index) for row in self.rows], layout.greatest)
        at_once = self.isa.rows_at_once
        for part in range(parts):
            numbers = range(part * per_part, (part + 1) * per_part)
            integers = []
            for some in (self.rows[first : first + at_once] for first in range(0, len(self.rows), at_once)):
                start = [self.start(row, index, part) for row in some]
                products = [(lines[number], [partial(inputs, row, number) for row in some]) for number in numbers]
                integers += self.isa.add_lines(b, start, products, layout.greatest)
            sums = self.scaled(index, part, integers, sums)
        return sums

    def weight_lines(self, index: ir.Value) -> list:
        """Return, for each four inputs of the group, a function that emits their weights as 16 lanes of 4 unsigned
        bytes."""
        b = self.b
        base = b.add(self.arg["weights"], b.mul(index, I64(self.layout.bytes_per_group)))

        def line(number):
            return load(b, b.add(base, I64(LINE * number)), V_I32, align=LINE)

        if self.layout.bits == 8:
            signed = self.isa.signed_weights and self.layout.bias == 128
            return [lambda n=n: b.xor(line(n), TOP_BITS) if signed else line(n) for n in range(8)]

        bits = partial(constant, V_I32)

        def low_bits(four):
            half = line(four % 4)
            return b.and_(half if four < 4 else b.lshr(half, bits(4)), bits(0x0F0F0F0F))

        def six_bits(four):
            upper, shift = line(4 + four // 4), 4 - 2 * (four % 4)
            upper = b.shl(upper, bits(shift)) if shift >= 0 else b.lshr(upper, bits(-shift))
            return b.or_(low_bits(four), b.and_(upper, bits(0x30303030)))

        def two_bits(four):
            return b.and_(b.lshr(line(four % 2), bits(four // 2 * 2)), bits(0x03030303))

        def three_bits(four):
            upper, shift = line(2), 2 - four
            upper = b.shl(upper, bits(shift)) if shift >= 0 else b.lshr(upper, bits(-shift))
            return b.or_(two_bits(four), b.and_(upper, bits(0x04040404)))

        unpacked = {2: two_bits, 3: three_bits, 4: low_bits, 6: six_bits}[self.layout.bits]
        return [lambda n=n: unpacked(n) for n in range(8)]

    def start(self, row: int, index: ir.Value, part: int) -> ir.Value:
        """Emit -bias * (sum of the part's activations), in every lane."""
        bias = self.layout.bias
        if bias == 0 or (self.isa.signed_weights and bias == 128):
            return constant(V_I32, 0)
        return splat(self.b, self.b.mul(self.activation_sum(row, index, part), I32(-bias)))

    def scaled(self, index, part, integers, sums):
        """Emit sums + integers * (weight scale * activation scale) - minimum * (activation scale * activation sum)."""
        factors = self.group_scales(index, part)
        per_row = zip(self.rows, integers, sums, strict=True)
        return [self.scaled_row(row, index, part, integer, factors, total) for row, integer, total in per_row]

    def scaled_row(self, row, index, part, integer, factors, total):
        """Emit `scaled` for one row. factors: the part's scale and minimum."""
        b, (scale, minimum) = self.b, factors
        x_scale = self.x_scale(row, index)
        total = fused_multiply_add(b, self.to_float(integer), b.fmul(scale, splat(b, x_scale)), total)
        if minimum is None:
            return total
        offset = self.minimum_factor(row, index, part, x_scale)
        return fused_multiply_add(b, minimum, splat(b, offset), total)

    def to_float(self, integer: ir.Value) -> ir.Value:
        """Emit a row's integer sums as float32."""
        return self.b.sitofp(integer, V_F32)

    def minimum_factor(self, row: int, index: ir.Value, part: int, x_scale: ir.Value) -> ir.Value:
        """Emit -(activation scale * activation sum): stored for a part of 32, multiplied here for one of 16."""
        if self.layout.group == GROUP:
            return self.x_offset(row, index)
        return self.b.fmul(x_scale, self.b.sitofp(self.b.neg(self.activation_sum(row, index, part)), F32))

    def x_scale(self, row: int, index: ir.Value) -> ir.Value:
        """Load the scale of a group's activations."""
        return load(self.b, self.row_address("x_scales", row, 16, index, 8), F32)

    def x_offset(self, row: int, index: ir.Value) -> ir.Value:
        """Load minus the scale of a group's activations times their sum."""
        return load(self.b, self.b.add(self.row_address("x_scales", row, 16, index, 8), I64(4)), F32)

    def group_scales(self, index: ir.Value, part: int) -> tuple[ir.Value, ir.Value | None]:
        """Emit the scale and minimum of 16 weight rows for one part of a group, as float32."""
        b, layout = self.b, self.layout
        if layout.scale_kind == "f16":
            at = b.add(b.mul(index, I64(layout.scale_bytes)), I64(part * LANES * 2))
            minimum = self.float16(b.add(self.arg["minimums"], at)) if layout.has_minimum else None
            return self.float16(b.add(self.arg["scales"], at)), minimum
        groups = SUPERBLOCK // GROUP
        factors = b.add(self.arg["scales"], b.mul(b.udiv(index, I64(groups)), I64(layout.superblock_bytes)))
        parts = GROUP // layout.group
        number = b.add(b.mul(b.urem(index, I64(groups)), I64(parts)), I64(part))
        integers = b.add(factors, b.add(I64(layout.factor_bytes), b.mul(number, I64(layout.integer_bytes))))
        scale = b.fmul(self.float16(factors), self.small_integers(integers))
        if layout.unit != 1:
            scale = b.fmul(scale, constant(V_F32, layout.unit))
        if not layout.has_minimum:
            return scale, None
        minimum_factors, minimum_integers = b.add(factors, I64(2 * LANES)), b.add(integers, I64(LANES))
        return scale, b.fmul(self.float16(minimum_factors), self.small_integers(minimum_integers))

    def float16(self, address: ir.Value) -> ir.Value:
        return widen(self.b, load(self.b, address, STORED["f16"], align=16), "f16")

    def small_integers(self, address: ir.Value) -> ir.Value:
        """Load 16 int8 as float32."""
        vector = load(self.b, address, ir.VectorType(I8, LANES), align=16)
        return self.b.sitofp(self.b.sext(vector, V_I32), V_F32)

    def activation_sum(self, row: int, index: ir.Value, part: int) -> ir.Value:
        """Emit the integer sum of this part's activations: two sums of 16 for a part of 32, one for a part of 16."""
        b = self.b
        address = self.row_address("x_sums", row, 16, index, 8)
        if self.layout.group == 16:
            return load(b, b.add(address, I64(4 * part)), I32)
        return b.add(load(b, address, I32), load(b, b.add(address, I64(4)), I32))

    def x_address(self, row: int, index: ir.Value) -> ir.Value:
        """Return the address of a group's activations."""
        b = self.b
        base = b.add(self.arg["x"], b.mul(I64(row), self.arg["x_stride"]))
        return b.add(base, b.mul(index, I64(GROUP)))

    def row_address(self, name: str, row: int, per: int, index: ir.Value, step: int) -> ir.Value:
        """Return the address of group `index`, `step` bytes, in row `row` of an array with 4 bytes per `per`
        activations."""
        b = self.b
        stride = b.mul(b.udiv(self.arg["x_stride"], I64(per)), I64(4 * row))
        return b.add(b.add(self.arg[name], stride), b.mul(index, I64(step)))

    def prefetch(self, index: ir.Value) -> None:
        """Prefetch the same group of the tile ahead. Without it a pass with several rows leaves memory idle while it
        computes, and the next tile then waits for its weights: 39 ms against 29 for 16 rows of a 0.6B model."""
        b, half = self.b, self.layout.bits // 2
        for name, first, last in (("ahead_low", 0, half), ("ahead_high", half, self.layout.bits)):
            base = b.add(self.arg[name], b.mul(index, I64(self.layout.bytes_per_group)))
            with b.if_then(b.icmp_signed("!=", self.arg[name], I64(0))):
                for number in range(first, last):
                    prefetch_line(b, b.add(base, I64(LINE * number)))

    def write(self, results: list[ir.Value]) -> None:
        b = self.b
        add = b.icmp_signed("!=", self.arg["add"], I64(0))
        for row, result in zip(self.rows, results, strict=True):
            address = b.add(self.arg["out"], b.mul(I64(4 * row), self.arg["out_stride"]))
            with b.if_else(add) as (adding, storing):
                with adding:
                    store(b, address, b.fadd(load(b, address, V_F32), result))
                with storing:
                    store(b, address, result)


class PairCode:
    """Emits the code of two tiles that lie side by side, for layouts that gain by it (`TileLayout.gains_by_pairs`)."""

    def __init__(self, tile: TileCode):
        """tile: the first of the two."""
        self.tiles = tile, tile.beside()

    def emit(self) -> None:
        """Emit what `TileCode.emit` does, group by group for both."""
        first, _ = self.tiles
        zeros = [constant(V_F32, 0.0) for tile in self.tiles for _ in tile.rows]
        results = loop(first.b, first.arg["num_groups"], 1, zeros, self.group)
        for tile, of_tile in zip(self.tiles, self.apart(results), strict=True):
            tile.write(of_tile)

    def apart(self, vectors: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        """Cut the rows' vectors, those of the first tile before those of the second, in two."""
        return vectors[:PAIR_ROWS], vectors[PAIR_ROWS:]

    def group(self, index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Emit one group of 32 inputs for all rows of both, each line's activations loaded once."""
        first, _ = self.tiles
        b, isa, rows = first.b, first.isa, first.rows
        first.prefetch(index)
        lines = [tile.weight_lines(index) for tile in self.tiles]
        inputs = isa.inputs_of(b, [first.x_address(row, index) for row in rows], first.layout.greatest)
        integers = [[first.start(row, index, 0) for row in rows]] * 2
        for number in range(GROUP // 4):
            x = [inputs(row, number) for row in rows]
            weights = [of_tile[number]() for of_tile in lines]
            integers = [
                [isa.dot(b, total, line, of_row) for total, of_row in zip(totals, x, strict=True)]
                for totals, line in zip(integers, weights, strict=True)
            ]
        by_tile = zip(self.tiles, integers, self.apart(sums), strict=True)
        return [total for tile, of_tile, totals in by_tile for total in tile.scaled(index, 0, of_tile, totals)]
