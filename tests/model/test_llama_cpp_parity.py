"""forge against llama.cpp on files of random weights: embeddings, every format's logits, YaRN, experts, rerankers."""

import numpy as np
import pytest

from forge import LLM
from forge.backends.devices import create_backend
from forge.engine.tasks import rerank_prompt
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import one_prefill
from tests.backends.cpu.models import QUANTIZED, WHOLE_BLOCKS
from tests.model.test_heads import reranker_gguf
from tests.model.test_rope import YARN
from tests.small_models import write_small_qwen3

llama_cpp = pytest.importorskip("llama_cpp", reason="parity needs llama.cpp: pip install llama-cpp-python")

TOKEN_IDS = np.random.default_rng(0).integers(0, 256, 120).tolist()
TEXTS = ["the cat", "a tin hat on the sea", "no"]
LAST, RANK = 3, 4
"""llama.cpp's `llama_pooling_type`."""


def opened(path, **options):
    return llama_cpp.Llama(str(path), n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=2, verbose=False, **options)


def their_logits(path, token_ids=TOKEN_IDS, kv_type: int = 0, **options) -> np.ndarray:
    """kv_type: of keys and values, ggml's number (0 is float32)."""
    model = opened(path, logits_all=True, type_k=kv_type, type_v=kv_type, **options)
    model.eval(token_ids)
    return np.array(model.scores[: len(token_ids)], np.float64)


def our_logits(path, device: str, token_ids=TOKEN_IDS) -> np.ndarray:
    with open_weights(path) as source:
        return one_prefill(load_qwen3(source, create_backend(device)), token_ids).astype(np.float64)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual - expected‖ / ‖expected‖ of all rows together."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def cosines(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    return (actual * expected).sum(axis=1) / norms


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_float_logits_are_llama_cpps(tmp_path, seed, tie):
    path = write_small_qwen3(tmp_path / "m.gguf", seed=seed, tie=tie)
    assert error(our_logits(path, "reference"), their_logits(path)) < 1e-4


@pytest.mark.parametrize("tensor_type", QUANTIZED)
def test_quantized_logits_are_no_further_from_float32_than_llama_cpps(tmp_path, tensor_type):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type=tensor_type, seed=7, **WHOLE_BLOCKS)
    exact = our_logits(path, "reference")
    ours, theirs = error(our_logits(path, "cpu"), exact), error(their_logits(path), exact)
    print(f"{tensor_type}: relative error of the logits {ours:.4f}, llama.cpp {theirs:.4f}")
    assert ours <= 1.05 * theirs


@pytest.mark.parametrize("add_eos", [True, False])
def test_embeddings_are_llama_cpps(tmp_path, add_eos):
    """As Qwen3-Embedding is converted: the file asks for an end of text, and the vector is that of the last token."""
    metadata = {
        "qwen3.pooling_type": LAST,
        "tokenizer.ggml.add_eos_token": add_eos,
        "tokenizer.ggml.eos_token_id": 256 + 10,
    }
    path = write_small_qwen3(tmp_path / "embedding.gguf", seed=3, metadata=metadata)
    ours = LLM(path, kv="off", device="reference", kv_dtype="float32").embed(TEXTS)
    theirs = np.array(opened(path, embedding=True, type_k=0, type_v=0).embed(TEXTS))
    assert ours.shape == theirs.shape
    assert cosines(ours, theirs).min() > 0.9999


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_yarn_is_llama_cpps_within_and_beyond_the_original_context(tmp_path, factor):
    metadata = YARN | {"qwen3.rope.scaling.factor": factor}
    path = write_small_qwen3(tmp_path / "m.gguf", seed=5, metadata=metadata, rope_theta=1e4)
    for length in (30, 120):  # of which the original context is 40
        ids = TOKEN_IDS[:length]
        assert error(our_logits(path, "reference", ids), their_logits(path, ids)) < 1e-4


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize(("experts", "used"), [(4, 2), (16, 3)])
def test_a_mixture_of_experts_is_llama_cpps(tmp_path, tensor_type, experts, used):
    sizes = WHOLE_BLOCKS | {"num_experts": experts, "num_experts_per_tok": used}
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type=tensor_type, seed=11, **sizes)
    exact, theirs = our_logits(path, "reference"), their_logits(path)
    if tensor_type == "F32":
        assert error(exact, theirs) < 1e-4
        assert error(our_logits(path, "cpu"), theirs) < 1e-4
    else:  # a router's near tie may fall differently, so rows are compared
        for ours in (our_logits(path, "cpu"), exact):
            rows = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
            assert np.median(rows) < 0.05


def test_a_reranker_with_rank_pooling_scores_as_llama_cpp(tmp_path):
    path, _head = reranker_gguf(tmp_path / "rerank.gguf")
    ours = LLM(path, kv="prefix", device="reference", kv_dtype="float32")
    prompt = rerank_prompt(ours.tokenizer, "who?", "the sea")
    model = opened(path, embedding=True, pooling_type=RANK, type_k=0, type_v=0)
    batch = llama_cpp.llama_batch_init(len(prompt), 0, 1)
    batch.n_tokens = len(prompt)
    for row, token in enumerate(prompt):
        batch.token[row], batch.pos[row], batch.logits[row] = token, row, True
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
    assert llama_cpp.llama_decode(model.ctx, batch) == 0
    yes, no = llama_cpp.llama_get_embeddings_seq(model.ctx, 0)[:2]
    llama_cpp.llama_batch_free(batch)
    assert yes + no == pytest.approx(1)
    assert ours.rerank("who?", ["the sea"]) == pytest.approx([yes], abs=1e-4)
