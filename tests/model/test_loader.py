"""From a file to a model: every tensor once, progress to the end, nothing loaded from a file that is not sound."""

from dataclasses import fields

import numpy as np
import pytest

from forge.backends.reference import ReferenceBackend
from forge.gguf import GGUFError, GGUFFile
from forge.model.loader import load_qwen3
from forge.model.qwen3 import DenseLayerWeights
from forge.model.weight_source import GGUFWeights
from tests.small_models import write_small_qwen3


class RecordingBackend(ReferenceBackend):
    def __init__(self):
        super().__init__()
        self.loaded = []

    def load_matrix(self, tensor):
        self.loaded.append(tensor.name)
        return super().load_matrix(tensor)

    def load_vector(self, tensor):
        self.loaded.append(tensor.name)
        return super().load_vector(tensor)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0"])
def test_progress_rises_to_the_total_which_is_the_tensors_bytes(tmp_path, tie, tensor_type):
    path = write_small_qwen3(tmp_path / "m.gguf", tie=tie, tensor_type=tensor_type)
    calls = []
    with GGUFFile.open(path) as file:
        load_qwen3(GGUFWeights(file), ReferenceBackend(), lambda done, total: calls.append((done, total)))
        nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
        num_tensors = len(file.tensors)

    done = [call[0] for call in calls]
    assert {total for _, total in calls} == {nbytes}
    assert done == sorted(set(done))
    assert done[-1] == nbytes
    assert len(calls) == num_tensors


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_every_tensor_is_loaded_once_and_a_tied_head_is_the_embedding_itself(tmp_path, tie):
    backend = RecordingBackend()
    with GGUFFile.open(write_small_qwen3(tmp_path / "m.gguf", tie=tie)) as file:
        model = load_qwen3(GGUFWeights(file), backend)
        assert sorted(backend.loaded) == sorted(file.tensors)

    assert (model.weights.head is model.weights.embedding) == tie


def test_each_weight_lands_in_its_own_field(tmp_path):
    with GGUFFile.open(write_small_qwen3(tmp_path / "m.gguf", tie=False)) as file:
        model = load_qwen3(GGUFWeights(file), ReferenceBackend())
        for index, layer in enumerate(model.weights.layers):
            for field in fields(DenseLayerWeights):
                expected = file.tensors[f"blk.{index}.{field.name}.weight"].dequantize()
                assert np.array_equal(getattr(layer, field.name), expected), (index, field)


def test_the_weights_outlive_the_file(tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        model = load_qwen3(GGUFWeights(file), ReferenceBackend())
    path.unlink()

    assert np.isfinite(model.weights.embedding).all()


def test_nothing_is_loaded_from_a_file_that_contradicts_itself(tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf", metadata={"qwen3.feed_forward_length": 100})
    backend = RecordingBackend()

    with GGUFFile.open(path) as file, pytest.raises(GGUFError, match="ffn_gate"):
        load_qwen3(GGUFWeights(file), backend)
    assert backend.loaded == []
