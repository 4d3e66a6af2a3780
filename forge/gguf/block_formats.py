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

import numpy as np

from forge.gguf.ggml_types import BLOCK_SIZES, FLOAT_TYPES, QUANTIZED_TYPES, GGMLType, row_nbytes

ELEMENTS_PER_PASS = 1 << 18
"""Elements decoded at a time, so that a pass's working arrays stay in the second-level cache."""


@dataclass(frozen=True)
class QuantizedGroups:
    """A quantized matrix as integers, with one scale (and for some types one minimum) per `group_size` columns.

    value[r, c] = float32(scales[r, g] * quants[r, c]) where minimums is None, otherwise
    value[r, c] = float32(float32(scales[r, g] * quants[r, c]) - minimums[r, g]), with g = c // group_size: one rounding
    per operation, no fused multiply-add.

    quants   int8 [rows, columns]: Q8_0 -128..127, Q4_0 -8..7, Q5_0 -16..15, Q6_K -32..31 (signed, no minimum);
             Q4_1, Q4_K 0..15, Q5_1, Q5_K 0..31 (with a minimum)
    scales   float32 [rows, columns // group_size]
    minimums float32 [rows, columns // group_size] or None; what is *subtracted*, so Q4_1's stored m appears negated
    """

    quants: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    group_size: int


@dataclass(frozen=True)
class _Format:
    """`decode(blocks, quants, scales, minimums)` fills the last three from `blocks`, uint8 [n, bytes of a block].

    quants is int8 [n, elements of a block]; scales and minimums are float32 [n, groups of a block].
    """

    group_size: int
    has_minimums: bool
    decode: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], None]


def group_size(ggml_type: GGMLType) -> int:
    """Columns that share one scale in `ggml_type`, which must be one of `QUANTIZED_TYPES`."""
    return _FORMATS[ggml_type].group_size


def has_minimums(ggml_type: GGMLType) -> bool:
    """Whether the values of `ggml_type`, one of `QUANTIZED_TYPES`, have a minimum subtracted."""
    return _FORMATS[ggml_type].has_minimums


