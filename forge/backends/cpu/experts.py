"""The kernels of a mixture of experts: rows grouped by expert, so that an expert's weights are read once for all.

    choose   per row: its experts, in ascending order, and their weights
    group    the rows of each expert side by side: where each expert's rows start, and which row each of them is
    gather   copies of the rows in that order
    experts_* the product of each expert's rows with its own matrix
    combine  per row: the weighted sum of its experts' results, added in ascending order of the experts

A row's experts, its place's contents and the order of its sum follow from that row alone; where it lies among an
expert's rows cannot be seen in a tile's result. So a row has the same bits in any batch.
"""

import numba
import numpy as np

from forge.backends.cpu import words as w
from forge.backends.cpu.kernels import _float_tile, word
from forge.backends.cpu.team_code import take
from forge.backends.cpu.vectors import (
    call_tile,
    exp_f32,
    fma,
    get_f32,
    get_i32,
    load_bf16,
    load_f16,
    load_f32,
    put_f32,
    put_i32,
    splat_f32,
    store_f32,
)

ZERO = np.float32(0.0)
_QUARTERS = 4
"""Items that an expert's product is shared out in: of 128 experts few have rows in a decode, and all are looked at."""


@numba.njit
def _likeliest(logits, experts, below, after):
    """The expert with the greatest logit among those that come after (`below`, `after`) in order of falling logits, the
    lower number first of equals."""
    best, found = ZERO, -1
    for expert in range(experts):
        logit = get_f32(logits + 4 * expert)
        comes_later = logit < below or (logit == below and expert > after)
        if comes_later and (found < 0 or logit > best):
            best, found = logit, expert
    return found


def choose(op, ctx, thread, threads):
    """The experts of each row in ascending order, int32 `[T, used]`, and their weights. One item per row."""
    experts, used, stride = word(op, w.MOE_EXPERTS), word(op, w.MOE_USED), word(op, w.MOE_STRIDE)
    while True:
        row = take(op, 1)
        if row >= word(ctx, w.CTX_ROWS):
            break
        logits = word(op, w.MOE_IN) + 4 * row * word(op, w.MOE_IN_STRIDE)
        chosen, weights = word(op, w.MOE_CHOSEN) + 4 * row * stride, word(op, w.MOE_WEIGHTS) + 4 * row * stride
        below, after = np.float32(np.inf), -1
        largest = ZERO
        for place in range(used):
            expert = _likeliest(logits, experts, below, after)
            expert = max(expert, 0)  # logits that are no numbers: whatever comes of it is none either
            below, after = get_f32(logits + 4 * expert), expert
            if place == 0:
                largest = below
            at = place  # insertion into the ascending order
            while at > 0 and get_i32(chosen + 4 * (at - 1)) > expert:
                put_i32(chosen + 4 * at, get_i32(chosen + 4 * (at - 1)))
                at -= 1
            put_i32(chosen + 4 * at, np.int32(expert))
        total = ZERO
        if word(op, w.MOE_NORMALIZE) != 0:
            for place in range(used):
                total += exp_f32(get_f32(logits + 4 * np.int64(get_i32(chosen + 4 * place))) - largest)
        else:
            for expert in range(experts):
                total += exp_f32(get_f32(logits + 4 * expert) - largest)
        for place in range(used):
            share = exp_f32(get_f32(logits + 4 * np.int64(get_i32(chosen + 4 * place))) - largest)
            put_f32(weights + 4 * place, share / total)


def group(op, ctx, thread, threads):
    """Count each expert's rows and give each (row, place) its number in that order. One item.

    MOE_STARTS: int32 `[experts + 1]`; MOE_PLACES: int32 `[T, used]`; MOE_ROWS: int32 `[T * used, 1]`.
    """
    if take(op, 1) == 0:
        experts, used, stride = word(op, w.MOE_EXPERTS), word(op, w.MOE_USED), word(op, w.MOE_STRIDE)
        rows, starts, chosen = word(ctx, w.CTX_ROWS), word(op, w.MOE_STARTS), word(op, w.MOE_CHOSEN)
        for expert in range(experts + 1):
            put_i32(starts + 4 * expert, np.int32(0))
        for row in range(rows):
            for place in range(used):
                after = starts + 4 * (np.int64(get_i32(chosen + 4 * (row * stride + place))) + 1)
                put_i32(after, np.int32(get_i32(after) + 1))
        for expert in range(experts):
            at = starts + 4 * (expert + 1)
            put_i32(at, np.int32(get_i32(at) + get_i32(at - 4)))
        for row in range(rows - 1, -1, -1):  # from the last, so that each start ends as the number before its first row
            for place in range(used):
                end = starts + 4 * (np.int64(get_i32(chosen + 4 * (row * stride + place))) + 1)
                at = np.int64(get_i32(end)) - 1
                put_i32(end, np.int32(at))
                put_i32(word(op, w.MOE_PLACES) + 4 * (row * stride + place), np.int32(at))
                put_i32(word(op, w.MOE_ROWS) + 4 * at * word(op, w.MOE_ROWS_STRIDE), np.int32(row))
        # Every end has moved down to its expert's start: starts[expert + 1] says where `expert` begins.


