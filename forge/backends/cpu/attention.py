"""Attention's kernels: writing keys and values to their slots, and reading them back block by block.

Keys come in chunks of 64 absolute positions, and each chunk is reduced alone before it is merged into what came before.
That is what makes prefill and decode agree to the last bit: a row's result is a function of its own keys, cut at the
same places however they came to be computed (the merging is that of Milakov and Gimelshein 2018 and of FlashAttention).
"""

import numba
import numpy as np

from forge.backends.cpu.amx_attention import (
    add_values_by_amx,
    begin_amx,
    dot_keys_by_amx,
    end_amx,
    multiplies_by_amx,
)
from forge.backends.cpu.attention_code import (
    BY_AMX,
    LOWEST,
    WIDENED,
    add_values,
    dot_keys,
    dot_packed_keys,
    key_offset,
    pack_keys,
    pack_values,
    prepare_values,
    running_maximum,
    softmax_chunk,
)
from forge.backends.cpu.kernels import ONE, VECTOR, ZERO, quantize_group, values_of
from forge.backends.cpu.op_layout import (
    BFLOAT16,
    CHUNK,
    FLOAT16,
    FLOAT32,
    INT8,
    LINE_BYTES,
    QUERIES_PER_BLOCK,
    ROWS_PER_BLOCK,
)
from forge.backends.cpu.thread_pool_code import next_item
from forge.backends.cpu.tiles import AMX_ROWS
from forge.backends.cpu.vectors import (
    absolute,
    fma,
    get_f32,
    get_i32,
    get_i64,
    interleave_bf16,
    interleave_i8,
    load_f32,
    mask_lanes,
    max16,
    maximum,
    prefetch,
    put_f32,
    put_i32,
    put_i64,
    round_to_int,
    scatter_bf16,
    scatter_i8,
    splat_f32,
    store_bf16,
    store_f16,
    store_f32,
    store_i8,
    sum16,
    without_tiny,
)

ITEMS_PER_THREAD = 32
"""Items that each thread has at least where an item has more than `ROWS_PER_BLOCK` rows: with few, one thread waits
long for the last. Ledger, one layer at 2,048 tokens on one thread, 16 and 32 rows: int8 95 and 90 ms, bfloat16 111 and
107. With AMX, 28 layers on 2 cores, 32, 64 and 128 rows of two queries each: 715, 655 and 620 ms."""
_ROWS_AHEAD = 2
"""How many rows ahead `norm_rope_store` fetches: the processor does not, because a head's rows lie far apart. Ledger,
0.6B shape, a prefill of 512 tokens on 2 cores of a Xeon: 26 ms without, 20 so."""
MANY_QUERIES = 8
"""Queries for which AMX takes less than products of up to four at a time, or widening int8 values once for all."""


@numba.njit
def _number_bytes(cache):
    """Return the bytes of a key's or value's numbers, without the scale of int8."""
    return cache.row_bytes - 4 if cache.kind == INT8 else cache.row_bytes


@numba.njit
def _store_kind(address, index, vector, kind):
    """Round 16 floats to `kind` and store them at element `index` of an array."""
    if kind == FLOAT32:
        store_f32(address + 4 * index, vector)
    elif kind == FLOAT16:
        store_f16(address + 2 * index, vector)
    else:
        store_bf16(address + 2 * index, without_tiny(vector))


@numba.njit
def _norm_rope_head(x, width, weight, eps, cos, sin):
    """Normalize one query or key head in place (RMSNorm), then rotate element i with i + width / 2."""
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
def _are_packed(cache):
    """Return whether the storage keeps keys and values packed (`CpuKvStorage`): as `pack_keys` and `pack_values` write
    them, with the scales of 16 slots behind these."""
    return cache.kind in (BFLOAT16, INT8) and cache.block_size % 16 == 0