def unpack(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> QuantizedGroups:
    """The integers and scales of a quantized tensor. `raw` is uint8, the bytes of `shape`, whose last axis is the row.

    A shape of more or fewer than two axes is taken as rows of its last axis. ValueError for a type without blocks, and
    where `raw` is not the size that `shape` says.
    """
    if ggml_type not in QUANTIZED_TYPES:
        raise ValueError(f"{GGMLType(ggml_type).name} has no groups to unpack")
    blocks, rows, columns = _blocks(ggml_type, raw, shape)
    layout = _FORMATS[ggml_type]
    elements, groups = BLOCK_SIZES[ggml_type].elements, columns // layout.group_size
    quants = np.empty((rows, columns), dtype=np.int8)
    scales = np.empty((rows, groups), dtype=np.float32)
    minimums = np.empty((rows, groups), dtype=np.float32) if layout.has_minimums else None

    quants_by_block = quants.reshape(-1, elements)
    scales_by_block = scales.reshape(len(blocks), -1)
    minimums_by_block = minimums.reshape(len(blocks), -1) if minimums is not None else None
    for span in _passes(len(blocks), elements):
        minimums_span = minimums_by_block[span] if minimums_by_block is not None else None
        with np.errstate(all="ignore"):
            layout.decode(blocks[span], quants_by_block[span], scales_by_block[span], minimums_span)
    return QuantizedGroups(quants, scales, minimums, layout.group_size)


@dataclass(frozen=True)
class SuperblockScales:
    """The scales of a K type as stored: small integers per group, and float16 factors per 256 columns.

    scales[r, g] of `QuantizedGroups` is float32(scale_factors[r, c // 256] * scales[r, g]); minimums likewise.

    scale_factors, minimum_factors  float16 [rows, columns // 256]
    scales                          int8 [rows, columns // group_size]
    minimums                        uint8 [rows, columns // group_size], 0..63
    The two about minimums are None for Q6_K.
    """

    scale_factors: np.ndarray
    minimum_factors: np.ndarray | None
    scales: np.ndarray
    minimums: np.ndarray | None


def superblock_scales(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> SuperblockScales:
    """The scales of a tensor of type Q4_K, Q5_K or Q6_K. ValueError for another type, or a `raw` of another size."""
    if ggml_type not in (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K):
        raise ValueError(f"{GGMLType(ggml_type).name} has no superblocks")
    blocks, rows, _ = _blocks(ggml_type, raw, shape)

    def factors(at: int) -> np.ndarray:
        return blocks[:, at : at + 2].copy().view("<f2").reshape(rows, -1)

    if ggml_type == GGMLType.Q6_K:
        return SuperblockScales(factors(208), None, blocks[:, 192:208].view(np.int8).reshape(rows, -1), None)
    scales, minimums = _six_bit_scales(blocks, 4)
    return SuperblockScales(factors(0), factors(2), scales.view(np.int8).reshape(rows, -1), minimums.reshape(rows, -1))


def dequantize(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor's values, a new float32 array of `shape`. `raw` is uint8, exactly the tensor's bytes.

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
        _multiply_out(_FORMATS[ggml_type], blocks, values.reshape(len(blocks), -1))
    return values


def _multiply_out(layout: _Format, blocks: np.ndarray, values: np.ndarray) -> None:
    """Fill `values`, float32 [n, elements of a block], pass by pass."""
    elements = values.shape[1]
    groups = elements // layout.group_size
    for span in _passes(len(blocks), elements):
        count = span.stop - span.start
        quants = np.empty((count, elements), dtype=np.int8)
        scales = np.empty((count, groups), dtype=np.float32)
        minimums = np.empty((count, groups), dtype=np.float32) if layout.has_minimums else None
        grouped = values[span].reshape(count, groups, layout.group_size)
        with np.errstate(all="ignore"):
            layout.decode(blocks[span], quants, scales, minimums)
            grouped[...] = quants.reshape(grouped.shape)
            grouped *= scales[:, :, None]
            if minimums is not None:
                grouped -= minimums[:, :, None]


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
    """`raw` as uint8 [blocks, bytes of a block], with the rows and columns of `shape`."""
    if not shape:
        raise ValueError("a tensor has at least one dimension")
    rows, columns = int(np.prod(shape[:-1], dtype=np.int64)), shape[-1]
    expected = rows * row_nbytes(ggml_type, columns)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise ValueError(f"{ggml_type!r} of shape {shape} takes {expected} bytes, not {raw.size} of {raw.dtype}")
    return raw.reshape(-1, BLOCK_SIZES[ggml_type].nbytes), rows, columns


def _passes(num_blocks: int, elements: int) -> list[slice]:
    step = max(1, ELEMENTS_PER_PASS // elements)
    return [slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step)]


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Low and high four bits of `packed` into `low` and `high`, int8 views of the same shape."""
    np.bitwise_and(packed, 0x0F, out=low.view(np.uint8))
    np.right_shift(packed, 4, out=high.view(np.uint8))


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Bit j of the little-endian word at byte `at` is bit 4 of x[j]: uint8 [n, 32], each 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q8_0(blocks, quants, scales, minimums):
    # 34 bytes for 32 elements:  0:2 d | 2:34 x[0:32] as int8
    scales[...] = _float16(blocks, 0)
    quants[...] = blocks[:, 2:].view(np.int8)


def _q4_0(blocks, quants, scales, minimums):
    # 18 bytes for 32 elements:  0:2 d | 2:18 low nibbles x[0:16], high nibbles x[16:32], each 8 too large
    scales[...] = _float16(blocks, 0)
    _nibbles(blocks[:, 2:], quants[:, :16], quants[:, 16:])
    quants -= 8


def _q4_1(blocks, quants, scales, minimums):
    # 20 bytes for 32 elements:  0:2 d | 2:4 m | 4:20 low nibbles x[0:16], high nibbles x[16:32]; d * q + m
    scales[...] = _float16(blocks, 0)
    minimums[...] = -_float16(blocks, 2)
    _nibbles(blocks[:, 4:], quants[:, :16], quants[:, 16:])


def _q5_0(blocks, quants, scales, minimums):
    # 22 bytes for 32 elements:  0:2 d | 2:6 fifth bits | 6:22 nibbles as in Q4_0; 16 too large
    scales[...] = _float16(blocks, 0)
    _nibbles(blocks[:, 6:], quants[:, :16], quants[:, 16:])
    quants |= _fifth_bits(blocks, 2).view(np.int8)
    quants -= 16


def _q5_1(blocks, quants, scales, minimums):
    # 24 bytes for 32 elements:  0:2 d | 2:4 m | 4:8 fifth bits | 8:24 nibbles as in Q4_0; d * q + m
    scales[...] = _float16(blocks, 0)
    minimums[...] = -_float16(blocks, 2)
    _nibbles(blocks[:, 8:], quants[:, :16], quants[:, 16:])
    quants |= _fifth_bits(blocks, 4).view(np.int8)


def _six_bit_scales(blocks: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima from the twelve bytes at `at`: two uint8 [n, 8].

    bytes 0:4    low six bits: scale[j], j = 0..3;     high two bits: bits 4 and 5 of scale[j + 4]
    bytes 4:8    low six bits: minimum[j], j = 0..3;   high two bits: bits 4 and 5 of minimum[j + 4]
    bytes 8:12   low nibble: bits 0 to 3 of scale[j + 4];  high nibble: bits 0 to 3 of minimum[j + 4]
    """
    first, second, third = (blocks[:, at + 4 * part : at + 4 * part + 4] for part in range(3))
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales, minimums


def _q4_k(blocks, quants, scales, minimums):
    # 144 bytes for 256 elements in 8 groups:  0:2 d | 2:4 dmin | 4:16 six-bit scales and minima | 16:144 four runs of
    # 32 bytes, run r: low nibbles x[64r : 64r+32], high nibbles x[64r+32 : 64r+64]
    six_bit_scales, six_bit_minimums = _six_bit_scales(blocks, 4)
    np.multiply(_float16(blocks, 0), six_bit_scales, out=scales, dtype=np.float32)
    np.multiply(_float16(blocks, 2), six_bit_minimums, out=minimums, dtype=np.float32)
    runs = quants.reshape(-1, 4, 2, 32)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), runs[:, :, 0], runs[:, :, 1])


def _q5_k(blocks, quants, scales, minimums):
    # 176 bytes for 256 elements in 8 groups:  0:2 d | 2:4 dmin | 4:16 six-bit scales and minima | 16:48 fifth bits: bit
    # g of byte j belongs to x[32g + j] | 48:176 nibbles as in Q4_K
    six_bit_scales, six_bit_minimums = _six_bit_scales(blocks, 4)
    np.multiply(_float16(blocks, 0), six_bit_scales, out=scales, dtype=np.float32)
    np.multiply(_float16(blocks, 2), six_bit_minimums, out=minimums, dtype=np.float32)
    runs = quants.reshape(-1, 4, 2, 32)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), runs[:, :, 0], runs[:, :, 1])
    groups = quants.view(np.uint8).reshape(-1, 8, 32)
    for group in range(8):
        groups[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4


def _q6_k(blocks, quants, scales, minimums):
    # 210 bytes for 256 elements in 16 groups:  0:128 low four bits | 128:192 high two bits | 192:208 int8 scales, one
    # per group | 208:210 d.  Each half h of 128 elements is four runs of 32. The low nibbles of bytes 64h : 64h+64 are
    # the low bits of runs 0 and 1, the high nibbles those of runs 2 and 3; bits 2r and 2r+1 of the bytes
    # 128+32h : 160+32h are the high bits of run r. Together they are 32 too large.
    np.multiply(_float16(blocks, 208), blocks[:, 192:208].view(np.int8), out=scales, dtype=np.float32)
    halves = quants.reshape(-1, 2, 2, 64)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), halves[:, :, 0], halves[:, :, 1])
    runs = quants.view(np.uint8).reshape(-1, 2, 4, 32)
    high_bits = blocks[:, 128:192].reshape(-1, 2, 32)
    for run in range(4):
        runs[:, :, run] |= ((high_bits >> (2 * run)) & 3) << 4
    quants -= 32


_FORMATS: dict[GGMLType, _Format] = {
    GGMLType.Q8_0: _Format(32, False, _q8_0),
    GGMLType.Q4_0: _Format(32, False, _q4_0),
    GGMLType.Q4_1: _Format(32, True, _q4_1),
    GGMLType.Q5_0: _Format(32, False, _q5_0),
    GGMLType.Q5_1: _Format(32, True, _q5_1),
    GGMLType.Q4_K: _Format(32, True, _q4_k),
    GGMLType.Q5_K: _Format(32, True, _q5_k),
    GGMLType.Q6_K: _Format(16, False, _q6_k),
}
