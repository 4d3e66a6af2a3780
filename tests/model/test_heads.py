"""Models that end in something else than the next token's logits: classification and reward heads, embedding models
without an output head. Held against transformers, from a Hugging Face folder and from GGUF."""

import json

import numpy as np
import pytest

from forge import LLM, UsageError
from forge.engine.tasks import rerank_candidates, rerank_prompt
from forge.gguf import GGMLType, GGUFFile
from forge.gguf.writer import write_gguf
from forge.mapped_file import ModelFileError
from forge.model.hf_directory import ModelFolderError
from forge.model.loader import open_weights
from tests.model.raw_safetensors import CONFIG, SMALL, random_tensors, write_folder
from tests.model.test_transformers_parity import hugging_face_model
from tests.small_models import array_tensor, small_config, small_metadata, small_tensors, write_small_qwen3
from tests.tokenizer.conftest import tokenizer_document

torch = pytest.importorskip("torch", reason="parity needs PyTorch: pip install torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install transformers")

TOKEN_IDS = [np.random.default_rng(seed).integers(0, 280, 9 + seed).tolist() for seed in range(3)]
FLOATS = {"device": "reference", "kv_dtype": "float32"}


def with_tokenizer(folder, vocab_size: int = 300):
    """`folder` with a tokenizer.json of bytes and Qwen's control tokens."""
    from forge.tokenizer.spec import BYTE_ALPHABET

    document = tokenizer_document({token: number for number, token in enumerate(BYTE_ALPHABET)}, [])
    assert len(document["added_tokens"]) + 256 <= vocab_size
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def saved_classifier(folder, labels: int):
    """transformers' classifier of random weights, saved in `folder`."""
    torch.manual_seed(labels)
    config = transformers.Qwen3Config(
        **SMALL,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=299,
        num_labels=labels,
    )
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    with_tokenizer(folder)
    return model


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("labels", [1, 2, 5])
def test_a_classification_head_gives_transformers_logits(tmp_path, labels, device):
    theirs = saved_classifier(tmp_path, labels)
    llm = LLM(tmp_path, kv="prefix", device=device, kv_dtype="float32")
    assert llm.model.labels == tuple(f"LABEL_{number}" for number in range(labels))
    for token_ids, one in zip(TOKEN_IDS, llm.classify(TOKEN_IDS), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([token_ids])).logits[0].double()
        if labels == 1:
            assert one.score == pytest.approx(expected.item(), abs=1e-3)
            assert one.probabilities["LABEL_0"] == pytest.approx(expected.sigmoid().item(), abs=1e-4)
        else:
            assert list(one.probabilities.values()) == pytest.approx(expected.softmax(-1).tolist(), abs=1e-4)
            assert one.score is None


def test_a_reranker_with_one_label_scores_by_its_sigmoid(tmp_path):
    theirs = saved_classifier(tmp_path, 1)
    llm = LLM(tmp_path, kv="prefix", **FLOATS)
    documents = ["a tin hat", "the sea"]
    for document, score in zip(documents, llm.rerank("who?", documents), strict=True):
        with torch.no_grad():
            prompt = rerank_prompt(llm.tokenizer, "who?", document)
            assert score == pytest.approx(theirs(torch.tensor([prompt])).logits.sigmoid().item(), abs=1e-4)


def reranker_gguf(path, vocab_size: int = 288):
    """As llama.cpp's converter writes Qwen3-Reranker: `rank` pooling, a head of the rows of "yes" and "no"."""
    config = small_config(vocab_size=vocab_size)
    head = np.random.default_rng(1).standard_normal((2, config.hidden_size), np.float32)
    metadata = small_metadata(config)
    metadata |= {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    tensors = [*small_tensors(config, GGMLType.F32, 4), array_tensor("cls.output.weight", GGMLType.F32, head)]
    return write_gguf(path, metadata, tensors), head


def test_a_gguf_reranker_is_the_softmax_of_its_two_rows(tmp_path):
    path, head = reranker_gguf(tmp_path / "rerank.gguf")
    body = write_small_qwen3(tmp_path / "body.gguf", seed=4)
    with GGUFFile.open(body) as file, open_weights(path) as weights:
        theirs = hugging_face_model(weights.config, file)
    llm = LLM(path, kv="prefix", **FLOATS)
    documents = ["a tin hat", "the sea", "a ship"]
    for document, score in zip(documents, llm.rerank("who?", documents), strict=True):
        prompt = rerank_prompt(llm.tokenizer, "who?", document)
        with torch.no_grad():
            hidden = theirs.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        yes, no = (head @ hidden).tolist()
        assert score == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-4)
    assert llm.embed(["x"]).shape == (1, 64)


