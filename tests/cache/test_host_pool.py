"""Room on the host, and the order in which a step moves blocks."""

import numpy as np

from forge.cache.host_pool import HostEntry, HostPool, Swap
from forge.cache.kv_storage import BlockCopy, KvLayout, NumpyKvStorage


def test_an_entry_takes_its_blocks_of_room():
    pool = HostPool(5)
    pool.add(0, HostEntry(2, 7))
    pool.add(1, HostEntry(3, 9))
    assert pool.num_free == 0
    del pool.entries[0]
    assert pool.num_free == 2


def test_what_is_swapped_out_is_read_before_copies_and_what_is_swapped_in_is_written_after_them():
    storage = NumpyKvStorage(KvLayout(1, 6, 1, 1, 1))
    storage.keys[0, :, 0, 0, 0] = storage.values[0, :, 0, 0, 0] = range(6)
    pool = HostPool(4)
    for seq_id, data in enumerate((storage.read_blocks((3,)), storage.read_blocks((4,)), None, None)):
        pool.add(seq_id, HostEntry(1, 1, data))
    outs, ins = [Swap(2, (1,)), Swap(3, (5,))], [Swap(0, (2,)), Swap(1, (5,))]
    pool.move(storage, outs, [BlockCopy(2, 1), BlockCopy(0, 2)], ins)

    assert storage.keys.ravel().tolist() == storage.values.ravel().tolist() == [0, 2, 3, 3, 4, 4]
    assert [np.ravel(pool.entries[seq_id].data).tolist() for seq_id in (2, 3)] == [[1, 1], [5, 5]]
