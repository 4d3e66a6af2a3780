"""What the kernels read, as NumPy structured types: an operation's arguments, the batch context, the thread pool.

Both sides use a field's name. In a kernel `op.num_tiles` is a load at a constant offset, because Numba knows these
types as records; Python writes through the ctypes structure that NumPy makes of the type (`structure`). A field is an
int64: a count, or an address, of float32 unless its comment names another type. Kernels write to no field but those of
an operation's first cache line.
"""

from functools import cache
from typing import Any

import numpy as np

LINE_BYTES = 64
"""Size of a cache line: what several threads write lies in lines of its own."""
OPERATION_BYTES = 5 * LINE_BYTES

Field = str | tuple[str, Any]
"""A name alone, which is an int64, or a name and its type."""


def fields(*names: Field) -> np.dtype:
    """Return a structured type of those fields, one after another."""
    return np.dtype([(name, np.int64) if isinstance(name, str) else name for name in names], align=True)


def _with_lines(itemsize: int, **lines: np.dtype) -> np.dtype:
    """Join the fields of several types, each of which begins at a cache line; the names are for the reader."""
    names: list[str] = []
    formats: list[np.dtype] = []
    offsets: list[int] = []
    start = 0
    for line in lines.values():
        assert line.fields is not None and line.names is not None
        names += line.names
        formats += [line.fields[name][0] for name in line.names]
        offsets += [start + line.fields[name][1] for name in line.names]
        start += -(-line.itemsize // LINE_BYTES) * LINE_BYTES
    size = max(itemsize, start)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}, align=True)


@cache
def structure(dtype: np.dtype) -> Any:
    """Return the ctypes structure with the same fields, which is faster to write from Python than an array's entry."""
    return np.ctypeslib.as_ctypes_type(dtype)


ROWS = fields(
    "count",  # where in the context their number stands, in bytes
    "values",
    "quants",  # int8; 0 for rows that are not quantized
    "scales",  # [rows, stride / 32, 2]: the scale, and minus the scale times the sum of the quants
    "sums",  # int32 [rows, stride / 16], of the quants
    "columns",  # elements of a row, a multiple of 32
    "stride",  # elements from a row to the next, see `program.Buffer`
)
"""Activations `[rows, columns]`, and their quantized form."""

MATRIX = fields(
    "tiles",  # int64 [MAX_ROWS + 2]: the machine code for each number of rows, for a pair of tiles, and by AMX
    "weights",  # as `packing.py` lays them out
    "scales",
    "minimums",
    "tile_bytes",  # of the weights of 16 rows
    "scale_bytes",  # of their scales
    "num_groups",  # of 32 columns
)
"""A packed weight matrix. Of a float matrix only `weights` and `tile_bytes` are set."""

# The batch context.

CACHE = fields(
    "keys",  # [blocks, layers, kv heads, block size, row_bytes]
    "values",
    "block_size",
    "layer_bytes",  # of one block in one layer
    "block_bytes",  # of one block in all layers
    "head_bytes",  # of one head of a block in a layer
    "row_bytes",  # of one token of that: its numbers, and the scale of int8
    "kind",  # index into KV_DTYPES
)
"""The KV storage."""

CONTEXT = fields(
    "num_rows",  # T
    "num_logit_rows",  # R
    "num_expert_rows",  # T times the experts of each row
    "num_sequences",  # S
    "token_ids",  # int32 [T]
    "positions",  # int32 [T]
    "cu_seqlens",  # int32 [S + 1]
    "slot_mapping",  # int32 [T]
    "block_tables",  # int32 [S, table_stride]
    "table_stride",
    "logit_rows",  # int32 [R]
    ("cache", CACHE),
    "rope_cos",  # [positions, head_dim / 2]
    "rope_sin",
    "scratch",  # uint8 [threads, scratch_bytes]: each thread's own memory
    "scratch_bytes",
)

FLOAT32, FLOAT16, BFLOAT16, INT8 = 0, 1, 2, 3
"""Kinds of stored numbers, in the order of KV_DTYPES. INT8 is for keys and values, each with a scale behind it."""

# Operations.

HEADER = fields(
    "kernel",  # address of its machine code
    "waits",  # 1 if all threads must wait after it
    "next_item",  # the next item of work that no thread has taken: threads take them in turn
    "stretches",  # int64 [threads, 8]: how many items of each thread's own stretch are taken, a cache line for each
)
"""The first cache line of every operation belongs to the thread pool."""


