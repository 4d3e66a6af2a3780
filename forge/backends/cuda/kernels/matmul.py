"""A few rows times a matrix, on the tensor cores: decode for several sequences, and the output head.

The same products as `matvec`, with the same norm before and residual or SwiGLU after, for up to BLOCK_M rows that share
one pass over the weights. A tensor core's tile has at least 16 rows, so two rows cost what sixteen do; what bounds it
is still the weights. Packed weights are multiplied out to the activations' dtype on the way to the tensor cores.

Two switches for few rows, both off until a GPU has been asked (`shapes.Tuning`): SPLIT_K programs share the columns of
a tile, and whichever is done last adds up what all have left, in ascending order; PREFETCH reads the first weights
before the wait for the kernel before.

A row's result depends on its own input and on the tile's shape, never on its neighbours in the tile: with one shape for
every row count (`--invariant`) a row has the same bits in any batch.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import dot, gated, let_next_start, wait_for_previous, weight_tile


@triton.jit
def matmul(
    x,  # [M, in_features]
    values,  # the matrix [out_features, in_features], packed or not
    scales,
    factors,
    norm,  # float32 [in_features], read if NORM
    out,  # [M, out_features], or [M, out_features / 2] if GLU; added to if ADD
    partial,  # float32 [tiles, SPLIT_K, BLOCK_M, BLOCK_N], then [tiles, SPLIT_K, BLOCK_M]; used if SPLIT_K > 1
    counters,  # int32 [tiles], all 0; likewise
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
    SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j, k): rows i * BLOCK_M … of x, output features j * BLOCK_N …, part k of the columns."""
    x_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.minimum(row, out_features - 1)
    x_line = x + x_row.to(tl.int64)[:, None] * in_features
    inside = (x_row < M)[:, None]
    first, end = 0, in_features
    if SPLIT_K > 1:
        share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
        first = tl.program_id(2) * share
        end = tl.minimum(first + share, in_features)
    if PREFETCH:
        tile = weight_tile(values, scales, factors, row, first, in_features, KIND, BLOCK_K)
    let_next_start(PDL)
    wait_for_previous(PDL)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if PREFETCH:  # a part may have no columns at all: then what it loads lies past the end, and is 0
        sums, squares = accumulate(x_line, norm, tile, first, in_features, inside, sums, squares, NORM, EXACT, BLOCK_K)
        first += BLOCK_K
    for start in range(first, end, BLOCK_K):
        tile = weight_tile(values, scales, factors, row, start, in_features, KIND, BLOCK_K)
        sums, squares = accumulate(x_line, norm, tile, start, in_features, inside, sums, squares, NORM, EXACT, BLOCK_K)
    if SPLIT_K == 1:
        finish(
            sums, squares, x_row, out, M, in_features, out_features, out_stride, eps, NORM, ADD, GLU, BLOCK_M, BLOCK_N
        )
    else:
        index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        all_squares = partial + tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * SPLIT_K * BLOCK_M * BLOCK_N
        line = tl.arange(0, BLOCK_M)
        offset = line[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at = index.to(tl.int64) * SPLIT_K + tl.program_id(2)
        tl.store(partial + at * BLOCK_M * BLOCK_N + offset, sums)
        tl.store(all_squares + at * BLOCK_M + line, squares)
        tl.debug_barrier()  # every thread has stored before one of them says so
        arrived = tl.atomic_add(counters + index, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            tl.store(counters + index, 0)
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for part in range(SPLIT_K):
                at = index.to(tl.int64) * SPLIT_K + part
                # Around the first-level cache, which may hold what stood here before.
                sums += tl.load(partial + at * BLOCK_M * BLOCK_N + offset, cache_modifier=".cg")
                squares += tl.load(all_squares + at * BLOCK_M + line, cache_modifier=".cg")
            finish(
                sums,
                squares,
                x_row,
                out,
                M,
                in_features,
                out_features,
                out_stride,
                eps,
                NORM,
                ADD,
                GLU,
                BLOCK_M,
                BLOCK_N,
            )


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


@triton.jit
def finish(
    sums,
    squares,
    x_row,
    out,
    M,
    in_features,
    out_features,
    out_stride,
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Apply the norm's divisor and the residual or SwiGLU, and store the result."""
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