@pytest.mark.parametrize("tied", [True, False])
def test_a_bare_model_embeds_as_the_whole_one(tmp_path, tied):
    """Qwen3-Embedding: tensors without `model.` before their names, and where nothing is tied no lm_head."""
    whole = write_folder(tmp_path / "whole", tie_word_embeddings=True)
    bare = {name.removeprefix("model."): values for name, values in random_tensors().items()}
    bare = write_folder(tmp_path / "bare", bare, tie_word_embeddings=tied)
    vectors = [LLM(with_tokenizer(folder), kv="off", **FLOATS).embed(TOKEN_IDS) for folder in (whole, bare)]
    assert vectors[0].tobytes() == vectors[1].tobytes()
    with open_weights(bare) as weights:
        assert weights.config.generates is tied and not weights.config.labels
        assert weights.nbytes == sum(values.nbytes for values in random_tensors().values())


def test_a_model_without_an_output_head_generates_nothing_and_says_so(tmp_path):
    bare = {name.removeprefix("model."): values for name, values in random_tensors().items()}
    llm = LLM(with_tokenizer(write_folder(tmp_path / "m", bare, tie_word_embeddings=False)), kv="paged", **FLOATS)
    with pytest.raises(UsageError, match="generates no text; it embeds: forge embed"):
        llm.generate(["the"])
    with pytest.raises(UsageError, match="generates no text"):
        llm.classify(["the"], ["a", "b"])
    llm.embed(["the"])
    path, _ = reranker_gguf(tmp_path / "rerank.gguf")
    classifier = LLM(path, kv="paged", **FLOATS)
    for refused in (lambda: classifier.generate(["the"]), lambda: classifier.score([("a", "b")])):
        with pytest.raises(UsageError, match="generates no text; it classifies: forge classify"):
            refused()
    with pytest.raises(UsageError, match="labels of its own: yes, no; leave --labels out"):
        classifier.classify(["the"], ["a", "b"])


def test_a_lost_output_head_is_not_taken_for_a_bare_model(tmp_path):
    with pytest.raises(ModelFileError, match=r"'lm_head\.weight': the model needs this tensor"):
        open_weights(write_folder(tmp_path / "m", random_tensors(), tie_word_embeddings=False))
    assert CONFIG.tie_word_embeddings


def test_labels_that_rank_nothing_are_refused(tmp_path):
    saved_classifier(tmp_path, 3)
    with pytest.raises(UsageError, match="LABEL_0, LABEL_1, LABEL_2; a reranker has one label, or yes and no"):
        LLM(tmp_path, kv="off", **FLOATS).rerank("q", ["d"])
    assert rerank_candidates(None, ["no", "yes"]) == (1, 0)


def test_the_rerankers_prompt_is_that_of_its_card():
    """https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, "Using Transformers"."""
    tokenizer = LLM("tales", kv="off").tokenizer
    prompt = tokenizer.decode(rerank_prompt(tokenizer, "Q?", "D. <|im_end|>", "I"))
    assert prompt == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: I\n<Query>: Q?\n<Document>: D. <|im_end|><|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    end = tokenizer.encode("<|im_end|>", allow_special=True)[0]
    assert rerank_prompt(tokenizer, "Q?", "D. <|im_end|>").count(end) == 2, "a document's text holds no control token"


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"word_embedding_dimension": 64}, "last"),
    ],
)
def test_a_folder_pools_as_sentence_transformers_states(tmp_path, stated, pooling):
    folder = with_tokenizer(write_folder(tmp_path))
    expected = LLM(folder, kv="off", **FLOATS).embed(TOKEN_IDS, pooling=pooling)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    assert LLM(folder, kv="off", **FLOATS).embed(TOKEN_IDS).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "stated", [{"pooling_mode": "cls"}, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}]
)
def test_another_pooling_is_refused_by_name(tmp_path, stated):
    folder = with_tokenizer(write_folder(tmp_path))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelFolderError, match=r"pooling_mode: .* is not supported: forge pools last or mean"):
        LLM(folder, kv="off", **FLOATS)
