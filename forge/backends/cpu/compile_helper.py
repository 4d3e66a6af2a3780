"""The helper process of `compilation.compile_all`: another process that compiles kernels by their names."""

import gc
import os
import sys

from forge.backends.cpu import kernel_table, packing, thread_pool
from forge.backends.cpu.compilation import MachineCode, tile_set


def run() -> None:
    """Compile what standard input names, line by line, and answer each with a line."""
    gc.disable()
    tiles = [tile_set(layout) for layout in packing.LAYOUT_OF_TYPE.values()]
    known = {
        item.name: item
        for item in (*vars(kernel_table).values(), *thread_pool.POOL_KERNELS, *tiles)
        if isinstance(item, MachineCode)
    }
    for line in sys.stdin:
        known[line.strip()].compile()
        print(flush=True)
    os._exit(0)  # without freeing every object that Numba made
