"""Every kernel by name, with the layout of its operation. Naming one loads neither Numba nor the module that it is
written in; compiling one does. `run` is the helper process of `compilation.compile_all`.
"""

import gc
import os
import sys

import numpy as np

from forge.backends.cpu import op_layout as layouts
from forge.backends.cpu import packing, thread_pool
from forge.backends.cpu.compilation import Kernel, MachineCode, tile_set


class OperationKernel(Kernel):
    """A kernel of an operation: `kernel(op, ctx, thread number, number of threads)`."""

    def __init__(self, module: str, name: str, layout: np.dtype):
        super().__init__(module, name, (layout, layouts.CONTEXT, "int64", "int64"))
        self.layout = layout


embed_quantized = OperationKernel("kernels", "embed_quantized", layouts.EMBED)
embed_float = OperationKernel("kernels", "embed_float", layouts.EMBED)
rms_norm = OperationKernel("kernels", "rms_norm", layouts.RMS_NORM)
quantize = OperationKernel("kernels", "quantize", layouts.QUANTIZE)
matmul_quantized = OperationKernel("kernels", "matmul_quantized", layouts.MATMUL)
matmul_f32 = OperationKernel("kernels", "matmul_f32", layouts.MATMUL)
matmul_f16 = OperationKernel("kernels", "matmul_f16", layouts.MATMUL)
matmul_bf16 = OperationKernel("kernels", "matmul_bf16", layouts.MATMUL)
swiglu = OperationKernel("kernels", "swiglu", layouts.SWIGLU)
gate_up_swiglu = OperationKernel("kernels", "gate_up_swiglu", layouts.GATE_UP_SWIGLU)
route = OperationKernel("moe", "route", layouts.ROUTE)
sort_by_expert = OperationKernel("moe", "sort_by_expert", layouts.SORT_BY_EXPERT)
gather = OperationKernel("moe", "gather", layouts.GATHER)
experts_quantized = OperationKernel("moe", "experts_quantized", layouts.EXPERTS)
experts_f32 = OperationKernel("moe", "experts_f32", layouts.EXPERTS)
experts_f16 = OperationKernel("moe", "experts_f16", layouts.EXPERTS)
experts_bf16 = OperationKernel("moe", "experts_bf16", layouts.EXPERTS)
combine = OperationKernel("moe", "combine", layouts.COMBINE)
norm_rope_store = OperationKernel("attention", "norm_rope_store", layouts.NORM_ROPE_STORE)
attention = OperationKernel("attention", "attention", layouts.ATTENTION)
draw = Kernel("draw_code", "draw", ("int64",) * 10, "int64")
"""Called from Python by `draw.py`, not from a program."""


def all_items() -> list[MachineCode]:
    """List everything that any model may need compiled."""
    tiles = [tile_set(layout) for layout in dict.fromkeys(packing.LAYOUT_OF_TYPE.values())]
    items = (*globals().values(), *thread_pool.POOL_KERNELS, *tiles)
    return [item for item in items if isinstance(item, MachineCode)]


def run() -> None:
    """Compile what standard input names, line by line, and answer each with a line."""
    gc.disable()
    items = {item.name: item for item in all_items()}
    for line in sys.stdin:
        items[line.strip()].compile()
        print(flush=True)
    os._exit(0)  # without freeing every object that Numba made
