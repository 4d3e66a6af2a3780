"""A few rows times a matrix, on the tensor cores: decode for several sequences, and the output head.

The same products as `matvec`, with the same norm before and residual or SwiGLU after, for up to BLOCK_M rows that share
one pass over the weights. A tensor core's tile has at least 16 rows, so two rows cost what sixteen do; what bounds it
is still the weights. Packed weights are multiplied out to the activations' dtype on the way to the tensor cores.

A row's result depends on its own input and on the tile's shape, never on its neighbours in the tile: with one shape for
every row count (`--invariant`) a row has the same bits in any batch.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import dot, gated, let_next_start, wait_for_previous, weight_tile


@triton.jit
def matmul(
    x,  # [M, columns]
    values,  # the matrix [rows, columns], packed or not
    scales,
    factors,
    norm,  # float32 [columns], read if NORM
    out,  # [M, rows], or [M, rows / 2] if GLU; added to if ADD
    M,
    columns,
    rows,
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
    PDL: tl.constexpr,
):
    """Program (i, j): rows i * BLOCK_M … of x by rows j * BLOCK_N … of the matrix; i runs fastest."""
    own = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.minimum(row, rows - 1)
    x_line = x + own.to(tl.int64)[:, None] * columns
    let_next_start(PDL)
    wait_for_previous(PDL)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, columns, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < columns
        tile = weight_tile(values, scales, factors, row, start, columns, KIND, BLOCK_K)
        part = tl.load(x_line + column[None, :], mask=(own < M)[:, None] & inside[None, :], other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            part = (wide * tl.load(norm + column, mask=inside, other=0.0)[None, :]).to(part.dtype)
        sums = dot(part, tl.trans(tile.to(part.dtype)), sums, EXACT)
    if NORM:
        sums *= tl.rsqrt(squares / columns + eps)[:, None]
    line = out + own.to(tl.int64)[:, None] * out_stride
    if GLU:
        column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask = (own < M)[:, None] & (column < rows // 2)[None, :]
        tl.store(line + column[None, :], gated(sums, BLOCK_M, BLOCK_N), mask=mask)
    else:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (own < M)[:, None] & (column < rows)[None, :]
        if ADD:
            sums += tl.load(line + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(line + column[None, :], sums, mask=mask)
