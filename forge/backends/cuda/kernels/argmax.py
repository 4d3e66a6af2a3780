"""The argmax of each row of logits: what greedy sampling needs of a vocabulary of 150,000, found where the logits are.

One row on one multiprocessor would take longer than a layer. So PART columns are a program's, and whichever program of
a row is done last compares what all of them found: no second kernel, and no dependence on who was last.

A logit and its token are compared as one integer of 64 bits: the logit's bits, turned so that integers are ordered as
the numbers are (and a NaN above all), then the token's complement, so that the lowest token id of equals wins.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import let_next_start, wait_for_previous


@triton.jit
def ordered(logit, token):
    """Encode (logit, token) as an int64 that is greater for a greater logit and, of equals, for a lower token."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(logit != logit, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def argmax_rows(
    logits,  # float32 [R, vocabulary]
    part_maxima,  # int64 [R, PARTS]: what each program found
    samples,  # int32 [R or more, 2]: token, the bits of its logit
    counters,  # int32 [R], all 0
    vocabulary,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): columns part * PART … of a row. BLOCK_PARTS is at least PARTS."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocabulary
    token = part * PART + tl.arange(0, PART)
    # Past the end stands what never wins against a real token.
    logit = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
    best = tl.max(ordered(logit, token), axis=0)
    tl.store(part_maxima + row * PARTS + part, best)
    tl.debug_barrier()  # stored before it is said
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if arrived == PARTS - 1:
        tl.store(counters + row, 0)
        index = tl.arange(0, BLOCK_PARTS)
        # Around the first-level cache, which may hold what stood here before. Past the end: the first one again.
        maxima = tl.load(part_maxima + row * PARTS + tl.where(index < PARTS, index, 0), cache_modifier=".cg")
        winner = 0x7FFFFFFF - (tl.max(maxima, axis=0) & 0x7FFFFFFF).to(tl.int32)
        tl.store(samples + 2 * row, winner)
        tl.store(samples + 2 * row + 1, tl.load(logits + winner).to(tl.int32, bitcast=True))
