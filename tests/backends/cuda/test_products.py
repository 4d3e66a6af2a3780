"""Each product kernel against float64, over fresh random operands, into poisoned memory."""

import numpy as np
import pytest
import torch

from forge.backends.cuda.shapes import Tuning
from forge.backends.fusion import Norm
from tests.backends.cuda.models import (
    TOLERANCE,
    exact_values,
    launches,
    random_activations,
    random_matrix,
    relative_error,
)
from tests.slow import mostly_slow

EPS = 1e-6
SIZES = {"F32": (37, 20), "BF16": (34, 144), "Q8_0": (20, 96), "Q4_0": (18, 160), "Q4_K": (18, 512)}
"""rows, columns by type: neither powers of two, nor whole tiles."""


def exactly_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x64 = x.double().cpu()
    return x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()


def new_norm(width: int, device: str, rng: np.random.Generator) -> Norm:
    return Norm(None, torch.from_numpy(1 + 0.2 * rng.standard_normal(width, dtype=np.float32)).to(device), EPS)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel is given to write holds NaN before."""
    empty = torch.empty

    def poison(*arguments, **options):
        out = empty(*arguments, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], quick=["float32"]))
@pytest.mark.parametrize("batch_rows", mostly_slow([1, 3], quick=[3]))
@pytest.mark.parametrize("kind", SIZES)
def test_a_norm_and_its_product(kind, batch_rows, dtype, device):
    rng = np.random.default_rng()
    rows, columns = SIZES[kind]
    matrix = random_matrix(kind, rows, columns, dtype, device, rng)
    x = random_activations(batch_rows, columns, dtype, device, rng) * 3
    norm = new_norm(columns, device, rng)

    got = launches(device, dtype).products(x, norm, (matrix,))

    assert relative_error(got, exactly_normed(x, norm.weight) @ exact_values(matrix).t()) < TOLERANCE[dtype]


@pytest.mark.parametrize("invariant", [False, True], ids=["own tile", "one tiling"])
@pytest.mark.parametrize("batch_rows", mostly_slow([1, 3, 16, 17, 257], quick=[3, 17]))
def test_a_product_added_to_the_stream(batch_rows, invariant, device):
    rng = np.random.default_rng()
    matrix = random_matrix("F32", 50, 70, "float32", device, rng)
    x, stream = (random_activations(batch_rows, width, "float32", device, rng) for width in (70, 50))
    want = stream.double().cpu() + x.double().cpu() @ exact_values(matrix).t()

    launches(device, "float32", invariant=invariant).add_product(stream, x, matrix)

    assert relative_error(stream, want) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("kind", "batch_rows"),
    [("F32", 1), ("F32", 2), ("F32", 17), ("Q8_0", 1), ("Q4_0", 2), ("Q4_K", 1), ("Q4_K", 20), ("Q4_K", 65)],
)
def test_gate_and_up_with_swiglu(kind, batch_rows, device):
    rng = np.random.default_rng()
    rows, columns = SIZES[kind][0] // 2 * 2, SIZES[kind][1]
    matrix = random_matrix(kind, rows, columns, "float32", device, rng)
    x = random_activations(batch_rows, columns, "float32", device, rng)
    norm = new_norm(columns, device, rng)
    run = launches(device, "float32")
    run._scratch = torch.zeros(rows * columns, device=device)

    got = run.gated(x, norm, matrix)

    gate, up = (exactly_normed(x, norm.weight) @ exact_values(matrix).t()).unflatten(-1, (-1, 2)).unbind(-1)
    assert relative_error(got, torch.nn.functional.silu(gate) * up) < TOLERANCE["float32"]


def test_products_of_several_kinds_lie_side_by_side(device):
    rng = np.random.default_rng()
    matrices = tuple(random_matrix(kind, 9, 256, "float32", device, rng) for kind in ("Q4_K", "F32", "Q8_0"))
    x = random_activations(1, 256, "float32", device, rng)
    norm = new_norm(256, device, rng)

    got = launches(device, "float32").products(x, norm, matrices)

    want = exactly_normed(x, norm.weight) @ torch.cat([exact_values(matrix) for matrix in matrices]).t()
    assert relative_error(got, want) < TOLERANCE["float32"]


@pytest.mark.parametrize("batch_rows", [1, 5, 70])
def test_logits_are_float32_whatever_the_activations(batch_rows, device):
    rng = np.random.default_rng()
    matrix = random_matrix("BF16", 40, 48, "bfloat16", device, rng)
    x = random_activations(batch_rows, 48, "bfloat16", device, rng)
    norm = new_norm(48, device, rng)

    got = launches(device, "bfloat16").logits(x, norm, matrix)

    assert got.dtype == torch.float32
    assert relative_error(got, exactly_normed(x, norm.weight) @ exact_values(matrix).t()) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0", "Q4_K"])
def test_embeddings_are_the_named_rows(kind, device):
    rng = np.random.default_rng()
    table = random_matrix(kind, 12, 512, "float32", device, rng)
    numbers = torch.tensor([3, 11, 0, 3], dtype=torch.int32, device=device)
    out = torch.empty((4, 512), device=device)

    launches(device, "float32")._gather(table, numbers, None, out)

    assert torch.equal(out.double().cpu(), exact_values(table)[numbers.cpu().long()])


def test_swiglu_of_extreme_gates_is_finite(device):
    from forge.backends.cuda.kernels import unfused

    gates = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]], device=device)
    pairs = torch.stack([gates, torch.ones_like(gates)], dim=-1).flatten(1).contiguous()
    out = torch.empty((1, 5), device=device)

    unfused.swiglu[(1, 1)](pairs, out, 5, BLOCK=8, PDL=False)

    assert torch.allclose(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 90.0, 200.0]]))


TUNINGS = {
    "as it is": Tuning(),
    "few rows": Tuning(tile_rows=16),
    "prefetch": Tuning(tile_rows=16, prefetch=True),
    "many rows": Tuning(tile_rows=128),
}


@pytest.mark.parametrize(
    ("tuning", "kind", "batch_rows"),
    mostly_slow(
        [
            *((name, "F32", rows) for name in TUNINGS for rows in (2, 17)),
            *(("prefetch", kind, 16) for kind in ("Q8_0", "Q4_K")),
        ],
        quick=[("prefetch", "F32", 2), ("prefetch", "F32", 17)],
    ),
)
def test_every_switch_computes_the_same_product(tuning, kind, batch_rows, device):
    rng, tuning = np.random.default_rng(), TUNINGS[tuning]
    rows, columns = 36, 1536 if kind == "Q4_K" else 1056
    matrix = random_matrix(kind, rows, columns, "float32", device, rng)
    x = random_activations(batch_rows, columns, "float32", device, rng)
    stream, norm = random_activations(batch_rows, rows, "float32", device, rng), new_norm(columns, device, rng)
    run = launches(device, "float32", multiprocessors=132, tuning=tuning)
    added = stream.double().cpu() + x.double().cpu() @ exact_values(matrix).t()
    normed = exactly_normed(x, norm.weight) @ exact_values(matrix).t()
    gate, up = normed.unflatten(-1, (-1, 2)).unbind(-1)

    assert relative_error(run.products(x, norm, (matrix,)), normed) < TOLERANCE["float32"]
    assert relative_error(run.gated(x, norm, matrix), torch.nn.functional.silu(gate) * up) < TOLERANCE["float32"]
    run.add_product(stream, x, matrix)
    assert relative_error(stream, added) < TOLERANCE["float32"]
