"""The kernels of a mixture of experts: rows grouped by expert, so that an expert's weights are read once for all.

    route           per row: its top-k experts, in ascending order, and their shares
    sort_by_expert  the rows of each expert side by side: where each expert's rows start, and which row each of them is
    gather          copies of the rows in that order
    experts_*       the product of each expert's rows with its own matrix
    combine         per row: the weighted sum of its experts' results, added in ascending order of the experts

A row's experts, its place's contents and the order of its sum follow from that row alone; where it lies among an
expert's rows cannot be seen in a tile's result. So a row has the same bits in any batch.
"""

import numba
import numpy as np

from forge.backends.cpu.kernels import float_tile, multiply_rows, quants_of, rows_near, scales_of, sums_of, values_of
from forge.backends.cpu.thread_pool_code import next_item
from forge.backends.cpu.vectors import (
    exp_f32,
    fma,
    get_f32,
    get_i32,
    get_i64,
    load_bf16,
    load_f16,
    load_f32,
    put_f32,
    put_i32,
    put_i64,
    splat_f32,
    store_f32,
)

ZERO = np.float32(0.0)
_QUARTERS = 4
"""Items that an expert's product is shared out in: of 128 experts few have rows in a decode, and all are looked at."""


@numba.njit
def _argmax(logits, experts, below, after):
    """Return the expert with the largest logit among those that come after (`below`, `after`) in order of falling
    logits, the lower number first of equals."""
    best, best_expert = ZERO, -1
    for expert in range(experts):
        logit = get_f32(logits + 4 * expert)
        comes_later = logit < below or (logit == below and expert > after)
        if comes_later and (best_expert < 0 or logit > best):
            best, best_expert = logit, expert
    return best_expert


def route(op, ctx, thread, threads):
    """Choose each row's `num_used` experts with the largest logits, and their softmax. One item per row."""
    experts, used = op.num_experts, op.num_used
    while True:
        row = next_item(op, 1)
        if row >= ctx.num_rows:
            break
        logits, chosen, shares = values_of(op.logits, row), values_of(op.experts, row), values_of(op.shares, row)
        below, after = np.float32(np.inf), -1
        largest = ZERO
        for place in range(used):
            expert = _argmax(logits, experts, below, after)
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
        if op.normalize != 0:
            for place in range(used):
                total += exp_f32(get_f32(logits + 4 * np.int64(get_i32(chosen + 4 * place))) - largest)
        else:
            for expert in range(experts):
                total += exp_f32(get_f32(logits + 4 * expert) - largest)
        for place in range(used):
            share = exp_f32(get_f32(logits + 4 * np.int64(get_i32(chosen + 4 * place))) - largest)
            put_f32(shares + 4 * place, share / total)


def sort_by_expert(op, ctx, thread, threads):
    """Sort all (row, expert) by expert (counting sort): where an expert's rows start, and each pair's place. One
    item."""
    if next_item(op, 1) == 0:
        experts, used, rows, starts = op.num_experts, op.num_used, ctx.num_rows, op.starts
        for expert in range(experts + 1):
            put_i32(starts + 4 * expert, np.int32(0))
        for row in range(rows):
            for place in range(used):
                after = starts + 4 * (np.int64(get_i32(values_of(op.experts, row) + 4 * place)) + 1)
                put_i32(after, np.int32(get_i32(after) + 1))
        for expert in range(experts):
            at = starts + 4 * (expert + 1)
            put_i32(at, np.int32(get_i32(at) + get_i32(at - 4)))
        for row in range(rows - 1, -1, -1):  # from the last, so that each start ends as the number before its first row
            for place in range(used):
                end = starts + 4 * (np.int64(get_i32(values_of(op.experts, row) + 4 * place)) + 1)
                at = np.int64(get_i32(end)) - 1
                put_i32(end, np.int32(at))
                put_i32(values_of(op.places, row) + 4 * place, np.int32(at))
                put_i32(values_of(op.sources, at), np.int32(row))
        # Every end has moved down to its expert's start: starts[expert + 1] says where `expert` begins.


