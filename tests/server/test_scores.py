"""Embeddings, rerank, score, classify over HTTP: the values are the library's own."""

import base64
import socket
from itertools import product
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from forge import LLM
from forge.engine import tasks
from forge.server.app import create_app
from forge.server.messages import Ready
from forge.server.metrics import Metrics
from forge.server.settings import Settings
from forge.tokenizer.byte_tokenizer import ByteTokenizer
from tests.server.conftest import Server, request_bytes
from tests.small_models import write_small_qwen3
from tests.waiting import until

pytest.importorskip("forge.engine.tasks", reason="this engine answers no one-shot questions")
TEXTS = ["a fox in the snow", "a lantern", "x"]


@pytest.fixture(scope="module")
def library(model_path) -> LLM:
    return LLM(model_path, kv="prefix")


def test_embeddings_are_the_librarys_as_numbers_and_as_bytes(client, library):
    expected = library.embed(TEXTS)
    found = client.embeddings.create(model="small", input=TEXTS, encoding_format="float")
    assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
    default = client.embeddings.create(model="small", input=TEXTS)  # the client asks for base64 by itself
    assert np.array_equal(np.array([one.embedding for one in default.data], np.float32), expected)
    assert found.usage.prompt_tokens == sum(len(library.tokenizer.encode(text)) for text in TEXTS)


def test_embeddings_are_pooled_as_the_models_file_says(tmp_path):
    path = write_small_qwen3(tmp_path / "mean.gguf", metadata={"qwen3.pooling_type": 1})
    expected = LLM(str(path), kv="prefix").embed(TEXTS, pooling="mean")
    one = Server("-m", str(path))
    _, found = one.request("/v1/embeddings", {"input": TEXTS})
    assert one.stop() == 0
    assert np.array_equal(np.array([each["embedding"] for each in found["data"]], np.float32), expected)


def test_a_classification_head_reranks_and_classifies(reranker):
    path, one = reranker
    llm = LLM(str(path), kv="prefix")
    _, ranked = one.request("/v1/rerank", {"query": "who?", "documents": TEXTS})
    _, classes = one.request("/classify", {"input": TEXTS})
    status, refused = one.request("/classify", {"input": TEXTS, "labels": ["a", "b"]})
    scores = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert [scores[index] for index in range(len(TEXTS))] == pytest.approx(llm.rerank("who?", TEXTS))
    expected = [list(each.probabilities.values()) for each in llm.classify(TEXTS)]
    assert [each["probs"] for each in classes["data"]] == expected
    assert status == 400 and "labels of its own: yes, no" in refused["error"]["message"]


def test_a_client_that_leaves_takes_its_questions_along(server):
    """They would take a while: two thousand of them, of 65,000 tokens."""
    texts = [f"text {number} " + "x" * 500 for number in range(128)]
    labels = ["".join(pair) for pair in product("abcd", "efgh")]

    def computed() -> float:
        return server.metric("vllm:iteration_tokens_total_sum")

    before = computed()
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.sendall(request_bytes("/classify", {"input": texts, "labels": labels}))
    assert until(lambda: server.metric("vllm:num_requests_waiting") > 500)
    raw.close()
    assert until(server.is_idle)
    assert computed() - before < 40_000, "the engine went on for a client that had left"


def test_base64_is_little_endian_float32(server, library):
    _, found = server.request("/v1/embeddings", {"input": "x", "encoding_format": "base64"})
    raw = base64.b64decode(found["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), library.embed("x")[0])


def test_an_embedding_of_more_dimensions_than_there_are_is_refused(client):
    with pytest.raises(openai.BadRequestError) as found:
        client.embeddings.create(model="small", input="x", dimensions=7000)
    assert found.value.param == "dimensions"


def test_scores_are_log_probabilities(server, library):
    _, found = server.request("/v1/score", {"text_1": "a fox", "text_2": [" runs", " sleeps"]})
    expected = library.score([("a fox", " runs"), ("a fox", " sleeps")])
    assert [one["score"] for one in found["data"]] == pytest.approx([one.total for one in expected], abs=1e-12)
    assert server.request("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})[0] == 400


def test_classification_gives_each_label_its_share(server, library):
    labels = ["a", "bc", "d"]
    _, found = server.request("/classify", {"input": TEXTS, "labels": labels})
    expected = library.classify(TEXTS, labels)
    for one, other in zip(found["data"], expected, strict=True):
        assert one["label"] == other.label and one["probs"] == pytest.approx(list(other.probabilities.values()))
    assert server.request("/classify", {"input": "x", "labels": ["a", "a"]})[0] == 400
    assert server.request("/classify", {"input": "x", "labels": ["a"]})[0] == 400


def test_reranking_needs_a_model_that_has_yes_and_no(server):
    status, found = server.request("/v1/rerank", {"query": "q", "documents": ["a"]})
    assert status == 400 and "'yes'" in found["error"]["message"]


@pytest.fixture
def no_engine() -> TestClient:
    """The application on a tokenizer of bytes, without an engine behind it."""
    sampling, labels = {}, ("yes", "no")
    facts = ("small", "prefix", "cpu", "", 64, 256, 0.0, "mean", sampling, labels, 40, 16, ByteTokenizer, None)
    client = SimpleNamespace(metrics=Metrics(Ready(*facts)), num_unfinished=0, dead=False)
    return TestClient(create_app(client, Ready(*facts), Settings()), base_url="http://localhost")


def test_reranking_encodes_no_document_behind_one_that_is_too_long(no_engine, monkeypatch):
    encoded = []
    monkeypatch.setattr(tasks, "rerank_prompt", lambda tokenizer, query, document: encoded.append(document) or [1] * 65)
    answer = no_engine.post("/v1/rerank", json={"query": "q", "documents": ["a", "b", "c"]})
    assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]["message"]
    assert encoded == ["a"]
    answer = no_engine.post("/v1/rerank", json={"query": "q" * 60_000, "documents": ["a", "b", "c"]})
    assert answer.status_code == 400 and encoded == ["a"], "so many characters cannot be 64 tokens"


def test_labels_times_inputs_are_counted_before_requests_are_made_of_them(no_engine, monkeypatch):
    def make(prompts, labels, names):
        raise AssertionError("requests were made")

    monkeypatch.setattr(tasks, "classify", make)
    no_engine.app.state.service.ready = no_engine.app.state.service.ready._replace(labels=())
    body = {"input": ["x"] * 128, "labels": [f"label {number}" for number in range(100)]}
    answer = no_engine.post("/classify", json=body)
    assert answer.status_code == 400 and "12800 answers at once" in answer.json()["error"]["message"]


def test_what_is_too_long_or_empty_is_refused(server):
    for body in ({"input": []}, {"input": [""]}, {"input": "x" * 5000}, {"input": ["x"] * 500}, {"input": [10**7]}):
        status, found = server.request("/v1/embeddings", body)
        assert status == 400 and found["error"]["param"] == "input"


def test_questions_and_generations_share_the_engine(server, library):
    import threading

    answers = []
    asking = [
        threading.Thread(
            target=lambda: answers.append(server.request("/v1/embeddings", {"input": "x", "encoding_format": "float"}))
        )
        for _ in range(8)
    ]
    for one in asking:
        one.start()
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    assert server.request("/v1/completions", body)[0] == 200
    for one in asking:
        one.join()
    assert {status for status, _ in answers} == {200}
    expected = library.embed("x")[0]
    assert all(np.array_equal(np.float32(found["data"][0]["embedding"]), expected) for _, found in answers)
