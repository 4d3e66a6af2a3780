"""Vectors of 16 lanes as Numba values, so that a kernel can be written, and read, in Python.

A kernel works on `f32x16` (16 float32) and `i32x16` (16 int32) values. LLVM maps them to what the machine has: one
register on AVX-512, two on AVX2, four on NEON or SSE. Sixteen lanes are part of the arithmetic contract: a float
reduction keeps 16 partial sums and adds them in one fixed tree (`sum16`), so its bits are the same on every machine,
for every batch. Nothing here carries a fast-math flag: LLVM may not reorder, contract or approximate anything.

Addresses are plain int64 numbers, as in C. Loads and stores need no alignment beyond that of one element.
"""

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.llvm_code import (
    F32,
    F64,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STORED,
    V_F32,
    V_I32,
    call_intrinsic,
    fused_multiply_add,
    load,
    narrow,
    reduce_each,
    splat,
    store,
    widen,
)
from forge.backends.cpu.numba_internals import define_operator, vector_type

f32x16 = vector_type("f32x16", V_F32)
i32x16 = vector_type("i32x16", V_I32)

for _function, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    define_operator(_function, _name, f32x16)


def _loader(kind: str):
    @intrinsic
    def load_vector(typingctx, address):
        def codegen(context, builder, sig, args):
            return widen(builder, load(builder, args[0], STORED[kind]), kind)

        return f32x16(types.int64), codegen

    return load_vector