@numba.njit
def _share(op, ctx, item):
    """Return the rows of an item's expert and the item's quarter of its tiles: the first, and one past the last, of
    both."""
    expert, quarter, tiles = item // _QUARTERS, item % _QUARTERS, op.tiles_each
    starts = op.starts + 4 * (expert + 1)  # where it begins: see the end of `sort_by_expert`
    is_last = expert + 1 == op.num_experts
    end = ctx.num_expert_rows if is_last else np.int64(get_i32(starts + 4))
    return np.int64(get_i32(starts)), end, tiles * quarter // _QUARTERS, tiles * (quarter + 1) // _QUARTERS


@numba.njit
def _copy(source, target, count):
    """Copy `count` bytes, a multiple of 8."""
    for offset in range(0, count, 8):
        put_i64(target + offset, get_i64(source + offset))


def gather(op, ctx, thread, threads):
    """Copy rows in the order of their experts: floats, or quants, scales and sums. One item per row."""
    columns = op.x.columns
    while True:
        at = next_item(op, 1)
        if at >= ctx.num_expert_rows:
            break
        row = np.int64(get_i32(values_of(op.sources, at)))
        if op.copies_values != 0:
            _copy(values_of(op.x, row), values_of(op.out, at), 4 * columns)
        if op.out.quants != 0:
            _copy(quants_of(op.x, row), quants_of(op.out, at), columns)
            _copy(scales_of(op.x, row), scales_of(op.out, at), columns // 4)
            _copy(sums_of(op.x, row), sums_of(op.out, at), columns // 4)


def experts_quantized(op, ctx, thread, threads):
    """Compute out = x · matrixᵀ, each expert's rows with its own quantized matrix. One item per quarter expert."""
    near, item = rows_near(op.x.columns), next_item(op, 1)
    while item < _QUARTERS * op.num_experts:
        begin, last, first_tile, last_tile = _share(op, ctx, item)
        for first in range(begin, last, near):
            for tile in range(first_tile, last_tile):
                weights, out = item // _QUARTERS * op.tiles_each + tile, values_of(op.out, first) + 64 * tile
                multiply_rows(op.matrix, weights, 1, op.x, first, min(first + near, last), out, op.out.stride, 0, 0)
        item = next_item(op, 1)


@numba.njit
def _experts_float(op, ctx, load, step):
    columns = op.x.columns
    item = next_item(op, 1)
    while item < _QUARTERS * op.num_experts:
        begin, last, first_tile, last_tile = _share(op, ctx, item)
        for tile in range(first_tile, last_tile if begin < last else first_tile):
            weights = op.matrix.weights + (item // _QUARTERS * op.tiles_each + tile) * op.matrix.tile_bytes
            for row in range(begin, last):
                result = float_tile(load, weights, step, values_of(op.x, row), columns)
                store_f32(values_of(op.out, row) + 64 * tile, result)
        item = next_item(op, 1)


def experts_f32(op, ctx, thread, threads):
    """Compute out = x · matrixᵀ as `experts_quantized`, with float32 weights."""
    _experts_float(op, ctx, load_f32, 64)


def experts_f16(op, ctx, thread, threads):
    """Compute out = x · matrixᵀ as `experts_quantized`, with float16 weights."""
    _experts_float(op, ctx, load_f16, 32)


def experts_bf16(op, ctx, thread, threads):
    """Compute out = x · matrixᵀ as `experts_quantized`, with bfloat16 weights."""
    _experts_float(op, ctx, load_bf16, 32)


def combine(op, ctx, thread, threads):
    """Add the weighted sum of a row's results to x, experts in ascending order. One item per row."""
    used, width = op.num_used, op.out.columns
    while True:
        row = next_item(op, 1)
        if row >= ctx.num_rows:
            break
        places, shares = values_of(op.places, row), values_of(op.shares, row)
        for offset in range(0, 4 * width, 64):
            total = splat_f32(ZERO)
            for place in range(used):
                result = values_of(op.x, np.int64(get_i32(places + 4 * place)))
                total = fma(splat_f32(get_f32(shares + 4 * place)), load_f32(result + offset), total)
            x = values_of(op.out, row) + offset
            store_f32(x, load_f32(x) + total)
