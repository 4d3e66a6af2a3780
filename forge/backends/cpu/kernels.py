"""The kernels: every operation of a forward pass on the CPU, each a function that all threads run together.

How to read one. `op` is the address of its operation and `ctx` that of the batch; `word(op, NAME)` is an argument,
named in `words.py`. Threads share the work by taking numbered items from the operation one after another (`take`): an
item is a row, a tile of 16 weight rows, or a head of a row. Nothing that a thread computes depends on which thread it
is or on which other items exist. That is the whole secret of getting the same bits from every batch.

Activations are float32 `[rows, stride]`, strides a multiple of 32 and padding zero. Before a quantized matrix product
they are also quantized to int8, 32 at a time (`_quantize_32`).
"""

import numba
import numpy as np

from forge.backends.cpu import words as w
from forge.backends.cpu.team_code import atomic_load, claim, take
from forge.backends.cpu.vectors import (
    absolute,
    call_tile,
    exp16,
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
    max16,
    maximum,
    put_f32,
    put_i32,
    round_to_int,
    splat_f32,
    store_f32,
    store_i8,
    sum16,
    sum_i32,
)

VECTOR = 64
"""Bytes of 16 float32."""
ONE, ZERO = np.float32(1.0), np.float32(0.0)
_PIECES = 8
"""In which a thread does its own stretch of a matrix, as far as a word has bits for all threads' pieces."""


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


