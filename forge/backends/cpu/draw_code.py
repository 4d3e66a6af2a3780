"""The kernel of a draw: Philox noise and Gumbel-max over a row of scores, as `forge.engine.rng` defines them.

Its words are Philox's own. Its logarithm is not NumPy's to the last bit, so it decides no close race: where two sums
are nearer to each other than two logarithms can differ, it returns -1 and NumPy decides. Both always choose the same
token. A logarithm is taken only for a word that is large enough to win; of 151,936 tokens that is a handful.

Ledger (AVX2): 4,096 tokens 242 → 25 µs, of which half is the call; 151,936 tokens 3.1 → 0.65 ms.
"""

from functools import partial

import numba
import numpy as np
from llvmlite import ir
from numba import types

from forge.backends.cpu.llvm_code import (
    F64,
    I32,
    I64,
    LANES,
    V_I32,
    call_intrinsic,
    constant,
    load,
    shuffle,
    splat,
    store,
)
from forge.backends.cpu.op_layout import DRAW_COUNTERS
from forge.backends.cpu.vectors import bits_float, emits, exp_f32, float_bits, get_f64, get_i64, get_u32

LEAD = 4.0
LUCKY_WORD = int(np.exp(-np.exp(-LEAD)) * 2**32) - 4096
"""Words below it give less noise than `LEAD`."""
TOO_NEAR = 1e-9
"""Two sums are too near if they differ by less than this share of the greater (at least of 1). The two logarithms
differ by a thousandth of that."""
_HALF_UNIT = 2.0**-32
_LN2 = 0.6931471805599453
_SQRT_HALF = 0x3FE6A09E667F3BCD
"""The bits of sqrt(1/2)."""
_MASK, _M0, _M1 = np.uint64(0xFFFFFFFF), np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_V_I64, _V_F64 = ir.VectorType(I64, LANES), ir.VectorType(F64, LANES)
_W0, _W1, _SHIFT = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85), np.uint64(32)


@numba.njit(inline="always")
def _philox(x0, x1, x2, x3, k0, k1):
    """Compute Philox4x32-10: four words of 32 bits, as uint64."""
    for _ in range(10):
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (p1 >> _SHIFT) ^ x1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return x0, x1, x2, x3


@numba.njit
def _log(x):
    """Compute log x of a positive x, to about 1e-15 of itself: 2 atanh((m - 1) / (m + 1)) + e log 2, m around 1."""
    bits = float_bits(x)
    exponent = (bits - _SQRT_HALF) >> 52
    m = bits_float(bits - (exponent << 52))
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = 1 / 21
    for odd in (19, 17, 15, 13, 11, 9, 7, 5, 3):
        series = series * t + 1 / odd
    return exponent * _LN2 + 2 * (s + s * t * series)


@numba.njit
def _noise(word):
    """Return the Gumbel noise of a Philox word."""
    return -_log(-_log((np.float64(word) + 0.5) * _HALF_UNIT))