def operation(*names: Field) -> np.dtype:
    """Return the layout of an operation with those arguments."""
    dtype = _with_lines(OPERATION_BYTES, header=HEADER, arguments=fields(*names))
    assert dtype.itemsize == OPERATION_BYTES, "its arguments need more room"
    return dtype


OPERATION = operation()
"""The fields that all operations have."""

EMBED = operation(
    ("out", ROWS),
    "table",
    "columns",
    "kind",  # of a float table
    # of a quantized table:
    "bits",
    "bias",
    "group",  # columns that share a scale
    "scales",
    "minimums",  # of a K type: whether there are any, as they lie among the scales
    "superblock",  # bytes of a K type's scales for 256 columns; 0 for another type
    ("unit", np.float32),
)

RMS_NORM = operation(("x", ROWS), ("out", ROWS), "width", "weight", ("eps", np.float32), "logit_rows_only")

QUANTIZE = operation(("x", ROWS))

MATMUL = operation(("matrix", MATRIX), ("x", ROWS), ("out", ROWS), "num_tiles", "chunk", "adds")

GATE_UP_SWIGLU = operation(("gate", MATRIX), ("up", MATRIX), ("x", ROWS), ("out", ROWS), "num_groups", "chunk")

SWIGLU = operation(("gate", ROWS), ("up", ROWS), ("out", ROWS))

NORM_ROPE_STORE = operation(
    ("q", ROWS),
    ("k", ROWS),
    ("v", ROWS),
    "heads",
    "kv_heads",
    "head_dim",
    "q_norm",
    "k_norm",
    ("eps", np.float32),
    "layer",
)

ATTENTION = operation(("q", ROWS), ("out", ROWS), "heads", "kv_heads", "head_dim", "layer", ("scale", np.float32))

# Operations of a mixture of experts.

ROUTE = operation(
    ("logits", ROWS),
    ("experts", ROWS),  # int32 [T, num_used]: each row's, in ascending order
    ("shares", ROWS),  # [T, num_used]: how much each of them counts
    "num_experts",
    "num_used",
    "normalize",
)

SORT_BY_EXPERT = operation(
    ("experts", ROWS),
    ("places", ROWS),  # int32 [T, num_used]: where each (row, expert) lies among the sorted rows
    ("sources", ROWS),  # int32 [sorted rows, 1]: which row each of them is
    "starts",  # int32 [num_experts + 1]: starts[e + 1] is where expert e's rows begin
    "num_experts",
    "num_used",
)

GATHER = operation(("sources", ROWS), ("x", ROWS), ("out", ROWS), "copies_values")

EXPERTS = operation(("matrix", MATRIX), ("x", ROWS), ("out", ROWS), "num_experts", "tiles_each", "starts")

COMBINE = operation(("x", ROWS), ("shares", ROWS), ("places", ROWS), ("out", ROWS), "num_used")

# Sizes that the kernels and the code that lays out their memory agree on.

CHUNK = 64
"""Keys that attention reduces together: absolute positions 0 to 63, 64 to 127, …"""
ROWS_PER_BLOCK, QUERIES_PER_BLOCK = 16, 256
"""Rows of one sequence that share a pass over its keys, at least; and queries, at most, where there are more rows than
all threads need."""
ROWS_NEAR, NEAR_BYTES = 256, 512 << 10
"""Rows of a large batch that pass over weights together, at most; and bytes of their quants, which stay in the
second-level cache meanwhile."""
GLU_GROUPS = 2
"""Groups of 32 results that `gate_up_swiglu` computes together, at most."""
GLU_SCRATCH_FLOATS = ROWS_NEAR * 2 * 32 * GLU_GROUPS
"""Scratch of a thread for them: the gates and the ups of each of those rows."""
DRAW_COUNTERS = 256
"""Philox counters whose words a draw computes together."""
DRAW_SCRATCH_BYTES = 16 * DRAW_COUNTERS
"""Scratch for those words: four of 32 bits per counter."""

# The memory that a pool's threads share.

MAX_THREADS = 63
"""Sleeping threads are a mask of bits in one int64."""
INSIDE_SLOTS = 64

POOL = _with_lines(
    0,
    wake_up=fields("generation"),
    program=fields("program", "num_operations", "context", "num_threads", "sleepers"),
    closed=fields("closed"),
    done=fields("done"),
    inside=fields(("inside", (np.int64, INSIDE_SLOTS))),
    asleep=fields(("asleep", (np.int64, MAX_THREADS + 1))),
)
