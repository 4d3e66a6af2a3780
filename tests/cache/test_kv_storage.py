"""The arrays: blocks copied whole, read back through a table."""

import numpy as np

from forge.cache.kv_storage import BlockCopy, KvLayout, NumpyKvStorage


def filled(dtype=np.float32, num_blocks=4, block_size=3) -> NumpyKvStorage:
    storage = NumpyKvStorage(KvLayout(2, num_blocks, block_size, 2, 2, np.dtype(dtype)))
    storage.keys[:] = np.arange(storage.keys.size).reshape(storage.keys.shape)
    storage.values[:] = -storage.keys
    return storage


def test_bytes_per_token_are_those_of_the_arrays():
    for dtype in (np.float32, np.float16):
        storage = filled(dtype)
        slots = storage.layout.num_blocks * storage.layout.block_size
        assert storage.layout.bytes_per_token * slots == storage.keys.nbytes + storage.values.nbytes


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
    storage = filled(np.float16)
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
