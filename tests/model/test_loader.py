"""From a file to a model: every tensor once, progress to the end, nothing loaded from a file that is not sound."""

from dataclasses import fields

import numpy as np
import pytest
from gguf import GGUFReader

from forge import LLM
from forge.backends.reference import ReferenceBackend
from forge.gguf import GGUFError, GGUFFile
from forge.model.loader import load_qwen3
from forge.model.qwen3 import DenseLayerWeights
from forge.model.weight_source import ArrayTensor, GGUFWeights, balanced_norms
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
                if field.name in ("attn_q_norm", "attn_k_norm"):
                    continue  # balanced, see below
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


def tensors_of(q: list[float], k: list[float]):
    return (ArrayTensor(name, np.array(values, np.float32)) for name, values in (("q", q), ("k", k)))


def test_large_keys_are_shared_with_the_queries_and_no_product_changes():
    rng = np.random.default_rng(5)
    q, k = rng.uniform(0.5, 2, (2, 64)).astype(np.float32)
    k[[3, 35, 8]] *= (100, 90, -37)
    q[[20, 52]] *= (12, 0.1)

    balanced_q, balanced_k = (norm.dequantize() for norm in balanced_norms(*tensors_of(q, k)))

    assert np.array_equal(balanced_q * balanced_k, q * k)
    factors = balanced_q / q
    assert np.array_equal(factors, np.exp2(np.rint(np.log2(factors))))  # powers of two
    assert np.array_equal(factors[:32], factors[32:])  # of the two dimensions that RoPE turns into each other
    assert np.abs(k).max() > 80 and np.abs(balanced_k).max() < 20
    for ones in (balanced_q, balanced_k):
        pairs = np.abs(ones).reshape(2, -1).max(axis=0)
        assert pairs.max() / pairs.min() < 2 * (100 * 4) ** 0.5


def test_norms_of_zeros_stay_as_they_are():
    q, k = [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]
    balanced_q, balanced_k = balanced_norms(*tensors_of(q, k))
    assert balanced_q.values.tolist() == q and balanced_k.values.tolist() == k


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_model_whose_keys_have_outliers_says_the_same_to_the_bit(tmp_path, kv_dtype):
    """The same function of the tokens, with powers of two moved from the queries' norms to the keys'."""
    plain = write_small_qwen3(tmp_path / "plain.gguf")
    outliers = tmp_path / "outliers.gguf"
    outliers.write_bytes(plain.read_bytes())
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(outliers, "r+").tensors}
    half = len(tensors["blk.0.attn_k_norm.weight"]) // 2
    for name, factor in (("k", 64.0), ("q", 1 / 64)):
        tensors[f"blk.0.attn_{name}_norm.weight"][[1, 1 + half]] *= factor

    logits = [LLM(path, kv_dtype=kv_dtype).logits([1, 2, 3, 4, 5]) for path in (plain, outliers)]

    assert np.array_equal(*logits)
