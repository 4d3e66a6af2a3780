"""What several kernels have in common."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels defined from here on run under Triton's interpreter, on the CPU: decided by TRITON_INTERPRET=1 at the
time of definition."""

DENSE = tl.constexpr(0)
Q8 = tl.constexpr(1)
Q4 = tl.constexpr(2)
Q4_K = tl.constexpr(3)
"""`forge.backends.cuda.weights` says what each holds."""


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all that was launched before has written its results. Then let the next kernel's programs start and
    read their first weights, once all programs of this kernel have come here: so only one kernel waits at a time."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def arrives_last(counter, count):
    """Return whether this is the last of `count` programs to come here, and if so reset the counter, which is 0 at
    first. What the others stored before is there then; to be read around the first-level cache, which may hold what
    stood there before."""
    tl.debug_barrier()  # every thread has stored before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def dot(a, b, accumulator, EXACT: tl.constexpr):
    """Return accumulator + a · b, computed on the tensor cores and accumulated in float32.

    EXACT multiplies float32: for float32 weights, and under the interpreter, whose bfloat16 products are garbage. Each
    product is three of the tensor cores' own, of the numbers' upper and lower halves, which leaves out less than one
    part in two million. (The multiplications themselves, `ieee`, spill kilobytes of registers in the larger tiles.)
    """
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="tf32x3")
    else:
        return tl.dot(a, b, accumulator)


@triton.jit
def weight_tile(values, scales, factors, features, first, in_features, KIND: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the weights of output `features` (int64 `[N]`) and columns `first` to `first + BLOCK_K`: `[N, BLOCK_K]`.

    In float32 if they are packed, in their own dtype if dense. Columns past the end are 0; features must exist.
    """
    if KIND == DENSE:
        column = first + tl.arange(0, BLOCK_K)
        return tl.load(
            values + features[:, None] * in_features + column[None, :], mask=(column < in_features)[None, :], other=0.0
        )
    else:
        groups = in_features // 32
        group = first // 32 + tl.arange(0, BLOCK_K // 32)
        inside = (group < groups)[None, :]
        at = features[:, None] * groups + group[None, :]
        if KIND == Q8:
            element = tl.arange(0, 32)
            quants = tl.load(values + at[:, :, None] * 32 + element[None, None, :], mask=inside[:, :, None], other=0)
            scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
            tile = quants.to(tl.float32) * scale[:, :, None]
        else:
            byte = tl.arange(0, 16)
            pairs = tl.load(values + at[:, :, None] * 16 + byte[None, None, :], mask=inside[:, :, None], other=0)
            # [N, groups, 16, 2] → [N, groups, 2, 16]: the low halves of a group are its first 16 columns
            quants = tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 1, 3, 2)).to(tl.float32)
            if KIND == Q4:
                scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
                tile = (quants - 8.0) * scale[:, :, None, None]
            else:
                scale, minimum = superblock_scales(scales, factors, features, group, groups)
                tile = quants * scale[:, :, None, None] - minimum[:, :, None, None]
        return tl.reshape(tile, (tile.shape[0], BLOCK_K))


@triton.jit
def superblock_scales(scales, factors, features, group, groups):
    """Load Q4_K's scale and minimum of each of `features` and `group`: two float32 `[N, G]`, 0 past the end."""
    inside = (group < groups)[None, :]
    at = (features[:, None] * groups + group[None, :]) * 2
    superblock = (features[:, None] * (groups // 8) + (group // 8)[None, :]) * 2
    scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    minimum = tl.load(scales + at + 1, mask=inside, other=0).to(tl.float32)
    d = tl.load(factors + superblock, mask=inside, other=0.0).to(tl.float32)
    dmin = tl.load(factors + superblock + 1, mask=inside, other=0.0).to(tl.float32)
    return scale * d, minimum * dmin


@triton.jit
def gated(pairs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return silu(gate) * up of `[ROWS, COLUMNS]` with gate in the even columns, up in the odd: `[ROWS, COLUMNS /
    2]`."""
    gate, up = tl.split(tl.reshape(pairs, (ROWS, COLUMNS // 2, 2)))
    return gate / (1.0 + tl.exp(-gate)) * up
