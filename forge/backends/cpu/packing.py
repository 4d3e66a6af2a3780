"""Weights as the kernels want them: a matrix repacked once, when it is loaded, into tiles of 16 rows.

Every tensor type becomes one of a few layouts, exactly: what the packed form stands for is what the gguf package
dequantizes to, up to the one rounding of the multiplication.

    8-bit   Q8_0, Q5_0, IQ4_NL, IQ4_XS · Q5_1, Q5_K (with a minimum)
    6-bit   Q6_K (groups of 16), IQ3_S, IQ3_XXS
    4-bit   Q4_0 · Q4_1, Q4_K (with a minimum)
    3-bit   Q3_K (groups of 16)
    2-bit   Q2_K (groups of 16, with a minimum)
    float   F32, F16, BF16 as they are

The IQ types' quants stand for values of a table, which are what is packed: 8 bits for 4 and 6 for 3.

Scales stay what they are in the file: a float16 number per group or, for the K types, integers and factors.

Rows are padded to a multiple of 16 and columns to a multiple of 32, with zeros that contribute nothing. `tiles.py`
draws the order of bytes inside a tile.
"""

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np

from forge.backends.cpu.llvm_code import LANES
from forge.backends.cpu.tiles import GROUP, LINE, SUPERBLOCK, TileLayout
from forge.gguf import GGMLType, SuperblockScales, superblock_scales, unpack

Q8 = TileLayout(bits=8, bias=128, group=32, scale_kind="f16", has_minimum=False)
Q6K = TileLayout(bits=6, bias=32, group=16, scale_kind="k", has_minimum=False)
Q5M = TileLayout(bits=8, bias=0, group=32, scale_kind="f16", has_minimum=True)
Q4 = TileLayout(bits=4, bias=8, group=32, scale_kind="f16", has_minimum=False)

LAYOUT_OF_TYPE = {
    GGMLType.Q8_0: Q8,
    GGMLType.Q5_0: Q8,
    GGMLType.Q6_K: Q6K,
    GGMLType.Q5_1: Q5M,
    GGMLType.Q5_K: TileLayout(bits=8, bias=0, group=32, scale_kind="k", has_minimum=True),
    GGMLType.Q4_0: Q4,
    GGMLType.Q4_1: TileLayout(bits=4, bias=0, group=32, scale_kind="f16", has_minimum=True),
    GGMLType.Q4_K: TileLayout(bits=4, bias=0, group=32, scale_kind="k", has_minimum=True),
    GGMLType.Q3_K: TileLayout(bits=3, bias=4, group=16, scale_kind="k", has_minimum=False),
    GGMLType.Q2_K: TileLayout(bits=2, bias=0, group=16, scale_kind="k", has_minimum=True),
    GGMLType.IQ4_NL: Q8,
    GGMLType.IQ4_XS: TileLayout(bits=8, bias=128, group=32, scale_kind="k", has_minimum=False),
    GGMLType.IQ3_S: TileLayout(bits=6, bias=32, group=32, scale_kind="k", has_minimum=False),
    GGMLType.IQ3_XXS: TileLayout(bits=6, bias=32, group=32, scale_kind="k", has_minimum=False, unit=0.5),
}
"""The layout of each quantized type. The float types keep their own numbers (`FLOAT_KIND_OF_TYPE`)."""

FLOAT_KIND_OF_TYPE = {GGMLType.F32: "f32", GGMLType.F16: "f16", GGMLType.BF16: "bf16"}
_FLOAT_DTYPE: dict[str, np.dtype] = {"f32": np.dtype("<f4"), "f16": np.dtype("<u2"), "bf16": np.dtype("<u2")}

ROWS_PER_PASS = 2048
"""Rows repacked at a time, so that what is temporary stays small beside the model."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of 8- to 2-bit groups. T tiles of 16 rows, G groups of 32 columns, both padded."""

    rows: int
    columns: int
    layout: TileLayout
    quants: np.ndarray
    """uint8 `[T, G, bits, 64]`, 64-byte aligned: for each group its lines."""
    scales: np.ndarray
    """float16 `[T, G, 16]`; for a K type uint8 `[T, G / 8, superblock_bytes]`, minimums included (see `TileLayout`)."""
    minimums: np.ndarray | None
    """float16 `[T, G, 16]`, subtracted from every weight of the group; None where the type has none, or is a K type."""

    @property
    def num_tiles(self) -> int:
        return self.quants.shape[0]

    @property
    def num_groups(self) -> int:
        return self.quants.shape[1]

    @property
    def nbytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)


