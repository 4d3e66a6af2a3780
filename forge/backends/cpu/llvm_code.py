"""Pieces of LLVM code that the tiles and the vector operations share. Needs llvmlite, and no Numba.

Addresses are plain int64 numbers, as in C.
"""

from collections.abc import Callable

from llvmlite import ir

LANES = 16

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F64, F32, HALF = ir.DoubleType(), ir.FloatType(), ir.HalfType()
V_F32, V_I32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def load(builder: ir.IRBuilder, address: ir.Value, type_: ir.Type, align: int = 1) -> ir.Value:
    """Load a value of `type_` from an int64 address."""
    value = builder.load(builder.inttoptr(address, type_.as_pointer()))
    value.align = align
    return value


def store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def constant(type_: ir.VectorType, number: float) -> ir.Constant:
    """Return a vector of one number in every lane."""
    return ir.Constant(type_, [number] * type_.count)


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Return 16 copies of a scalar."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first_lane = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first_lane, undefined, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(function, args)


def fused_multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c with one rounding, on every machine."""
    return call_intrinsic(builder, f"llvm.fma.v{LANES}f32", V_F32, a, b, c)


def widen(builder: ir.IRBuilder, raw: ir.Value, kind: str) -> ir.Value:
    """Convert 16 stored numbers (`f32`, `f16` or `bf16`) exactly to float32."""
    if kind == "f32":
        return raw
    if kind == "f16":
        return builder.fpext(raw, V_F32)
    shifted = builder.shl(builder.zext(raw, V_I32), constant(V_I32, 16))
    return builder.bitcast(shifted, V_F32)


STORED = {
    "f32": V_F32,
    "f16": ir.VectorType(HALF, LANES),
    "bf16": ir.VectorType(I16, LANES),
}
"""How 16 numbers of each kind lie in memory."""


def narrow(builder: ir.IRBuilder, value: ir.Value, kind: str) -> ir.Value:
    """Convert float32 to the stored kind, rounded to nearest, ties to even."""
    if kind == "f32":
        return value
    if kind == "f16":
        return builder.fptrunc(value, STORED["f16"])
    bits = builder.bitcast(value, V_I32)
    ones_vector, sixteen, half = (constant(V_I32, number) for number in (1, 16, 0x7FFF))
    even = builder.and_(builder.lshr(bits, sixteen), ones_vector)
    rounded = builder.lshr(builder.add(builder.add(bits, half), even), sixteen)
    return builder.trunc(rounded, STORED["bf16"])


def _halves(builder: ir.IRBuilder, vectors: list[ir.Value], width: int) -> tuple[list[ir.Value], list[ir.Value]]:
    """Cut every vector into runs of `width` lanes. Return, for each two vectors, the even runs of both in one vector;
    and the odd runs."""
    low = [lane for lane in range(LANES) if lane % (2 * width) < width]
    lows, highs = (
        ir.Constant(ir.VectorType(I32, LANES), [lane + half + side for side in (0, LANES) for lane in low])
        for half in (0, width)
    )
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    return [builder.shuffle_vector(*pair, lows) for pair in pairs], [
        builder.shuffle_vector(*pair, highs) for pair in pairs
    ]


def reduce_each(
    builder: ir.IRBuilder, vectors: list[ir.Value], combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Reduce 16 vectors to the vector of their reductions: in each, lanes 0 to 7 with 8 to 15, then 0 to 3 with 4 to 7,
    …

    Level by level, two vectors become one that holds the halves of both, so that each operation serves two of them.
    """
    for width in (8, 4, 2, 1):
        vectors = [combine(low, high) for low, high in zip(*_halves(builder, vectors, width), strict=True)]
    return vectors[0]


def transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose 16 vectors of 16 lanes."""
    groups = [rows]
    for width in (8, 4, 2, 1):
        groups = [half for group in groups for half in _halves(builder, group, width)]
    return [column for group in groups for column in group]
