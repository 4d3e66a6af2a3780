"""Pieces of LLVM code that the tiles and the vector operations share. Needs llvmlite, and no Numba.

Addresses are plain int64 numbers, as in C.
"""

from collections.abc import Callable, Sequence

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


def store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def prefetch_line(builder: ir.IRBuilder, address: ir.Value, level: int = 2, is_written: bool = False) -> None:
    """Prefetch the cache line at an address into the first-level cache or the second; one that will be written, as this
    core's own."""
    pointer, locality = builder.inttoptr(address, I8.as_pointer()), 4 - level
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(int(is_written)), I32(locality), I32(1))


def constant(type_: ir.VectorType, number: float) -> ir.Constant:
    """Return a vector of one number in every lane."""
    return ir.Constant(type_, [number] * type_.count)


INTEGER_BASE = 1.5 * 2.0**23
"""Around this float32 numbers lie 1 apart: its bits plus an integer within ±2^22 are those of this plus the integer."""
TOP_BITS = constant(V_I32, 0x80808080 - (1 << 32))
"""128 in every byte: xor turns signed bytes w into unsigned w + 128, and back."""


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """Return a vector of so many copies of a scalar."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, scalar, I32(0)), [0] * lanes)


def shuffle(builder: ir.IRBuilder, vector: ir.Value, lanes: Sequence[int], other: ir.Value | None = None) -> ir.Value:
    """Return a vector of some lanes of one, or of two: the lanes of `other` are numbered behind those of `vector`."""
    other = ir.Constant(vector.type, ir.Undefined) if other is None else other
    return builder.shuffle_vector(vector, other, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(function, args)


def call_address(builder: ir.IRBuilder, address: ir.Value, *args: ir.Value) -> None:
    """Call the machine code at an address with int64 arguments."""
    function_type = ir.FunctionType(ir.VoidType(), [I64] * len(args))
    builder.call(builder.inttoptr(address, function_type.as_pointer()), args)


def in_registers(builder: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """Return several vectors from an empty piece of assembly: LLVM has all of them in registers there, neither computes
    earlier what comes later nor keeps what it has loaded. On x86 alone, for vectors of a register's size."""
    if len(vectors) == 1:
        return vectors
    outputs = ir.LiteralStructType([vector.type for vector in vectors])
    constraints = [*["=v"] * len(vectors), *map(str, range(len(vectors))), "~{memory}"]
    function = ir.FunctionType(outputs, [vector.type for vector in vectors])
    result = builder.call(ir.InlineAsm(function, "", ",".join(constraints), side_effect=True), vectors)
    return [builder.extract_value(result, number) for number in range(len(vectors))]


def opaque(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return an address from an empty piece of assembly. LLVM cannot see how it was computed, so a constant that is
    added to it becomes part of the load that uses the sum."""
    function = ir.FunctionType(I64, [I64])
    return builder.call(ir.InlineAsm(function, "", "=r,0"), [address])


def fused_multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c with one rounding, on every machine."""
    return call_intrinsic(builder, f"llvm.fma.v{LANES}f32", V_F32, a, b, c)


class _BFloat(ir.Type):
    """bfloat16, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()


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


def half_to_float(b: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """Convert one float16 to float32 in integers, as the IEEE 754 instructions do."""
    bits = b.sext(b.bitcast(half, I16), I32)
    sign, magnitude = b.and_(bits, I32(-(1 << 31))), b.and_(bits, I32(0x7FFF))
    subnormal = b.bitcast(b.fmul(b.uitofp(magnitude, F32), F32(2.0**-24)), I32)
    shifted = b.shl(magnitude, I32(13))
    normal = b.add(shifted, I32(112 << 23))  # the exponent's bias grows from 15 to 127
    finite = b.select(b.icmp_unsigned("<", magnitude, I32(0x400)), subnormal, normal)
    infinite = b.or_(shifted, I32(0x7F800000))
    quiet = b.or_(infinite, I32(0x400000))  # what is not a number
    special = b.select(b.icmp_unsigned(">", magnitude, I32(0x7C00)), quiet, infinite)
    unsigned = b.select(b.icmp_unsigned(">=", magnitude, I32(0x7C00)), special, finite)
    return b.bitcast(b.or_(unsigned, sign), F32)


def float_to_half(b: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Convert one float32 to float16 in integers, rounded as the IEEE 754 instructions round: to nearest, ties to
    even."""
    bits = b.bitcast(number, I32)
    magnitude, sign = b.and_(bits, I32(0x7FFFFFFF)), b.and_(b.lshr(bits, I32(16)), I32(0x8000))
    # The bias shrinks from 127 to 15, and 13 bits are rounded away: a carry out of the largest exponent gives infinity.
    odd = b.and_(b.lshr(magnitude, I32(13)), I32(1))
    normal = b.lshr(b.add(b.sub(magnitude, I32((112 << 23) - 0xFFF)), odd), I32(13))
    # Adding 0.5 leaves multiples of 2^-24 in the mantissa.
    aligned = b.bitcast(b.fadd(b.bitcast(magnitude, F32), F32(0.5)), I32)
    subnormal = b.sub(aligned, I32(0x3F000000))
    finite = b.select(b.icmp_unsigned("<", magnitude, I32(0x38800000)), subnormal, normal)
    quiet = b.or_(b.and_(b.lshr(magnitude, I32(13)), I32(0x3FF)), I32(0x7E00))  # what is not a number
    special = b.select(b.icmp_unsigned(">", magnitude, I32(0x7F800000)), quiet, I32(0x7C00))
    unsigned = b.select(b.icmp_unsigned(">=", magnitude, I32(0x47800000)), special, finite)
    return b.bitcast(b.trunc(b.or_(unsigned, sign), I16), HALF)


def _halves(builder: ir.IRBuilder, vectors: list[ir.Value], width: int) -> tuple[list[ir.Value], list[ir.Value]]:
    """Cut every vector into runs of `width` lanes. Return, for each two vectors, the even runs of both in one vector;
    and the odd runs."""
    low = [lane for lane in range(LANES) if lane % (2 * width) < width]
    lows, highs = ([lane + half + side for side in (0, LANES) for lane in low] for half in (0, width))
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    return [shuffle(builder, a, lows, b) for a, b in pairs], [shuffle(builder, a, highs, b) for a, b in pairs]


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


Values = list[ir.Value]


def loop(
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
