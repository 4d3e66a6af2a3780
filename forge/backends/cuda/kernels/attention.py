"""Attention over the paged cache, for any rows: prefills, chunks, verifications, and decodes where nothing is fused.

A program takes a *tile*: some rows of one sequence, with all query heads that share one key/value head, as the rows of
a matrix, and walks the keys through the block table, 64 absolute positions at a time, with a running maximum and sum
(online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022). Which chunk a key falls in depends on
its position alone, and a chunk that a row may not see changes none of its bits; so a row's result depends neither on
the rows beside it nor on where its prompt was cut.

A few rows over a long context would leave most of the device idle. Then SPLITS programs share a tile, each with its
part of the keys (flash-decoding: Dao et al. 2023), and whichever is done last merges their results, in ascending order:
no second kernel, and no dependence on who was last.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import dot, let_next_start, wait_for_previous


@triton.jit
def key_places(table, start, end, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Where the keys of positions `start` to `start + CHUNK` lie: token slots, int64 `[CHUNK]`, and which are < end."""
    position = start + tl.arange(0, CHUNK)
    live = position < end
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE, position, live


@triton.jit
def softmax_step(scores, maximum, total, mixed):
    """One chunk's scores `[M, CHUNK]` into the running softmax: the chunk's weights and the rescaled state.

    A row that has seen no key yet keeps a maximum of -inf, and weights of 0.
    """
    higher = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    fade = tl.exp(maximum - base)
    return weights, higher, total * fade + tl.sum(weights, axis=1), mixed * fade[:, None]


@triton.jit
def merged_splits(partial, extremes, index, M: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """The results of all splits of tile `index`, merged in ascending order: float32 `[M, WIDTH]`.

    partial float32 [tiles, SPLITS, M, WIDTH]; extremes float32 [tiles, SPLITS, 2, M]: each split's maximum and sum.
    """
    own = tl.arange(0, M)
    column = tl.arange(0, WIDTH)
    maximum = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, WIDTH), tl.float32)
    for split in range(SPLITS):
        at = index * SPLITS + split
        # Around the first-level cache, which may hold what stood here before.
        top = tl.load(extremes + at * 2 * M + own, cache_modifier=".cg")
        part_total = tl.load(extremes + at * 2 * M + M + own, cache_modifier=".cg")
        part = tl.load(partial + at * M * WIDTH + own[:, None] * WIDTH + column[None, :], cache_modifier=".cg")
        higher = tl.maximum(maximum, top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, gain = tl.exp(maximum - base), tl.exp(top - base)
        maximum, total = higher, total * fade + part_total * gain
        mixed = mixed * fade[:, None] + part * gain[:, None]
    return mixed / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def is_last_split(
    partial,
    extremes,
    counters,
    index,
    split,
    maximum,
    total,
    mixed,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Leave this split's result for the others; whether all have left theirs now. Then the counter is 0 again."""
    own = tl.arange(0, M)
    column = tl.arange(0, WIDTH)
    at = index * SPLITS + split
    tl.store(extremes + at * 2 * M + own, maximum)
    tl.store(extremes + at * 2 * M + M + own, total)
    tl.store(partial + at * M * WIDTH + own[:, None] * WIDTH + column[None, :], mixed)
    tl.debug_barrier()  # every thread has stored before one of them says so
    arrived = tl.atomic_add(counters + index, 1, sem="acq_rel")
    last = arrived == SPLITS - 1
    if last:
        tl.store(counters + index, 0)
    return last


@triton.jit
def paged_attention(
    qkv,  # [T, (HEADS + 2 * KV_HEADS) * HEAD_DIM]: queries ready to be used
    positions,  # int32 [T]
    tile_sequences,  # int32 [tiles]
    tile_rows,  # int32 [tiles]: a tile's first row
    tile_lengths,  # int32 [tiles]: its number of rows, 0 for a tile that is padding
    tables,  # int32 [sequences, stride]
    table_stride,  # int32 [1]
    keys,  # one layer: [blocks * BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    values,
    out,  # [T, HEADS * HEAD_DIM]; if COMPACT, where tiles have one row, [tiles, HEADS * HEAD_DIM]
    partial,  # see `merged_splits`, read if SPLITS > 1; tiles here are tiles times key/value heads
    extremes,
    counters,  # int32 [tiles * KV_HEADS], all 0
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPACT: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, key/value head, split). Row m of the matrix is row m // BLOCK_GROUP, query head m % BLOCK_GROUP.

    WIDE: queries meet keys, and weights values, in float32; otherwise in the cache's dtype.
    BLOCK_M is at least ROWS * BLOCK_GROUP, BLOCK_GROUP at least HEADS / KV_HEADS, BLOCK_D at least HEAD_DIM.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kind: tl.constexpr = tl.float32 if WIDE else keys.dtype.element_ty
    let_next_start(PDL)
    wait_for_previous(PDL)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(tile_lengths + tile)
    row = tl.load(tile_rows + tile)
    table = tables + tl.load(tile_sequences + tile).to(tl.int64) * tl.load(table_stride)
    own = tl.arange(0, BLOCK_M)
    member = own % BLOCK_GROUP
    live = (own // BLOCK_GROUP < length) & (member < GROUP) & (own // BLOCK_GROUP < ROWS)
    own_row = (row + own // BLOCK_GROUP).to(tl.int64)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_D)
    within = (column < HEAD_DIM)[None, :]
    query = tl.load(
        qkv + own_row[:, None] * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :],
        mask=live[:, None] & within,
        other=0.0,
    ).to(kind)
    position = tl.load(positions + own_row, mask=live, other=-1)
    end = tl.where(length > 0, tl.load(positions + row + length - 1, mask=length > 0, other=-1) + 1, 0)
    share = tl.cdiv(tl.cdiv(end, CHUNK), SPLITS) * CHUNK

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, end), CHUNK):
        slot, key_position, exists = key_places(table, start, end, BLOCK_SIZE, CHUNK)
        at = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        key = tl.load(keys + at, mask=exists[:, None] & within, other=0.0)
        scores = dot(query, tl.trans(key.to(kind)), tl.zeros((BLOCK_M, CHUNK), tl.float32), EXACT) * scale
        scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
        weights, maximum, total, mixed = softmax_step(scores, maximum, total, mixed)
        value = tl.load(values + at, mask=exists[:, None] & within, other=0.0)
        mixed = dot(weights.to(kind), value.to(kind), mixed, EXACT)

    line = (tile + own * 0).to(tl.int64) if COMPACT else own_row
    place = out + line[:, None] * HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :]
    mask = live[:, None] & within
    if SPLITS == 1:
        tl.store(place, mixed / tl.maximum(total, 1e-30)[:, None], mask=mask)
    else:
        index = tile * KV_HEADS + kv_head
        last = is_last_split(partial, extremes, counters, index, split, maximum, total, mixed, BLOCK_M, BLOCK_D, SPLITS)
        if last:
            tl.store(place, merged_splits(partial, extremes, index, BLOCK_M, BLOCK_D, SPLITS), mask=mask)
