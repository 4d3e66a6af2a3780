"""The arrays: blocks copied whole, read back through a table."""

import numpy as np
import pytest

from forge.cache.kv_storage import KV_DTYPES, BlockCopy, KvLayout, NumpyKvStorage, quantized, rounded


def filled() -> NumpyKvStorage:
    storage = NumpyKvStorage(KvLayout(num_layers=2, num_blocks=4, block_size=3, num_kv_heads=2, head_dim=2))
    storage.keys[:] = np.arange(storage.keys.size).reshape(storage.keys.shape)
    storage.values[:] = -storage.keys
    return storage


@pytest.mark.parametrize(("kv_dtype", "item"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_bytes_per_token_count_keys_and_values_of_every_layer(kv_dtype, item):
    assert KvLayout(3, 10, 16, 2, 8, kv_dtype).bytes_per_token == 2 * 3 * 2 * 8 * item


def test_gather_reads_positions_in_the_order_of_the_table():
    storage = filled()

    keys, values = storage.gather(1, (2, 0), 5)

    expected = np.concatenate([storage.keys[1, 2], storage.keys[1, 0]])[:5]
    assert np.array_equal(keys, expected)
    assert np.array_equal(values, -expected)


def test_gather_ignores_what_a_padded_table_has_beyond_the_length():
    storage = filled()

    keys, _ = storage.gather(0, np.array([3, -1, -1], np.int32), 3)

    assert np.array_equal(keys, storage.keys[0, 3])
    assert storage.gather(0, (3,), 0)[0].shape == (0, 2, 2)


def test_gather_is_a_float32_copy():
    storage = filled()
    before = storage.keys.copy()

    keys, _ = storage.gather(0, (0,), 3)
    keys[:] = 99

    assert keys.dtype == np.float32
    assert np.array_equal(storage.keys, before)


def test_copies_are_performed_in_order_in_every_layer():
    storage = filled()
    original = storage.keys.copy()

    storage.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2)])

    for block in (0, 1, 2):
        assert np.array_equal(storage.keys[:, block], original[:, 0])
    assert np.array_equal(storage.keys[:, 3], original[:, 3])
    assert np.array_equal(storage.values, -storage.keys)


def test_blocks_that_were_read_are_written_elsewhere():
    storage, original = filled(), filled()
    storage.write_blocks((0, 2), storage.read_blocks((2, 1)))

    for written, expected in ((storage.keys, original.keys), (storage.values, original.values)):
        assert np.array_equal(written, expected[:, [2, 1, 1, 3]])


def test_int8_takes_a_byte_a_number_and_a_scale_for_each_key_and_value():
    assert KvLayout(3, 10, 16, 2, 8, "int8").bytes_per_token == 2 * 3 * 2 * (8 + 4)


def test_int8_is_the_nearest_multiple_of_a_127th_of_the_largest_of_its_own_head():
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((40, 3, 64)) * 10.0 ** rng.integers(-9, 9, (40, 3, 1))).astype(np.float32)
    values[5, 1] = 0
    quants, scales = quantized(values)
    assert quants.dtype == np.int8 and scales.dtype == np.float32 and scales.shape == (40, 3)
    assert np.array_equal(np.abs(quants).max(axis=-1), np.where(scales > 0, 127, 0)) and scales[5, 1] == 0
    assert np.array_equal(rounded(values, "int8"), quants * scales[..., None])
    assert (np.abs(rounded(values, "int8") - values).max(axis=-1) <= 0.5001 * scales).all()


def test_int8_of_a_head_does_not_depend_on_what_is_stored_beside_it():
    values = np.random.default_rng(2).standard_normal((9, 3, 32)).astype(np.float32)
    beside = values * np.float32(100)
    beside[4, 1] = values[4, 1]
    assert np.array_equal(rounded(values, "int8")[4, 1], rounded(beside, "int8")[4, 1])
    assert np.array_equal(rounded(values, "int8")[4, 1], rounded(values[4, 1], "int8"))


def test_int8_of_nothing_is_nothing():
    assert rounded(np.zeros((0, 2, 8), np.float32), "int8").shape == (0, 2, 8)


@pytest.mark.parametrize("kv_dtype", [dtype for dtype in KV_DTYPES if dtype != "int8"])
def test_values_are_rounded_to_the_nearest_ties_to_even(kv_dtype):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch: pip install torch")
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(20_000) * 10.0 ** rng.integers(-9, 5, 20_000)).astype(np.float32)
    ties = np.float32(1) + np.arange(64, dtype=np.float32) / 2**11
    values = np.concatenate([values, ties, -ties, [0.0, -0.0, 1e-8, 65504.0, 70000.0]]).astype(np.float32)

    expected = torch.from_numpy(values).to(getattr(torch, kv_dtype)).float().numpy()

    actual = rounded(values, kv_dtype)
    assert actual.dtype == np.float32
    assert np.array_equal(actual, expected)
    assert np.array_equal(rounded(actual, kv_dtype), actual)
