"""Weights on the device stand for exactly what the file says, alone and fused."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from forge.backends.cuda.weights import DENSE, Q4, Q4_K, Q8, interleaved, load_matrix, quantized_to_q8, stacked
from tests.backends.cpu.models import memory_tensor
from tests.backends.cuda.models import random_matrix

KINDS = {"Q8_0": Q8, "Q4_0": Q4, "Q4_K": Q4_K}


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_has_the_bits_of_the_files_numbers(kind, device):
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (5, {"Q8_0": 34 * 24, "Q4_0": 18 * 24, "Q4_K": 144 * 3}[kind]), dtype=np.uint8)
    tensor = memory_tensor("m", kind, data)

    matrix = load_matrix(tensor, torch.device(device), torch.float32, keep_packed=True)

    assert (matrix.kind, matrix.out_features, matrix.in_features) == (KINDS[kind], 5, 768)
    got, want = matrix.packed.dense(torch.float32).cpu().numpy(), tensor.dequantize()
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q6_K", "Q5_0"])
def test_every_other_type_is_dense_and_rounded_once(kind, device):
    rng = np.random.default_rng(2)
    values = rng.standard_normal((3, 256), dtype=np.float32)
    data = rng.integers(0, 64, (3, 210), dtype=np.uint8) if kind == "Q6_K" else values
    tensor = memory_tensor("m", kind, data)

    matrix = load_matrix(tensor, torch.device(device), torch.bfloat16, keep_packed=True)

    assert matrix.kind == DENSE and matrix.dense.dtype == torch.bfloat16
    assert torch.equal(matrix.dense.cpu(), torch.from_numpy(tensor.dequantize()).bfloat16())


def test_loading_leaves_nothing_in_the_files_memory(device):
    tensor = memory_tensor("m", "F32", np.ones((2, 4), np.float32))

    matrix = load_matrix(tensor, torch.device(device), torch.float32, keep_packed=True)
    tensor.bytes_[...] = 0

    assert matrix.dense.cpu().eq(1).all()


def test_quantizing_is_off_by_half_a_step_at_most():
    values = torch.randn(4, 96)
    values[0, :32] = 0

    packed = quantized_to_q8(values)

    steps = packed.scales.float().repeat_interleave(32, dim=1)
    assert (packed.dense(torch.float32) - values).abs().le(0.5 * steps + 127 * steps * 2.0**-11).all()


@pytest.mark.parametrize("kinds", [("F32",) * 3, ("Q4_K",) * 3, ("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "F32", "Q8_0")])
def test_stacked_matrices_keep_their_rows_in_order_and_their_parts_as_views(kinds, device):
    rng = np.random.default_rng(3)
    matrices = [random_or_q6(kind, rows, rng, device) for kind, rows in zip(kinds, (4, 2, 3), strict=True)]
    before = [values(matrix) for matrix in matrices]

    runs = stacked(matrices)

    assert len(runs) == 1 + sum(first != second for first, second in pairwise(kinds))
    assert torch.equal(torch.cat([values(run) for run in runs]), torch.cat(before))
    assert all(torch.equal(values(matrix), was) for matrix, was in zip(matrices, before, strict=True))
    if len(runs) == 1:
        parts = [m.packed.values if m.packed else m.dense for m in matrices]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("kinds", [("F32", "F32"), ("Q4_K", "Q4_K"), ("Q8_0", "Q8_0"), ("Q8_0", "F32")])
def test_interleaved_matrices_take_their_rows_in_turn(kinds, device):
    rng = np.random.default_rng(4)
    gate, up = (random_or_q6(kind, 5, rng, device) for kind in kinds)
    before = values(gate), values(up)

    whole = interleaved(gate, up, torch.float32)

    assert whole.out_features == 10 and whole.kind == (DENSE if kinds[0] != kinds[1] else gate.kind)
    assert torch.equal(values(whole)[0::2], before[0]) and torch.equal(values(whole)[1::2], before[1])
    assert torch.equal(values(gate), before[0]) and torch.equal(values(up), before[1])


def random_or_q6(kind, rows, rng, device):
    if kind == "Q6_K":
        tensor = memory_tensor("m", kind, rng.integers(0, 64, (rows, 210), dtype=np.uint8))
        return load_matrix(tensor, torch.device(device), torch.float32, keep_packed=True)
    return random_matrix(kind, rows, 256, "float32", device, rng)


def values(matrix) -> torch.Tensor:
    return (matrix.dense if matrix.packed is None else matrix.packed.dense(torch.float32)).clone()
