"""The kernels: every operation of a forward pass on the CPU, each a function that all threads run together.

How to read one. `op` is the address of its operation and `ctx` that of the batch; `word(op, NAME)` is an argument, named
in `words.py`. Threads share the work by taking numbered items from the operation one after another (`take`): an item is
a row, a tile of 16 weight rows, or a head of a row. Nothing that a thread computes depends on which thread it is or on
which other items exist. That is the whole secret of getting the same bits from every batch.

Activations are float32 `[rows, stride]`, strides a multiple of 32 and padding zero. Before a quantized matrix product
they are also quantized to int8, 32 at a time (`_quantize_32`).
"""

import numba
import numpy as np

from forge.backends.cpu import words as w
from forge.backends.cpu.compilation import kernel
from forge.backends.cpu.team import take
from forge.backends.cpu.vectors import (
    absolute,
    call_tile,
    dot_keys,
    exp16,
    exp_f32,
    fma,
    get_bf16,
    get_f16,
    get_f32,
    get_f32_bits,
    get_i32,
    get_i64,
    get_u8,
    load_bf16,
    load_f16,
    load_f32,
    mask_lanes,
    max16,
    maximum,
    prefetch,
    put_f32,
    put_i32,
    round_to_int,
    splat_f32,
    store_bf16,
    store_f16,
    store_f32,
    store_i8,
    sum16,
    sum_i32,
)

CHUNK = 64
"""Keys that attention reduces together: absolute positions 0 to 63, 64 to 127, …"""
ROWS_PER_BLOCK = 16
"""Rows of one sequence that share a pass over its keys."""
VECTOR = 64
"""Bytes of 16 float32."""
LOWEST = np.float32(-3.0e38)
ONE, ZERO = np.float32(1.0), np.float32(0.0)


@numba.njit(inline="always")
def word(address, number):
    """An int64 argument."""
    return get_i64(address + 8 * number)


@numba.njit(inline="always")
def number(address, index):
    """A float32 argument."""
    return get_f32_bits(word(address, index))


# Embedding


@numba.njit
def _stored_number(address, index, kind):
    """Element `index` of an array of float32, float16 or bfloat16."""
    if kind == w.KIND_F32:
        return get_f32(address + 4 * index)
    if kind == w.KIND_F16:
        return get_f16(address + 2 * index)
    return get_bf16(address + 2 * index)


