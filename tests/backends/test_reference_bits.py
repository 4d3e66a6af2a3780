"""`reference` computes one row at a time: nothing but a row's own sequence can be seen in its logits, to the bit."""

import numpy as np
import pytest

from forge.backends.reference import ReferenceBackend, ReferenceOperations
from forge.cache.kv_storage import rounded
from forge.model.loader import LoadedModel, load_model
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill
from forge.model.qwen3 import Qwen3
from forge.testing import MODEL_CHECKS
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
def loaded(request, tmp_path_factory) -> LoadedModel:
    path = write_small_qwen3(tmp_path_factory.mktemp("model") / "m.gguf", tie=False, seed=7, **request.param)
    return load_model(path, ReferenceBackend)


@pytest.fixture
def model(loaded) -> Qwen3:
    return loaded.model


def random_tokens(model: Qwen3, length: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(0, model.vocab_size, length).tolist()


@pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)
def test_the_models_on_it_keep_every_promise(check, loaded):
    check(loaded)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
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
        np.testing.assert_allclose(stored, rounded(stored, kv_dtype), rtol=2e-7)  # int8: a scale of a scale
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