def _storer(kind: str):
    @intrinsic
    def store_vector(typingctx, address, value):
        def codegen(context, builder, sig, args):
            store(builder, args[0], narrow(builder, args[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, f32x16), codegen

    return store_vector


load_f32, load_f16, load_bf16 = _loader("f32"), _loader("f16"), _loader("bf16")
store_f32, store_f16, store_bf16 = _storer("f32"), _storer("f16"), _storer("bf16")


@intrinsic
def splat_f32(typingctx, scalar):
    """Return an f32x16 with the same float32 in every lane."""

    def codegen(context, builder, sig, args):
        return splat(builder, args[0])

    return f32x16(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, sig, args):
        return fused_multiply_add(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


def _tree(combine):
    """Reduce 16 lanes: 0..7 with 8..15, then 0..3 with 4..7, then pairs, then the last two. Always in this order."""

    @intrinsic
    def reduce(typingctx, vector):
        def codegen(context, builder, sig, args):
            value = args[0]
            width = LANES
            while width > 1:
                width //= 2
                undefined = ir.Constant(value.type, ir.Undefined)
                low, high = (
                    builder.shuffle_vector(
                        value, undefined, ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
                    )
                    for start in (0, width)
                )
                value = combine(builder, low, high)
            return builder.extract_element(value, ir.Constant(I32, 0))

        return types.float32(f32x16), codegen

    return reduce


def _maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


sum16 = _tree(lambda builder, a, b: builder.fadd(a, b))
max16 = _tree(_maximum)


@intrinsic
def maximum(typingctx, a, b):
    """Return the larger of each lane; b where they do not compare."""

    def codegen(context, builder, sig, args):
        return _maximum(builder, *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def absolute(typingctx, a):
    """Return |a| of each lane."""

    def codegen(context, builder, sig, args):
        bits = builder.and_(builder.bitcast(args[0], V_I32), ir.Constant(V_I32, [0x7FFFFFFF] * LANES))
        return builder.bitcast(bits, V_F32)

    return f32x16(f32x16), codegen


def _rounded(builder, a):
    # Adding 1.5 * 2^23 pushes the fraction out of the mantissa, rounding it to nearest even on the way.
    magic = ir.Constant(V_F32, [12582912.0] * LANES)
    bits = builder.bitcast(builder.fadd(a, magic), V_I32)
    return builder.sub(bits, ir.Constant(V_I32, [0x4B400000] * LANES))


@intrinsic
def round_to_int(typingctx, a):
    """Round each lane to the nearest integer, ties to even, as i32x16. Lanes must lie within ±2^22."""

    def codegen(context, builder, sig, args):
        return _rounded(builder, *args)

    return i32x16(f32x16), codegen


@intrinsic
def to_f32(typingctx, a):
    """Convert i32x16 to f32x16."""

    def codegen(context, builder, sig, args):
        return builder.sitofp(args[0], V_F32)

    return f32x16(i32x16), codegen


@intrinsic
def store_i8(typingctx, address, a):
    """Store 16 int32 lanes as 16 int8, which they must fit."""

    def codegen(context, builder, sig, args):
        store(builder, args[0], builder.trunc(args[1], ir.VectorType(I8, LANES)))
        return context.get_dummy_value()

    return types.void(types.int64, i32x16), codegen


@intrinsic
def quantize_16_groups(typingctx, x, x_step, quants, quants_step, scales, scales_step, sums, sums_step):
    """Do what `kernels._quantize_32` does for 16 groups at once, each array's groups so many bytes apart.

    One group alone waits for its maximum, for a division and for its sums; here the lanes of one vector are those of
    all 16. Every step is exact or rounds in its own lane, so the bits are the same.
    """

    def codegen(context, b, sig, args):
        x, x_step, quants, quants_step, scales, scales_step, sums, sums_step = args

        def constant(number):
            return ir.Constant(V_F32, [number] * LANES)

        def absolute_of(value):
            bits = b.and_(b.bitcast(value, V_I32), ir.Constant(V_I32, [0x7FFFFFFF] * LANES))
            return b.bitcast(bits, V_F32)

        def half(group, offset):
            return load(b, b.add(x, b.add(b.mul(x_step, I64(group)), I64(offset))), V_F32)

        larger = [_maximum(b, absolute_of(half(group, 0)), absolute_of(half(group, 64))) for group in range(LANES)]
        largest = reduce_each(b, larger, lambda left, right: _maximum(b, left, right))
        is_large = b.fcmp_ordered(">", largest, constant(float(np.float32(1e-30))))
        factors = b.select(is_large, b.fdiv(constant(127.0), largest), constant(0.0))
        units = b.select(is_large, b.fdiv(largest, constant(127.0)), constant(0.0))
        halves: list[list[ir.Value]] = [[], []]
        for group in range(LANES):
            factor = splat(b, b.extract_element(factors, I32(group)))
            for part in range(2):
                rounded = _rounded(b, b.fmul(half(group, 64 * part), factor))
                place = b.add(quants, b.add(b.mul(quants_step, I64(group)), I64(16 * part)))
                store(b, place, b.trunc(rounded, ir.VectorType(I8, LANES)))
                halves[part].append(rounded)
        low, high = (reduce_each(b, sums_of_half, b.add) for sums_of_half in halves)
        offsets = b.fmul(b.fneg(units), b.sitofp(b.add(low, high), V_F32))
        for array, step, values in ((scales, scales_step, (units, offsets)), (sums, sums_step, (low, high))):
            for group in range(LANES):
                place = b.add(array, b.mul(step, I64(group)))
                for part, value in enumerate(values):
                    store(b, b.add(place, I64(4 * part)), b.extract_element(value, I32(group)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def sum_i32(typingctx, a):
    """The sum of 16 int32 lanes (exact, so in any order)."""

    def codegen(context, builder, sig, args):
        return call_intrinsic(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, args[0])

    return types.int32(i32x16), codegen


@intrinsic
def add_i32(typingctx, a, b):
    """Lane by lane a + b."""

    def codegen(context, builder, sig, args):
        return builder.add(*args)

    return i32x16(i32x16, i32x16), codegen


_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Minimax polynomial of (exp(r) - 1 - r) / r² on |r| ≤ ln(2) / 2, highest power first (Cephes, expf.c)."""


def exp_code(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp of 16 lanes, our own, so that its bits do not depend on a library: relative error about 1e-7.

    x is clamped to [-87.3, 88.0]: below, the result is 1.2e-38 rather than 0, which no softmax can tell apart. exp(x) =
    2^n * exp(r) with n = round(x / ln 2) and r = x - n ln 2, ln 2 in two parts so that r keeps its bits.
    """

    def constant(number: float) -> ir.Constant:
        return ir.Constant(V_F32, [number] * LANES)

    low, high = constant(-87.3), constant(88.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    magic = constant(12582912.0)
    shifted = fused_multiply_add(builder, x, constant(1.44269504088896341), magic)
    n = builder.fsub(shifted, magic)
    r = fused_multiply_add(builder, n, constant(-0.693359375), x)
    r = fused_multiply_add(builder, n, constant(2.12194440e-4), r)
    polynomial = constant(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        polynomial = fused_multiply_add(builder, polynomial, r, constant(coefficient))
    result = fused_multiply_add(builder, polynomial, builder.fmul(r, r), builder.fadd(r, constant(1.0)))
    exponent = builder.sub(builder.bitcast(shifted, V_I32), ir.Constant(V_I32, [0x4B400000 - 127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(V_I32, [23] * LANES)), V_F32)
    return builder.fmul(result, scale)


@intrinsic
def exp16(typingctx, x):
    """exp lane by lane (see `exp_code`)."""

    def codegen(context, builder, sig, args):
        return exp_code(builder, args[0])

    return f32x16(f32x16), codegen


# Scalars at addresses.


def _scalar_load(numba_type, llvm_type):
    @intrinsic
    def load_scalar(typingctx, address):
        def codegen(context, builder, sig, args):
            return load(builder, args[0], llvm_type)

        return numba_type(types.int64), codegen

    return load_scalar


def _scalar_store(numba_type):
    @intrinsic
    def store_scalar(typingctx, address, value):
        def codegen(context, builder, sig, args):
            store(builder, args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store_scalar


get_i64, get_i32, get_u8 = _scalar_load(types.int64, I64), _scalar_load(types.int32, I32), _scalar_load(types.uint8, I8)
get_u32 = _scalar_load(types.uint32, I32)
get_f32, get_f64 = _scalar_load(types.float32, F32), _scalar_load(types.float64, F64)
put_i64, put_i32 = _scalar_store(types.int64), _scalar_store(types.int32)
put_f32 = _scalar_store(types.float32)


@intrinsic
def float_bits(typingctx, number):
    """The bits of a float64 as an int64."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], I64)

    return types.int64(types.float64), codegen


@intrinsic
def bits_float(typingctx, bits):
    """The float64 of those bits."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], F64)

    return types.float64(types.int64), codegen


@intrinsic
def address(typingctx, record):
    """Return the address of a record."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], I64)

    return types.int64(record), codegen


@intrinsic(prefer_literal=True)
def field_address(typingctx, record, name):
    """Return the address of a record's field."""

    def codegen(context, builder, sig, args):
        return builder.add(builder.ptrtoint(args[0], I64), I64(record.offset(name.literal_value)))

    return types.int64(record, name), codegen


def _scalar_widener(kind: str, raw_type: ir.Type):
    @intrinsic
    def get_number(typingctx, address):
        def codegen(context, builder, sig, args):
            raw = load(builder, args[0], raw_type)
            if kind == "f16":
                return builder.fpext(raw, F32)
            return builder.bitcast(builder.shl(builder.zext(raw, I32), I32(16)), F32)

        return types.float32(types.int64), codegen

    return get_number


get_f16, get_bf16 = _scalar_widener("f16", HALF), _scalar_widener("bf16", I16)


@intrinsic
def mask_lanes(typingctx, vector, count, fill):
    """Replace the lanes from `count` on by `fill`."""

    def codegen(context, builder, sig, args):
        value, count, fill = args
        lanes = ir.Constant(V_I32, list(range(LANES)))
        keep = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32)))
        return builder.select(keep, value, splat(builder, fill))

    return f32x16(f32x16, types.int64, types.float32), codegen


@intrinsic
def exp_f32(typingctx, x):
    """exp of one number, the same as in a lane of `exp16`."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(exp_code(builder, splat(builder, args[0])), I32(0))

    return types.float32(types.float32), codegen


@intrinsic
def call_tile(
    typingctx, tile, weights, scales, minimums, x, x_scales, x_sums, out, groups, x_stride, out_stride, add, low, high
):
    """Call a compiled tile (see `tiles.py`) by its address."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(ir.VoidType(), [I64] * (len(args) - 1))
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), codegen


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at an address into the second-level cache."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(2), I32(1))
        return context.get_dummy_value()

    return types.void(types.int64), codegen
