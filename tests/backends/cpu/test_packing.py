"""What a packed matrix stands for is what the gguf package dequantizes, and its padding stands for nothing."""

from dataclasses import replace
from itertools import pairwise

import gguf
import numpy as np
import pytest

from forge.backends.cpu.llvm_code import LANES
from forge.backends.cpu.packing import Arena, FloatMatrix, QuantizedMatrix, pack
from forge.backends.cpu.tiles import SUPERBLOCK
from forge.gguf import GGMLType
from forge.gguf.ggml_types import FLOAT_TYPES, QUANTIZED_TYPES, SUPPORTED_TYPES
from tests.backends.cpu.models import FLOATS, QUANTIZED, random_bytes

ROWS = [1, 15, 16, 17, 40, 2048 + 5]


def gguf_dequantized(tensor_type: str, raw: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor_type]).reshape(shape).astype(np.float32)


def dequantized(matrix: QuantizedMatrix) -> np.ndarray:
    """Return the numbers that the packed form stands for: float32 `[rows, columns]`."""
    layout, (tiles, groups) = matrix.layout, matrix.quants.shape[:2]
    lines = matrix.quants
    if layout.bits in (4, 6):
        lines = np.concatenate([lines[:, :, :4] & 15, lines[:, :, :4] >> 4], axis=2)
    elif layout.bits in (2, 3):
        lines = np.concatenate([lines[:, :, :2] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    if layout.bits == 3:
        lines |= np.concatenate([matrix.quants[:, :, 2:] >> bit & 1 for bit in range(8)], axis=2) << 2
    if layout.bits == 6:
        upper = np.stack([matrix.quants[:, :, 4:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
        lines |= upper.reshape(lines.shape) << 4
    # [T, G, 8 lines, 16 rows, 4 inputs] → [T, 16 rows, G, 8 lines, 4 inputs]
    quants = lines.reshape(tiles, groups, 8, LANES, 4).transpose(0, 3, 1, 2, 4).astype(np.float32) - layout.bias
    quants = quants.reshape(tiles * LANES, -1, layout.group)
    scales, minimums = group_scales(matrix)
    values = quants * scales[:, :, None]
    if minimums is not None:
        values -= minimums[:, :, None]
    return values.reshape(tiles * LANES, -1)[: matrix.rows, : matrix.columns]


def group_scales(matrix: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray | None]:
    """Return scales and minimums by weight row: float32 `[T * 16, groups]`."""
    if matrix.layout.scale_kind == "f16":
        return by_row(matrix.scales), None if matrix.minimums is None else by_row(matrix.minimums)
    layout, tiles = matrix.layout, matrix.num_tiles
    factors = matrix.scales[:, :, : layout.factor_bytes].copy().view(np.float16).reshape(tiles, -1, 1, LANES)
    integers = matrix.scales[:, :, layout.factor_bytes :].copy().view(np.int8)
    integers = integers.reshape(tiles, -1, SUPERBLOCK // layout.group, layout.integer_bytes)
    kinds = 2 if layout.has_minimum else 1
    factors = factors.reshape(tiles, -1, kinds, LANES).astype(np.float32)
    factors *= np.float32(layout.unit)
    values = [
        by_row((factors[:, :, k, None] * integers[..., k * LANES : (k + 1) * LANES]).reshape(tiles, -1, LANES))
        for k in range(kinds)
    ]
    return values[0], values[1] if layout.has_minimum else None


def by_row(per_group: np.ndarray) -> np.ndarray:
    """Reorder `[T, groups, 16]` to float32 `[T * 16, groups]`."""
    return per_group.astype(np.float32).transpose(0, 2, 1).reshape(-1, per_group.shape[1])


def float_values(matrix: FloatMatrix) -> np.ndarray:
    """Everything a float matrix stands for, padding included: float32 `[rows padded, columns padded]`."""
    values = matrix.values
    if matrix.kind == "f16":
        values = values.view(np.float16)
    elif matrix.kind == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).transpose(0, 2, 1).reshape(-1, matrix.values.shape[1])


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype == np.float32
    assert got.shape == want.shape
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))


def test_there_is_a_layout_for_every_type_that_the_loader_knows():
    assert {GGMLType[name] for name in QUANTIZED} == set(QUANTIZED_TYPES)
    assert {GGMLType[name] for name in FLOATS} == set(FLOAT_TYPES)
    assert set(SUPPORTED_TYPES) == set(QUANTIZED_TYPES) | set(FLOAT_TYPES)


@pytest.mark.parametrize("tensor_type", QUANTIZED)
@pytest.mark.parametrize("rows", ROWS)
def test_a_packed_quantized_matrix_stands_for_what_gguf_dequantizes(tensor_type, rows):
    """Every byte at random, so every scale (infinite and not a number too), every minimum and every quant."""
    columns = 3 * max(32, GGMLType[tensor_type].block.elements) if rows < 2000 else 256
    raw = random_bytes(tensor_type, (rows, columns), np.random.default_rng(rows))
    want = gguf_dequantized(tensor_type, raw, (rows, columns))

    packed = pack(GGMLType[tensor_type], raw.reshape(-1), (rows, columns), Arena())

    assert isinstance(packed, QuantizedMatrix)
    with np.errstate(all="ignore"):
        assert_same_bits(dequantized(packed), want)


@pytest.mark.parametrize("tensor_type", QUANTIZED)
def test_rows_that_fill_a_tile_up_weigh_nothing(tensor_type):
    raw = random_bytes(tensor_type, (5, 256), np.random.default_rng(1))
    packed = pack(GGMLType[tensor_type], raw.reshape(-1), (5, 256), Arena())
    with np.errstate(all="ignore"):
        assert not dequantized(replace(packed, rows=16))[5:].any()


@pytest.mark.parametrize("tensor_type", FLOATS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_a_packed_float_matrix_holds_the_numbers_of_the_file_and_zeros(tensor_type, rows, columns):
    raw = random_bytes(tensor_type, (rows, columns), np.random.default_rng(columns))
    want = gguf_dequantized(tensor_type, raw, (rows, columns))

    packed = pack(GGMLType[tensor_type], raw.reshape(-1), (rows, columns), Arena())

    assert isinstance(packed, FloatMatrix)
    values = float_values(packed)
    assert_same_bits(np.ascontiguousarray(values[:rows, :columns]), want)
    assert not values[rows:].any()
    assert not values[:, columns:].any()


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_0", "F32"])
def test_packing_leaves_the_file_alone_and_keeps_nothing_of_it(tensor_type):
    """A file is mapped read-only, and its pages are given back after loading."""
    raw = random_bytes(tensor_type, (16, 64), np.random.default_rng(2)).reshape(-1)
    before = raw.copy()
    raw.flags.writeable = False

    packed = pack(GGMLType[tensor_type], raw, (16, 64), Arena())

    np.testing.assert_array_equal(raw, before)
    for array in [getattr(packed, name, None) for name in ("quants", "scales", "values")]:
        assert array is None or not np.shares_memory(array, raw)


def test_an_arena_gives_aligned_pieces_that_do_not_overlap():
    arena, rng = Arena(), np.random.default_rng(3)
    arrays = [arena.empty((int(rng.integers(1, 5000)),), np.uint8) for _ in range(200)]
    arrays.append(arena.empty((Arena.PIECE + 1,), np.uint8))
    arrays.append(arena.empty((7,), np.float32))

    spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays)

    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
