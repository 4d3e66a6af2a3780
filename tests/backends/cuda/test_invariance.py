"""`--invariant`: a row's bits do not depend on what else is in its batch, nor on how its sequence was cut.

A tensor core computes every row of a tile the same way. The interpreter's product is NumPy's, which does not, so
here it is replaced by one that computes each row by itself.
"""

import numpy as np
import pytest

from forge.backends.cuda.backend import CudaBackend
from forge.errors import UsageError
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill
from tests.backends.cpu.models import small_model


@pytest.fixture
def rows_alike(monkeypatch, device):
    if device == "cuda":
        return
    from triton.runtime import interpreter

    def row_by_row(self, a, b, accumulator, input_precision, max_num_imprecise_acc):
        right = np.ascontiguousarray(b.data)
        rows = [np.dot(np.ascontiguousarray(row), right) for row in a.data]
        return interpreter.TensorHandle(np.stack(rows) + accumulator.data, accumulator.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", row_by_row)


def test_rows_have_the_same_bits_alone_in_chunks_and_beside_others(device, rows_alike):
    model = small_model(CudaBackend(device, invariant=True), "F32", seed=1)
    rng = np.random.default_rng(1)
    ours, others = rng.integers(0, 288, (2, 23)).tolist()
    whole = one_prefill(model, ours, block_size=8)
    storage = new_storage(model, 8, 4)
    blocks, other_blocks = [5, 1, 7, 0, 6, 3], [2, 4]

    def step(start: int, end: int, *beside: Part) -> np.ndarray:
        logits = model.forward(flat_batch([*beside, Part(ours, start, end, blocks)], 4), storage)
        return logits[-(end - start) :]

    got = [
        step(0, 11, Part(others, 0, 3, other_blocks)),
        step(11, 12, Part(others, 3, 4, other_blocks)),
        step(12, 20),
        step(20, 21),
        step(21, 23, Part(others, 4, 8, other_blocks)),
    ]

    assert np.array_equal(np.concatenate(got), whole)


def test_pruning_the_last_layer_changes_no_bit(device, rows_alike):
    model = small_model(CudaBackend(device, invariant=True), "Q8_0", seed=1, num_layers=1)
    part = Part(list(range(9)), 0, 9, [0, 1])

    every, last = (
        model.forward(flat_batch([part], 8, logit_rows=rows), new_storage(model, 2, 8)) for rows in (None, [8])
    )

    assert np.array_equal(every[8:], last)


def test_torchs_own_products_cannot_promise_it(device):
    with pytest.raises(UsageError, match="triton"):
        CudaBackend(device, kernels="torch", invariant=True)
