"""All that can be compiled, by name, and the helper process of `compilation.compile_all`, which compiles by names."""

import gc
import os
import sys

from forge.backends.cpu import kernel_table, packing, thread_pool
from forge.backends.cpu.compilation import MachineCode, tile_set


def all_items() -> list[MachineCode]:
    """Everything that any model may need compiled."""
    tiles = [tile_set(layout) for layout in dict.fromkeys(packing.LAYOUT_OF_TYPE.values())]
    items = (*vars(kernel_table).values(), *thread_pool.POOL_KERNELS, *tiles)
    return [item for item in items if isinstance(item, MachineCode)]


def run() -> None:
    """Compile what standard input names, line by line, and answer each with a line."""
    gc.disable()
    items = {item.name: item for item in all_items()}
    for line in sys.stdin:
        items[line.strip()].compile()
        print(flush=True)
    os._exit(0)  # without freeing every object that Numba made
