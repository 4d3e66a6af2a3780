"""Vectors of 16 lanes as Numba values, so that a kernel can be written, and read, in Python.

A kernel works on `f32x16` (16 float32) and `i32x16` (16 int32) values. LLVM maps them to what the machine has: one
register on AVX-512, two on AVX2, four on NEON or SSE. Sixteen lanes are part of the arithmetic contract: a float
reduction keeps 16 partial sums and adds them in one fixed tree (`sum16`), so its bits are the same on every machine,
for every batch. Nothing here carries a fast-math flag: LLVM may not reorder, contract or approximate anything.

Addresses are plain int64 numbers, as in C. Loads and stores need no alignment beyond that of one element.
"""

import operator
from functools import partial
from inspect import Parameter, Signature

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
    INTEGER_BASE,
    LANES,
    STORED,
    V_F32,
    V_I32,
    call_address,
    call_intrinsic,
    constant,
    fused_multiply_add,
    load,
    narrow,
    prefetch_line,
    reduce_each,
    shuffle,
    splat,
    store,
    widen,
)
from forge.backends.cpu.numba_internals import VectorType, define_operator

f32x16 = VectorType("f32x16", V_F32)
i32x16 = VectorType("i32x16", V_I32)


def emits(result: types.Type, *arguments: types.Type):
    """Make a Numba function of one that emits LLVM code: `emit(builder, *values)` returns its value, or None if the
    result is void. Called with positional arguments only."""

    def decorate(emit):
        def typing(typingctx, *argument_types):
            def codegen(context, builder, sig, values):
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return result(*arguments), codegen

        names = ["typingctx", *(f"value{number}" for number in range(len(arguments)))]
        typing.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typing)

    return decorate


for _function, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    define_operator(_function, _name, f32x16)


def _loader(kind: str):
    return emits(f32x16, types.int64)(lambda b, address: widen(b, load(b, address, STORED[kind]), kind))


def _storer(kind: str):
    return emits(types.void, types.int64, f32x16)(lambda b, address, value: store(b, address, narrow(b, value, kind)))


load_f32, load_f16, load_bf16 = _loader("f32"), _loader("f16"), _loader("bf16")
store_f32, store_f16, store_bf16 = _storer("f32"), _storer("f16"), _storer("bf16")


splat_f32 = emits(f32x16, types.float32)(splat)
fma = emits(f32x16, f32x16, f32x16, f32x16)(fused_multiply_add)


def _tree(combine):
    """Reduce 16 lanes: 0..7 with 8..15, then 0..3 with 4..7, then pairs, then the last two. Always in this order."""

    @emits(types.float32, f32x16)
    def reduce(builder, vector):
        value = vector
        width = LANES
        while width > 1:
            width //= 2
            low, high = (shuffle(builder, value, range(start, start + width)) for start in (0, width))
            value = combine(builder, low, high)
        return builder.extract_element(value, ir.Constant(I32, 0))

    return reduce


