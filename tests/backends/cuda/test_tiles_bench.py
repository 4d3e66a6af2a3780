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
    launched, compiled = [], []
    monkeypatch.setattr(
        cuda_tiles, "TritonLauncher", lambda dependent: lambda kernel, *_, **__: launched.append(kernel)
    )

    def clock(call):
        call()
        if len(launched) == 7:
            raise RuntimeError("out of resource:\nshared memory")
        return 1e-3

    found = list(cuda_tiles.measure(config, kind, [1, 4], device, clock, 1, compiled.extend))

    assert {(each.product, each.rows) for each in found} == set(
        product(("qkv", "output", "gate_up", "down", "output_head"), (1, 4))
    )
    assert sum(each.is_chosen for each in found) == 10 and len(found) > 100
    names = {kernel.__name__ for kernel in launched}
    assert {"matvec_packed" if kind else "matvec", "matmul"} <= names
    assert {each.kernel.split(".")[1] for each in compiled} == names, "what is launched was compiled before"
    assert ({"rms_norm", "swiglu"} <= names) == (kind == 0), "cuBLAS is tried for dense weights"
    assert [each.failed for each in found if each.failed] == ["RuntimeError: out of resource: shared memory"]
    best = cuda_tiles.best_of(found)
    assert sum(each.is_chosen for each in best) == 10 and len(best) <= 40
    assert all(each.rows > 1 and each.product != "output_head" for each in found if each.tile is None)
    assert "← chosen" in "".join(map(str, found)) and "shared memory" in "".join(map(str, found))


def test_neighbours_differ_in_their_sizes_and_begin_with_the_tile_itself():
    for tile in (Tile(1, 8, 1024, 4, 1), Tile(16, 32, 128, 4, 4)):
        found = cuda_tiles.neighbours(tile)
        assert found[0] == tile and len(found) == len(set(found)) > 10
        assert {each.block_m for each in found} == {tile.block_m}
