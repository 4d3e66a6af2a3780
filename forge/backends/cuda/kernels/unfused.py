"""Operations on whole rows, for batches so large that products are cuBLAS's and what lies between them is apart."""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import gated, wait_for_previous, weight_tile


@triton.jit
def gather_rows(
    values,
    scales,
    factors,
    numbers,  # int32 [M], read if NUMBERED
    samples,  # int32 [R, 2], read for numbers below 0
    out,  # [M, in_features]
    in_features,
    NUMBERED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy row `numbers[m]` of a matrix, packed or not, to row m of out: embeddings. Not NUMBERED: every row,
    multiplied out.

    Number -1 - r stands for `samples[r, 0]`, what the step before has chosen, which the host may not know yet. Program
    (m, i): columns i * BLOCK_K … of row m.
    """
    wait_for_previous(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    number = out_row
    if NUMBERED:
        source = tl.load(numbers + out_row)
        chosen = tl.load(samples + 2 * (-1 - source), mask=source < 0, other=0)
        number = tl.where(source < 0, chosen, source).to(tl.int64)
    first = tl.program_id(1) * BLOCK_K
    tile = weight_tile(values, scales, factors, number + tl.zeros((1,), tl.int64), first, in_features, KIND, BLOCK_K)
    column = first + tl.arange(0, BLOCK_K)
    tl.store(out + out_row * in_features + column[None, :], tile, mask=(column < in_features)[None, :])


@triton.jit
def rms_norm(
    x,  # [M, width]
    weight,  # float32 [width]
    out,  # [M, width]
    width,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute x / sqrt(mean(x²) + eps) * weight, one row a program. BLOCK is at least `width`."""
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, mask=column < width, other=0.0)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * width + column
    values = tl.load(x + at, mask=column < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + at, values * scale * gain, mask=column < width)


@triton.jit
def swiglu(
    pairs,  # [M, 2 * width]: gate, up in turn
    out,  # [M, width]
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute silu(gate) * up. Program (m, i): columns i * BLOCK … of row m."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    values = tl.load(pairs + row * 2 * width + pair, mask=pair < 2 * width, other=0.0).to(tl.float32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    result = tl.reshape(gated(tl.reshape(values, (1, 2 * BLOCK)), 1, 2 * BLOCK), (BLOCK,))
    tl.store(out + row * width + column, result, mask=column < width)
