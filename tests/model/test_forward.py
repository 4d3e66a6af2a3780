"""What a forward pass computes, and what it leaves out."""

import numpy as np
import pytest

from forge.gguf import GGUFFile
from forge.model.loader import load_qwen3
from forge.model.manual_batch import Part, flat_batch, new_storage
from forge.model.weight_source import GGUFWeights
from tests.backends.counting import CountingBackend
from tests.small_models import write_small_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_small_qwen3(tmp_path_factory.mktemp("model") / "m.gguf", vocab_size=300)
    with GGUFFile.open(path) as file:
        return load_qwen3(GGUFWeights(file), CountingBackend())


@pytest.mark.parametrize("wanted", [[], [19], [0, 5, 12], list(range(20))], ids=len)
def test_only_the_rows_that_need_logits_pay_for_the_head(model, wanted):
    model.backend.products.clear()
    batch = flat_batch([Part(list(range(20)), 0, 20, [0, 1])], 16, logit_rows=wanted)

    logits = model.forward(batch, new_storage(model, 2, 16))

    heads = [rows for rows, out in model.backend.products if out == model.vocab_size]
    assert heads == [len(wanted)]
    assert logits.shape == (len(wanted), model.vocab_size)
    assert {rows for rows, out in model.backend.products if out != model.vocab_size} == {20}


def test_logits_are_float32_and_come_in_the_order_of_the_rows(model):
    part = Part([5, 6, 7, 8], 0, 4, [0])
    every = model.forward(flat_batch([part], 16), new_storage(model, 1, 16))

    some = model.forward(flat_batch([part], 16, logit_rows=[1, 3]), new_storage(model, 1, 16))

    assert some.dtype == np.float32
    assert np.array_equal(some, every[[1, 3]])


def test_a_token_changes_what_follows_and_nothing_before(model):
    def logits(tokens):
        return model.forward(flat_batch([Part(tokens, 0, 6, [0])], 16), new_storage(model, 1, 16))

    one, other = logits([1, 2, 3, 4, 5, 6]), logits([1, 2, 3, 9, 5, 6])

    assert np.array_equal(one[:3], other[:3])
    assert (one[3:] != other[3:]).any(axis=1).all()


def test_the_same_tokens_elsewhere_in_a_sequence_say_something_else(model):
    logits = model.forward(flat_batch([Part([7, 8, 7], 0, 3, [0])], 16), new_storage(model, 1, 16))

    assert not np.array_equal(logits[0], logits[2])
