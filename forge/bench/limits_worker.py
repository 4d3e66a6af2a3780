"""What this machine can do at most: bytes per second from memory, multiplications per second.

Reading on the processor: every usable CPU sums its share of an array that is far larger than any cache and lies in huge
pages. Two ways of walking it (one stream per thread, or four), because machines differ in which they like; the faster
one counts.

Multiplying there: forge's own tile of eight rows, its pair of tiles for four, and its tiles by AMX, over weights and
activations that fit in the first-level cache. It is what multiplying integers gives in this form when memory costs
nothing, so it is the limit of forge's kernels and a close one of the processor's. Weights of 8 and of 4 bits are tried,
and the fastest counts: a processor without a dot-product instruction adds products of 4 bits in sums of 16 bits, with
fewer instructions.

On a GPU: copying an array far larger than any cache onto another, read and write counted; finding the largest number of
one, which only reads, as a decode step only reads its weights; and a large square product through cuBLAS in bfloat16.
The fastest of many passes counts, because a limit is what is possible.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numba
import numpy as np

from forge.backends.cpu.compilation import compile_all, tile_set
from forge.backends.cpu.packing import Q4, Q8, aligned_empty, huge_pages
from forge.backends.cpu.processor import usable_cpus
from forge.backends.cpu.tiles import AMX, AMX_ROWS, GROUP, LINE, MAX_ROWS, PAIR, PAIR_ROWS, TileLayout
from forge.backends.cpu.vectors import LANES, call_tile
from forge.backends.devices import why_not_cuda
from forge.bench.worker import Missing, Worker, timed

TILE_COLUMNS = 512
"""Inputs of the tile: 8 kB of weights (a pair 16) and 4 kB of activations, far less than any first-level data cache. By
AMX 32 and 16 kB, which the cache of such a processor just holds."""
_ROWS = {MAX_ROWS: MAX_ROWS, PAIR: PAIR_ROWS, AMX: 2 * AMX_ROWS}
"""Rows of each code that is tried."""
_TILES = {MAX_ROWS: 1, PAIR: 2, AMX: 4}
"""Tiles that it multiplies in a call. Ledger, AMX: 538 to 598 G products/s with 64 rows and one tile, 686 to 722 so."""
_SHORT = 2_000


@numba.njit(nogil=True)
def _sum_one_stream(values):
    total = 0
    for index in range(values.size):
        total += values[index]
    return total


@numba.njit(nogil=True)
def _sum_four_streams(values):
    quarter = values.size // 4
    # Views of their own, because an index such as `quarter + index` might be negative for all the compiler knows.
    first, second = values[:quarter], values[quarter : 2 * quarter]
    third, fourth = values[2 * quarter : 3 * quarter], values[3 * quarter : 4 * quarter]
    total = 0
    for index in range(quarter):
        total += (first[index] + second[index]) + (third[index] + fourth[index])
    return total


@numba.njit(nogil=True)
def _repeat_tile(times, tile, weights, scales, x, x_scales, x_sums, out, groups, x_stride, rows, tiles):
    for _ in range(times):
        out_stride = LANES * tiles
        call_tile(
            tile, weights, scales, 0, x, x_scales, x_sums, out, groups, x_stride, out_stride, 0, 0, 0, rows, tiles
        )


def measure_cpu(array_bytes: int, seconds: float) -> Mapping[str, Any]:
    """Measure this processor's limits, each as the median of passes over about `seconds`."""
    threads = usable_cpus()
    return {
        "bytes_per_second": read_bandwidth(array_bytes, seconds, threads),
        "products_per_second": product_rate(seconds, threads),
    }


def read_bandwidth(array_bytes: int, seconds: float, threads: int) -> float:
    """Return bytes per second that `threads` threads read together."""
    values = huge_pages(array_bytes).view(np.int64)
    shares = np.array_split(values, threads)
    _at_once([partial(share.fill, 1) for share in shares])  # untouched memory would not be read at all
    rates = []
    for walk in (_sum_one_stream, _sum_four_streams):
        walk(values[:64])  # compiled
        taken = _passes([partial(walk, share) for share in shares], seconds / 2)
        rates.append(values.nbytes / float(np.median(taken)))
    return max(rates)


