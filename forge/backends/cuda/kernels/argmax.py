"""The choice of a token for each row of logits, made where the logits are: their argmax, or the Gumbel-max draw.

One row of 150,000 on one multiprocessor would take longer than a layer. So PART columns are a program's, and whichever
program of a row is done last compares what all of them found: no second kernel, and no dependence on who was last.

A logit and its token are compared as one integer of 64 bits: the logit's bits, turned so that integers are ordered as
the numbers are (and a NaN above all), then the token's complement, so that the lowest token id of equals wins.

`gumbel_argmax` draws in one launch: noise by Philox, its argmax, the token for the next step. Row by row it computes
what `forge.engine.rng.gumbel_argmax` does, in float64 too:

    argmax over allowed tokens of (logit - maximum) / temperature + gumbel(seed, sample index, position, token id)

One Philox counter gives the noise of four tokens. By torch's own operations it would be 200 launches.
"""

import triton
import triton.language as tl

from forge.backends.cuda.kernels.parts import arrives_last, wait_for_previous


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
    """Find each row's argmax. Program (row, part): columns part * PART … of a row. BLOCK_PARTS is at least PARTS."""
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * vocabulary
    token = part * PART + tl.arange(0, PART)
    # Past the end stands what never wins against a real token.
    logit = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
    best = tl.max(ordered(logit, token), axis=0)
    tl.store(part_maxima + row * PARTS + part, best)
    if arrives_last(counters + row, PARTS):
        index = tl.arange(0, BLOCK_PARTS)
        # Past the end: the first one again.
        maxima = tl.load(part_maxima + row * PARTS + tl.where(index < PARTS, index, 0), cache_modifier=".cg")
        winner = 0x7FFFFFFF - (tl.max(maxima, axis=0) & 0x7FFFFFFF).to(tl.int32)
        tl.store(samples + 2 * row, winner)
        tl.store(samples + 2 * row + 1, tl.load(logits + winner).to(tl.int32, bitcast=True))


NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def gumbel_noise(seed, position, sample_index, first, COUNT: tl.constexpr):
    """Return the noise of COUNT tokens from `first` on, a multiple of 4: float64 `[COUNT]`."""
    counter = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    none = tl.zeros((COUNT // 4,), tl.uint32)
    a, b, c, d = tl.philox(seed, counter, none + position.to(tl.uint32), none + sample_index.to(tl.uint32), none)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (COUNT,))  # in the order of their tokens
    return -tl.log(-tl.log((words.to(tl.float64) + 0.5) * 0.00000000023283064365386962890625))  # 2^-32


@triton.jit
def gumbel_argmax(
    scored,  # float32 [R, vocabulary]: logits with penalties
    logits,  # float32 [R, vocabulary]: the model's
    allowed,  # uint8 [R, vocabulary], read if MASKED
    maxima,  # float32 [R, 2]: of `scored`, of `logits`
    words,  # int64 [R, 8]: `SamplingRows.words`
    sums,  # float64 [R, PARTS]: the largest sum that each program found
    tokens,  # int32 [R, PARTS]: and its token
    samples,  # int32 [R or more, 2]: token, the bits of its logit
    counters,  # int32 [R], all 0
    vocabulary,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw a token from each row. Program (row, part): columns part * PART … of a row. BLOCK_PARTS is at least PARTS.

    A temperature of 0 takes the argmax of `scored`. Where the maximum of `logits` is not finite, it is left in place of
    the token's logit.
    """
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words += row * 8
    seed = tl.load(words + 1)
    position, sample_index = tl.load(words + 2), tl.load(words + 3)
    temperature = tl.load(words + 4).to(tl.float64, bitcast=True)
    token = part * PART + tl.arange(0, PART)
    inside = token < vocabulary
    at = row * vocabulary + token
    score = tl.load(scored + at, mask=inside, other=float("-inf")).to(tl.float64)
    # In this order, so that a tiny temperature makes -infinity of all but the largest.
    score = (score - tl.load(maxima + 2 * row).to(tl.float64)) / tl.where(temperature == 0.0, 1.0, temperature)
    if MASKED:
        keep = tl.load(allowed + at, mask=inside, other=0) != 0
        score = tl.where(keep, score, float("-inf"))
    noise = gumbel_noise(seed, position, sample_index, part * PART, PART)
    score = tl.where(temperature == 0.0, score, score + noise)
    best = tl.max(score, axis=0)
    tl.store(sums + row * PARTS + part, best)
    tl.store(tokens + row * PARTS + part, tl.min(tl.where(score == best, token, NO_TOKEN), axis=0))
    if arrives_last(counters + row, PARTS):
        index = tl.arange(0, BLOCK_PARTS)
        # Past the end: the first one again.
        offset = row * PARTS + tl.where(index < PARTS, index, 0)
        best_sums = tl.load(sums + offset, cache_modifier=".cg")
        first = tl.load(tokens + offset, cache_modifier=".cg")
        winner = tl.min(tl.where(best_sums == tl.max(best_sums, axis=0), first, NO_TOKEN), axis=0)
        winner = tl.minimum(winner, vocabulary - 1)  # of a row that is not finite, any token
        maximum = tl.load(maxima + 2 * row + 1)
        chosen = tl.where(maximum - maximum == 0.0, tl.load(logits + row * vocabulary + winner), maximum)
        tl.store(samples + 2 * row, winner)
        tl.store(samples + 2 * row + 1, chosen.to(tl.int32, bitcast=True))
