"""The checks of a session find wrong and moving results, and call no right one wrong."""

import pytest
import torch

from forge.backends.cuda.launches import ListingLauncher
from forge.backends.cuda.shapes import DEFAULT_TUNING
from forge.backends.cuda.weights import DENSE
from forge.bench.gpu_checks import ALL_SWITCHES, Cases, Checked, Checks
from forge.model.synth import synthetic_config

CONFIG = synthetic_config(
    num_layers=1,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=288,
)


def checks(device: str, **options) -> Checks:
    return Checks(CONFIG, device, False, 2, **options)


CASES = Cases(rows=(1, 5), contexts=(1, 150), sequences=(2,), spans=((20, 27),))


def everything(found: Checks) -> list[Checked]:
    return [*(each for part in found.parts(CASES).values() for each in part), *found.draws(3)]


@pytest.mark.parametrize("options", [{}, {"tuning": ALL_SWITCHES}], ids=["as it is", "all switches"])
def test_kernels_are_found_right(options, device):
    found = everything(checks(device, **options))

    assert [each for each in found if not each.is_right] == []
    names = {each.name.split(",")[0] for each in found}
    assert {"qkv", "output", "gate_up", "down", "output_head", "embedding", "draws", "decode"} <= names


@pytest.mark.parametrize("tuning", [DEFAULT_TUNING, ALL_SWITCHES], ids=["as it is", "all switches"])
def test_everything_that_the_checks_launch_is_listed_before(tuning, device):
    """So that a session compiles it in parallel."""
    listing = ListingLauncher(False)
    checked = checks(device, tuning=tuning, launcher=listing)
    for part in checked.parts(CASES).values():
        list(part)
    listed = Checks.launches(CONFIG, False, tuning, checked._policy.multiprocessors, CASES)

    assert len(listed) > 10
    assert set(listing.found) <= set(listed)


def test_a_wrong_a_moving_and_a_broken_result_are_found():
    checked, want = checks("cpu"), torch.ones(4, 4, dtype=torch.float64)
    factors = {
        "wrong": [1.02] * 3,
        "moving": [1, 1, 1 + 1e-6],
        "broken": [float("nan")] * 3,
        "right": [1.001] * 3,
    }
    found = {
        name: checked._repeated(name, lambda each=iter(each): want * next(each), want) for name, each in factors.items()
    }

    assert [name for name, each in found.items() if each.is_right] == ["right"]
    assert found["moving"].moved == 1


def test_a_kernel_that_computes_something_else_is_found(device, monkeypatch):
    checked = checks(device)
    add_product = checked._run.add_product
    monkeypatch.setattr(checked._run, "add_product", lambda stream, x, matrix: add_product(stream, x * 1.1, matrix))
    monkeypatch.setattr(checked._run, "argmax", lambda logits, samples: samples.fill_(1))

    wrong = {each.name.split(",")[0] for each in checked.products((3,), (DENSE,)) if not each.is_right}
    assert wrong == {"output", "down", "output_head"}