@numba.njit
def _word(token, k0, k1, position, sample, purpose):
    """Return the Philox word of one token."""
    counter, lane = np.uint64(token // 4), token % 4
    x0, x1, x2, x3 = _philox(counter, position, sample, purpose, k0, k1)
    return x0 if lane == 0 else x1 if lane == 1 else x2 if lane == 2 else x3


@emits(types.void, types.int64, *[types.uint64] * 5, types.int64)
def _words_of_16(b, first, k0, k1, position, sample, purpose, out):
    """Compute `_philox` of the counters `first` to `first` + 15: uint32 `[16, 4]`, a word for each of 64 tokens."""

    vector = partial(constant, _V_I64)

    def masked(value: ir.Value) -> ir.Value:
        return b.and_(value, vector(int(_MASK)))

    x0 = masked(b.add(splat(b, first), ir.Constant(_V_I64, list(range(LANES)))))
    x1, x2, x3, k0, k1 = (masked(splat(b, value)) for value in (position, sample, purpose, k0, k1))
    for _ in range(10):
        p0, p1 = b.mul(x0, vector(int(_M0))), b.mul(x2, vector(int(_M1)))
        x0 = b.xor(b.xor(b.lshr(p1, vector(32)), x1), k0)
        x2 = b.xor(b.xor(b.lshr(p0, vector(32)), x3), k1)
        x1, x3 = masked(p1), masked(p0)
        k0, k1 = masked(b.add(k0, vector(int(_W0)))), masked(b.add(k1, vector(int(_W1))))
    words = [b.trunc(word, V_I32) for word in (x0, x1, x2, x3)]
    low, high = (shuffle(b, left, range(2 * LANES), right) for left, right in (words[:2], words[2:]))
    for part in range(4):  # four counters each: of a pair of vectors, lane `4 * part` of all four words first
        lanes = [LANES * word + 4 * part + number for number in range(4) for word in range(4)]
        store(b, b.add(out, I64(64 * part)), shuffle(b, low, lanes, high))


@emits(types.int64, types.int64, types.int64, types.int64, types.int64, types.float64)
def _num_hopeless(b, words, scores, least_word, lucky_word, close):
    """Count the tokens, of 16, before the first that can win: its word is no less than `least_word`, and either its
    word no less than `lucky_word` or its score no less than `close`. 16 if none can."""

    word, score = load(b, words, V_I32), load(b, scores, _V_F64)
    lucky = b.icmp_unsigned(">=", word, splat(b, b.trunc(lucky_word, I32)))
    able = b.or_(lucky, b.fcmp_ordered(">=", score, splat(b, close)))
    able = b.and_(able, b.icmp_unsigned(">=", word, splat(b, b.trunc(least_word, I32))))
    bits = b.or_(b.zext(b.bitcast(able, ir.IntType(LANES)), I64), I64(1 << LANES))
    return call_intrinsic(b, "llvm.cttz.i64", I64, bits, ir.Constant(ir.IntType(1), 1))


@numba.njit
def _least_word(lead):
    """Return the word below which noise is less than `lead`: u < 1 - exp(-lead) ≤ exp(-exp(-lead))."""
    share = 1.0 - 1.000001 * np.float64(exp_f32(np.float32(-lead)))
    return max(np.int64(share * 4294967296.0) - 2, 0)


def draw(token_ids, low, scores, count, leader, seed, position, sample, purpose, scratch):
    """Return the index of the greatest score + noise, or -1 if another sum is too near to it.

    token_ids: int64 `[count]`, ascending, the first of them `low`; 0 if they follow each other. scores: float64
    `[count]`. leader: the index of the greatest score. purpose: the last word of the counter. scratch:
    `DRAW_SCRATCH_BYTES`.
    """
    seed = np.uint64(seed)
    k0, k1 = seed & _MASK, seed >> _SHIFT
    position, sample, purpose = np.uint64(position), np.uint64(sample), np.uint64(purpose)
    top = get_f64(scores + 8 * leader)
    is_whole = token_ids == 0
    token = low + leader if is_whole else get_i64(token_ids + 8 * leader)
    best = top + _noise(_word(token, k0, k1, position, sample, purpose))
    second, winner = -np.inf, leader
    is_sparse = not is_whole and get_i64(token_ids + 8 * (count - 1)) - low >= 4 * count
    first, end, index, least_word = low // 4, low, 0, _least_word(best - top)
    while index < count:
        token = low + index if is_whole else get_i64(token_ids + 8 * index)
        score = get_f64(scores + 8 * index)
        if is_sparse:
            word = _word(token, k0, k1, position, sample, purpose)
        else:
            if token >= end:
                first = token // 4
                end = 4 * (first + DRAW_COUNTERS)
                for number in range(0, DRAW_COUNTERS, LANES):
                    _words_of_16(first + number, k0, k1, position, sample, purpose, scratch + 16 * number)
            place = scratch + 4 * (token - 4 * first)
            if is_whole and index + LANES <= count and token + LANES <= end:
                hopeless = _num_hopeless(place, scores + 8 * index, least_word, LUCKY_WORD, best - LEAD)
                index += hopeless
                if hopeless == LANES:
                    continue
                place, score = place + 4 * hopeless, get_f64(scores + 8 * index)
            word = np.uint64(get_u32(place))
        if (word >= LUCKY_WORD or score >= best - LEAD) and index != leader:
            total = score + _noise(word)
            if total > best:
                second, best, winner = best, total, index
                least_word = _least_word(best - top)
            elif total > second:
                second = total
        index += 1
    return winner if best - second > TOO_NEAR * max(1.0, abs(best)) else -1
