"""Every block format decodes to what the gguf package says, in every bit, from any bytes at all."""

import tracemalloc

import gguf
import numpy as np
import pytest

from forge.gguf import (
    QUANTIZED_TYPES,
    SUPPORTED_TYPES,
    GGMLType,
    block_formats,
    dequantize,
    row_nbytes,
    superblock_scales,
    unpack,
)
from forge.gguf.ggml_types import FLOAT_TYPES
from forge.gguf.writer import encode
from tests.small_models import MADE_DIRECTLY, random_weights

ALL = sorted(SUPPORTED_TYPES)
QUANTIZED = sorted(QUANTIZED_TYPES)
SUPERBLOCKS = [ggml_type for ggml_type in QUANTIZED if ggml_type.block.elements == 256]
# Where a block has its float16 scales, by byte.
SCALES_AT = {
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.IQ4_XS: (0,),
    GGMLType.IQ3_S: (0,),
    GGMLType.IQ3_XXS: (0,),
}
GROUPS_OF_16 = {GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q6_K}


def reference(ggml_type: GGMLType, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows = raw.reshape(*shape[:-1], row_nbytes(ggml_type, shape[-1]))
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(ggml_type)).reshape(shape)


def random_bytes(ggml_type: GGMLType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    nbytes = int(np.prod(shape[:-1])) * row_nbytes(ggml_type, shape[-1])
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal in every bit, the sign of a zero included; a NaN must be a NaN."""
    assert got.dtype == want.dtype == np.float32
    assert got.shape == want.shape
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda t: t.name)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_bytes_dequantize_as_in_the_gguf_package(ggml_type, seed):
    shape = (37, 768)
    raw = random_bytes(ggml_type, shape, seed)
    assert_same_bits(dequantize(ggml_type, raw, shape), reference(ggml_type, raw, shape))


@pytest.mark.parametrize("ggml_type", QUANTIZED, ids=lambda t: t.name)
@pytest.mark.parametrize(
    "scale",
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00],
    ids=lambda bits: f"{bits:04x}",
)
def test_extreme_scales_dequantize_as_in_the_gguf_package(ggml_type, scale):
    """Zeros of both signs, subnormals, the largest numbers, infinities, a NaN, one; in the first scale and in both."""
    shape = (8, 512)
    for places in (SCALES_AT[ggml_type][:1], SCALES_AT[ggml_type]):
        raw = random_bytes(ggml_type, shape, seed=scale)
        blocks = raw.reshape(-1, ggml_type.block.nbytes)
        for at in places:
            blocks[:, at : at + 2] = np.array([scale], dtype="<u2").view(np.uint8)
        assert_same_bits(dequantize(ggml_type, raw, shape), reference(ggml_type, raw, shape))


@pytest.mark.parametrize("ggml_type", [GGMLType.F16, GGMLType.BF16], ids=lambda t: t.name)
def test_every_sixteen_bit_float_widens_as_in_the_gguf_package(ggml_type):
    raw = np.arange(2**16, dtype="<u2").view(np.uint8)
    assert_same_bits(dequantize(ggml_type, raw, (2**16,)), reference(ggml_type, raw, (2**16,)))


@pytest.mark.parametrize("ggml_type", QUANTIZED, ids=lambda t: t.name)
def test_unpacked_integers_and_scales_multiply_out_to_the_dequantized_values(ggml_type):
    shape = (16, 1024)
    raw = random_weights(ggml_type, shape, 0.05, np.random.default_rng(3)).reshape(-1)
    groups = unpack(ggml_type, raw, shape)
    assert groups.quants.dtype == np.int8 and groups.quants.shape == shape
    assert groups.scales.dtype == np.float32 and groups.scales.shape == (16, 1024 // groups.group_size)
    assert groups.group_size == (16 if ggml_type in GROUPS_OF_16 else 32)

    scales = np.repeat(groups.scales, groups.group_size, axis=1)
    values = scales * groups.quants.astype(np.float32)
    if groups.minimums is not None:
        assert groups.minimums.dtype == np.float32 and groups.minimums.shape == groups.scales.shape
        values = values - np.repeat(groups.minimums, groups.group_size, axis=1)
    assert_same_bits(values, dequantize(ggml_type, raw, shape))


@pytest.mark.parametrize(
    ("ggml_type", "lowest", "highest"),
    [
        (GGMLType.Q8_0, -128, 127),
        (GGMLType.Q4_0, -8, 7),
        (GGMLType.Q4_1, 0, 15),
        (GGMLType.Q5_0, -16, 15),
        (GGMLType.Q5_1, 0, 31),
        (GGMLType.Q2_K, 0, 3),
        (GGMLType.Q3_K, -4, 3),
        (GGMLType.IQ4_NL, -127, 113),
        (GGMLType.IQ4_XS, -127, 113),
        (GGMLType.IQ3_S, -15, 15),
        (GGMLType.IQ3_XXS, -31, 31),
        (GGMLType.Q4_K, 0, 15),
        (GGMLType.Q5_K, 0, 31),
        (GGMLType.Q6_K, -32, 31),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_unpacked_integers_span_the_documented_range(ggml_type, lowest, highest):
    quants = unpack(ggml_type, random_bytes(ggml_type, (64, 256), seed=4), (64, 256)).quants
    assert (quants.min(), quants.max()) == (lowest, highest)


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda t: t.name)
def test_result_does_not_depend_on_the_size_of_a_pass(ggml_type, monkeypatch):
    shape = (7, 512)
    raw = random_bytes(ggml_type, shape, seed=5)
    whole = dequantize(ggml_type, raw, shape)
    whole_groups = unpack(ggml_type, raw, shape) if ggml_type in QUANTIZED_TYPES else None
    for elements in (1, 256, 1000):
        monkeypatch.setattr(block_formats, "ELEMENTS_PER_PASS", elements)
        assert_same_bits(dequantize(ggml_type, raw, shape), whole)
        if whole_groups is not None:
            groups = unpack(ggml_type, raw, shape)
            np.testing.assert_array_equal(groups.quants, whole_groups.quants)
            np.testing.assert_array_equal(groups.scales, whole_groups.scales)


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(512,), (1, 256), (2, 3, 256), (2, 1, 3, 256)])
def test_any_number_of_axes_keeps_its_shape(ggml_type, shape):
    raw = random_bytes(ggml_type, shape, seed=6)
    assert_same_bits(dequantize(ggml_type, raw, shape), reference(ggml_type, raw, shape))


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda t: t.name)
def test_read_only_bytes_at_any_address_are_accepted_and_left_alone(ggml_type):
    raw = random_bytes(ggml_type, (4, 256), seed=7)
    shifted = np.frombuffer(b"\0" + raw.tobytes(), dtype=np.uint8)[1:]
    values = dequantize(ggml_type, shifted, (4, 256))
    assert values.flags.writeable and values.flags.owndata
    assert_same_bits(values, reference(ggml_type, raw, (4, 256)))


@pytest.mark.parametrize("ggml_type", sorted(SUPPORTED_TYPES - MADE_DIRECTLY))
def test_quantizing_and_dequantizing_comes_back_near_the_values(ggml_type):
    values = np.random.default_rng(8).standard_normal((8, 256), dtype=np.float32)
    back = dequantize(ggml_type, encode(ggml_type, values).reshape(-1), (8, 256))
    allowed = 0.01 if ggml_type in FLOAT_TYPES | {GGMLType.Q8_0} else 0.15
    assert np.sqrt(np.mean((back - values) ** 2)) < allowed


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda t: t.name)
def test_random_weights_have_the_mean_and_deviation_that_were_asked_for(ggml_type):
    raw = random_weights(ggml_type, (64, 1024), 0.05, np.random.default_rng(9))
    values = dequantize(ggml_type, raw.reshape(-1), (64, 1024))
    assert abs(values.mean()) < 0.002
    assert 0.04 < values.std() < 0.06


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda t: t.name)
def test_dequantizing_needs_little_memory_beside_the_result(ggml_type):
    shape = (4096, 1024)
    raw = random_bytes(ggml_type, shape, seed=10)
    tracemalloc.start()
    try:
        values = dequantize(ggml_type, raw, shape)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes + (4 << 20)


def test_bytes_of_another_size_or_type_are_a_callers_error():
    raw = np.zeros(34 * 8, dtype=np.uint8)
    for bad_raw, shape in ((raw[:-1], (1, 256)), (raw, (2, 256)), (raw.view(np.int8), (1, 256)), (raw, ())):
        with pytest.raises(ValueError):
            dequantize(GGMLType.Q8_0, bad_raw, shape)
    with pytest.raises(ValueError, match="multiple"):
        dequantize(GGMLType.Q8_0, raw, (1, 250))
    with pytest.raises(ValueError, match="IQ2_S"):
        dequantize(GGMLType.IQ2_S, raw[:82], (1, 256))
    for ggml_type in (GGMLType.F32, GGMLType.BF16, GGMLType.IQ2_S):
        with pytest.raises(ValueError, match="no groups"):
            unpack(ggml_type, raw, (1, 256))


@pytest.mark.parametrize(
    "ggml_type", [t for t in sorted(QUANTIZED_TYPES) if t.block.elements == 256], ids=lambda t: t.name
)
def test_superblock_scales_multiply_out_to_the_unpacked_ones(ggml_type):
    shape = (8, 512)
    raw = random_weights(ggml_type, shape, 0.05, np.random.default_rng(3)).reshape(-1)
    groups, stored = unpack(ggml_type, raw, shape), superblock_scales(ggml_type, raw, shape)
    per_factor = 256 // groups.group_size
    unit = np.float32(0.5 if ggml_type == GGMLType.IQ3_XXS else 1)
    scales = np.repeat(stored.scale_factors.astype(np.float32), per_factor, axis=1) * stored.scales * unit
    assert_same_bits(scales, groups.scales)
    assert (groups.minimums is None) == (stored.minimums is None) == (stored.minimum_factors is None)
    if groups.minimums is not None:
        factors = np.repeat(stored.minimum_factors.astype(np.float32), per_factor, axis=1)
        assert_same_bits(factors * stored.minimums.astype(np.float32), groups.minimums)
