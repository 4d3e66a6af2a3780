"""Attention's kernels: writing keys and values to their slots, and reading them back block by block.

Keys come in chunks of 64 absolute positions, and each chunk is reduced alone before it is merged into what came before.
That is what makes prefill and decode agree to the last bit: a row's result is a function of its own keys, cut at the
same places however they came to be computed (the merging is that of Milakov and Gimelshein 2018 and of FlashAttention).
"""

import numba
import numpy as np

from forge.backends.cpu.kernels import ONE, VECTOR, ZERO
from forge.backends.cpu.op_layout import CHUNK, FLOAT16, FLOAT32, ROWS_PER_BLOCK
from forge.backends.cpu.thread_pool_code import next_item
from forge.backends.cpu.vectors import (
    dot_keys,
    exp16,
    exp_f32,
    fma,
    get_f32,
    get_i32,
    load_bf16,
    load_f16,
    load_f32,
    mask_lanes,
    max16,
    maximum,
    prefetch,
    put_f32,
    splat_f32,
    store_bf16,
    store_f16,
    store_f32,
    sum16,
)

LOWEST = np.float32(-3.0e38)


@numba.njit
def _store_kind(address, index, vector, kind):
    """16 floats at element `index` of an array of `kind`, rounded to it."""
    if kind == FLOAT32:
        store_f32(address + 4 * index, vector)
    elif kind == FLOAT16:
        store_f16(address + 2 * index, vector)
    else:
        store_bf16(address + 2 * index, vector)


@numba.njit
def _norm_rope_head(x, width, weight, eps, cos, sin):
    """One query or key head, in place: RMSNorm, then rotation of element i with i + width / 2."""
    total = splat_f32(ZERO)
    for offset in range(0, width, 16):
        value = mask_lanes(load_f32(x + 4 * offset), width - offset, ZERO)
        total = fma(value, value, total)
    factor = ONE / np.sqrt(sum16(total) / np.float32(width) + eps)
    half = width // 2
    if half % 16 == 0:
        scale = splat_f32(factor)
        for i in range(0, 4 * half, VECTOR):
            j = i + 4 * half
            first, second = (
                load_f32(x + i) * scale * load_f32(weight + i),
                load_f32(x + j) * scale * load_f32(weight + j),
            )
            c, s = load_f32(cos + i), load_f32(sin + i)
            store_f32(x + i, first * c - second * s)
            store_f32(x + j, second * c + first * s)
        return
    for i in range(0, 4 * half, 4):
        j = i + 4 * half
        a, b = get_f32(x + i) * factor * get_f32(weight + i), get_f32(x + j) * factor * get_f32(weight + j)
        put_f32(x + i, a * get_f32(cos + i) - b * get_f32(sin + i))
        put_f32(x + j, b * get_f32(cos + i) + a * get_f32(sin + i))


@numba.njit
def _store_head(ctx, address, layer, row, head, source, width):
    """Write a head's key or value into the row's slot, in the storage's kind; nothing for slot -1."""
    slot = np.int64(get_i32(ctx.slot_mapping + 4 * row))
    if slot < 0:
        return
    block_size = ctx.cache.block_size
    place = address + layer * ctx.cache.layer_bytes + slot // block_size * ctx.cache.block_bytes
    place += head * ctx.cache.head_bytes + slot % block_size * ctx.cache.row_bytes
    for offset in range(0, width, 16):
        vector = mask_lanes(load_f32(source + 4 * offset), width - offset, ZERO)
        _store_kind(place, offset, vector, ctx.cache.kind)


