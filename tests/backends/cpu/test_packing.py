"""What a packed matrix stands for is what the gguf package dequantizes, and its padding stands for nothing."""

from dataclasses import replace
from itertools import pairwise

import gguf
import numpy as np
import pytest

from forge.backends.cpu.packing import Arena, FloatMatrix, QuantizedMatrix, pack
from forge.gguf import GGMLType
from forge.gguf.ggml_types import FLOAT_TYPES, QUANTIZED_TYPES, SUPPORTED_TYPES
from tests.backends.cpu.models import FLOATS, QUANTIZED, random_bytes

ROWS = [1, 15, 16, 17, 40, 2048 + 5]


def gguf_dequantized(tensor_type: str, raw: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor_type]).reshape(shape).astype(np.float32)


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
        assert_same_bits(packed.dequantize(), want)


@pytest.mark.parametrize("tensor_type", QUANTIZED)
def test_rows_that_fill_a_tile_up_weigh_nothing(tensor_type):
    raw = random_bytes(tensor_type, (5, 256), np.random.default_rng(1))
    packed = pack(GGMLType[tensor_type], raw.reshape(-1), (5, 256), Arena())
    with np.errstate(all="ignore"):
        assert not replace(packed, rows=16).dequantize()[5:].any()


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
