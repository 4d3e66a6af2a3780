"""Blocks copied, swapped out and back, on a torch device."""

import numpy as np
import pytest
import torch

from forge.backends.cuda.storage import TORCH_DTYPES, TorchKvStorage
from forge.cache.kv_storage import BlockCopy, KvLayout
from forge.engine.handoff import KvHandoff


def storage_of(device: str, kv_dtype: str = "float32") -> TorchKvStorage:
    storage = TorchKvStorage(KvLayout(2, 6, 4, 2, 8, kv_dtype), torch.device(device))
    for array in (storage.keys, storage.values):
        array.copy_(torch.randn(array.shape))
    return storage


def test_copies_happen_in_order(device):
    storage = storage_of(device)
    before = storage.keys.clone(), storage.values.clone()

    storage.copy_blocks([BlockCopy(0, 3), BlockCopy(3, 5), BlockCopy(1, 0), BlockCopy(2, 3)])

    for array, was in zip((storage.keys, storage.values), before, strict=True):
        for block, source in enumerate((1, 1, 2, 2, 4, 0)):
            assert torch.equal(array[:, block], was[:, source]), block


def test_no_copies_are_no_work(device):
    storage = storage_of(device)
    before = storage.keys.clone()
    storage.copy_blocks([])
    assert torch.equal(storage.keys, before)


@pytest.mark.parametrize("kv_dtype", TORCH_DTYPES)
def test_blocks_come_back_from_the_host_with_their_bits_wherever_they_are_put(kv_dtype, device):
    storage = storage_of(device, kv_dtype)
    before = storage.keys.clone(), storage.values.clone()

    kept = storage.read_blocks([4, 1])
    storage.keys.zero_(), storage.values.zero_()
    storage.write_blocks([0, 5], kept)

    for array, was in zip((storage.keys, storage.values), before, strict=True):
        assert torch.equal(array[:, 0], was[:, 4]) and torch.equal(array[:, 5], was[:, 1])
        assert not array[:, 1:5].any()


def test_what_was_read_does_not_change_with_the_storage(device):
    storage = storage_of(device)
    keys, _ = storage.read_blocks([2])
    was = keys.clone()
    storage.keys.zero_()
    assert torch.equal(keys, was)


def test_what_was_read_can_be_handed_over(device):
    storage = storage_of(device)
    handoff = KvHandoff((0, 1, 2, 3), storage.layout, storage.read_blocks([2]))
    assert handoff.num_bytes == storage.keys[:, 2].nbytes + storage.values[:, 2].nbytes


def test_gather_follows_the_table(device):
    storage = storage_of(device)

    keys, values = storage.gather(1, [5, 2, 0], 10)

    assert keys.dtype == values.dtype == np.float32 and keys.shape == (10, 2, 8)
    assert np.array_equal(keys[4], storage.keys[1, 2, 0].cpu().numpy())
    assert np.array_equal(values[9], storage.values[1, 0, 1].cpu().numpy())


@pytest.mark.parametrize("blocks", [1 << 30, 1 << 55])
def test_too_much_is_a_memory_error(blocks, device):
    with pytest.raises(MemoryError):
        TorchKvStorage(KvLayout(64, blocks, 16, 8, 128), torch.device(device))