@numba.njit
def _group_number(op, tile, lane, column, which):
    """The scale (`which` 0) or minimum (1) of a weight, as it lies in a packed matrix."""
    columns, group, scales = word(op, w.EMBED_COLUMNS), word(op, w.EMBED_GROUP), word(op, w.EMBED_SCALES)
    if word(op, w.EMBED_SUPERBLOCK) == 0:
        entry = (tile * (columns // group) + column // group) * 16 + lane
        return get_f16((word(op, w.EMBED_MINIMUMS) if which else scales) + 2 * entry)
    kinds = 2 if word(op, w.EMBED_MINIMUMS) != 0 else 1
    factors = scales + (tile * (columns // 256) + column // 256) * word(op, w.EMBED_SUPERBLOCK)
    integers = factors + 32 * kinds + column % 256 // group * 16 * kinds
    value = get_f16(factors + 32 * which + 2 * lane) * np.float32(np.int8(get_u8(integers + 16 * which + lane)))
    return value * number(op, w.EMBED_UNIT)


def embed_quantized(op, ctx, thread, threads):
    """Rows of a quantized table, multiplied out. One item per row; the bytes lie as `tiles.py` draws them."""
    columns, bits, bias = word(op, w.EMBED_COLUMNS), word(op, w.EMBED_BITS), word(op, w.EMBED_BIAS)
    while True:
        row = take(op, 1)
        if row >= word(ctx, w.CTX_ROWS):
            break
        token = np.int64(get_i32(word(ctx, w.CTX_TOKEN_IDS) + 4 * row))
        tile, lane = token // 16, token % 16
        out = word(op, w.EMBED_OUT) + 4 * row * word(op, w.EMBED_STRIDE)
        lines = word(op, w.EMBED_TABLE) + tile * columns * 2 * bits
        for column in range(columns):
            four, group = column % 32 // 4, lines + column // 32 * 64 * bits + 4 * lane + column % 4
            if bits == 8:
                quant = np.int64(get_u8(group + 64 * four))
            elif bits >= 4:
                quant = np.int64(get_u8(group + 64 * (four % 4))) >> four // 4 * 4 & 15
            else:
                quant = np.int64(get_u8(group + 64 * (four % 2))) >> four // 2 * 2 & 3
            if bits == 6:
                quant += (np.int64(get_u8(group + 64 * (4 + four // 4))) >> 2 * (four % 4) & 3) << 4
            if bits == 3:
                quant += (np.int64(get_u8(group + 128)) >> four & 1) << 2
            value = _group_number(op, tile, lane, column, 0) * np.float32(quant - bias)
            if word(op, w.EMBED_MINIMUMS) != 0:
                value -= _group_number(op, tile, lane, column, 1)
            put_f32(out + 4 * column, value)


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
    """32 floats to 32 int8, their scale and minus the scale times the sum of the quants, and two sums of 16.

    The largest magnitude becomes 127: scale = max|x| / 127, quant = round(x * 127 / max|x|), ties to even.
    """
    low, high = load_f32(x), load_f32(x + VECTOR)
    largest = max16(maximum(absolute(low), absolute(high)))
    inverse = np.float32(127.0) / largest if largest > np.float32(1e-30) else ZERO
    unit = largest / np.float32(127.0) if largest > np.float32(1e-30) else ZERO
    factor = splat_f32(inverse)
    low_quants, high_quants = round_to_int(low * factor), round_to_int(high * factor)
    store_i8(quants, low_quants)
    store_i8(quants + 16, high_quants)
    low_sum, high_sum = sum_i32(low_quants), sum_i32(high_quants)
    put_i32(sums, low_sum)
    put_i32(sums + 4, high_sum)
    put_f32(scale, unit)
    put_f32(scale + 4, -unit * np.float32(low_sum + high_sum))


@numba.njit
def _quantize_row(x, row, stride, quants, scales, sums):
    """A whole row of `stride` floats, 32 at a time, into row `row` of the three arrays."""
    for group in range(stride // 32):
        at = row * (stride // 32) + group
        _quantize_32(x + 128 * group, quants + 32 * at, scales + 8 * at, sums + 8 * at)


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


@numba.njit
def own_share(count, threads):
    """How many of an operation's `count` items are each thread's before it takes of the rest: three quarters, evenly.

    A thread's own items lie side by side. Threads that read turn by turn from one place get 50 GB/s out of a memory
    that gives 75 to threads that each read a stretch of their own.
    """
    return 3 * count // 4 // threads


@numba.njit
def next_items(op, thread, threads, chunk, count, piece):
    """The items that a thread does next, first and behind the last, and the next piece of its own to look at (0 at the
    beginning). The first is `count` or more if none are left.

    A thread does its own stretch in pieces, each claimed when its turn comes; then items that belong to no thread; then
    pieces of threads that have not come so far (the system may have given their core to another program).
    """
    share, pieces = own_share(count, threads), min(_PIECES, 63 // threads)
    while piece < pieces:
        first, last = thread * share + share * piece // pieces, thread * share + share * (piece + 1) // pieces
        piece += 1
        if first < last and claim(op, thread * pieces + piece - 1):
            return first, last, piece
    first = threads * share + take(op, chunk)
    if first < count:
        return first, min(first + chunk, count), piece
    claimed = atomic_load(op + 8 * w.CLAIM_WORD)
    for step in range(threads * pieces):
        which = (thread * pieces + step) % (threads * pieces)
        other, part = which // pieces, which % pieces
        first, last = other * share + share * part // pieces, other * share + share * (part + 1) // pieces
        if claimed >> which & 1 == 0 and first < last and claim(op, which):
            return first, last, piece
    return count, count, piece


def matmul_quantized(op, ctx, thread, threads):
    """out (+)= x · weightsᵀ for quantized weights. One item per tile of 16 weight rows.

    All rows of the batch pass over a tile while its weights are near: up to eight at a time, the rest in a tile made
    for exactly as many. The first two passes fetch the next tile ahead (`tiles.py`). A thread takes the next items
    before it has done the last of those it has, so that it knows which tile that is.
    """
    rows, num_tiles, chunk = word(ctx, word(op, w.ROWS_WORD)), word(op, w.MM_NUM_TILES), word(op, w.MM_CHUNK)
    x_stride, out_stride = word(op, w.MM_X_STRIDE), word(op, w.MM_OUT_STRIDE)
    tile_bytes, scale_bytes = word(op, w.MM_TILE_BYTES), word(op, w.MM_TILE_SCALE_BYTES)
    first, last, piece = next_items(op, thread, threads, chunk, num_tiles, 0)
    while first < num_tiles:
        upcoming, its_last, piece = next_items(op, thread, threads, chunk, num_tiles, piece)
        for tile in range(first, last):
            weights = word(op, w.MM_WEIGHTS) + tile * tile_bytes
            following = tile + 1 if tile + 1 < last else upcoming
            ahead = word(op, w.MM_WEIGHTS) + following * tile_bytes if following < num_tiles else 0
            row = 0
            while row < rows:
                count = min(8, rows - row)
                call_tile(
                    word(word(op, w.MM_TILES), count),
                    weights,
                    word(op, w.MM_SCALES) + tile * scale_bytes,
                    word(op, w.MM_MINIMUMS) + tile * scale_bytes,
                    word(op, w.MM_X) + row * x_stride,
                    word(op, w.MM_X_SCALES) + row * (x_stride // 4),
                    word(op, w.MM_X_SUMS) + row * (x_stride // 4),
                    word(op, w.MM_OUT) + 4 * (row * out_stride + 16 * tile),
                    word(op, w.MM_GROUPS),
                    x_stride,
                    out_stride,
                    word(op, w.MM_ADD),
                    ahead if row == 0 else 0,
                    ahead if row == 8 or rows <= 8 else 0,
                )
                row += count
        first, last = upcoming, its_last


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


def matmul_f32(op, ctx, thread, threads):
    """out (+)= x · weightsᵀ for float32 weights `[tiles, columns, 16]`. One item per tile."""
    _matmul_float(op, ctx, load_f32, 64)


def matmul_f16(op, ctx, thread, threads):
    """The same for float16 weights, widened as they are read."""
    _matmul_float(op, ctx, load_f16, 32)


def matmul_bf16(op, ctx, thread, threads):
    """The same for bfloat16 weights."""
    _matmul_float(op, ctx, load_bf16, 32)


# Feed-forward


@numba.njit(inline="always")
def _silu(gate):
    """gate / (1 + exp(-gate)), lane by lane."""
    return gate / (splat_f32(ONE) + exp16(splat_f32(ZERO) - gate))


def swiglu(op, ctx, thread, threads):
    """silu(gate) * up, quantized too where a quantized product follows. One item per 256 columns of a row."""
    stride = word(op, w.GLU_STRIDE)
    parts = (stride + 255) // 256
    while True:
        item = take(op, 1)
        if item >= word(ctx, word(op, w.ROWS_WORD)) * parts:
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
                    word(op, w.GLU_SCALES) + 8 * group,
                    word(op, w.GLU_SUMS) + 8 * group,
                )


@numba.njit
def _two_tiles(op, matrix, pair, first, count, out, ahead, rows):
    """Rows `first` to `first + count` - 1 times 32 weight rows, float32 `[count, 64]` of which 32 columns are written.

    `matrix` is the first of the six words that describe it (`PAIR_TILES` and on); `ahead` the pair to fetch meanwhile.
    """
    tile_bytes, scale_bytes = word(op, matrix + w.PAIR_TILE_BYTES), word(op, matrix + w.PAIR_SCALE_BYTES)
    x_stride = word(op, w.FFN_X_STRIDE)
    for half in range(2):
        tile = 2 * pair + half
        weights = word(op, matrix + w.PAIR_WEIGHTS) + tile * tile_bytes
        upcoming = weights + 2 * (ahead - pair) * tile_bytes if ahead < word(op, w.FFN_PAIRS) else 0
        call_tile(
            word(word(op, matrix + w.PAIR_TILES), count),
            weights,
            word(op, matrix + w.PAIR_SCALES) + tile * scale_bytes,
            word(op, matrix + w.PAIR_MINIMUMS) + tile * scale_bytes,
            word(op, w.FFN_X) + first * x_stride,
            word(op, w.FFN_X_SCALES) + first * (x_stride // 4),
            word(op, w.FFN_X_SUMS) + first * (x_stride // 4),
            out + 64 * half,
            word(op, w.FFN_GROUPS),
            x_stride,
            64,
            0,
            upcoming if first == 0 else 0,
            upcoming if first == 8 or rows <= 8 else 0,
        )


def gate_up_swiglu(op, ctx, thread, threads):
    """silu(x · gateᵀ) * (x · upᵀ), quantized on the spot. One item per 32 results, which share one scale.

    The two products never reach memory: eight rows at a time they wait in the thread's scratch. For a prefill of 512
    tokens that saves a third of a gigabyte of traffic.
    """
    rows, pairs, stride = word(ctx, w.CTX_ROWS), word(op, w.FFN_PAIRS), word(op, w.FFN_OUT_STRIDE)
    gates = word(ctx, w.CTX_SCRATCH) + thread * word(ctx, w.CTX_SCRATCH_BYTES)
    ups = gates + 128
    row_blocks, chunk = (rows + 7) // 8, word(op, w.FFN_CHUNK)
    first, last, piece = next_items(op, thread, threads, chunk, pairs, 0)
    while first < pairs:
        upcoming, its_last, piece = next_items(op, thread, threads, chunk, pairs, piece)
        for item in range(first * row_blocks, last * row_blocks):
            pair, row = item // row_blocks, 8 * (item % row_blocks)
            count = min(8, rows - row)
            ahead = pair + 1 if pair + 1 < last else upcoming
            _two_tiles(op, w.FFN_GATE, pair, row, count, gates, ahead, rows)
            _two_tiles(op, w.FFN_UP, pair, row, count, ups, ahead, rows)
            for index in range(count):
                gate, up = gates + 256 * index, ups + 256 * index
                store_f32(gate, _silu(load_f32(gate)) * load_f32(up))
                store_f32(gate + 64, _silu(load_f32(gate + 64)) * load_f32(up + 64))
                group = (row + index) * (stride // 32) + pair
                _quantize_32(
                    gate,
                    word(op, w.FFN_QUANTS) + 32 * group,
                    word(op, w.FFN_SCALES) + 8 * group,
                    word(op, w.FFN_SUMS) + 8 * group,
                )
        first, last = upcoming, its_last
