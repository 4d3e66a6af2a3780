"""How ggml's quantized tensor types lay out a block, and what the block's bytes mean as numbers.

`unpack` gives a tensor's small integers and float scales apart, which is what a kernel repacks; `dequantize` multiplies
them out to float32. Both follow the order of operations of the gguf package's `quants.dequantize`, and equal it in
every bit (a NaN, which only a damaged scale gives, may have the other sign).

Nothing here checks a file: `raw` is taken to hold exactly the tensor's bytes, which the reader has made sure of. Scales
that are infinite or not a number come out as such values and raise nothing.

The layouts are those of ggml's `ggml-common.h`. In the comments `d` and `m` are float16 and little-endian, and `x[a:b]`
are the elements that a byte range serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from forge.gguf.ggml_types import FLOAT_TYPES, QUANTIZED_TYPES, GGMLType, row_nbytes

ELEMENTS_PER_PASS = 1 << 18
"""Elements decoded at a time, so that a pass's working arrays stay in the second-level cache."""


@dataclass(frozen=True)
class QuantizedGroups:
    """A quantized matrix as integers, with one scale (and for some types one minimum) per `group_size` columns.

    value[r, c] = float32(scales[r, g] * quants[r, c]) where minimums is None, otherwise
    value[r, c] = float32(float32(scales[r, g] * quants[r, c]) - minimums[r, g]), with g = c // group_size: one rounding
    per operation, no fused multiply-add.

    quants   int8 [rows, columns]: Q8_0 -128..127, Q4_0 -8..7, Q5_0 -16..15, Q6_K -32..31, Q3_K -4..3, IQ4_NL and
             IQ4_XS -127..113, IQ3_S -15..15, IQ3_XXS -31..31 (signed, no minimum);
             Q4_1, Q4_K 0..15, Q5_1, Q5_K 0..31, Q2_K 0..3 (with a minimum)
    scales   float32 [rows, columns // group_size]
    minimums float32 [rows, columns // group_size] or None; what is *subtracted*, so Q4_1's stored m appears negated
    """

    quants: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    group_size: int


@dataclass(frozen=True)
class _Format:
    """A type's layout. `decode(blocks, quants)` fills `quants`, int8 [n, elements of a block], from `blocks`, uint8
    [n, bytes of a block]; `_decode` reads the scales as the other fields say.
    """

    group_size: int
    decode: Callable[[np.ndarray, np.ndarray], None]
    factor_at: int = 0
    """The byte of a block's float16 factor of scales."""
    minimum_at: int | None = None
    """The byte of its float16 factor of minimums, where it has any."""
    integers: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]] | None = None
    """Reads the small integers per group that the factors are multiplied by; None where there is one group."""
    times: float = 1.0
    """A factor of all scales, applied last."""