@dataclass(frozen=True)
class FloatMatrix:
    """A matrix of 32- or 16-bit floats: `[T, columns, 16]`, so that one input's 16 weights are one load."""

    rows: int
    columns: int
    kind: str
    """`f32`, `f16` or `bf16`."""
    values: np.ndarray
    """float32, or uint16 that holds the bits, `[T, columns padded, 16]`."""

    @property
    def num_tiles(self) -> int:
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


PackedMatrix = QuantizedMatrix | FloatMatrix


class Arena:
    """Cuts arrays from large pieces of memory.

    The operating system gives huge pages (2 MB) to large allocations only, and how fast weights stream from memory
    depends on them: with 4 KB pages a decode step reads at about half the speed. So arrays share pieces of 64 MB.
    """

    PIECE = 64 << 20

    def __init__(self):
        self._piece = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """Return an uninitialized array that starts on a cache line."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self._used + -(self._piece.ctypes.data + self._used) % LINE
        if start + size > len(self._piece):
            self._piece = huge_pages(max(size, self.PIECE) + LINE)
            start = -self._piece.ctypes.data % LINE
        self._used = start + size
        return self._piece[start : start + size].view(dtype).reshape(shape)


def huge_pages(size: int) -> np.ndarray:
    """Return `size` bytes of zeros that take up memory only as they are written, in huge pages where the system has
    them."""
    piece = mmap.mmap(-1, padded(size, 2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            piece.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(piece, np.uint8)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return an uninitialized array with memory of its own that starts on a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + LINE, np.uint8)
    start = -buffer.ctypes.data % LINE
    return buffer[start : start + size].view(dtype).reshape(shape)


def padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def pack(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, int], arena: Arena) -> PackedMatrix:
    """Repack a matrix `[rows, columns]` from its bytes in the file into memory of `arena`."""
    if ggml_type in FLOAT_KIND_OF_TYPE:
        return _pack_float(FLOAT_KIND_OF_TYPE[ggml_type], raw, shape, arena)
    return _pack_quantized(ggml_type, raw, shape, arena)


def encode_q8_0(values: np.ndarray) -> np.ndarray:
    """Quantize float32 `[rows, columns]` to the bytes of a Q8_0 tensor: the largest of 32 becomes ±127, its scale
    float16.

    ggml's own quantization (`quantize_row_q8_0_ref`): the quants follow from the scale before it is rounded.
    """
    blocks = np.empty((values.size // GROUP, 34), np.uint8)
    groups = values.reshape(-1, GROUP)
    for first in range(0, len(groups), ROWS_PER_PASS * 64):
        part = groups[first : first + ROWS_PER_PASS * 64]
        scales = np.abs(part).max(axis=1) / np.float32(127)
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        scaled = part * inverse[:, None]
        quants = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))  # ties away from zero
        span = slice(first, first + len(part))
        blocks[span, :2] = scales.astype(np.float16)[:, None].view(np.uint8)
        blocks[span, 2:] = quants.astype(np.int8).view(np.uint8)
    return blocks.reshape(-1)


def _pack_float(kind: str, raw: np.ndarray, shape: tuple[int, int], arena: Arena) -> FloatMatrix:
    rows, columns = shape
    dtype = _FLOAT_DTYPE[kind]
    source = raw.view(dtype).reshape(shape)
    values = arena.empty((padded(rows, LANES) // LANES, padded(columns, GROUP), LANES), dtype)
    if rows % LANES or columns % GROUP:
        values[...] = 0
    for first in range(0, rows, ROWS_PER_PASS):
        tiles = _tiled(source[first : first + ROWS_PER_PASS])
        values[first // LANES :][: len(tiles), :columns] = tiles
    return FloatMatrix(rows, columns, kind, values)


def _pack_quantized(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, int], arena: Arena) -> QuantizedMatrix:
    rows, columns = shape
    layout = LAYOUT_OF_TYPE[ggml_type]
    tiles, groups = padded(rows, LANES) // LANES, columns // GROUP
    quants = arena.empty((tiles, groups, layout.bits, LINE), np.uint8)
    has_superblocks = layout.scale_kind == "k"
    if has_superblocks:
        scales = arena.empty((tiles, columns // SUPERBLOCK, layout.superblock_bytes), np.uint8)
    else:
        scales = arena.empty((tiles, groups, LANES), np.float16)
    minimums = arena.empty(scales.shape, np.float16) if layout.has_minimum and not has_superblocks else None
    row_bytes = len(raw) // rows
    for first in range(0, rows, ROWS_PER_PASS):
        count = min(ROWS_PER_PASS, rows - first)
        span = slice(first // LANES, first // LANES + padded(count, LANES) // LANES)
        part = raw[first * row_bytes : (first + count) * row_bytes]
        unsigned, part_scales, part_minimums = _unsigned_quants(ggml_type, part, (count, columns), layout)
        _interleave(unsigned, layout, quants[span])
        if has_superblocks:
            _place_superblocks(superblock_scales(ggml_type, part, (count, columns)), layout, scales[span])
            continue
        scales[span] = _tiled(part_scales)
        if minimums is not None:
            minimums[span] = _tiled(part_minimums)
    return QuantizedMatrix(rows, columns, layout, quants, scales, minimums)


def _unsigned_quants(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, int], layout: TileLayout):
    """Return quants with their bias added, uint8 `[rows padded, columns]`, and scales and minimums `[rows, groups]`."""
    rows = shape[0]
    if ggml_type == GGMLType.Q8_0:  # the common one, without a detour: a float16 scale and 32 int8 per block
        blocks = raw.reshape(rows, -1, 34)
        quants = np.ascontiguousarray(blocks[:, :, 2:]).reshape(shape)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
        minimums = None
    else:
        groups = unpack(ggml_type, raw, shape)
        quants, scales, minimums = groups.quants.view(np.uint8), groups.scales, groups.minimums
    if layout.bias == 128:
        quants ^= 0x80  # int8 w and uint8 w + 128 differ in the top bit
    elif layout.bias:
        quants += np.uint8(layout.bias)
    return quants, scales, minimums


def _place_superblocks(stored: SuperblockScales, layout: TileLayout, out: np.ndarray) -> None:
    """Write a K type's scales into `out`, uint8 `[tiles, superblocks, superblock_bytes]`: factors, then by group."""
    tiles, superblocks = out.shape[:2]
    factors = out[:, :, : layout.factor_bytes].reshape(tiles, superblocks, -1, LANES, 2)
    integers = out[:, :, layout.factor_bytes :].reshape(tiles, superblocks, SUPERBLOCK // layout.group, -1, LANES)
    pairs = [(stored.scale_factors, stored.scales), (stored.minimum_factors, stored.minimums)]
    for kind, (factor, integer) in enumerate(pairs[: 2 if layout.has_minimum else 1]):
        assert factor is not None and integer is not None
        factors[:, :, kind] = np.ascontiguousarray(_tiled(factor)).view(np.uint8).reshape(tiles, superblocks, LANES, 2)
        integers[:, :, :, kind] = _tiled(integer).reshape(tiles, superblocks, -1, LANES).view(np.uint8)


def _interleave(quants: np.ndarray, layout: TileLayout, lines: np.ndarray) -> None:
    """Write uint8 quants `[rows, columns]` into `lines`, uint8 `[tiles, groups, bits, 64]`."""
    rows, columns = quants.shape
    if rows % LANES:
        quants = np.concatenate([quants, np.full((-rows % LANES, columns), layout.bias, np.uint8)])
    # A 32-bit element is four consecutive inputs of one row; rows go inside, so that 16 of them make a line.
    fours = quants.view(np.uint32).reshape(-1, LANES, columns // GROUP, 8).transpose(0, 2, 3, 1)
    if layout.bits == 8:
        lines.view(np.uint32).reshape(fours.shape)[...] = fours
        return
    words = lines.view(np.uint32).reshape(*fours.shape[:2], layout.bits, LANES)
    if layout.bits in (2, 3):
        pairs = (fours & np.uint32(0x03030303)).reshape(*fours.shape[:2], 4, 2, LANES)
        words[:, :, :2] = pairs[:, :, 0] | pairs[:, :, 1] << 2 | pairs[:, :, 2] << 4 | pairs[:, :, 3] << 6
        if layout.bits == 3:
            high_bits = (fours >> 2 & np.uint32(0x01010101)) << np.arange(8, dtype=np.uint32)[:, None]
            np.bitwise_or.reduce(high_bits, axis=2, out=words[:, :, 2])
        return
    halves = words[:, :, :4]
    if layout.bits == 4:
        halves[...] = fours[:, :, 4:]
        halves <<= 4
        halves |= fours[:, :, :4]
        return
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    halves[...] = (fours[:, :, 4:] & low) << 4 | fours[:, :, :4] & low
    upper = words[:, :, 4:]
    by_line = (fours & high).reshape(*fours.shape[:2], 2, 4, LANES)
    upper[...] = by_line[:, :, :, 0] >> 4 | by_line[:, :, :, 1] >> 2 | by_line[:, :, :, 2] | by_line[:, :, :, 3] << 2


def _tiled(per_row: np.ndarray) -> np.ndarray:
    """Reorder `[rows, groups]` to `[tiles, groups, 16]`, with rows padded with zeros."""
    rows, groups = per_row.shape
    if rows % LANES:
        per_row = np.concatenate([per_row, np.zeros((-rows % LANES, groups), per_row.dtype)])
    return per_row.reshape(-1, LANES, groups).transpose(0, 2, 1)
