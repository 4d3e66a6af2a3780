"""Queries and keys made ready: the norm of each head, rotary positions, and keys and values written to the cache."""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import let_next_start, wait_for_previous


@triton.jit
def normed_and_turned(heads, inside, norm, cos, sin, eps, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Normalize (RMSNorm) and rotate the heads that begin at `heads` (pointers `[N]`).

    Returns their two halves, float32 `[N, BLOCK_HALF]` each.

    Element i of a head turns with i + HEAD_DIM / 2. cos and sin are those of the head's position, pointers to
    `[HEAD_DIM / 2]`. What is not `inside`, and what is past a half's end, comes out as 0.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)
    within = column < HALF
    mask = inside[:, None] & within[None, :]
    first = tl.load(heads[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads[:, None] + HALF + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps)[:, None]
    first *= scale * tl.load(norm + column, mask=within, other=0.0)[None, :]
    second *= scale * tl.load(norm + HALF + column, mask=within, other=0.0)[None, :]
    c = tl.load(cos + column, mask=within, other=0.0)[None, :]
    s = tl.load(sin + column, mask=within, other=0.0)[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def norm_rope_store(
    qkv,  # [T, (HEADS + 2 * KV_HEADS) * HEAD_DIM]; its queries are replaced
    query_norm,  # float32 [HEAD_DIM]
    key_norm,
    cos,  # float32 [positions, HEAD_DIM / 2]
    sin,
    positions,  # int32 [T]
    slots,  # int32 [T], -1 for a row whose key and value go nowhere
    keys,  # one layer: [blocks * block_size, KV_HEADS, HEAD_DIM]
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program t: row t's queries, normed and turned in offset; its keys, likewise, and its values into their slot."""
    HALF: tl.constexpr = HEAD_DIM // 2
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    turn = tl.load(positions + row) * HALF
    slot = tl.load(slots + row).to(tl.int64)
    qkv += row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    column = tl.arange(0, BLOCK_HALF)[None, :]

    head = tl.arange(0, BLOCK_HEADS)
    pointers = qkv + head * HEAD_DIM
    first, second = normed_and_turned(
        pointers, head < HEADS, query_norm, cos + turn, sin + turn, eps, HEAD_DIM, BLOCK_HALF
    )
    mask = (head < HEADS)[:, None] & (column < HALF)
    tl.store(pointers[:, None] + column, first, mask=mask)
    tl.store(pointers[:, None] + HALF + column, second, mask=mask)

    head = tl.arange(0, BLOCK_KV_HEADS)
    pointers = qkv + (HEADS + head) * HEAD_DIM
    first, second = normed_and_turned(
        pointers, head < KV_HEADS, key_norm, cos + turn, sin + turn, eps, HEAD_DIM, BLOCK_HALF
    )
    mask = (head < KV_HEADS)[:, None] & (column < HALF)
    stored = mask & (head[:, None] + slot >= head[:, None])  # slot >= 0, compared as a tile: the interpreter wants it
    offset = slot * KV_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + column
    tl.store(keys + offset, first, mask=stored)
    tl.store(keys + offset + HALF, second, mask=stored)
    pointers = qkv + (HEADS + KV_HEADS + head[:, None]) * HEAD_DIM + column
    tl.store(values + offset, tl.load(pointers, mask=mask, other=0.0), mask=stored)
    tl.store(values + offset + HALF, tl.load(pointers + HALF, mask=mask, other=0.0), mask=stored)
