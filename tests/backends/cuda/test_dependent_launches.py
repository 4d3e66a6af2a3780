"""A kernel that starts while the one before it still runs reads nothing that that one writes, until it has waited.

Under the interpreter the wait is where the kernel before "ends": until then all that it writes is NaN, or a number out
of range. On a GPU the kernels run with dependent launches as they are; `test_real_sizes.py` looks for races there.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from forge.backends.cuda.kernels.parts import INTERPRETED
from forge.backends.cuda.shapes import Tuning
from tests.backends.cuda.models import launches, random_activations, random_matrix
from tests.backends.cuda.test_attention import Setting
from tests.backends.cuda.test_products import new_norm
from tests.slow import mostly_slow

FEW_ROWS = Tuning(tile_rows=16)  # cuBLAS waits for all that was launched before, and is no kernel of ours
ALL_SWITCHES = Tuning(tile_rows=16, prefetch=True, new_key_last=True)


class Previous:
    """The kernel before: at the first wait of each launch it writes what it computes."""

    def __init__(self):
        self.waits = 0
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def writes(self, *arrays: torch.Tensor) -> None:
        """From now on these hold garbage, until a kernel waits."""
        self._late = [(array, array.clone()) for array in arrays]
        for array in arrays:
            array.fill_(float("nan") if array.is_floating_point() else -(1 << 30))

    def end(self) -> None:
        self.waits += 1
        for array, values in self._late:
            array.copy_(values)
        self._late = []


@pytest.fixture
def previous(monkeypatch, device) -> Previous:
    if device == "cuda":
        pytest.skip("on a GPU kernels wait for each other themselves")
    import triton.language as tl

    assert INTERPRETED
    previous = Previous()
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda _semantic=None: previous.end())
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda _semantic=None: None)
    return previous


def same_when_late(
    previous: Previous, run: Callable[[bool], torch.Tensor], restore: Callable[[], None], *written: torch.Tensor
) -> None:
    """run: computes, with dependent launches or without. restore: puts back what it overwrites."""
    want = run(False).clone()
    restore()
    previous.writes(*written)
    got = run(True)
    assert previous.waits, "it never waited"
    assert torch.equal(got, want)


@pytest.mark.parametrize("tuning", [FEW_ROWS, ALL_SWITCHES], ids=["few rows", "all switches"])
@pytest.mark.parametrize("kind", mostly_slow(["F32", "Q8_0", "Q4_K"], quick=["Q8_0"]))
@pytest.mark.parametrize("rows", mostly_slow([1, 3], quick=[3]))
def test_products_read_weights_alone_before_they_wait(rows, kind, tuning, previous, device):
    rng = np.random.default_rng(1)
    matrix = random_matrix(kind, 32, 512, "float32", device, rng)
    x, before = (random_activations(rows, width, "float32", device, rng) for width in (512, 32))
    norm, stream = new_norm(512, device, rng), before.clone()
    runs = {
        dependent: launches(device, "float32", multiprocessors=132, dependent=dependent, tuning=tuning)
        for dependent in (False, True)
    }

    def added(dependent: bool) -> torch.Tensor:
        runs[dependent].add_product(stream, x, matrix)
        return stream

    same_when_late(previous, lambda d: runs[d].products(x, norm, (matrix,)), lambda: None, x)
    same_when_late(previous, lambda d: runs[d].gated(x, norm, matrix), lambda: None, x)
    same_when_late(previous, lambda d: runs[d].logits(x, norm, matrix), lambda: None, x)
    same_when_late(previous, added, lambda: stream.copy_(before), x, stream)


def test_what_surrounds_large_products_waits_too(previous, device):
    rng = np.random.default_rng(2)
    x, norm = random_activations(5, 40, "float32", device, rng), new_norm(40, device, rng)
    matrix = random_matrix("F32", 24, 40, "float32", device, rng)
    runs = {dependent: launches(device, "float32", dependent=dependent, tuning=Tuning()) for dependent in (False, True)}
    samples = torch.full((6, 2), 7, dtype=torch.int32, device=device)
    numbers = torch.tensor([3, -2, 0, 23], dtype=torch.int32, device=device)

    def gathered(dependent: bool) -> torch.Tensor:
        out = torch.empty((4, 40), device=device)
        runs[dependent]._gather(matrix, numbers, samples, out)
        return out

    def argmax(dependent: bool) -> torch.Tensor:
        runs[dependent].argmax(x, samples)
        return samples

    same_when_late(previous, lambda d: runs[d].normed(x, norm), lambda: None, x)
    same_when_late(previous, lambda d: runs[d].gated(x, norm, matrix), lambda: None, x)
    same_when_late(previous, gathered, lambda: None, numbers, samples)
    same_when_late(previous, argmax, lambda: None, x)


@pytest.mark.parametrize("tuning", [Tuning(), ALL_SWITCHES], ids=["as it is", "all switches"])
def test_attention_reads_norms_alone_before_it_waits(tuning, previous, device):
    options = {"multiprocessors": 132, "tuning": tuning}
    setting = Setting(device, "float32", "float32", 4, 2, 16, spans=[(0, 1), (150, 151)], block_size=16, **options)
    late = setting.with_launches(dependent=True, **options)
    inputs, storage = setting.inputs(), setting.storage
    late._rotations = setting.run._rotations
    before = setting.qkv.clone(), storage.keys.clone(), storage.values.clone()
    words = inputs.positions, inputs.slots, inputs.tile_firsts, inputs.tile_lengths, inputs.tile_sequences

    def restore() -> None:
        for array, values in zip((setting.qkv, storage.keys, storage.values), before, strict=True):
            array.copy_(values)

    def fused(dependent: bool) -> torch.Tensor:
        run = late if dependent else setting.run
        return run.decode_attention(setting.qkv, setting.layer, storage, 0, inputs)

    def stored(dependent: bool) -> torch.Tensor:
        (late if dependent else setting.run).store_heads(setting.qkv, setting.layer, storage, 0, inputs)
        return setting.qkv

    def attended(dependent: bool) -> torch.Tensor:
        return (late if dependent else setting.run).attention(setting.qkv, storage, 0, inputs, logit_rows_only=False)

    assert inputs.shape.splits > 1
    same_when_late(previous, fused, restore, setting.qkv, storage.keys, storage.values, *words)
    restore()
    same_when_late(previous, stored, restore, setting.qkv, *words)
    same_when_late(previous, attended, lambda: None, setting.qkv, storage.keys, storage.values, *words)