def product_rate(seconds: float, threads: int) -> float:
    """Measure int8 multiplications (each with its addition) per second that `threads` threads do together."""
    layouts = (Q8, Q4)
    compile_all([tile_set(layout) for layout in layouts])
    tried = [(layout, code) for layout in layouts for code in _ROWS if tile_set(layout).addresses[code]]
    return max(_product_rate(layout, code, seconds / len(tried), threads) for layout, code in tried)


def _product_rate(layout: TileLayout, code: int, seconds: float, threads: int) -> float:
    work = [_tile(layout, code) for _ in range(threads)]
    work[0](1)
    times = _SHORT
    while timed(partial(work[0], times))[1] < seconds / 20:
        times *= 2
    taken = _passes([partial(repeat, times) for repeat in work], seconds)
    return threads * times * _ROWS[code] * _TILES[code] * LANES * TILE_COLUMNS / float(np.median(taken))


def _tile(layout: TileLayout, code: int) -> Callable[[int], None]:
    """Return a function that runs a tile of so many rows, a pair, or a tile by AMX, so many times, on operands that are
    one thread's own."""
    address, rows, tiles = int(tile_set(layout).addresses[code]), _ROWS[code], _TILES[code]
    groups = TILE_COLUMNS // GROUP
    rng = np.random.default_rng(1)

    def filled(shape, dtype, values):
        array = aligned_empty(shape, dtype)
        array[...] = values
        return array

    arrays = (
        filled((tiles, groups, layout.bits, LINE), np.uint8, rng.integers(1, 255, (tiles, groups, layout.bits, LINE))),
        filled((tiles, groups, LANES), np.float16, 0.01),
        filled((rows, TILE_COLUMNS), np.int8, rng.integers(-127, 127, (rows, TILE_COLUMNS))),
        filled((rows, groups, 2), np.float32, 0.01),
        filled((rows, groups * 2), np.int32, 0),
        filled((rows, tiles * LANES), np.float32, 0),
    )

    def repeat(times: int) -> None:
        arguments = [address, *(array.ctypes.data for array in arrays), groups, TILE_COLUMNS, rows, tiles]
        _repeat_tile(times, *arguments)

    return repeat


def _passes(work: list[Callable[[], object]], seconds: float) -> list[float]:
    """Return how long it takes to do all of `work` at once, again and again for about `seconds`, at least three
    times."""
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        taken.append(timed(lambda: _at_once(work))[1])
    return taken


def _at_once(work: list[Callable[[], object]]) -> None:
    """Run each in a thread of its own, the first in this one, and wait for all."""
    helpers = [threading.Thread(target=item) for item in work[1:]]
    for thread in helpers:
        thread.start()
    work[0]()
    for thread in helpers:
        thread.join()


def measure_gpu(array_bytes: int, seconds: float, side: int = 8192) -> Mapping[str, Any]:
    """Measure this GPU's limits, each as the fastest pass over about `seconds`."""
    torch = import_torch()
    source = torch.ones(array_bytes // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    words = source.view(torch.int64)
    return {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "copy_bytes_per_second": 2 * source.nbytes / fastest(torch, lambda: target.copy_(source), seconds),
        "read_bytes_per_second": source.nbytes / fastest(torch, lambda: words.max(), seconds),
        "products_per_second": side**3 / fastest(torch, lambda: torch.mm(left, right), seconds),
    }


def import_torch():
    """Return torch, if it sees a GPU. Raises `Missing`."""
    if reason := why_not_cuda():
        raise Missing(reason)
    import torch

    return torch


def fastest(torch, work: Callable[[], object], seconds: float) -> float:
    """Return the least seconds of one call of `work`, of passes over about `seconds`, by the device's own clock."""
    best, spent = float("inf"), 0.0
    work()
    while spent < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end) / 1e3
        best, spent = min(best, taken / 10), spent + taken
    return best


class LimitsWorker(Worker):
    """Measures this machine."""

    measure_cpu, measure_gpu = staticmethod(measure_cpu), staticmethod(measure_gpu)
