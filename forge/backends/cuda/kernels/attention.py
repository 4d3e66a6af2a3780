"""Attention over the paged cache, for any rows: prefills, chunks, verifications, and decodes where nothing is fused.

A program takes a *tile*: some rows of one sequence, with all query heads that share one key/value head, as the rows of
a matrix, and walks the keys through the block table, 64 absolute positions at a time, with a running maximum and sum
(online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022). Which chunk a key falls in depends on
its position alone, and a chunk that a row may not see changes none of its bits; so a row's result depends neither on
the rows beside it nor on where its prompt was cut.

A few rows over a long context would leave most of the device idle. Then SPLITS programs share a tile, each with its
part of the keys (flash-decoding: Dao et al. 2023), and whichever is done last merges their results, in ascending order:
no second kernel, and no dependence on who was last.

`norm_rope_store` makes queries and keys ready for it: the norm of each head, rotary positions, and keys and values
written to the cache. `decode_attention` does both for a decode step.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import arrives_last, dot, wait_for_previous


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
    """Normalize and rotate queries and keys, and store keys and values. Program t: row t's queries in offset, its keys
    and values into their slot."""
    HALF: tl.constexpr = HEAD_DIM // 2
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


@triton.jit
def key_slots(table, start, end, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the token slots of the keys of positions `start` to `start + CHUNK`, int64 `[CHUNK]`, and which are <
    end."""
    position = start + tl.arange(0, CHUNK)
    valid = position < end
    block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE, position, valid


@triton.jit
def softmax_step(scores, maximum, total, mixed):
    """Merge one chunk's scores `[M, CHUNK]` into the running softmax. Returns the chunk's weights and the rescaled
    state.

    A row that has seen no key yet keeps a maximum of -inf, and weights of 0.
    """
    higher = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    fade = tl.exp(maximum - base)
    return weights, higher, total * fade + tl.sum(weights, axis=1), mixed * fade[:, None]