@numba.njit
def _share(op, ctx, item):
    """The rows of an item's expert, and which quarter of its tiles is the item's: first and behind the last of both."""
    expert, quarter, tiles = item // _QUARTERS, item % _QUARTERS, word(op, w.MOE_TILES_EACH)
    starts = word(op, w.MOE_STARTS) + 4 * (expert + 1)  # where it begins: see the end of `group`
    is_last = expert + 1 == word(op, w.MOE_EXPERTS)
    end = word(ctx, w.CTX_EXPERT_ROWS) if is_last else np.int64(get_i32(starts + 4))
    return np.int64(get_i32(starts)), end, tiles * quarter // _QUARTERS, tiles * (quarter + 1) // _QUARTERS


@numba.njit
def _copy(source, target, count):
    for offset in range(0, count, 64):
        store_f32(target + offset, load_f32(source + offset))


def gather(op, ctx, thread, threads):
    """Copies of rows in the order of their experts: floats, or quants, scales and sums. One item per row."""
    stride = word(op, w.MOE_IN_STRIDE)
    while True:
        at = take(op, 1)
        if at >= word(ctx, w.CTX_EXPERT_ROWS):
            break
        row = np.int64(get_i32(word(op, w.MOE_ROWS) + 4 * at * word(op, w.MOE_ROWS_STRIDE)))
        if word(op, w.MOE_QUANTS) == 0:
            _copy(word(op, w.MOE_IN) + 4 * stride * row, word(op, w.MOE_OUT) + 4 * stride * at, 4 * stride)
            continue
        for part in range(3):  # quants, scales and sums: stride, stride / 4 and stride / 4 bytes
            size = stride if part == 0 else stride // 4
            source = word(op, w.MOE_QUANTS + part) + size * row
            target = word(op, w.MOE_OUT_QUANTS + part) + size * at
            for offset in range(0, size, 4):
                put_i32(target + offset, get_i32(source + offset))


def experts_quantized(op, ctx, thread, threads):
    """out = x · matrixᵀ, each expert's rows with its own quantized matrix. One item per quarter of an expert."""
    tiles, x_stride, out_stride = word(op, w.MOE_TILES_EACH), word(op, w.MM_X_STRIDE), word(op, w.MM_OUT_STRIDE)
    item = take(op, 1)
    while item < _QUARTERS * word(op, w.MOE_EXPERTS):
        begin, last, first_tile, last_tile = _share(op, ctx, item)
        for tile in range(first_tile, last_tile if begin < last else first_tile):
            weight = item // _QUARTERS * tiles + tile
            row = begin
            while row < last:
                count = min(8, last - row)
                call_tile(
                    word(word(op, w.MM_TILES), count),
                    word(op, w.MM_WEIGHTS) + weight * word(op, w.MM_TILE_BYTES),
                    word(op, w.MM_SCALES) + weight * word(op, w.MM_TILE_SCALE_BYTES),
                    word(op, w.MM_MINIMUMS) + weight * word(op, w.MM_TILE_SCALE_BYTES),
                    word(op, w.MM_X) + row * x_stride,
                    word(op, w.MM_X_SCALES) + row * (x_stride // 4),
                    word(op, w.MM_X_SUMS) + row * (x_stride // 4),
                    word(op, w.MM_OUT) + 4 * (row * out_stride + 16 * tile),
                    word(op, w.MM_GROUPS),
                    x_stride,
                    out_stride,
                    0,
                    0,
                    0,
                )
                row += count
        item = take(op, 1)


@numba.njit
def _experts_float(op, ctx, load, step):
    tiles, columns, out_stride = word(op, w.MOE_TILES_EACH), word(op, w.MM_X_STRIDE), word(op, w.MM_OUT_STRIDE)
    item = take(op, 1)
    while item < _QUARTERS * word(op, w.MOE_EXPERTS):
        begin, last, first_tile, last_tile = _share(op, ctx, item)
        for tile in range(first_tile, last_tile if begin < last else first_tile):
            weights = word(op, w.MM_WEIGHTS) + (item // _QUARTERS * tiles + tile) * word(op, w.MM_TILE_BYTES)
            for row in range(begin, last):
                result = _float_tile(load, weights, step, word(op, w.MM_X) + 4 * row * columns, columns)
                store_f32(word(op, w.MM_OUT) + 4 * (row * out_stride + 16 * tile), result)
        item = take(op, 1)


def experts_f32(op, ctx, thread, threads):
    """The same for float32 weights."""
    _experts_float(op, ctx, load_f32, 64)


def experts_f16(op, ctx, thread, threads):
    """The same for float16 weights."""
    _experts_float(op, ctx, load_f16, 32)


def experts_bf16(op, ctx, thread, threads):
    """The same for bfloat16 weights."""
    _experts_float(op, ctx, load_bf16, 32)


def combine(op, ctx, thread, threads):
    """x += the weighted sum of a row's results, experts in ascending order. One item per row."""
    used, stride, width = word(op, w.MOE_USED), word(op, w.MOE_STRIDE), word(op, w.MOE_IN_STRIDE)
    while True:
        row = take(op, 1)
        if row >= word(ctx, w.CTX_ROWS):
            break
        places, weights = word(op, w.MOE_PLACES) + 4 * row * stride, word(op, w.MOE_WEIGHTS) + 4 * row * stride
        for offset in range(0, 4 * width, 64):
            total = splat_f32(ZERO)
            for place in range(used):
                result = word(op, w.MOE_IN) + 4 * width * np.int64(get_i32(places + 4 * place))
                total = fma(splat_f32(get_f32(weights + 4 * place)), load_f32(result + offset), total)
            x = word(op, w.MOE_OUT) + 4 * row * width + offset
            store_f32(x, load_f32(x) + total)