@kernel
def embed_quantized(op, ctx, thread, threads):
    """Rows of a quantized table, multiplied out. One item per row; the bytes lie as `tiles.py` draws them."""
    columns, bits, group = word(op, w.EMBED_COLUMNS), word(op, w.EMBED_BITS), word(op, w.EMBED_GROUP)
    bias, kind, minimums = word(op, w.EMBED_BIAS), word(op, w.EMBED_KIND), word(op, w.EMBED_MINIMUMS)
    while True:
        row = take(op, 1)
        if row >= word(ctx, w.CTX_ROWS):
            break
        token = np.int64(get_i32(word(ctx, w.CTX_TOKEN_IDS) + 4 * row))
        tile, lane = token // 16, token % 16
        out = word(op, w.EMBED_OUT) + 4 * row * word(op, w.EMBED_STRIDE)
        lines = word(op, w.EMBED_TABLE) + tile * columns * 2 * bits
        for column in range(columns):
            four = column % 32 // 4
            line = column // 32 * bits + (four if bits == 8 else four % 4)
            quant = np.int64(get_u8(lines + 64 * line + 4 * lane + column % 4))
            if bits == 4:
                quant = quant >> 4 if four >= 4 else quant & 15
            entry = (tile * (columns // group) + column // group) * 16 + lane
            value = _stored_number(word(op, w.EMBED_SCALES), entry, kind) * np.float32(quant - bias)
            if minimums != 0:
                value -= _stored_number(minimums, entry, kind)
            put_f32(out + 4 * column, value)


@kernel
def embed_float(op, ctx, thread, threads):
    """Rows of a float table `[tiles, columns, 16]`. One item per row."""
    columns, kind = word(op, w.EMBED_COLUMNS), word(op, w.EMBED_KIND)
    while True:
        row = take(op, 1)
        if row >= word(ctx, w.CTX_ROWS):
            break
        token = np.int64(get_i32(word(ctx, w.CTX_TOKEN_IDS) + 4 * row))
        out = word(op, w.EMBED_OUT) + 4 * row * word(op, w.EMBED_STRIDE)
        first = token // 16 * columns * 16 + token % 16
        for column in range(columns):
            put_f32(out + 4 * column, _stored_number(word(op, w.EMBED_TABLE), first + 16 * column, kind))


# Normalization and quantization of activations


@numba.njit
def _mean_square(x, width):
    """mean(x²) of `width` floats, padded with zeros to a multiple of 16: 16 partial sums, then the fixed tree."""
    sums = splat_f32(ZERO)
    for offset in range(0, 4 * width, VECTOR):
        value = load_f32(x + offset)
        sums = fma(value, value, sums)
    return sum16(sums) / np.float32(width)


@numba.njit
def _quantize_32(x, quants, scale, sums):
    """32 floats to 32 int8, their scale, and two sums of 16.

    The largest magnitude becomes 127: scale = max|x| / 127, quant = round(x * 127 / max|x|), ties to even.
    """
    low, high = load_f32(x), load_f32(x + VECTOR)
    largest = max16(maximum(absolute(low), absolute(high)))
    inverse = np.float32(127.0) / largest if largest > np.float32(1e-30) else ZERO
    put_f32(scale, largest / np.float32(127.0) if largest > np.float32(1e-30) else ZERO)
    factor = splat_f32(inverse)
    low_quants, high_quants = round_to_int(low * factor), round_to_int(high * factor)
    store_i8(quants, low_quants)
    store_i8(quants + 16, high_quants)
    put_i32(sums, sum_i32(low_quants))
    put_i32(sums + 4, sum_i32(high_quants))


@numba.njit
def _quantize_row(x, row, stride, quants, scales, sums):
    """A whole row of `stride` floats, 32 at a time, into row `row` of the three arrays."""
    for group in range(stride // 32):
        at = row * (stride // 32) + group
        _quantize_32(x + 128 * group, quants + 32 * at, scales + 4 * at, sums + 8 * at)


@kernel
def rms_norm(op, ctx, thread, threads):
    """x / sqrt(mean(x²) + eps) * weight, quantized too where a quantized product follows. One item per row.

    The rows are those of the batch, or those that `NORM_ROW_NUMBERS` names: the last norm's, which need logits.
    """
    stride, width, weight = word(op, w.NORM_STRIDE), word(op, w.NORM_WIDTH), word(op, w.NORM_WEIGHT)
    while True:
        row = take(op, 1)
        if row >= word(ctx, word(op, w.ROWS_WORD)):
            break
        source = row
        if word(op, w.NORM_ROW_NUMBERS) != 0:
            source = np.int64(get_i32(word(ctx, word(op, w.NORM_ROW_NUMBERS)) + 4 * row))
        x = word(op, w.NORM_IN) + 4 * source * stride
        out = word(op, w.NORM_OUT) + 4 * row * stride
        factor = splat_f32(ONE / np.sqrt(_mean_square(x, width) + number(op, w.NORM_EPS)))
        for offset in range(0, 4 * stride, VECTOR):
            store_f32(out + offset, load_f32(x + offset) * factor * load_f32(weight + offset))
        if word(op, w.NORM_QUANTS) != 0:
            _quantize_row(out, row, stride, word(op, w.NORM_QUANTS), word(op, w.NORM_SCALES), word(op, w.NORM_SUMS))


@kernel
def quantize(op, ctx, thread, threads):
    """Rows of floats to int8. One item per row."""
    stride = word(op, w.QUANT_STRIDE)
    while True:
        row = take(op, 1)
        if row >= word(ctx, word(op, w.ROWS_WORD)):
            break
        x = word(op, w.QUANT_IN) + 4 * row * stride
        _quantize_row(x, row, stride, word(op, w.QUANT_QUANTS), word(op, w.QUANT_SCALES), word(op, w.QUANT_SUMS))


# Matrix products


@kernel
def matmul_quantized(op, ctx, thread, threads):
    """out (+)= x · weightsᵀ for quantized weights. One item per tile of 16 weight rows.

    All rows of the batch pass over a tile while its weights are near: up to eight at a time, the rest in a tile made
    for exactly as many. The first pass fetches the next tile ahead (`tiles.py`).
    """
    rows, num_tiles, chunk = word(ctx, word(op, w.ROWS_WORD)), word(op, w.MM_NUM_TILES), word(op, w.MM_CHUNK)
    x_stride, out_stride = word(op, w.MM_X_STRIDE), word(op, w.MM_OUT_STRIDE)
    tile_bytes, scale_bytes = word(op, w.MM_TILE_BYTES), word(op, w.MM_TILE_SCALE_BYTES)
    while True:
        first = take(op, chunk)
        if first >= num_tiles:
            break
        last = min(first + chunk, num_tiles)
        for tile in range(first, last):
            weights = word(op, w.MM_WEIGHTS) + tile * tile_bytes
            ahead = weights + tile_bytes if tile + 1 < last else 0
            row = 0
            while row < rows:
                count = min(8, rows - row)
                call_tile(
                    word(word(op, w.MM_TILES), count),
                    weights,
                    word(op, w.MM_SCALES) + tile * scale_bytes,
                    word(op, w.MM_MINIMUMS) + tile * scale_bytes,
                    word(op, w.MM_X) + row * x_stride,
                    word(op, w.MM_X_SCALES) + row * (x_stride // 8),
                    word(op, w.MM_X_SUMS) + row * (x_stride // 4),
                    word(op, w.MM_OUT) + 4 * (row * out_stride + 16 * tile),
                    word(op, w.MM_GROUPS),
                    x_stride,
                    out_stride,
                    word(op, w.MM_ADD),
                    ahead,
                )
                ahead = 0
                row += count


@numba.njit
def _float_tile(load, weights, step, x, columns):
    """16 outputs of one row: inputs 0, 4, 8, … in one sum, 1, 5, 9, … in the next, and so on; then the four sums."""
    sum0 = sum1 = sum2 = sum3 = splat_f32(ZERO)
    for column in range(0, columns, 4):
        at, value = weights + step * column, x + 4 * column
        sum0 = fma(load(at), splat_f32(get_f32(value)), sum0)
        sum1 = fma(load(at + step), splat_f32(get_f32(value + 4)), sum1)
        sum2 = fma(load(at + 2 * step), splat_f32(get_f32(value + 8)), sum2)
        sum3 = fma(load(at + 3 * step), splat_f32(get_f32(value + 12)), sum3)
    return (sum0 + sum1) + (sum2 + sum3)


@numba.njit
def _matmul_float(op, ctx, load, step):
    rows, num_tiles, chunk = word(ctx, word(op, w.ROWS_WORD)), word(op, w.MM_NUM_TILES), word(op, w.MM_CHUNK)
    columns, out_stride = word(op, w.MM_X_STRIDE), word(op, w.MM_OUT_STRIDE)
    while True:
        first = take(op, chunk)
        if first >= num_tiles:
            break
        for tile in range(first, min(first + chunk, num_tiles)):
            weights = word(op, w.MM_WEIGHTS) + tile * word(op, w.MM_TILE_BYTES)
            for row in range(rows):
                out = word(op, w.MM_OUT) + 4 * (row * out_stride + 16 * tile)
                result = _float_tile(load, weights, step, word(op, w.MM_X) + 4 * row * columns, columns)
                if word(op, w.MM_ADD) != 0:
                    result = load_f32(out) + result
                store_f32(out, result)


@kernel
def matmul_f32(op, ctx, thread, threads):
    """out (+)= x · weightsᵀ for float32 weights `[tiles, columns, 16]`. One item per tile."""
    _matmul_float(op, ctx, load_f32, 64)


@kernel
def matmul_f16(op, ctx, thread, threads):
    """The same for float16 weights, widened as they are read."""
    _matmul_float(op, ctx, load_f16, 32)


@kernel
def matmul_bf16(op, ctx, thread, threads):
    """The same for bfloat16 weights."""
    _matmul_float(op, ctx, load_bf16, 32)


# Attention


@numba.njit
def _store_kind(address, index, vector, kind):
    """16 floats at element `index` of an array of `kind`, rounded to it."""
    if kind == w.KIND_F32:
        store_f32(address + 4 * index, vector)
    elif kind == w.KIND_F16:
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
            first, second = load_f32(x + i) * scale * load_f32(weight + i), load_f32(x + j) * scale * load_f32(weight + j)
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
    slot = np.int64(get_i32(word(ctx, w.CTX_SLOTS) + 4 * row))
    if slot < 0:
        return
    block_size = word(ctx, w.CTX_BLOCK_SIZE)
    place = address + layer * word(ctx, w.CTX_LAYER_BYTES) + slot // block_size * word(ctx, w.CTX_BLOCK_BYTES)
    place += head * word(ctx, w.CTX_HEAD_BYTES) + slot % block_size * word(ctx, w.CTX_ROW_BYTES)
    for offset in range(0, width, 16):
        vector = mask_lanes(load_f32(source + 4 * offset), width - offset, ZERO)
        _store_kind(place, offset, vector, word(ctx, w.CTX_KV_KIND))


@kernel
def norm_rope_store(op, ctx, thread, threads):
    """Normalize and rotate queries and keys in place, and write keys and values to their slots.

    One item per head of a row: first its query heads, then key heads, then value heads.
    """
    heads, kv_heads, width = word(op, w.QKV_HEADS), word(op, w.QKV_KV_HEADS), word(op, w.QKV_HEAD_DIM)
    per_row, layer, eps = heads + 2 * kv_heads, word(op, w.QKV_LAYER), number(op, w.QKV_EPS)
    while True:
        first = take(op, 4)
        if first >= word(ctx, w.CTX_ROWS) * per_row:
            break
        for item in range(first, min(first + 4, word(ctx, w.CTX_ROWS) * per_row)):
            row, head = item // per_row, item % per_row
            position = np.int64(get_i32(word(ctx, w.CTX_POSITIONS) + 4 * row))
            cos = word(ctx, w.CTX_ROPE_COS) + 4 * position * (width // 2)
            sin = word(ctx, w.CTX_ROPE_SIN) + 4 * position * (width // 2)
            if head < heads:
                q = word(op, w.QKV_Q) + 4 * (row * word(op, w.QKV_Q_STRIDE) + head * width)
                _norm_rope_head(q, width, word(op, w.QKV_Q_NORM), eps, cos, sin)
                continue
            head -= heads
            of_row = row * word(op, w.QKV_KV_STRIDE)
            if head < kv_heads:
                k = word(op, w.QKV_K) + 4 * (of_row + head * width)
                _norm_rope_head(k, width, word(op, w.QKV_K_NORM), eps, cos, sin)
                _store_head(ctx, word(ctx, w.CTX_KEYS), layer, row, head, k, width)
            else:
                head -= kv_heads
                v = word(op, w.QKV_V) + 4 * (of_row + head * width)
                _store_head(ctx, word(ctx, w.CTX_VALUES), layer, row, head, v, width)


@numba.njit
def _gather_chunk(ctx, head, table, start, count, out, width):
    """Copy one head's keys or values of positions `start` to `start + count` - 1 into float32 `[count, width]`.

    `head` is the address of that head in block 0 of the layer. Goes block by block through the table; in a block the
    head's tokens lie side by side.
    """
    block_size, kind, row_bytes = word(ctx, w.CTX_BLOCK_SIZE), word(ctx, w.CTX_KV_KIND), word(ctx, w.CTX_ROW_BYTES)
    end = start + count
    while start < end:
        inside = start % block_size
        run = min(block_size - inside, end - start)
        block = np.int64(get_i32(table + 4 * (start // block_size)))
        source = head + block * word(ctx, w.CTX_BLOCK_BYTES) + inside * row_bytes
        if kind == w.KIND_F32:
            for element in range(0, run * width, 16):
                store_f32(out + 4 * element, load_f32(source + 4 * element))
        elif kind == w.KIND_F16:
            for element in range(0, run * width, 16):
                store_f32(out + 4 * element, load_f16(source + 2 * element))
        else:
            for element in range(0, run * width, 16):
                store_f32(out + 4 * element, load_bf16(source + 2 * element))
        start += run
        out += 4 * run * width


@numba.njit
def _fetch_chunk(ctx, head, table, start, count):
    """Ask for the keys or values that `_gather_chunk` will read with the same arguments.

    A block of a head is a page of its own, at whose end the processor stops fetching ahead by itself.
    """
    block_size, row_bytes = word(ctx, w.CTX_BLOCK_SIZE), word(ctx, w.CTX_ROW_BYTES)
    end = start + count
    while start < end:
        inside = start % block_size
        run = min(block_size - inside, end - start)
        block = np.int64(get_i32(table + 4 * (start // block_size)))
        source = head + block * word(ctx, w.CTX_BLOCK_BYTES) + inside * row_bytes
        for line in range(0, run * row_bytes, 64):
            prefetch(source + line)
        start += run


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
def _attend_block(op, ctx, sequence, kv_head, first_row, last_row, scratch):
    """Attention of rows `first_row` to `last_row` - 1 of one sequence, all query heads that read one key/value head.

    Keys come in chunks of 64 absolute positions. A chunk is reduced alone (its own maximum, sum and weighted values) and
    then merged into what came before it, in ascending order; so a row's result depends on its own keys only, whatever
    the batch, the prefill's chunks or the blocks of the cache. Each chunk is widened to float32 once for all rows here.
    """
    head_dim, kv_heads = word(op, w.ATT_HEAD_DIM), word(op, w.ATT_KV_HEADS)
    width = (head_dim + 15) // 16 * 16
    group = word(op, w.ATT_HEADS) // kv_heads
    scale = number(op, w.ATT_SCALE)
    queries = (last_row - first_row) * group
    chunk = scratch
    all_weights = chunk + 4 * CHUNK * width
    outs = all_weights + 4 * CHUNK * ROWS_PER_BLOCK * group
    states = outs + 4 * width * ROWS_PER_BLOCK * group
    for i in range(queries):
        put_f32(states + 16 * i, LOWEST)
        put_f32(states + 16 * i + 4, ZERO)
        for offset in range(0, 4 * width, VECTOR):
            store_f32(outs + 4 * i * width + offset, splat_f32(ZERO))
    layer = word(op, w.ATT_LAYER) * word(ctx, w.CTX_LAYER_BYTES) + kv_head * word(ctx, w.CTX_HEAD_BYTES)
    keys, values = word(ctx, w.CTX_KEYS) + layer, word(ctx, w.CTX_VALUES) + layer
    table = word(ctx, w.CTX_TABLES) + 4 * sequence * word(ctx, w.CTX_TABLE_STRIDE)
    positions, q_stride, head_bytes = word(ctx, w.CTX_POSITIONS), word(op, w.ATT_Q_STRIDE), 4 * head_dim
    end = np.int64(get_i32(positions + 4 * (last_row - 1))) + 1
    _fetch_chunk(ctx, keys, table, 0, min(CHUNK, end))
    for start in range(0, end, CHUNK):
        present = min(CHUNK, end - start)
        _fetch_chunk(ctx, values, table, start, present)
        _gather_chunk(ctx, keys, table, start, present, chunk, width)
        weights, state = all_weights, states
        for row in range(first_row, last_row):
            count = min(CHUNK, np.int64(get_i32(positions + 4 * row)) + 1 - start)
            query = word(op, w.ATT_Q) + 4 * row * q_stride + kv_head * group * head_bytes
            for _ in range(group):
                if count > 0:
                    _chunk_weights(query, chunk, width, count, scale, weights, state)
                query += head_bytes
                weights += 4 * CHUNK
                state += 16
        _fetch_chunk(ctx, keys, table, start + CHUNK, min(CHUNK, end - start - present))
        _gather_chunk(ctx, values, table, start, present, chunk, width)
        weights, state, out = all_weights, states, outs
        for row in range(first_row, last_row):
            count = min(CHUNK, np.int64(get_i32(positions + 4 * row)) + 1 - start)
            for _ in range(group):
                if count > 0:
                    _merge_chunk(state, weights, chunk, width, count, out)
                weights += 4 * CHUNK
                state += 16
                out += 4 * width
    for i in range(queries):
        inverse = ONE / get_f32(states + 16 * i + 4)
        out = word(op, w.ATT_OUT) + 4 * (first_row + i // group) * q_stride
        out += (kv_head * group + i % group) * head_bytes
        for element in range(head_dim):
            put_f32(out + 4 * element, get_f32(outs + 4 * (i * width + element)) * inverse)


@kernel
def attention(op, ctx, thread, threads):
    """softmax(q · Kᵀ · scale) · V over the blocks of each sequence. One item per key/value head of a block of rows."""
    scratch = word(ctx, w.CTX_SCRATCH) + thread * word(ctx, w.CTX_SCRATCH_BYTES)
    kv_heads, sequences, bounds = word(op, w.ATT_KV_HEADS), word(ctx, w.CTX_SEQUENCES), word(ctx, w.CTX_CU_SEQLENS)
    sequence, before = 0, 0  # items of the sequences before this one
    while True:
        item = take(op, 1)
        while sequence < sequences:
            first, last = np.int64(get_i32(bounds + 4 * sequence)), np.int64(get_i32(bounds + 4 * sequence + 4))
            blocks = (last - first + ROWS_PER_BLOCK - 1) // ROWS_PER_BLOCK
            if item < before + blocks * kv_heads:
                break
            before += blocks * kv_heads
            sequence += 1
        if sequence >= sequences:
            break
        # The last rows of a sequence see the most keys, so their blocks go first.
        block = blocks - 1 - (item - before) // kv_heads
        start = first + block * ROWS_PER_BLOCK
        _attend_block(op, ctx, sequence, (item - before) % kv_heads, start, min(last, start + ROWS_PER_BLOCK), scratch)


# Feed-forward


@numba.njit(inline="always")
def _silu(gate):
    """gate / (1 + exp(-gate)), lane by lane."""
    return gate / (splat_f32(ONE) + exp16(splat_f32(ZERO) - gate))


@kernel
def swiglu(op, ctx, thread, threads):
    """silu(gate) * up, quantized too where a quantized product follows. One item per 256 columns of a row."""
    stride = word(op, w.GLU_STRIDE)
    parts = (stride + 255) // 256
    while True:
        item = take(op, 1)
        if item >= word(ctx, w.CTX_ROWS) * parts:
            break
        row, first = item // parts, item % parts * 256
        for column in range(first, min(first + 256, stride), 32):
            at = 4 * (row * stride + column)
            for offset in (at, at + 64):
                silu = _silu(load_f32(word(op, w.GLU_GATE) + offset))
                store_f32(word(op, w.GLU_OUT) + offset, silu * load_f32(word(op, w.GLU_UP) + offset))
            if word(op, w.GLU_QUANTS) != 0:
                group = row * (stride // 32) + column // 32
                _quantize_32(
                    word(op, w.GLU_OUT) + at,
                    word(op, w.GLU_QUANTS) + 32 * group,
                    word(op, w.GLU_SCALES) + 4 * group,
                    word(op, w.GLU_SUMS) + 8 * group,
                )


GLU_SCRATCH_FLOATS = 8 * 2 * 32
"""What `gate_up_swiglu` needs of a thread's scratch: eight rows of 32 gates and 32 ups."""


@numba.njit
def _two_tiles(op, matrix, pair, first, count, out, ahead):
    """Rows `first` to `first + count` - 1 times 32 weight rows, float32 `[count, 64]` of which 32 columns are written.

    `matrix` is the first of the six words that describe it (`PAIR_TILES` and on).
    """
    tile_bytes, scale_bytes = word(op, matrix + w.PAIR_TILE_BYTES), word(op, matrix + w.PAIR_SCALE_BYTES)
    x_stride = word(op, w.FFN_X_STRIDE)
    for half in range(2):
        tile = 2 * pair + half
        weights = word(op, matrix + w.PAIR_WEIGHTS) + tile * tile_bytes
        call_tile(
            word(word(op, matrix + w.PAIR_TILES), count),
            weights,
            word(op, matrix + w.PAIR_SCALES) + tile * scale_bytes,
            word(op, matrix + w.PAIR_MINIMUMS) + tile * scale_bytes,
            word(op, w.FFN_X) + first * x_stride,
            word(op, w.FFN_X_SCALES) + first * (x_stride // 8),
            word(op, w.FFN_X_SUMS) + first * (x_stride // 4),
            out + 64 * half,
            word(op, w.FFN_GROUPS),
            x_stride,
            64,
            0,
            weights + 2 * tile_bytes if ahead else 0,
        )


@kernel
def gate_up_swiglu(op, ctx, thread, threads):
    """silu(x · gateᵀ) * (x · upᵀ), quantized on the spot. One item per 32 results, which share one scale.

    The two products never reach memory: eight rows at a time they wait in the thread's scratch. For a prefill of 512
    tokens that saves a third of a gigabyte of traffic.
    """
    rows, pairs, stride = word(ctx, w.CTX_ROWS), word(op, w.FFN_PAIRS), word(op, w.FFN_OUT_STRIDE)
    gates = word(ctx, w.CTX_SCRATCH) + thread * word(ctx, w.CTX_SCRATCH_BYTES)
    ups = gates + 128
    row_blocks, chunk = (rows + 7) // 8, word(op, w.FFN_CHUNK)
    while True:
        first = take(op, chunk)
        if first >= pairs:
            break
        last = min(first + chunk, pairs)
        for item in range(first * row_blocks, last * row_blocks):
            pair, row = item // row_blocks, 8 * (item % row_blocks)
            count = min(8, rows - row)
            ahead = row == 0 and pair + 1 < last
            _two_tiles(op, w.FFN_GATE, pair, row, count, gates, ahead)
            _two_tiles(op, w.FFN_UP, pair, row, count, ups, ahead)
            for index in range(count):
                gate, up = gates + 256 * index, ups + 256 * index
                store_f32(gate, _silu(load_f32(gate)) * load_f32(up))
                store_f32(gate + 64, _silu(load_f32(gate + 64)) * load_f32(up + 64))
                group = (row + index) * (stride // 32) + pair
                _quantize_32(
                    gate,
                    word(op, w.FFN_QUANTS) + 32 * group,
                    word(op, w.FFN_SCALES) + 4 * group,
                    word(op, w.FFN_SUMS) + 8 * group,
                )