@numba.njit
def _store_head(ctx, address, layer, row, head, source, width, scratch):
    """Write a head's key or value into the row's slot, in the storage's kind; nothing for slot -1.

    scratch: room for its int8 numbers.
    """
    slot = np.int64(get_i32(ctx.slot_mapping + 4 * row))
    if slot < 0:
        return
    cache = ctx.cache
    place = address + layer * cache.layer_bytes + slot // cache.block_size * cache.block_bytes + head * cache.head_bytes
    inside = slot % cache.block_size
    if _are_packed(cache):
        place += inside // 16 * 16 * cache.row_bytes
        _store_packed(cache, place, inside % 16, address == cache.keys, source, width, scratch)
        return
    place += inside * cache.row_bytes
    if cache.kind == INT8:
        _store_int8(place, source, width, place + _number_bytes(cache))
        return
    for offset in range(0, width, 16):
        vector = mask_lanes(load_f32(source + 4 * offset), width - offset, ZERO)
        _store_kind(place, offset, vector, cache.kind)


@numba.njit
def _store_packed(cache, place, inside, is_key, source, width, scratch):
    """Write a head's key or value into slot number `inside` of the 16 that are packed together at `place`."""
    size = _number_bytes(cache)
    if cache.kind == INT8:
        _store_int8(scratch, source, width, place + 16 * size + 4 * inside)
        for offset in range(0, size, 16):
            if is_key:
                scatter_i8(place + 4 * inside + 16 * offset, scratch + offset)
            else:
                interleave_i8(place + inside // 4 * 4 * size + inside % 4 + 4 * offset, scratch + offset)
        return
    for offset in range(0, width, 16):
        vector = without_tiny(mask_lanes(load_f32(source + 4 * offset), width - offset, ZERO))
        if is_key:
            scatter_bf16(place + 4 * inside + 32 * offset, vector)
        else:
            interleave_bf16(place + inside // 2 * 2 * size + inside % 2 * 2 + 4 * offset, vector)


@numba.njit
def _store_int8(place, source, width, scale):
    """Store a query, key or value as int8 at `place`, and its scale at `scale` (`kv_storage.quantized`)."""
    highest = splat_f32(ZERO)
    for offset in range(0, width, 16):
        highest = maximum(highest, absolute(mask_lanes(load_f32(source + 4 * offset), width - offset, ZERO)))
    largest = max16(highest)
    inverse = np.float32(127.0) / largest if largest > np.float32(1e-30) else ZERO
    for offset in range(0, width, 16):
        vector = mask_lanes(load_f32(source + 4 * offset), width - offset, ZERO)
        store_i8(place + offset, round_to_int(vector * splat_f32(inverse)))
    put_f32(scale, largest / np.float32(127.0) if inverse > ZERO else ZERO)


@numba.njit
def _quantize_query(query, width, scale, offset):
    """Quantize a query in place to int8, with zeros up to a multiple of 64, and store its scale and `key_offset`."""
    _store_int8(query, query, width, scale)
    for start in range(width, (width + 63) // 64 * 64, 16):
        store_i8(query + start, round_to_int(splat_f32(ZERO)))
    put_i32(offset, key_offset(query, width))


@numba.njit
def _round_query(query, width):
    """Round a query in place to bfloat16."""
    for start in range(0, width, 16):
        _store_kind(query, start, load_f32(query + 4 * start), BFLOAT16)


def norm_rope_store(op, ctx, thread, threads):
    """Normalize and rotate queries and keys in place, and write keys and values to their slots.

    One item per head of a block of rows: first query heads, then key heads, then value heads. Rows of a block mostly
    share cache lines where keys are packed, which two threads that write them would take from each other.
    """
    heads, kv_heads, width = op.heads, op.kv_heads, op.head_dim
    per_row, layer, eps = heads + 2 * kv_heads, op.layer, op.eps
    rows, scratch = ctx.num_rows, ctx.scratch + thread * ctx.scratch_bytes
    items = (rows + ROWS_PER_BLOCK - 1) // ROWS_PER_BLOCK * per_row
    while True:
        first = next_item(op, 4)
        if first >= items:
            break
        for item in range(first, min(first + 4, items)):
            head, first_row = item % per_row, item // per_row * ROWS_PER_BLOCK
            is_query, is_value = head < heads, head >= heads + kv_heads
            if is_query:
                x, of_x, weight = op.q, head, op.q_norm
            elif is_value:
                x, of_x, weight = op.v, head - heads - kv_heads, np.int64(0)
            else:
                x, of_x, weight = op.k, head - heads, op.k_norm
            stored = ctx.cache.values if is_value else ctx.cache.keys
            for row in range(first_row, min(first_row + ROWS_PER_BLOCK, rows)):
                source = values_of(x, row) + 4 * of_x * width
                for line in range(0, 4 * width if row + _ROWS_AHEAD < rows else 0, LINE_BYTES):
                    prefetch(source + 4 * _ROWS_AHEAD * x.stride + line)
                if not is_value:
                    at = 4 * np.int64(get_i32(ctx.positions + 4 * row)) * (width // 2)
                    _norm_rope_head(source, width, weight, eps, ctx.rope_cos + at, ctx.rope_sin + at)
                if not is_query:
                    _store_head(ctx, stored, layer, row, of_x, source, width, scratch)


@numba.njit
def _find_rows(ctx, table, start, count, rows):
    """Write to `rows` where `count` positions from `start` on lie in a head: int64 offsets from the head's first block.

    Of packed ones, numbers 0, 16, … are where 16 keys lie, and 0, 4, … (bfloat16: 0, 2, …) where four or two values do.
    The last offset, of packed ones the last 16, is repeated until there are `CHUNK`: keys are read up to 16 at a time,
    and a whole chunk is fetched ahead.
    """
    block_size, row_bytes, packed = ctx.cache.block_size, ctx.cache.row_bytes, _are_packed(ctx.cache)
    step, repeated = (_number_bytes(ctx.cache), 16) if packed else (row_bytes, 1)
    number, inside, block = np.int64(0), start % block_size, table + 4 * (start // block_size)
    while number < count:
        offset = np.int64(get_i32(block)) * ctx.cache.block_bytes + inside * row_bytes
        for _ in range(0, min(block_size - inside, count - number), repeated):
            for within in range(repeated):
                put_i64(rows + 8 * (number + within), offset + within * step)
            number += repeated
            offset += repeated * row_bytes
        block, inside = block + 4, 0
    while number < CHUNK:
        put_i64(rows + 8 * number, get_i64(rows + 8 * (number - repeated)) if count > 0 else 0)
        number += 1


@numba.njit
def _gather_scales(cache, keys, values, rows, scales, ahead_keys, ahead_values, ahead_rows):
    """Collect the scales of a chunk's keys, of its values, and the largest of a value's up to each position.

    Of packed ones 16 lie behind their rows. The next chunk's are fetched meanwhile; the other loops fetch its rows.
    """
    of_keys, of_values = scales, scales + 4 * CHUNK
    if _are_packed(cache):
        behind = 16 * _number_bytes(cache)
        for number in range(0, CHUNK, 16):
            place, upcoming = get_i64(rows + 8 * number) + behind, get_i64(ahead_rows + 8 * number) + behind
            store_f32(of_keys + 4 * number, load_f32(keys + place))
            store_f32(of_values + 4 * number, load_f32(values + place))
            prefetch(ahead_keys + upcoming)
            prefetch(ahead_values + upcoming)
    else:
        for number in range(CHUNK):
            place = get_i64(rows + 8 * number) + cache.row_bytes - 4  # behind the row
            put_f32(of_keys + 4 * number, get_f32(keys + place))
            put_f32(of_values + 4 * number, get_f32(values + place))
    running_maximum(of_values, of_values + 4 * CHUNK)


@numba.njit
def _fetch(cache, head, rows, first, last):
    """Prefetch a head's keys or values at the offsets number `first` to `last` - 1 of `rows`."""
    for number in range(first, last):
        row = head + get_i64(rows + 8 * number)
        for line in range(0, _number_bytes(cache), 64):
            prefetch(row + line)


@numba.njit
def _seen(visible, group, query):
    """Return how many keys of a chunk query number `query` sees; row 0 sees `visible`, less than one if none."""
    return min(CHUNK, visible + query // group)


@numba.njit
def _together(kind, seen, group, query, num_queries):
    """Return how many queries from number `query` on, which sees `seen` keys of a chunk, share a pass over it.

    Those that see the same keys: all of the rows to come where a row sees the whole chunk, else those of its own row.
    Keys and values in int8 may be passed over by queries that do not see them: an integer times zero adds nothing,
    where a float that is not a number would.
    """
    alike = num_queries - query if seen == CHUNK or kind == INT8 else group - query % group
    return 4 if alike >= 4 else 2 if alike >= 2 else 1


@numba.njit
def _attend_block(op, ctx, sequence, kv_head, first_row, last_row, scratch, next_head, next_table, next_end):
    """Attention of rows `first_row` to `last_row` - 1 of one sequence, all query heads that read one key/value head.

    Keys come in chunks of 64 absolute positions. A chunk is reduced alone (its own maximum, sum and weighted values)
    and then merged into what came before it, in ascending order; so a row's result depends on its own keys only,
    whatever the batch, the prefill's chunks or the blocks of the cache.

    While a chunk's keys are read the next chunk's are asked for, or the next item's first, and the same of its values.
    They are asked into the second-level cache, and evenly: a prefetch into the first level, or a burst, holds up the
    reads of what is there already. Ledger, 0.6B shape in float16, 1 sequence at context 8,192 on 2 cores: 17 GB/s
    without, and with bursts; 26 evenly; reading alone, in this pattern, 32. In int8, 16 sequences at 1,056 tokens on 2
    cores of a Xeon: 70 ms where a chunk's own values were asked for with its keys, and rows lay one behind the other;
    52 as it is; 48 is what 16 line buffers allow.
    """
    head_dim, kv_heads, kind = op.head_dim, op.kv_heads, ctx.cache.kind
    width = (head_dim + 15) // 16 * 16
    group = op.heads // kv_heads
    scale = op.scale
    num_queries, room = (last_row - first_row) * group, max(QUERIES_PER_BLOCK, ROWS_PER_BLOCK * group)
    rows, next_rows = scratch, scratch + 8 * CHUNK
    packed_keys = scratch + 16 * CHUNK
    size = width if kind == INT8 else 2 * width  # of what is packed
    packed_values = packed_keys + CHUNK * ((size + 63) // 64 * 64)
    chunk_scales = packed_values + 2 * CHUNK * width
    scales = chunk_scales if kind == INT8 else 0
    packed_groups = chunk_scales + 12 * CHUNK
    packed_rows = packed_groups + 8 * CHUNK
    factors = packed_rows + 8 * CHUNK
    offsets, seen = factors + 4 * room, factors + 8 * room
    queries = factors + 12 * room
    all_weights = queries + 4 * width * room
    outs = all_weights + 4 * CHUNK * room
    states = outs + 4 * width * room
    sums = states + 16 * room
    q_stride, head_bytes = op.q.stride, 4 * head_dim
    first_position = np.int64(get_i32(ctx.positions + 4 * first_row))
    for i in range(num_queries):
        q = op.q.values + 4 * (first_row + i // group) * q_stride + (kv_head * group + i % group) * head_bytes
        for offset in range(0, width, 16):
            vector = mask_lanes(load_f32(q + 4 * offset), head_dim - offset, ZERO)
            store_f32(queries + 4 * (i * width + offset), vector)
            store_f32(outs + 4 * (i * width + offset), splat_f32(ZERO))
        if kind == INT8:
            _quantize_query(queries + 4 * i * width, width, factors + 4 * i, offsets + 4 * i)
        elif kind == BFLOAT16:
            _round_query(queries + 4 * i * width, width)
        put_f32(factors + 4 * i, scale * get_f32(factors + 4 * i) if kind == INT8 else scale)
        put_i32(seen + 4 * i, first_position + 1 + i // group)
        put_f32(states + 4 * i, np.float32(LOWEST))
        put_f32(states + 4 * (room + i), ZERO)
    packs = kind in (INT8, BFLOAT16) and not _are_packed(ctx.cache)
    if packs or num_queries >= MANY_QUERIES:
        for number in range(0, CHUNK, 2):
            put_i64(packed_groups + 8 * number, number * ((size + 63) // 64 * 64))
            put_i64(packed_rows + 8 * number, number * (size if packs else 2 * width))
    head = _head_offset(op, ctx, kv_head)
    keys, values = ctx.cache.keys + head, ctx.cache.values + head
    next_keys, next_values = ctx.cache.keys + next_head, ctx.cache.values + next_head
    table = _table_address(ctx, sequence)
    end = first_position + last_row - first_row
    _find_rows(ctx, table, 0, min(CHUNK, end), rows)
    for start in range(0, end, CHUNK):
        following, count = start + CHUNK, min(CHUNK, end - start)
        ahead_keys, ahead_values, ahead_table, upcoming = keys, values, table, following
        if following >= end:
            ahead_keys, ahead_values, ahead_table, upcoming = next_keys, next_values, next_table, np.int64(0)
        _find_rows(ctx, ahead_table, upcoming, min(CHUNK, (end if following < end else next_end) - upcoming), next_rows)
        visible, first_query = first_position + 1 - start, max(0, start - first_position) * group
        prepares = kind == INT8 and num_queries - first_query >= MANY_QUERIES
        by_amx = prepares and multiplies_by_amx() != 0
        first_of_16 = first_query // AMX_ROWS * AMX_ROWS
        of_keys, key_rows, of_values, value_rows = keys, rows, values, rows
        if packs:
            of_keys, key_rows, of_values, value_rows = packed_keys, packed_groups, packed_values, packed_rows
            pack_keys(keys, rows, count, size, packed_keys, ahead_keys, next_rows)
        fetched = 0 if packs or by_amx else ahead_keys
        if by_amx:
            dot_keys_by_amx(first_of_16, num_queries, queries, width, of_keys, key_rows, all_weights)
        query = first_query
        while query < num_queries:
            least = _seen(visible, group, query)
            together = _together(kind, least, group, query, num_queries)
            most = least if least == CHUNK else _seen(visible, group, query + together - 1)
            weights, numbers = all_weights + 4 * CHUNK * query, queries + 4 * width * query
            if by_amx:
                pass
            elif kind in (INT8, BFLOAT16):
                offset = offsets + 4 * query
                dot_packed_keys(
                    kind, together, numbers, offset, width, of_keys, key_rows, most, weights, fetched, next_rows
                )
                fetched = 0
            else:
                dot_keys(kind, together, numbers, width, keys, rows, most, weights, ahead_keys, next_rows)
            if kind == INT8 and query == first_query:
                _gather_scales(ctx.cache, keys, values, rows, scales, ahead_keys, ahead_values, next_rows)
            state, counts, factor = states + 4 * query, seen + 4 * query, factors + 4 * query
            scored = BY_AMX if by_amx else kind
            softmax_chunk(scored, together, weights, start, counts, factor, scales, state, room)
            query += together
        if packs:
            pack_values(kind, values, rows, count, width, packed_values, ahead_values, next_rows)
        elif prepares:
            of_values, value_rows = packed_values, packed_rows
            prepare_values(values, rows, count, width, packed_values, ahead_keys, ahead_values, next_rows)
        if by_amx:
            add_values_by_amx(
                first_of_16, first_query, num_queries, all_weights, packed_values, width, outs, states, room, sums
            )
        fetched, added = 0 if packs or prepares else ahead_values, WIDENED if prepares and not packs else kind
        query = num_queries if by_amx else first_query
        while query < num_queries:
            least = _seen(visible, group, query)
            together = _together(kind, least, group, query, num_queries)
            most = least if least == CHUNK else _seen(visible, group, query + together - 1)
            weights, out = all_weights + 4 * CHUNK * query, outs + 4 * width * query
            state = states + 4 * query
            add_values(
                added, together, weights, most, of_values, value_rows, width, out, state, room, fetched, next_rows
            )
            fetched = 0
            query += together
        if following >= end:  # what a short chunk left out
            _fetch(ctx.cache, next_keys, next_rows, count, min(CHUNK, next_end))
            _fetch(ctx.cache, next_values, next_rows, count, min(CHUNK, next_end))
        rows, next_rows = next_rows, rows
    for i in range(num_queries):
        inverse, source = ONE / get_f32(states + 4 * (room + i)), outs + 4 * i * width
        row, column = first_row + i // group, (kv_head * group + i % group) * head_dim
        for element in range(0, width, 16):
            store_f32(source + 4 * element, load_f32(source + 4 * element) * splat_f32(inverse))
        if op.out.values != 0:
            out, whole = values_of(op.out, row) + 4 * column, head_dim // 16 * 16
            for element in range(0, whole, 16):
                store_f32(out + 4 * element, load_f32(source + 4 * element))
            for element in range(whole, head_dim):
                put_f32(out + 4 * element, get_f32(source + 4 * element))
        if op.out.quants != 0 and head_dim % 32 == 0:
            for element in range(0, head_dim, 32):
                quantize_group(source + 4 * element, op.out, row, (column + element) // 32)


@numba.njit
def _head_offset(op, ctx, kv_head):
    """Return the offset in the storage of a head in block 0 of an operation's layer."""
    return op.layer * ctx.cache.layer_bytes + kv_head * ctx.cache.head_bytes


@numba.njit
def _table_address(ctx, sequence):
    return ctx.block_tables + 4 * sequence * ctx.table_stride


@numba.njit
def _find_item(ctx, kv_heads, rows, item, sequence, before):
    """Find an item's block of `rows` rows and its head, searching from `sequence` on, whose first item is number
    `before`.

    (sequence, its first item, first row, last row + 1, head); the sequence is their number if there is no such item.
    """
    bounds = ctx.cu_seqlens
    while sequence < ctx.num_sequences:
        first, last = np.int64(get_i32(bounds + 4 * sequence)), np.int64(get_i32(bounds + 4 * sequence + 4))
        blocks = (last - first + rows - 1) // rows
        if item < before + blocks * kv_heads:
            # The last rows of a sequence see the most keys, so their blocks go first.
            start = first + (blocks - 1 - (item - before) // kv_heads) * rows
            return sequence, before, start, min(last, start + rows), (item - before) % kv_heads
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
    group, rows = op.heads // kv_heads, ROWS_PER_BLOCK
    while 2 * rows * group <= QUERIES_PER_BLOCK and ctx.num_rows * kv_heads >= 2 * rows * ITEMS_PER_THREAD * threads:
        rows *= 2
    may_use_amx = ctx.num_rows * group >= MANY_QUERIES
    if may_use_amx:
        begin_amx()
    item = next_item(op, together)
    sequence, before, first, last, head = _find_item(ctx, kv_heads, rows, item, np.int64(0), np.int64(0))
    if sequence < sequences:
        end = np.int64(get_i32(positions + 4 * (last - 1))) + 1
        count = min(CHUNK, end)
        _find_rows(ctx, _table_address(ctx, sequence), 0, count, scratch)
        for start in (ctx.cache.keys, ctx.cache.values):
            _fetch(ctx.cache, start + _head_offset(op, ctx, head), scratch, 0, count)
    while sequence < sequences:
        item = item + 1 if (item + 1) % together != 0 else next_item(op, together)
        next_sequence, before, next_first, next_last, next_head = _find_item(
            ctx, kv_heads, rows, item, sequence, before
        )
        next_end = np.int64(0)
        if next_sequence < sequences:
            next_end = np.int64(get_i32(positions + 4 * (next_last - 1))) + 1
        next_offset, next_table = _head_offset(op, ctx, next_head), _table_address(ctx, next_sequence)
        _attend_block(op, ctx, sequence, head, first, last, scratch, next_offset, next_table, next_end)
        sequence, first, last, head = next_sequence, next_first, next_last, next_head
    if may_use_amx:
        end_amx()