def norm_rope_store(op, ctx, thread, threads):
    """Normalize and rotate queries and keys in place, and write keys and values to their slots.

    One item per head of a row: first its query heads, then key heads, then value heads.
    """
    heads, kv_heads, width = op.heads, op.kv_heads, op.head_dim
    per_row, layer, eps = heads + 2 * kv_heads, op.layer, op.eps
    while True:
        first = next_item(op, 4)
        if first >= ctx.num_rows * per_row:
            break
        for item in range(first, min(first + 4, ctx.num_rows * per_row)):
            row, head = item // per_row, item % per_row
            position = np.int64(get_i32(ctx.positions + 4 * row))
            cos = ctx.rope_cos + 4 * position * (width // 2)
            sin = ctx.rope_sin + 4 * position * (width // 2)
            if head < heads:
                q = op.q.values + 4 * (row * op.q.stride + head * width)
                _norm_rope_head(q, width, op.q_norm, eps, cos, sin)
                continue
            head -= heads
            of_row = row * op.k.stride
            if head < kv_heads:
                k = op.k.values + 4 * (of_row + head * width)
                _norm_rope_head(k, width, op.k_norm, eps, cos, sin)
                _store_head(ctx, ctx.cache.keys, layer, row, head, k, width)
            else:
                head -= kv_heads
                v = op.v.values + 4 * (of_row + head * width)
                _store_head(ctx, ctx.cache.values, layer, row, head, v, width)


@numba.njit
def _fetch_chunk(ctx, head, table, start, count):
    """Ask for the keys or values that `_gather_chunk` will read with the same arguments.

    A block of a head is a page of its own, at whose end the processor stops fetching ahead by itself.
    """
    block_size, row_bytes = ctx.cache.block_size, ctx.cache.row_bytes
    end = start + count
    while start < end:
        inside = start % block_size
        run = min(block_size - inside, end - start)
        block = np.int64(get_i32(table + 4 * (start // block_size)))
        source = head + block * ctx.cache.block_bytes + inside * row_bytes
        for line in range(0, run * row_bytes, 64):
            prefetch(source + line)
        start += run


@numba.njit
def _gather_chunk(ctx, head, table, start, count, out, width, next_head, next_table, next_start, next_count):
    """Copy one head's keys or values of positions `start` to `start + count` - 1 into float32 `[count, width]`.

    `head` is the address of that head in block 0 of the layer. Goes block by block through the table; in a block the
    head's tokens lie side by side. A block of a head is a page of its own, at whose end the processor stops fetching
    ahead by itself, so the `next_count` tokens of `next_head` in `next_table` from `next_start` on, which will be
    gathered next, are asked for meanwhile, line by line.
    """
    block_size, kind, row_bytes = ctx.cache.block_size, ctx.cache.kind, ctx.cache.row_bytes
    end, next_end = start + count, next_start + next_count
    while start < end:
        inside = start % block_size
        run = min(block_size - inside, end - start)
        block = np.int64(get_i32(table + 4 * (start // block_size)))
        source = head + block * ctx.cache.block_bytes + inside * row_bytes
        ahead = source
        if next_start < next_end:
            block = np.int64(get_i32(next_table + 4 * (next_start // block_size)))
            ahead = next_head + block * ctx.cache.block_bytes + next_start % block_size * row_bytes
        if kind == FLOAT32:
            for element in range(0, run * width, 16):
                prefetch(ahead + 4 * element)
                store_f32(out + 4 * element, load_f32(source + 4 * element))
        elif kind == FLOAT16:
            for element in range(0, run * width, 16):
                prefetch(ahead + 2 * element)
                store_f32(out + 4 * element, load_f16(source + 2 * element))
        else:
            for element in range(0, run * width, 16):
                prefetch(ahead + 2 * element)
                store_f32(out + 4 * element, load_bf16(source + 2 * element))
        start += run
        next_start += run
        out += 4 * run * width
    if next_start < next_end:
        _fetch_chunk(ctx, next_head, next_table, next_start, next_end - next_start)


@numba.njit
def _chunk_weights(query, keys, width, count, scale, weights, state):
    """softmax numerators of one query over a chunk's first `count` keys, into `weights`.

    The chunk's largest score and the numerators' sum go to the third and fourth number of the query's state.
    """
    factor = splat_f32(scale)
    top = splat_f32(LOWEST)
    for block in range(0, count, 16):
        scores = dot_keys(query, keys + 4 * block * width, 4 * width, width) * factor
        scores = mask_lanes(scores, count - block, LOWEST)
        store_f32(weights + 4 * block, scores)
        top = maximum(top, scores)
    largest = max16(top)
    total = splat_f32(ZERO)
    for block in range(0, count, 16):
        value = mask_lanes(exp16(load_f32(weights + 4 * block) - splat_f32(largest)), count - block, ZERO)
        store_f32(weights + 4 * block, value)
        total = total + value
    put_f32(state + 8, largest)
    put_f32(state + 12, sum16(total))


@numba.njit
def _merge_chunk(state, weights, values, width, count, out):
    """Merge a chunk into what a query has so far: its state is (maximum, sum) of all, then of this chunk."""
    old, new = get_f32(state), get_f32(state + 8)
    top = max(old, new)
    # The first chunk meets the lowest maximum there is, and exp's smallest value times nothing.
    keep, gain = exp_f32(old - top), exp_f32(new - top)
    put_f32(state, top)
    put_f32(state + 4, get_f32(state + 4) * keep + get_f32(state + 12) * gain)
    _merge_values(weights, values, width, count, out, keep, gain)


@numba.njit
def _merge_values(weights, values, width, count, out, keep, gain):
    """out = out * keep + gain * (sum of weight[j] * value[j], j ascending), a head's `width` elements.

    Eight running sums at a time where the width allows, so that additions need not wait for each other.
    """
    kept, gained = splat_f32(keep), splat_f32(gain)
    offset = 0
    while offset + 128 <= width:
        at = values + 4 * offset
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat_f32(ZERO)
        for j in range(count):
            p = splat_f32(get_f32(weights + 4 * j))
            v = at + 4 * j * width
            a0 = fma(p, load_f32(v), a0)
            a1 = fma(p, load_f32(v + 64), a1)
            a2 = fma(p, load_f32(v + 128), a2)
            a3 = fma(p, load_f32(v + 192), a3)
            a4 = fma(p, load_f32(v + 256), a4)
            a5 = fma(p, load_f32(v + 320), a5)
            a6 = fma(p, load_f32(v + 384), a6)
            a7 = fma(p, load_f32(v + 448), a7)
        o = out + 4 * offset
        store_f32(o, fma(gained, a0, load_f32(o) * kept))
        store_f32(o + 64, fma(gained, a1, load_f32(o + 64) * kept))
        store_f32(o + 128, fma(gained, a2, load_f32(o + 128) * kept))
        store_f32(o + 192, fma(gained, a3, load_f32(o + 192) * kept))
        store_f32(o + 256, fma(gained, a4, load_f32(o + 256) * kept))
        store_f32(o + 320, fma(gained, a5, load_f32(o + 320) * kept))
        store_f32(o + 384, fma(gained, a6, load_f32(o + 384) * kept))
        store_f32(o + 448, fma(gained, a7, load_f32(o + 448) * kept))
        offset += 128
    while offset + 64 <= width:
        at = values + 4 * offset
        a0 = a1 = a2 = a3 = splat_f32(ZERO)
        for j in range(count):
            p = splat_f32(get_f32(weights + 4 * j))
            v = at + 4 * j * width
            a0 = fma(p, load_f32(v), a0)
            a1 = fma(p, load_f32(v + 64), a1)
            a2 = fma(p, load_f32(v + 128), a2)
            a3 = fma(p, load_f32(v + 192), a3)
        o = out + 4 * offset
        store_f32(o, fma(gained, a0, load_f32(o) * kept))
        store_f32(o + 64, fma(gained, a1, load_f32(o + 64) * kept))
        store_f32(o + 128, fma(gained, a2, load_f32(o + 128) * kept))
        store_f32(o + 192, fma(gained, a3, load_f32(o + 192) * kept))
        offset += 64
    while offset < width:
        total = splat_f32(ZERO)
        for j in range(count):
            total = fma(splat_f32(get_f32(weights + 4 * j)), load_f32(values + 4 * (j * width + offset)), total)
        o = out + 4 * offset
        store_f32(o, fma(gained, total, load_f32(o) * kept))
        offset += 16


@numba.njit
def _attend_block(op, ctx, sequence, kv_head, first_row, last_row, scratch, next_keys, next_table, next_count):
    """Attention of rows `first_row` to `last_row` - 1 of one sequence, all query heads that read one key/value head.

    Keys come in chunks of 64 absolute positions. A chunk is reduced alone (its own maximum, sum and weighted values)
    and then merged into what came before it, in ascending order; so a row's result depends on its own keys only,
    whatever the batch, the prefill's chunks or the blocks of the cache. Each chunk is widened to float32 once for all
    rows here. The first keys are on their way already; the last thing done is to ask for those of the next item.
    """
    head_dim, kv_heads = op.head_dim, op.kv_heads
    width = (head_dim + 15) // 16 * 16
    group = op.heads // kv_heads
    scale = op.scale
    num_queries, most = (last_row - first_row) * group, ROWS_PER_BLOCK * group
    chunk = scratch
    queries = chunk + 4 * CHUNK * width
    all_weights = queries + 4 * width * most
    outs = all_weights + 4 * CHUNK * most
    states = outs + 4 * width * most
    q_stride, head_bytes = op.q.stride, 4 * head_dim
    for i in range(num_queries):
        q = op.q.values + 4 * (first_row + i // group) * q_stride + (kv_head * group + i % group) * head_bytes
        for offset in range(0, width, 16):
            vector = mask_lanes(load_f32(q + 4 * offset), head_dim - offset, ZERO)
            store_f32(queries + 4 * (i * width + offset), vector)
            store_f32(outs + 4 * (i * width + offset), splat_f32(ZERO))
        put_f32(states + 16 * i, LOWEST)
        put_f32(states + 16 * i + 4, ZERO)
    head = _head_offset(op, ctx, kv_head)
    keys, values = ctx.cache.keys + head, ctx.cache.values + head
    table, positions = _table_address(ctx, sequence), ctx.positions
    end = np.int64(get_i32(positions + 4 * (last_row - 1))) + 1
    for start in range(0, end, CHUNK):
        present = min(CHUNK, end - start)
        _gather_chunk(ctx, keys, table, start, present, chunk, width, values, table, start, present)
        query, weights, state = queries, all_weights, states
        for row in range(first_row, last_row):
            count = min(CHUNK, np.int64(get_i32(positions + 4 * row)) + 1 - start)
            for _ in range(group):
                if count > 0:
                    _chunk_weights(query, chunk, width, count, scale, weights, state)
                query += 4 * width
                weights += 4 * CHUNK
                state += 16
        following, left = start + CHUNK, end - start - present
        if left == 0:
            _gather_chunk(ctx, values, table, start, present, chunk, width, next_keys, next_table, 0, next_count)
        else:
            if left < CHUNK // 2:  # too short to fetch much meanwhile
                _fetch_chunk(ctx, values, table, following, left)
                _fetch_chunk(ctx, next_keys, next_table, 0, next_count)
                next_count = 0
            upcoming = min(CHUNK, left)
            _gather_chunk(ctx, values, table, start, present, chunk, width, keys, table, following, upcoming)
        weights, state, out = all_weights, states, outs
        for row in range(first_row, last_row):
            count = min(CHUNK, np.int64(get_i32(positions + 4 * row)) + 1 - start)
            for _ in range(group):
                if count > 0:
                    _merge_chunk(state, weights, chunk, width, count, out)
                weights += 4 * CHUNK
                state += 16
                out += 4 * width
    for i in range(num_queries):
        inverse = ONE / get_f32(states + 16 * i + 4)
        out = op.out.values + 4 * (first_row + i // group) * q_stride
        out += (kv_head * group + i % group) * head_bytes
        for element in range(head_dim):
            put_f32(out + 4 * element, get_f32(outs + 4 * (i * width + element)) * inverse)


@numba.njit
def _head_offset(op, ctx, kv_head):
    """Where in the storage a head in block 0 of an operation's layer lies."""
    return op.layer * ctx.cache.layer_bytes + kv_head * ctx.cache.head_bytes


@numba.njit
def _table_address(ctx, sequence):
    return ctx.block_tables + 4 * sequence * ctx.table_stride


@numba.njit
def _find_item(ctx, kv_heads, item, sequence, before):
    """Which rows and which head an item is, searched from `sequence` on, whose first item is number `before`.

    (sequence, its first item, first row, last row + 1, head); the sequence is their number if there is no such item.
    """
    bounds = ctx.cu_seqlens
    while sequence < ctx.num_sequences:
        first, last = np.int64(get_i32(bounds + 4 * sequence)), np.int64(get_i32(bounds + 4 * sequence + 4))
        blocks = (last - first + ROWS_PER_BLOCK - 1) // ROWS_PER_BLOCK
        if item < before + blocks * kv_heads:
            # The last rows of a sequence see the most keys, so their blocks go first.
            start = first + (blocks - 1 - (item - before) // kv_heads) * ROWS_PER_BLOCK
            return sequence, before, start, min(last, start + ROWS_PER_BLOCK), (item - before) % kv_heads
        before += blocks * kv_heads
        sequence += 1
    return sequence, before, np.int64(0), np.int64(0), np.int64(0)


def attention(op, ctx, thread, threads):
    """softmax(q · Kᵀ · scale) · V over the blocks of each sequence. One item per key/value head of a block of rows.

    A thread takes the next item before it does the one that it has, so that it can fetch its first keys meanwhile; and
    up to four at a time, because the heads of a block lie side by side.
    """
    scratch = ctx.scratch + thread * ctx.scratch_bytes
    kv_heads, sequences, positions = op.kv_heads, ctx.num_sequences, ctx.positions
    together = max(1, min(4, sequences * kv_heads // threads))
    item = next_item(op, together)
    sequence, before, first, last, head = _find_item(ctx, kv_heads, item, np.int64(0), np.int64(0))
    if sequence < sequences:
        end = np.int64(get_i32(positions + 4 * (last - 1))) + 1
        keys = ctx.cache.keys + _head_offset(op, ctx, head)
        _fetch_chunk(ctx, keys, _table_address(ctx, sequence), 0, min(CHUNK, end))
    while sequence < sequences:
        item = item + 1 if (item + 1) % together != 0 else next_item(op, together)
        next_sequence, before, next_first, next_last, next_head = _find_item(ctx, kv_heads, item, sequence, before)
        next_count = np.int64(0)
        if next_sequence < sequences:
            next_count = min(CHUNK, np.int64(get_i32(positions + 4 * (next_last - 1))) + 1)
        next_keys = ctx.cache.keys + _head_offset(op, ctx, next_head)
        next_table = _table_address(ctx, next_sequence)
        _attend_block(op, ctx, sequence, head, first, last, scratch, next_keys, next_table, next_count)
        sequence, first, last, head = next_sequence, next_first, next_last, next_head
