import pytest

from forge.bench.cases import measure_model
from forge.experiments import kernels
from tests.small_models import write_small_qwen3


@pytest.fixture
def short(monkeypatch):
    for name, value in {
        "SHAPE_LAYERS": 1,
        "ROUND_SECONDS": 0.0001,
        "LIMIT_SECONDS": 0.005,
        "ARRAY_BYTES": 1 << 20,
    }.items():
        monkeypatch.setattr(kernels, name, value)


def test_a_model_is_measured_with_more_and_more_rows(tmp_path, short):
    path = write_small_qwen3(tmp_path / "small.gguf", max_position_embeddings=20)
    said = []
    result = kernels.run(path, threads=1, on_progress=said.append)
    (model,) = result.models
    assert [found.rows for found in model.passes] == [1, 2, 4, 8, 16]  # no more than its context
    size = measure_model(path, "int8")
    for found in model.passes:
        assert found.bytes_read == size.layer_bytes + size.head_bytes + found.rows * size.row_bytes
        assert found.products >= found.rows * size.layer_products + size.head_products and found.seconds > 0
    assert result.limits.bytes_per_second > 0 and model.threads == 1 and said


def test_models_are_made_up_in_each_type_and_gone_afterwards(tmp_path, short, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = kernels.run(None, ("Q8_0", "q4_0"), threads=1).models
    assert (first.name, second.name) == ("random-q8_0", "random-q4_0")
    assert first.passes[0].products == second.passes[0].products
    assert first.passes[0].bytes_read > 1.8 * second.passes[0].bytes_read
    assert not list(tmp_path.iterdir())


def test_a_model_of_ones_own_is_measured_beside_those_that_are_made_up(tmp_path, short):
    path = write_small_qwen3(tmp_path / "small.gguf", max_position_embeddings=20)
    models = kernels.run(path, ("Q8_0",), threads=1).models
    assert [model.name for model in models] == ["random-q8_0", "small"]
    assert [found.context for found in models[0].long_passes] == list(kernels.CONTEXTS)
    assert [found.context for found in models[1].long_passes] == [16]


def test_the_roof_is_measured_apart_from_the_passes_that_are_held_against_it(tmp_path, short, monkeypatch):
    low = kernels.Limits(1.0, 2.0)
    monkeypatch.setattr(kernels, "_limits", lambda threads: [low])
    path = write_small_qwen3(tmp_path / "small.gguf", max_position_embeddings=20)
    result = kernels.run(path, threads=1)
    assert result.limits == low and max(found.products_per_second for found in result.models[0].passes) > 2.0
