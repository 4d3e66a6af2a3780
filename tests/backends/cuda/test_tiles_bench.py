"""The search for tiles runs every product through the kernels that a decode step uses."""

from itertools import product

import pytest

from forge.backends.cuda.shapes import Tile
from forge.backends.cuda.weights import KIND_NAMES
from forge.bench import cuda_tiles
from tests.small_models import small_config


@pytest.mark.parametrize("kind", range(len(KIND_NAMES)), ids=KIND_NAMES)
def test_every_product_is_tried_with_the_chosen_tile_and_others(kind, device, monkeypatch):
    config = small_config(hidden_size=256, head_dim=64, intermediate_size=256, vocab_size=288)
    launched = []
    monkeypatch.setattr(
        cuda_tiles, "TritonLauncher", lambda dependent: lambda kernel, *_, **__: launched.append(kernel)
    )

    def clock(call):
        call()
        return 1e-3

    found = list(cuda_tiles.measure(config, kind, [1, 4], device, clock, least_bytes=1))

    assert {(each.product, each.rows) for each in found} == set(
        product(("qkv", "output", "gate_up", "down", "head"), (1, 4))
    )
    assert sum(each.is_chosen for each in found) == 10 and len(launched) >= len(found) > 100
    assert {kernel.__name__ for kernel in launched} == {"matvec_packed" if kind else "matvec", "matmul"}


def test_neighbours_differ_in_their_sizes_and_begin_with_the_tile_itself():
    for tile in (Tile(1, 8, 1024, 4, 1), Tile(16, 32, 128, 4, 4)):
        found = cuda_tiles.neighbours(tile)
        assert found[0] == tile and len(found) == len(set(found)) > 10
        assert {each.block_m for each in found} == {tile.block_m}
