"""A decode step's attention in one kernel: head norms, rotation, the new key and value into the cache, attention.

One row per sequence. A program has the query heads that share one key/value head, norms and turns them itself, and
takes its split of the keys before this one out of the cache. The new key and value never come back from memory: one
split starts its softmax with them, at the storage's precision, while it stores them.

Apart, the same work is `norm_rope_store` and `paged_attention`: one more launch, and one more trip of the queries
through memory, for some microseconds of work. What it costs is that every split repeats the queries' norm and rotation.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.attention import (
    is_last_split,
    key_slots,
    merged_splits,
    normed_and_turned,
    softmax_step,
    store_heads,
)
from forge.backends.cuda.kernels.parts import dot, let_next_start, wait_for_previous


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
    """Attend with one row per sequence. Program (row, key/value head, split).

    NEWEST: the split that takes the new key. NUM_VALID is at least HEADS / KV_HEADS, BLOCK_M at least NUM_VALID.
    IN_FLOAT32 as in `paged_attention`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    wait_for_previous(PDL)
    let_next_start(PDL)
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
