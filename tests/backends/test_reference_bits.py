"""`reference` computes one row at a time: nothing but a row's own sequence can be seen in its logits, to the bit."""

from itertools import pairwise

import numpy as np
import pytest

from forge.backends.devices import create_backend
from forge.backends.reference import ReferenceOperations
from forge.cache.kv_storage import rounded
from forge.gguf import GGUFFile
from forge.model.loader import load_qwen3
from forge.model.qwen3 import Qwen3
from forge.model.weight_source import GGUFWeights
from tests.model.forwards import Part, flat_batch, new_storage, one_prefill
from tests.small_models import write_small_qwen3

SIZES = [
    pytest.param({}, id="whole vectors"),
    pytest.param(
        {"hidden_size": 20, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 37},
        id="odd sizes",
    ),
    pytest.param(
        {"hidden_size": 132, "head_dim": 50, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1003},
        id="matrices large enough for BLAS threads",
    ),
]


@pytest.fixture(scope="module", params=SIZES)
def model(request, tmp_path_factory) -> Qwen3:
    path = write_small_qwen3(tmp_path_factory.mktemp("model") / "m.gguf", tie=False, seed=7, **request.param)
    with GGUFFile.open(path) as file:
        return load_qwen3(GGUFWeights(file), create_backend("reference"))


def random_tokens(model: Qwen3, length: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(0, model.vocab_size, length).tolist()


def random_cuts(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """[start, end) of the chunks of one sequence, at random places, single tokens often among them."""
    inner = rng.choice(np.arange(1, length), size=rng.integers(0, min(6, length)), replace=False) if length > 1 else []
    edges = [0, *sorted(int(cut) for cut in inner), length]
    return list(pairwise(edges))


def test_a_row_alone_has_the_bits_that_it_has_among_its_own_sequence(model):
    tokens = random_tokens(model, 67, np.random.default_rng(1))
    whole = one_prefill(model, tokens)

    storage = new_storage(model, 5, 16)
    for position in range(len(tokens)):
        part = Part(tokens, position, position + 1, [0, 1, 2, 3, 4])
        alone = model.forward(flat_batch([part], 16), storage)
        assert np.array_equal(alone[0], whole[position]), f"position {position}"


@pytest.mark.parametrize("seed", range(6))
def test_neighbours_chunks_block_size_and_block_numbers_cannot_be_seen(model, seed):
    rng = np.random.default_rng(seed)
    sequences = [random_tokens(model, int(rng.integers(1, 48)), rng) for _ in range(rng.integers(2, 6))]
    expected = [one_prefill(model, tokens, block_size=16) for tokens in sequences]

    block_size = int(rng.choice([1, 3, 8, 64]))
    numbers = [-(-len(tokens) // block_size) for tokens in sequences]
    scattered = iter(rng.permutation(sum(numbers)).tolist())
    blocks = [[next(scattered) for _ in range(number)] for number in numbers]
    storage = new_storage(model, sum(numbers), block_size)
    storage.keys[:], storage.values[:] = 1e30, 1e30  # what nobody wrote must not be read
    pending = [random_cuts(len(tokens), rng) for tokens in sequences]
    while any(pending):
        ready = [index for index, cuts in enumerate(pending) if cuts]
        chosen = rng.permutation([index for index in ready if rng.random() < 0.7] or ready[:1]).tolist()
        parts = [Part(sequences[index], *pending[index].pop(0), blocks[index]) for index in chosen]
        logits = model.forward(flat_batch(parts, block_size), storage)
        row = 0
        for index, part in zip(chosen, parts, strict=True):
            rows = logits[row : row + part.end - part.start]
            row += part.end - part.start
            assert np.array_equal(rows, expected[index][part.start : part.end]), f"sequence {index}, {part}"


def test_computing_a_sequence_again_from_its_tokens_gives_the_same_bits(model):
    tokens = random_tokens(model, 40, np.random.default_rng(2))
    storage = new_storage(model, 3, 16)
    batch = flat_batch([Part(tokens, 0, 40, [0, 1, 2])], 16)
    first = model.forward(batch, storage)
    kept = storage.keys.copy(), storage.values.copy()

    again = model.forward(batch, storage)

    assert np.array_equal(first, again)
    assert np.array_equal(kept[0], storage.keys)
    assert np.array_equal(kept[1], storage.values)


def test_rows_without_logits_leave_the_others_as_they_are(model):
    tokens = random_tokens(model, 30, np.random.default_rng(3))
    part = Part(tokens, 0, 30, [0, 1])
    every = model.forward(flat_batch([part], 16), new_storage(model, 2, 16))

    some = model.forward(flat_batch([part], 16, logit_rows=[4, 29]), new_storage(model, 2, 16))
    none = model.forward(flat_batch([part], 16, logit_rows=[]), new_storage(model, 2, 16))

    assert np.array_equal(some, every[[4, 29]])
    assert none.shape == (0, model.vocab_size)


def test_a_row_with_slot_minus_one_writes_nothing(model):
    tokens = random_tokens(model, 3, np.random.default_rng(4))
    storage = new_storage(model, 2, 4)
    batch = flat_batch([Part(tokens, 0, 3, [1])], 4)
    batch.slot_mapping[2] = -1

    model.forward(batch, storage)

    assert storage.keys[:, 1, :2].any(axis=(-1, -2)).all()
    assert not storage.keys[:, 1, 2:].any()
    assert not storage.keys[:, 0].any()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_rounded_keys_are_what_attention_sees_in_a_prefill_and_in_decodes_alike(model, kv_dtype):
    tokens = random_tokens(model, 40, np.random.default_rng(5))
    exact = one_prefill(model, tokens)
    whole, stepwise = (new_storage(model, 3, 16, kv_dtype) for _ in range(2))

    prefill = model.forward(flat_batch([Part(tokens, 0, 40, [0, 1, 2])], 16), whole)
    parts = [Part(tokens, position, position + 1, [0, 1, 2]) for position in range(40)]
    decodes = np.concatenate([model.forward(flat_batch([part], 16), stepwise) for part in parts])

    assert np.array_equal(prefill, decodes)
    for stored, again in ((whole.keys, stepwise.keys), (whole.values, stepwise.values)):
        assert np.array_equal(stored, again)
        assert np.array_equal(stored, rounded(stored, kv_dtype))
    assert not np.array_equal(prefill, exact)
    assert np.allclose(prefill, exact, atol=0.1)


@pytest.mark.parametrize("hidden", [1, 2, 7, 8, 9, 31, 130, 1024])
def test_the_norms_of_many_rows_are_the_norms_of_each(hidden):
    rng = np.random.default_rng(hidden)
    operations = ReferenceOperations()
    x = rng.standard_normal((9, hidden), dtype=np.float32)
    weight = rng.standard_normal(hidden, dtype=np.float32)

    together = operations.rms_norm(x, weight, 1e-6)
    alone = np.concatenate([operations.rms_norm(x[row : row + 1].copy(), weight, 1e-6) for row in range(9)])

    assert np.array_equal(together, alone)


def test_swiglu_of_extreme_values_is_finite_and_right():
    gate = np.array([[-200.0, -90.0, 0.0, 90.0, 200.0]], np.float32)
    up = np.ones_like(gate)

    out = ReferenceOperations().swiglu(gate, up)

    assert np.allclose(out, [[0.0, 0.0, 0.0, 90.0, 200.0]])