def unpack(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> QuantizedGroups:
    """Unpack the integers and scales of a quantized tensor. `raw` is uint8, the bytes of `shape`, whose last axis is
    the row.

    A shape of more or fewer than two axes is taken as rows of its last axis. ValueError for a type without blocks, and
    where `raw` is not the size that `shape` says.
    """
    if ggml_type not in QUANTIZED_TYPES:
        raise ValueError(f"{GGMLType(ggml_type).name} has no groups to unpack")
    blocks, rows, columns = _blocks(ggml_type, raw, shape)
    layout = _FORMATS[ggml_type]
    elements, groups = ggml_type.block.elements, columns // layout.group_size
    quants = np.empty((rows, columns), dtype=np.int8)
    scales = np.empty((rows, groups), dtype=np.float32)
    minimums = np.empty((rows, groups), dtype=np.float32) if layout.minimum_at is not None else None

    by_block = [array.reshape(len(blocks), -1) for array in (quants, scales, minimums) if array is not None]
    for span in _passes(len(blocks), elements):
        _decode(layout, blocks[span], *(array[span] for array in by_block))
    return QuantizedGroups(quants, scales, minimums, layout.group_size)


@dataclass(frozen=True)
class SuperblockScales:
    """The scales of a K type as stored: small integers per group, and float16 factors per 256 columns.

    scales[r, g] of `QuantizedGroups` is float32(scale_factors[r, c // 256] * scales[r, g]), of IQ3_XXS half of that;
    minimums likewise.

    scale_factors, minimum_factors  float16 [rows, columns // 256]
    scales                          int8 [rows, columns // group_size]
    minimums                        uint8 [rows, columns // group_size], 0..63
    The two about minimums are None where the type has none.
    """

    scale_factors: np.ndarray
    minimum_factors: np.ndarray | None
    scales: np.ndarray
    minimums: np.ndarray | None


def superblock_scales(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> SuperblockScales:
    """Return the scales of a tensor of a type of 256 elements a block. Raises ValueError for another type, or a `raw`
    of another size."""
    layout = _FORMATS.get(ggml_type)
    if layout is None or layout.integers is None:
        raise ValueError(f"{GGMLType(ggml_type).name} has no superblocks")
    blocks, rows, _ = _blocks(ggml_type, raw, shape)

    def factors(at: int) -> np.ndarray:
        return blocks[:, at : at + 2].copy().view("<f2").reshape(rows, -1)

    scales, minimums = layout.integers(blocks)
    return SuperblockScales(
        factors(layout.factor_at),
        None if layout.minimum_at is None else factors(layout.minimum_at),
        scales.view(np.int8).reshape(rows, -1),
        None if minimums is None else minimums.reshape(rows, -1),
    )


def dequantize(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert the tensor's values to a new float32 array of `shape`. `raw` is uint8, exactly the tensor's bytes.

    Beside the result this needs a few megabytes, however large the tensor. ValueError for a type that forge does not
    compute with, and where `raw` is not the size that `shape` says.
    """
    if ggml_type not in FLOAT_TYPES and ggml_type not in QUANTIZED_TYPES:
        raise ValueError(f"forge does not compute with tensors of type {GGMLType(ggml_type).name}")
    blocks, _, _ = _blocks(ggml_type, raw, shape)
    values = np.empty(shape, dtype=np.float32)
    if ggml_type in FLOAT_TYPES:
        _widen(ggml_type, blocks.reshape(-1), values.reshape(-1))
    else:
        _multiply_out(ggml_type, blocks, values.reshape(len(blocks), -1))
    return values


def _multiply_out(ggml_type: GGMLType, blocks: np.ndarray, values: np.ndarray) -> None:
    """Fill `values`, float32 [n, elements of a block], pass by pass."""
    elements = values.shape[1]
    for span in _passes(len(blocks), elements):
        part = unpack(ggml_type, blocks[span].reshape(-1), (span.stop - span.start, elements))
        grouped = values[span].reshape(*part.scales.shape, part.group_size)
        with np.errstate(all="ignore"):
            grouped[...] = part.quants.reshape(grouped.shape)
            grouped *= part.scales[:, :, None]
            if part.minimums is not None:
                grouped -= part.minimums[:, :, None]


def _decode(
    layout: _Format, blocks: np.ndarray, quants: np.ndarray, scales: np.ndarray, minimums: np.ndarray | None = None
) -> None:
    """Fill the last three from `blocks`, a row of each per block; scales and minimums are float32, one per group."""
    layout.decode(blocks, quants)
    by_group, minimums_by_group = layout.integers(blocks) if layout.integers else (np.int8(1), np.int8(-1))
    with np.errstate(all="ignore"):
        np.multiply(_float16(blocks, layout.factor_at), by_group, out=scales, dtype=np.float32)
        if layout.times != 1:
            scales *= np.float32(layout.times)
        if minimums is not None and layout.minimum_at is not None and minimums_by_group is not None:
            np.multiply(_float16(blocks, layout.minimum_at), minimums_by_group, out=minimums, dtype=np.float32)


def _widen(ggml_type: GGMLType, raw: np.ndarray, values: np.ndarray) -> None:
    if ggml_type == GGMLType.F32:
        values[...] = raw.view("<f4")
    elif ggml_type == GGMLType.F16:
        values[...] = raw.view("<f2")
    else:  # BF16: the upper half of a float32
        bits = values.view(np.uint32)
        bits[...] = raw.view("<u2")
        bits <<= 16


def _blocks(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, int, int]:
    """Reshape `raw` to uint8 [blocks, bytes of a block]; return it with the rows and columns of `shape`."""
    if not shape:
        raise ValueError("a tensor has at least one dimension")
    rows, columns = int(np.prod(shape[:-1], dtype=np.int64)), shape[-1]
    expected = rows * row_nbytes(ggml_type, columns)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise ValueError(f"{ggml_type!r} of shape {shape} takes {expected} bytes, not {raw.size} of {raw.dtype}")
    return raw.reshape(-1, ggml_type.block.nbytes), rows, columns


def _passes(num_blocks: int, elements: int) -> list[slice]:
    step = max(1, ELEMENTS_PER_PASS // elements)
    return [slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step)]


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Split `packed` into its low and high four bits: `low` and `high`, int8 views of the same shape."""
    np.bitwise_and(packed, 0x0F, out=low.view(np.uint8))
    np.right_shift(packed, 4, out=high.view(np.uint8))


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return bit 4 of each x[j], uint8 [n, 32], each 0 or 16: bit j of the little-endian word at byte `at`."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q8_0(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 34 bytes for 32 elements:  0:2 d | 2:34 x[0:32] as int8
    quants[...] = blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 18 bytes for 32 elements:  0:2 d | 2:18 low nibbles x[0:16], high nibbles x[16:32], each 8 too large
    _nibbles(blocks[:, 2:], quants[:, :16], quants[:, 16:])
    quants -= 8


def _q4_1(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 20 bytes for 32 elements:  0:2 d | 2:4 m | 4:20 low nibbles x[0:16], high nibbles x[16:32]; d * q + m
    _nibbles(blocks[:, 4:], quants[:, :16], quants[:, 16:])


def _q5_0(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 22 bytes for 32 elements:  0:2 d | 2:6 fifth bits | 6:22 nibbles as in Q4_0; 16 too large
    _nibbles(blocks[:, 6:], quants[:, :16], quants[:, 16:])
    quants |= _fifth_bits(blocks, 2).view(np.int8)
    quants -= 16


def _q5_1(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 24 bytes for 32 elements:  0:2 d | 2:4 m | 4:8 fifth bits | 8:24 nibbles as in Q4_0; d * q + m
    _nibbles(blocks[:, 8:], quants[:, :16], quants[:, 16:])
    quants |= _fifth_bits(blocks, 4).view(np.int8)


def _pairs_of_bits(packed: np.ndarray, quants: np.ndarray) -> None:
    """Unpack the 2-bit quants of Q2_K and Q3_K, 64 bytes a block, into uint8 [n, 256].

    Bits 2r and 2r + 1 of the bytes 32h : 32h+32 are x[128h + 32r : 128h + 32r + 32].
    """
    halves, runs = packed.reshape(-1, 2, 32), quants.reshape(-1, 2, 4, 32)
    for run in range(4):
        runs[:, :, run] = (halves >> (2 * run)) & 3


def _two_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack Q2_K's sixteen 4-bit scales and minima: two uint8 [n, 16]."""
    return blocks[:, :16] & 0x0F, blocks[:, :16] >> 4


def _three_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    """Q3_K's sixteen 6-bit scales: int8 [n, 16].

    bytes 96:104   low nibbles: bits 0 to 3 of scale[j], j = 0..7;  high nibbles: of scale[j + 8]
    bytes 104:108  bits 2k and 2k + 1 of byte j: bits 4 and 5 of scale[4k + j];  each 32 too large
    """
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.concatenate([low & 0x0F, low >> 4], axis=1)
    scales |= np.concatenate([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=1)
    return scales.view(np.int8) - np.int8(32), None


def _iq4_xs_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    """Unpack eight 6-bit scales: int8 [n, 8]. Bytes 4:8 low nibbles first, bytes 2:4 two upper bits each; 32 too
    large."""
    low = np.stack([blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    upper = np.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 8)
    return (low | upper << 4).view(np.int8) - np.int8(32), None


def _iq3_s_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    """Unpack eight odd scales 2s + 1 of 4-bit s, low nibbles first: uint8 [n, 8]."""
    nibbles = np.stack([blocks[:, 106:110] & 0x0F, blocks[:, 106:110] >> 4], axis=2).reshape(-1, 8)
    return 2 * nibbles + np.uint8(1), None


def _iq3_xxs_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    """Unpack eight odd scales 2s + 1, s in the upper four bits of each 32-bit word from byte 66 on: uint8 [n, 8]."""
    return 2 * (blocks[:, 69::4] >> 4) + np.uint8(1), None


def _six_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima from the twelve bytes 4:16: two uint8 [n, 8].

    bytes 0:4    low six bits: scale[j], j = 0..3;     high two bits: bits 4 and 5 of scale[j + 4]
    bytes 4:8    low six bits: minimum[j], j = 0..3;   high two bits: bits 4 and 5 of minimum[j + 4]
    bytes 8:12   low nibble: bits 0 to 3 of scale[j + 4];  high nibble: bits 0 to 3 of minimum[j + 4]
    """
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales, minimums


def _q2_k(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 84 bytes for 256 elements in 16 groups:  0:16 four-bit scales (low) and minima (high) | 16:80 two-bit quants |
    # 80:82 d | 82:84 dmin
    _pairs_of_bits(blocks[:, 16:80], quants.view(np.uint8))


def _q3_k(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 110 bytes for 256 elements in 16 groups:  0:32 third bits: bit b of byte j belongs to x[32b + j] | 32:96 two-bit
    # quants | 96:108 six-bit scales | 108:110 d;  4 too large
    _pairs_of_bits(blocks[:, 32:96], quants.view(np.uint8))
    runs = quants.view(np.uint8).reshape(-1, 8, 32)
    for run in range(8):
        runs[:, run] |= ((blocks[:, :32] >> run) & 1) << 2
    quants -= 4


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The numbers that the 4-bit quants of the IQ4 types stand for: closer together around zero."""


def _iq4_nl(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 18 bytes for 32 elements:  0:2 d | 2:18 nibbles as in Q4_0, each the index of a value
    _nibbles(blocks[:, 2:], quants[:, :16], quants[:, 16:])
    quants[...] = _IQ4_VALUES[quants]


def _iq4_xs(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 136 bytes for 256 elements in 8 groups:  0:2 d | 2:4 and 4:8 six-bit scales | 8:136 by group the nibbles of IQ4_NL
    groups = quants.reshape(-1, 8, 32)
    _nibbles(blocks[:, 8:].reshape(-1, 8, 16), groups[:, :, :16], groups[:, :, 16:])
    quants[...] = _IQ4_VALUES[quants]


@cache
def _grid(name: str) -> np.ndarray:
    """Return the table of an IQ3 type: int8 [entries, 4]. It is the gguf package's, imported for files of these types
    only."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    grid: np.ndarray = kind.grid.reshape(-1, 4).astype(np.int8)
    return grid


def _negate(quants: np.ndarray, signs: np.ndarray) -> None:
    """Negate x[j] where bit j of the block's `signs`, uint8 [n, 32], is set."""
    negative = np.unpackbits(signs, axis=1, bitorder="little").astype(bool)
    np.negative(quants, out=quants, where=negative)


def _iq3_s(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 110 bytes for 256 elements in 8 groups:  0:2 d | 2:66 for four elements the low bits of an index into the grid |
    # 66:74 their ninth bits | 74:106 signs | 106:110 four-bit scales
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    quants.reshape(-1, 64, 4)[...] = _grid("IQ3_S")[blocks[:, 2:66] | ninth << 8]
    _negate(quants, blocks[:, 74:106])


def _iq3_xxs(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 98 bytes for 256 elements in 8 groups:  0:2 d | 2:66 for four elements an index into the grid, whose values are
    # even and are halved here | 66:98 for each group 32 bits: four times the signs of eight elements, 7 bits and their
    # parity as the eighth, and a four-bit scale
    quants.reshape(-1, 64, 4)[...] = (_grid("IQ3_XXS") >> 1)[blocks[:, 2:66]]
    words = blocks[:, 66:98].copy().view("<u4")
    seven = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 0x7F).astype(np.uint8)
    parity = seven ^ seven >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    _negate(quants, (seven | parity << 7).reshape(-1, 32))


def _q4_k(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 144 bytes for 256 elements in 8 groups:  0:2 d | 2:4 dmin | 4:16 six-bit scales and minima | 16:144 four runs of
    # 32 bytes, run r: low nibbles x[64r : 64r+32], high nibbles x[64r+32 : 64r+64]
    runs = quants.reshape(-1, 4, 2, 32)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), runs[:, :, 0], runs[:, :, 1])


def _q5_k(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 176 bytes for 256 elements in 8 groups:  0:2 d | 2:4 dmin | 4:16 six-bit scales and minima | 16:48 fifth bits: bit
    # g of byte j belongs to x[32g + j] | 48:176 nibbles as in Q4_K
    runs = quants.reshape(-1, 4, 2, 32)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), runs[:, :, 0], runs[:, :, 1])
    groups = quants.view(np.uint8).reshape(-1, 8, 32)
    for group in range(8):
        groups[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4


def _q6_k(blocks: np.ndarray, quants: np.ndarray) -> None:
    # 210 bytes for 256 elements in 16 groups:  0:128 low four bits | 128:192 high two bits | 192:208 int8 scales, one
    # per group | 208:210 d.  Each half h of 128 elements is four runs of 32. The low nibbles of bytes 64h : 64h+64 are
    # the low bits of runs 0 and 1, the high nibbles those of runs 2 and 3; bits 2r and 2r+1 of the bytes
    # 128+32h : 160+32h are the high bits of run r. Together they are 32 too large.
    halves = quants.reshape(-1, 2, 2, 64)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), halves[:, :, 0], halves[:, :, 1])
    runs = quants.view(np.uint8).reshape(-1, 2, 4, 32)
    high_bits = blocks[:, 128:192].reshape(-1, 2, 32)
    for run in range(4):
        runs[:, :, run] |= ((high_bits >> (2 * run)) & 3) << 4
    quants -= 32


_FORMATS: dict[GGMLType, _Format] = {
    GGMLType.Q8_0: _Format(32, _q8_0),
    GGMLType.Q4_0: _Format(32, _q4_0),
    GGMLType.Q4_1: _Format(32, _q4_1, minimum_at=2),
    GGMLType.Q5_0: _Format(32, _q5_0),
    GGMLType.Q5_1: _Format(32, _q5_1, minimum_at=2),
    GGMLType.Q2_K: _Format(16, _q2_k, 80, 82, _two_bit_scales),
    GGMLType.Q3_K: _Format(16, _q3_k, 108, None, _three_bit_scales),
    GGMLType.Q4_K: _Format(32, _q4_k, 0, 2, _six_bit_scales),
    GGMLType.Q5_K: _Format(32, _q5_k, 0, 2, _six_bit_scales),
    GGMLType.Q6_K: _Format(16, _q6_k, 208, None, lambda blocks: (blocks[:, 192:208].view(np.int8), None)),
    GGMLType.IQ4_NL: _Format(32, _iq4_nl),
    GGMLType.IQ4_XS: _Format(32, _iq4_xs, 0, None, _iq4_xs_scales),
    GGMLType.IQ3_S: _Format(32, _iq3_s, 0, None, _iq3_s_scales),
    GGMLType.IQ3_XXS: _Format(32, _iq3_xxs, 0, None, _iq3_xxs_scales, times=0.5),
}
