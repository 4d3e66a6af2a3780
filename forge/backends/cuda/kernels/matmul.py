"""Products of a decode step: one row times a matrix, and a few rows times a matrix on the tensor cores.

`matvec` multiplies one row. What bounds it is reading the weights once, so everything else is folded into the pass over
them: the RMSNorm before, the residual or SwiGLU after. The norm costs no pass of its own because it is linear once its
divisor is known: norm(x) · w = (Σ x·g·w) / sqrt(mean(x²) + eps), and Σ x² is summed along the way. A program reads the
weights of BLOCK_N output features, BLOCK_K columns at a time, and keeps BLOCK_N x BLOCK_K partial sums, so threads
exchange numbers once, at the end. The first tile is asked for before the input is there (see PDL in `__init__.py`),
each further one before the one in hand is multiplied.

`matmul` is the same product, with the same norm before and residual or SwiGLU after, for up to BLOCK_M rows that share
one pass over the weights: decode for several sequences, and the output head. A tensor core's tile has at least 16 rows,
so two rows cost what sixteen do; what bounds it is still the weights. Packed weights are multiplied out to the
activations' dtype on the way to the tensor cores.

A switch for few rows, off until a GPU has been asked (`shapes.Tuning`): PREFETCH reads the first weights before the
wait for the kernel before.

A row's result depends on its own input and on the tile's shape, never on its neighbours in the tile: with one shape for
every row count (`--invariant`) a row has the same bits in any batch.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import (
    Q4_K,
    Q8,
    dot,
    gated,
    superblock_scales,
    wait_for_previous,
    weight_tile,
)


@triton.jit
def matvec(
    x,  # [M, in_features]
    weights,  # [out_features, in_features]
    norm,  # float32 [in_features], read if NORM
    out,  # [M, out_features], or [M, out_features / 2] if GLU; added to if ADD
    in_features,
    out_features,
    out_stride,
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x, row by row. Program (i, j): output features i * BLOCK_N …, for row j. GLU: features come in pairs of
    gate and up."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    x += tl.program_id(1).to(tl.int64) * in_features
    # Past the end: the last row again, stored nowhere.
    line = weights + tl.minimum(row, out_features - 1)[:, None] * in_features
    tile = tl.load(line + column[None, :], mask=(column < in_features)[None, :], other=0.0)
    wait_for_previous(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        here, following = start + column, start + BLOCK_K + column
        values = tl.load(x + here, mask=here < in_features, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm + here, mask=here < in_features, other=0.0)
        ahead = tl.load(line + following[None, :], mask=(following < in_features)[None, :], other=0.0)
        sums += tile.to(tl.float32) * values[None, :]
        tile = ahead
    total = tl.sum(sums, axis=1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares) / in_features + eps)
    store_row(out, total, out_features, out_stride, ADD, GLU, BLOCK_N)


@triton.jit
def matvec_packed(
    x,
    values,
    scales,
    factors,
    norm,
    out,
    in_features,
    out_features,
    out_stride,
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GLU: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `matvec` of a packed matrix, which is multiplied as the small integers that it holds.

    A group's integers are summed against x first, and its scale multiplies the sum: one multiplication for 32 columns.
    Q4_K's minimum multiplies the sum of x alone.
    """
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.minimum(row, out_features - 1)
    groups = in_features // 32
    lane = tl.arange(0, BLOCK_K // 32)
    element = tl.arange(0, 32 if KIND == Q8 else 16)
    x += tl.program_id(1).to(tl.int64) * in_features
    line = values + row[:, None, None] * groups * element.shape[0] + element[None, None, :]
    tile = tl.load(line + lane[None, :, None] * element.shape[0], mask=(lane < groups)[None, :, None], other=0)
    wait_for_previous(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_K // 32), tl.float32)
    squares = tl.zeros((BLOCK_K // 32,), tl.float32)
    for start in range(0, groups, BLOCK_K // 32):
        group, following = start + lane, start + BLOCK_K // 32 + lane
        ahead = tl.load(
            line + following[None, :, None] * element.shape[0], mask=(following < groups)[None, :, None], other=0
        )
        at = group[:, None] * 32 + element[None, :]
        inside = (group < groups)[:, None]
        first, square = normed_part(x, norm, at, inside, NORM)
        if KIND == Q8:
            partial = tl.sum(tile.to(tl.float32) * first[None, :, :], axis=2)
            squares += square
        else:
            second, other_square = normed_part(x, norm, at + 16, inside, NORM)
            squares += square + other_square
            low, high = (tile & 15).to(tl.float32), (tile >> 4).to(tl.float32)
            partial = tl.sum(low * first[None, :, :] + high * second[None, :, :], axis=2)
            plain = tl.sum(first + second, axis=1)[None, :]
        if KIND != Q4_K:
            scale = tl.load(
                scales + row[:, None] * groups + group[None, :], mask=(group < groups)[None, :], other=0.0
            ).to(tl.float32)
            sums += scale * (partial if KIND == Q8 else partial - 8.0 * plain)
        else:
            scale, minimum = superblock_scales(scales, factors, row, group, groups)
            sums += scale * partial - minimum * plain
        tile = ahead
    total = tl.sum(sums, axis=1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares) / in_features + eps)
    store_row(out, total, out_features, out_stride, ADD, GLU, BLOCK_N)


@triton.jit
def normed_part(x, norm, at, inside, NORM: tl.constexpr):
    """Load x at the offsets `at` in float32, times the norm's weight if NORM. Returns it and the sum of x² per
    group."""
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(values * values, axis=1)
    if NORM:
        values *= tl.load(norm + at, mask=inside, other=0.0)
    return values, square


@triton.jit
def store_row(out, total, out_features, out_stride, ADD: tl.constexpr, GLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store BLOCK_N sums of row `program_id(1)`, each by the one program that computed it."""
    out += tl.program_id(1).to(tl.int64) * out_stride
    if GLU:
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        values = tl.reshape(gated(tl.reshape(total, (1, BLOCK_N)), 1, BLOCK_N), (BLOCK_N // 2,))
        tl.store(out + column, values, mask=column < out_features // 2)
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        if ADD:
            total += tl.load(out + column, mask=column < out_features, other=0.0).to(tl.float32)
        tl.store(out + column, total, mask=column < out_features)


@triton.jit
def matmul(
    x,  # [M, in_features]
    values,  # the matrix [out_features, in_features], packed or not
    scales,
    factors,
    norm,  # float32 [in_features], read if NORM
    out,  # [M, out_features], or [M, out_features / 2] if GLU; added to if ADD
    M,
    in_features,
    out_features,
    out_stride,
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GLU: tl.constexpr,
    KIND: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x in tiles. Program (i, j): rows i * BLOCK_M … of x, output features j * BLOCK_N …."""
    x_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.minimum(row, out_features - 1)
    x_line = x + x_row.to(tl.int64)[:, None] * in_features
    inside = (x_row < M)[:, None]
    first = 0
    if PREFETCH:
        tile = weight_tile(values, scales, factors, row, first, in_features, KIND, BLOCK_K)
    wait_for_previous(PDL)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if PREFETCH:
        sums, squares = accumulate(x_line, norm, tile, first, in_features, inside, sums, squares, NORM, EXACT, BLOCK_K)
        first += BLOCK_K
    for start in range(first, in_features, BLOCK_K):
        tile = weight_tile(values, scales, factors, row, start, in_features, KIND, BLOCK_K)
        sums, squares = accumulate(x_line, norm, tile, start, in_features, inside, sums, squares, NORM, EXACT, BLOCK_K)
    if NORM:
        sums *= tl.rsqrt(squares / in_features + eps)[:, None]
    line = out + x_row.to(tl.int64)[:, None] * out_stride
    if GLU:
        column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask = (x_row < M)[:, None] & (column < out_features // 2)[None, :]
        tl.store(line + column[None, :], gated(sums, BLOCK_M, BLOCK_N), mask=mask)
    else:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (x_row < M)[:, None] & (column < out_features)[None, :]
        if ADD:
            sums += tl.load(line + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(line + column[None, :], sums, mask=mask)


@triton.jit
def accumulate(
    x_line,
    norm,
    tile,
    start,
    in_features,
    inside,
    sums,
    squares,
    NORM: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return sums + x · tileᵀ over the columns from `start` on, and squares + their sum of x² if NORM."""
    column = start + tl.arange(0, BLOCK_K)
    part = tl.load(x_line + column[None, :], mask=inside & (column < in_features)[None, :], other=0.0)
    if NORM:
        x32 = part.to(tl.float32)
        squares += tl.sum(x32 * x32, axis=1)
        part = (x32 * tl.load(norm + column, mask=column < in_features, other=0.0)[None, :]).to(part.dtype)
    return dot(part, tl.trans(tile.to(part.dtype)), sums, EXACT), squares