@triton.jit
def is_last_split(
    partial,  # float32 [tiles, SPLITS, NUM_VALID, WIDTH]
    extremes,  # float32 [tiles, SPLITS, 2, NUM_VALID]: maximum, sum
    counters,  # int32 [tiles], all 0
    index,
    split,
    maximum,
    total,
    mixed,
    NUM_VALID: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store this split's result for the last one to merge. Returns whether all are stored.

    Of the result's rows only the first NUM_VALID mean anything.
    """
    WIDTH: tl.constexpr = mixed.shape[1]
    tile_row = tl.arange(0, mixed.shape[0])
    column = tl.arange(0, WIDTH)
    at = (index * SPLITS + split).to(tl.int64) * NUM_VALID
    tl.store(extremes + 2 * at + tile_row, maximum, mask=tile_row < NUM_VALID)
    tl.store(extremes + 2 * at + NUM_VALID + tile_row, total, mask=tile_row < NUM_VALID)
    offset = partial + at * WIDTH + tile_row[:, None] * WIDTH + column[None, :]
    tl.store(offset, mixed, mask=(tile_row < NUM_VALID)[:, None] & (column < WIDTH)[None, :])
    return arrives_last(counters + index, SPLITS)


@triton.jit
def merged_splits(
    partial, extremes, index, NUM_VALID: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Merge the splits of tile `index`, AT_ONCE at a time: float32 `[NUM_VALID, WIDTH]`.

    One after the other they would cost the memory's latency each: 32 of them more than the attention itself.
    """
    tile_row = tl.arange(0, NUM_VALID)
    column = tl.arange(0, WIDTH)
    maximum = tl.full((NUM_VALID,), float("-inf"), tl.float32)
    total = tl.zeros((NUM_VALID,), tl.float32)
    mixed = tl.zeros((NUM_VALID, WIDTH), tl.float32)
    for first in range(0, SPLITS, AT_ONCE):
        at = (index * SPLITS + first + tl.arange(0, AT_ONCE)).to(tl.int64)[:, None] * NUM_VALID
        # Around the first-level cache, which may hold what stood here before.
        tops = tl.load(extremes + 2 * at + tile_row[None, :], cache_modifier=".cg")
        totals = tl.load(extremes + 2 * at + NUM_VALID + tile_row[None, :], cache_modifier=".cg")
        offset = partial + (at + tile_row[None, :])[:, :, None] * WIDTH + column[None, None, :]
        parts = tl.load(offset, cache_modifier=".cg")
        higher = tl.maximum(maximum, tl.max(tops, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, gains = tl.exp(maximum - base), tl.exp(tops - base[None, :])
        maximum, total = higher, total * fade + tl.sum(totals * gains, axis=0)
        mixed = mixed * fade[:, None] + tl.sum(parts * gains[:, :, None], axis=0)
    return mixed / tl.maximum(total, 1e-30)[:, None]


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
    partial,  # see `is_last_split`, used if SPLITS > 1; its tiles are these times the key/value heads
    extremes,
    counters,
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
    NUM_VALID: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COMPACT: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with tiles of rows. Program (tile, key/value head, split). Row m of the matrix is row m // BLOCK_GROUP,
    query head m % BLOCK_GROUP.

    IN_FLOAT32: queries meet keys, and weights values, in float32; otherwise in the cache's dtype. NUM_VALID is ROWS *
    BLOCK_GROUP, BLOCK_M at least that; BLOCK_GROUP is at least HEADS / KV_HEADS, BLOCK_D at least HEAD_DIM.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kind: tl.constexpr = tl.float32 if IN_FLOAT32 else keys.dtype.element_ty
    wait_for_previous(PDL)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(tile_lengths + tile)
    row = tl.load(tile_rows + tile)
    table = tables + tl.load(tile_sequences + tile).to(tl.int64) * tl.load(table_stride)
    tile_row = tl.arange(0, BLOCK_M)
    member = tile_row % BLOCK_GROUP
    valid = (tile_row // BLOCK_GROUP < length) & (member < GROUP) & (tile_row // BLOCK_GROUP < ROWS)
    own_row = (row + tile_row // BLOCK_GROUP).to(tl.int64)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_D)
    within = (column < HEAD_DIM)[None, :]
    query = tl.load(
        qkv + own_row[:, None] * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :],
        mask=valid[:, None] & within,
        other=0.0,
    ).to(kind)
    position = tl.load(positions + own_row, mask=valid, other=-1)
    end = tl.where(length > 0, tl.load(positions + row + length - 1, mask=length > 0, other=-1) + 1, 0)
    share = tl.cdiv(tl.cdiv(end, CHUNK), SPLITS) * CHUNK

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, end), CHUNK):
        slot, key_position, exists = key_slots(table, start, end, BLOCK_SIZE, CHUNK)
        at = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        key = tl.load(keys + at, mask=exists[:, None] & within, other=0.0)
        scores = dot(query, tl.trans(key.to(kind)), tl.zeros((BLOCK_M, CHUNK), tl.float32), EXACT) * scale
        scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
        weights, maximum, total, mixed = softmax_step(scores, maximum, total, mixed)
        value = tl.load(values + at, mask=exists[:, None] & within, other=0.0)
        mixed = dot(weights.to(kind), value.to(kind), mixed, EXACT)

    if SPLITS == 1:
        result = mixed / tl.maximum(total, 1e-30)[:, None]
        store_heads(
            out, result, kv_head, tile if COMPACT else row, length, HEADS, KV_HEADS, HEAD_DIM, ROWS, BLOCK_GROUP
        )
    else:
        index = tile * KV_HEADS + kv_head
        last = is_last_split(partial, extremes, counters, index, split, maximum, total, mixed, NUM_VALID, SPLITS)
        if last:
            result = merged_splits(partial, extremes, index, NUM_VALID, BLOCK_D, SPLITS, AT_ONCE)
            store_heads(
                out, result, kv_head, tile if COMPACT else row, length, HEADS, KV_HEADS, HEAD_DIM, ROWS, BLOCK_GROUP
            )


@triton.jit
def store_heads(
    out,
    result,
    kv_head,
    row,
    length,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """Store a tile's result, `[ROWS * BLOCK_GROUP or more, HEAD_DIM or more]`: `length` rows of out from `row`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile_row = tl.arange(0, result.shape[0])
    column = tl.arange(0, result.shape[1])
    number, member = tile_row // BLOCK_GROUP, tile_row % BLOCK_GROUP
    valid = (number < length) & (number < ROWS) & (member < GROUP)
    head = (row + number).to(tl.int64) * HEADS + kv_head * GROUP + member
    tl.store(
        out + head[:, None] * HEAD_DIM + column[None, :], result, mask=valid[:, None] & (column < HEAD_DIM)[None, :]
    )


@triton.jit
def decode_attention(
    qkv,  # [S, (HEADS + 2 * KV_HEADS) * HEAD_DIM], straight from the product
    query_norm,  # float32 [HEAD_DIM]
    key_norm,
    cos,  # float32 [positions, HEAD_DIM / 2]
    sin,
    positions,  # int32 [S]: also how many keys lie before each row
    slots,  # int32 [S]
    tables,  # int32 [S, stride]
    table_stride,  # int32 [1]
    keys,  # one layer: [blocks * BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    values,
    out,  # [S, HEADS * HEAD_DIM]
    partial,  # see `is_last_split`, used if SPLITS > 1; its tiles are rows times key/value heads
    extremes,
    counters,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_VALID: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NEWEST: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with one row per sequence, in one kernel: head norms, rotation, the new key and value into the cache.
    Program (row, key/value head, split).

    A program has the query heads that share one key/value head, norms and turns them itself, and takes its split of the
    keys before this one out of the cache. The new key and value never come back from memory: one split starts its
    softmax with them, at the storage's precision, while it stores them. Apart, the same work is `norm_rope_store` and
    `paged_attention`: one more launch, and one more trip of the queries through memory, for some microseconds of work.
    What it costs is that every split repeats the queries' norm and rotation.

    NEWEST: the split that takes the new key. NUM_VALID is at least HEADS / KV_HEADS, BLOCK_M at least NUM_VALID.
    IN_FLOAT32 as in `paged_attention`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    wait_for_previous(PDL)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    table = tables + row.to(tl.int64) * tl.load(table_stride)
    qkv += row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    turn = position * HALF
    kind: tl.constexpr = tl.float32 if IN_FLOAT32 else keys.dtype.element_ty
    stored_as: tl.constexpr = keys.dtype.element_ty

    member = tl.arange(0, BLOCK_M)
    valid = member < GROUP
    head = kv_head * GROUP + member
    first, second = normed_and_turned(
        qkv + head * HEAD_DIM, valid, query_norm, cos + turn, sin + turn, eps, HEAD_DIM, BLOCK_HALF
    )
    first, second = first.to(kind), second.to(kind)
    half = tl.arange(0, BLOCK_HALF)
    column = tl.arange(0, BLOCK_D)
    within_half, within = half < HALF, column < HEAD_DIM

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if split == NEWEST:
        single = tl.arange(0, 1)
        new_first, new_second = normed_and_turned(
            qkv + (HEADS + kv_head + single) * HEAD_DIM,
            single == 0,
            key_norm,
            cos + turn,
            sin + turn,
            eps,
            HEAD_DIM,
            BLOCK_HALF,
        )
        new_first, new_second = new_first.to(stored_as), new_second.to(stored_as)
        new_value = tl.load(qkv + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + column, mask=within, other=0.0)
        new_value = new_value.to(stored_as)
        offset = (slot * KV_HEADS + kv_head) * HEAD_DIM
        stored = (within_half & (half + slot >= half))[None, :]  # slot >= 0, as a tile: the interpreter wants it
        tl.store(keys + offset + half[None, :], new_first, mask=stored)
        tl.store(keys + offset + HALF + half[None, :], new_second, mask=stored)
        tl.store(values + offset + column, new_value, mask=within & (column + slot >= column))
        agreed = first.to(tl.float32) * new_first.to(tl.float32) + second.to(tl.float32) * new_second.to(tl.float32)
        maximum = tl.sum(agreed, axis=1) * scale
        total += 1.0
        mixed += new_value.to(tl.float32)[None, :]

    share = tl.cdiv(tl.cdiv(position, CHUNK), SPLITS) * CHUNK
    for start in range(split * share, tl.minimum((split + 1) * share, position), CHUNK):
        key_slot, _, exists = key_slots(table, start, position, BLOCK_SIZE, CHUNK)
        at = (key_slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM
        mask = exists[:, None] & within_half[None, :]
        key_first = tl.load(keys + at + half[None, :], mask=mask, other=0.0)
        key_second = tl.load(keys + at + HALF + half[None, :], mask=mask, other=0.0)
        scores = dot(first, tl.trans(key_first.to(kind)), tl.zeros((BLOCK_M, CHUNK), tl.float32), EXACT)
        scores = dot(second, tl.trans(key_second.to(kind)), scores, EXACT) * scale
        scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, maximum, total, mixed = softmax_step(scores, maximum, total, mixed)
        value = tl.load(values + at + column[None, :], mask=exists[:, None] & within[None, :], other=0.0)
        mixed = dot(weights.to(kind), value.to(kind), mixed, EXACT)

    if SPLITS == 1:
        store_heads(out, mixed / total[:, None], kv_head, row, 1, HEADS, KV_HEADS, HEAD_DIM, 1, NUM_VALID)
    else:
        index = row * KV_HEADS + kv_head
        last = is_last_split(partial, extremes, counters, index, split, maximum, total, mixed, NUM_VALID, SPLITS)
        if last:
            result = merged_splits(partial, extremes, index, NUM_VALID, BLOCK_D, SPLITS, AT_ONCE)
            store_heads(out, result, kv_head, row, 1, HEADS, KV_HEADS, HEAD_DIM, 1, NUM_VALID)
