"""A pass's logits are its caller's, though large ones are not copied."""

import numpy as np
import pytest

from forge.backends.cpu.program import SMALLEST_LENT, Program
from tests.backends.cpu.models import ThreadedBackend, small_model
from tests.backends.cpu.test_bit_invariance import alone
from tests.engine.test_interruption import interrupted_at

MANY, FEW = 250, 20


@pytest.fixture
def model():
    model = small_model(ThreadedBackend(2), "Q8_0", seed=3, num_layers=1)
    yield model
    model.backend._pool.close()


def logits_of(model, seed: int, rows: int = MANY) -> np.ndarray:
    return alone(model, np.random.default_rng(seed).integers(0, 288, rows).tolist(), "float32")


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_later_passes_leave_a_result_alone(model):
    first = logits_of(model, 1)
    assert first.nbytes >= SMALLEST_LENT
    expected, row = first.copy(), first[MANY - 1]
    others = [logits_of(model, seed) for seed in range(2, 6)]
    assert np.array_equal(first, expected) and len({address(result) for result in (first, *others)}) == 5
    del first  # the row alone keeps the memory
    for seed in range(6, 12):
        logits_of(model, seed)
    assert np.array_equal(row, expected[MANY - 1])
    assert np.array_equal(logits_of(model, 1), expected)


def test_after_an_interruption_in_any_line_later_passes_are_right(model):
    kept = logits_of(model, 1)
    expected = kept.copy()
    line = 0
    while interrupted_at(line, lambda: logits_of(model, 2), lambda code: code is Program.take_logits.__code__):
        assert np.array_equal(logits_of(model, 1), expected)
        line += 1
    assert line > 3 and np.array_equal(kept, expected)


def test_memory_is_used_again_once_no_array_looks_at_it(model):
    addresses = set()
    for seed in range(6):
        addresses.add(address(logits_of(model, seed)))
    assert len(addresses) <= 2


def test_few_rows_do_not_keep_the_memory_of_many(model):
    logits_of(model, 1)
    few = logits_of(model, 2, FEW)
    assert few.base is None and few.nbytes == 4 * FEW * 288