def maximum_code(builder, a, b):
    """Return the larger of each lane; b where they do not compare."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


sum16, max16 = _tree(ir.IRBuilder.fadd), _tree(maximum_code)
maximum = emits(f32x16, f32x16, f32x16)(maximum_code)


def _absolute(builder, a):
    """Return |a| of each lane."""
    return builder.bitcast(builder.and_(builder.bitcast(a, V_I32), constant(V_I32, 0x7FFFFFFF)), V_F32)


absolute = emits(f32x16, f32x16)(_absolute)


def without_tiny_code(builder, a):
    """Replace numbers below 2^-50 by zero, which products of bfloat16 need (`InstructionSet.dot_bfloat_pairs`)."""
    is_tiny = builder.fcmp_ordered("<", _absolute(builder, a), constant(V_F32, 2.0**-50))
    return builder.select(is_tiny, constant(V_F32, 0.0), a)


without_tiny = emits(f32x16, f32x16)(without_tiny_code)


def rounded_code(builder, a):
    """Round each lane to the nearest integer, ties to even, as i32x16. Lanes must lie within ±2^22."""
    # The addition pushes the fraction out of the mantissa, rounding it to nearest even on the way.
    base = constant(V_F32, INTEGER_BASE)
    bits = builder.bitcast(builder.fadd(a, base), V_I32)
    return builder.sub(bits, builder.bitcast(base, V_I32))


round_to_int = emits(i32x16, f32x16)(rounded_code)


@emits(types.void, types.int64, i32x16)
def store_i8(builder, address, a):
    """Store 16 int32 lanes as 16 int8, which they must fit."""
    store(builder, address, builder.trunc(a, ir.VectorType(I8, LANES)))


@emits(types.void, types.int64, f32x16)
def scatter_bf16(builder, address, a):
    """Round each lane to bfloat16, and store pairs of them 64 bytes apart."""
    pairs = builder.bitcast(narrow(builder, a, "bf16"), ir.VectorType(I32, LANES // 2))
    for number in range(LANES // 2):
        store(builder, builder.add(address, I64(64 * number)), builder.extract_element(pairs, I32(number)))


@emits(types.void, types.int64, f32x16)
def interleave_bf16(builder, address, a):
    """Round each lane to bfloat16, and store them 4 bytes apart."""
    numbers = narrow(builder, a, "bf16")
    for number in range(LANES):
        store(builder, builder.add(address, I64(4 * number)), builder.extract_element(numbers, I32(number)))


@emits(types.void, types.int64, types.int64)
def scatter_i8(builder, address, source):
    """Copy 16 bytes, four at a time, to places 64 bytes apart."""
    for number in range(4):
        four = load(builder, builder.add(source, I64(4 * number)), I32)
        store(builder, builder.add(address, I64(64 * number)), four)


@emits(types.void, types.int64, types.int64)
def interleave_i8(builder, address, source):
    """Copy 16 bytes to places 4 bytes apart."""
    numbers = load(builder, source, ir.VectorType(I8, LANES))
    for number in range(LANES):
        store(builder, builder.add(address, I64(4 * number)), builder.extract_element(numbers, I32(number)))


@emits(types.void, *[types.int64] * 8)
def quantize_16_groups(b, x, x_step, quants, quants_step, scales, scales_step, sums, sums_step):
    """Do what `kernels._quantize_32` does for 16 groups at once, each array's groups so many bytes apart.

    One group alone waits for its maximum, for a division and for its sums; here the lanes of one vector are those of
    all 16. Every step is exact or rounds in its own lane, so the bits are the same.
    """

    number = partial(constant, V_F32)

    def half(group, offset):
        return load(b, b.add(x, b.add(b.mul(x_step, I64(group)), I64(offset))), V_F32)

    larger = [maximum_code(b, _absolute(b, half(group, 0)), _absolute(b, half(group, 64))) for group in range(LANES)]
    largest = reduce_each(b, larger, lambda left, right: maximum_code(b, left, right))
    is_large = b.fcmp_ordered(">", largest, number(float(np.float32(1e-30))))
    factors = b.select(is_large, b.fdiv(number(127.0), largest), number(0.0))
    units = b.select(is_large, b.fdiv(largest, number(127.0)), number(0.0))
    halves: list[list[ir.Value]] = [[], []]
    for group in range(LANES):
        factor = splat(b, b.extract_element(factors, I32(group)))
        for part in range(2):
            rounded = rounded_code(b, b.fmul(half(group, 64 * part), factor))
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


@emits(types.int32, i32x16)
def sum_i32(builder, a):
    """The sum of 16 int32 lanes (exact, so in any order)."""
    return call_intrinsic(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, a)


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

    number = partial(constant, V_F32)
    low, high = number(-87.3), number(88.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    magic = number(12582912.0)
    shifted = fused_multiply_add(builder, x, number(1.44269504088896341), magic)
    n = builder.fsub(shifted, magic)
    r = fused_multiply_add(builder, n, number(-0.693359375), x)
    r = fused_multiply_add(builder, n, number(2.12194440e-4), r)
    polynomial = number(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        polynomial = fused_multiply_add(builder, polynomial, r, number(coefficient))
    result = fused_multiply_add(builder, polynomial, builder.fmul(r, r), builder.fadd(r, number(1.0)))
    exponent = builder.sub(builder.bitcast(shifted, V_I32), constant(V_I32, 0x4B400000 - 127))
    scale = builder.bitcast(builder.shl(exponent, constant(V_I32, 23)), V_F32)
    return builder.fmul(result, scale)


exp16 = emits(f32x16, f32x16)(exp_code)


# Scalars at addresses.


def _scalar_load(numba_type, llvm_type):
    return emits(numba_type, types.int64)(lambda builder, address: load(builder, address, llvm_type))


def _scalar_store(numba_type):
    return emits(types.void, types.int64, numba_type)(store)


get_i64, get_i32, get_u8 = _scalar_load(types.int64, I64), _scalar_load(types.int32, I32), _scalar_load(types.uint8, I8)
get_u32 = _scalar_load(types.uint32, I32)
get_f32, get_f64 = _scalar_load(types.float32, F32), _scalar_load(types.float64, F64)
put_i64, put_i32 = _scalar_store(types.int64), _scalar_store(types.int32)
put_f32 = _scalar_store(types.float32)


float_bits = emits(types.int64, types.float64)(lambda builder, number: builder.bitcast(number, I64))
bits_float = emits(types.float64, types.int64)(lambda builder, bits: builder.bitcast(bits, F64))


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


get_f16 = emits(types.float32, types.int64)(lambda builder, address: builder.fpext(load(builder, address, HALF), F32))


@emits(types.float32, types.int64)
def get_bf16(builder, address):
    """Load a bfloat16: the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(load(builder, address, I16), I32), I32(16)), F32)


@emits(f32x16, f32x16, types.int64, types.float32)
def mask_lanes(builder, value, count, fill):
    """Replace the lanes from `count` on by `fill`."""

    lanes = ir.Constant(V_I32, list(range(LANES)))
    keep = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32)))
    return builder.select(keep, value, splat(builder, fill))


@emits(types.float32, types.float32)
def exp_f32(builder, x):
    """exp of one number, the same as in a lane of `exp16`."""
    return builder.extract_element(exp_code(builder, splat(builder, x)), I32(0))


call_tile = emits(types.void, *[types.int64] * 16)(call_address)
"""Call a compiled tile by its address, with the arguments of `tiles.py`."""
prefetch = emits(types.void, types.int64)(prefetch_line)
