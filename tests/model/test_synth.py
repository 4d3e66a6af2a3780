"""Files of random weights: the shape that was asked for, types as llama.cpp chooses them, bytes as the seed has it."""

import os
from collections import Counter

import numpy as np
import pytest

from forge.backends.devices import create_backend
from forge.errors import UsageError
from forge.gguf import GGMLType, GGUFFile
from forge.gguf.block_formats import dequantize
from forge.model import synth as synth_module
from forge.model.config import expected_tensors
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import one_prefill
from forge.model.synth import (
    FULL_VOCABULARY,
    MIN_VOCABULARY,
    QUANTIZATIONS,
    SHAPES,
    SynthError,
    find_quantization,
    random_blocks,
    synth,
    synthetic_config,
    synthetic_vocabulary,
    tensor_types,
)
from forge.tokenizer import Tokenizer, TokenType, spec_from_gguf
from tests.slow import mostly_slow


def small(**sizes):
    given = {
        "num_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
    }
    return synthetic_config(**given | sizes)


# --- shapes and types


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("qwen3-0.6b", 596_049_920), ("qwen3-1.7b", 1_720_574_976), ("qwen3-4b", 4_022_468_096)],
)
def test_the_shapes_have_as_many_parameters_as_the_published_models(shape, parameters):
    assert sum(int(np.prod(sides)) for sides in expected_tensors(SHAPES[shape]).values()) == parameters


def test_a_q4_k_m_file_of_the_0_6b_shape_has_the_types_of_llama_cpp():
    types = tensor_types(SHAPES["qwen3-0.6b"], QUANTIZATIONS["Q4_K_M"])

    more_bits = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    for kind in ("attn_v", "ffn_down"):
        assert {layer for layer in range(28) if types[f"blk.{layer}.{kind}.weight"] == GGMLType.Q6_K} == more_bits
    assert types["token_embd.weight"] == GGMLType.Q6_K
    assert Counter(types.values()) == {GGMLType.F32: 113, GGMLType.Q4_K: 168, GGMLType.Q6_K: 29}


@pytest.mark.parametrize("base", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_S", "Q5_K_S", "Q6_K"])
def test_the_output_matrix_of_a_quantized_file_is_q6_k(base):
    tied = tensor_types(small(), QUANTIZATIONS[base])
    untied = tensor_types(small(tie_word_embeddings=False), QUANTIZATIONS[base])

    assert tied["token_embd.weight"] == untied["output.weight"] == GGMLType.Q6_K
    assert untied["token_embd.weight"] == QUANTIZATIONS[base].base


@pytest.mark.parametrize("base", ["F32", "F16", "BF16", "Q8_0"])
def test_every_matrix_of_a_plain_file_has_one_type(base):
    types = tensor_types(small(tie_word_embeddings=False), QUANTIZATIONS[base])
    assert {types[name] for name, sides in expected_tensors(small()).items() if len(sides) == 2} == {GGMLType[base]}


def test_pure_means_no_mixture():
    types = tensor_types(small(), QUANTIZATIONS["Q4_K_M"], pure=True)
    assert set(types.values()) == {GGMLType.F32, GGMLType.Q4_K}


@pytest.mark.parametrize(
    ("base", "hidden", "expected"),
    [
        ("Q4_K_M", 288, "Q5_0"),
        ("Q5_K_M", 288, "Q5_1"),
        ("Q6_K", 288, "Q8_0"),
        ("Q4_K_M", 72, "F16"),
        ("Q4_0", 72, "F16"),
    ],
)
def test_rows_that_are_not_whole_blocks_fall_back_as_in_llama_cpp(base, hidden, expected):
    types = tensor_types(small(hidden_size=hidden), QUANTIZATIONS[base])
    assert types["blk.0.attn_q.weight"] == GGMLType[expected]


@pytest.mark.parametrize(("name", "known"), [("q8_0", "Q8_0"), ("Q4_k", "Q4_K_M"), ("bf16", "BF16")])
def test_types_are_known_in_any_case(name, known):
    assert find_quantization(name) is QUANTIZATIONS[known]


def test_an_unknown_type_lists_the_known_ones():
    with pytest.raises(UsageError, match="unknown type 'Q3_K'; there are F32, F16, BF16, Q8_0"):
        find_quantization("Q3_K")


@pytest.mark.parametrize(
    "sizes",
    [{"num_layers": 0}, {"hidden_size": -1}, {"head_dim": 7}, {"num_attention_heads": 3}, {"intermediate_size": 2**40}],
)
def test_a_shape_that_no_model_can_have_is_refused(sizes):
    with pytest.raises(UsageError):
        small(**sizes)


# --- the file


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("quantization", mostly_slow(QUANTIZATIONS, quick=["F16", "Q8_0", "Q4_K_M"]))
def test_every_type_makes_a_file_that_loads_and_computes(tmp_path, quantization, tie):
    path = tmp_path / "m.gguf"
    written = synth(path, small(tie_word_embeddings=tie, vocab_size=512), quantization)

    with open_weights(path) as weights:
        model = load_qwen3(weights, create_backend("reference"))
        assert written.bytes == path.stat().st_size
        assert sum(written.type_bytes.values()) == weights.nbytes
    logits = one_prefill(model, [1, 2, 3, 4, 5])
    assert np.isfinite(logits).all()
    assert 2 < logits.std() < 8
    assert len(set(logits.argmax(axis=1))) > 1


@pytest.mark.parametrize("ggml_type", sorted({kind.base for kind in QUANTIZATIONS.values()}))
def test_weights_have_mean_zero_and_the_deviation_that_was_asked_for(ggml_type):
    blocks = random_blocks(ggml_type, 8192, 0.03, np.random.default_rng(0))
    elements = {GGMLType.F32: 1, GGMLType.F16: 1, GGMLType.BF16: 1}.get(ggml_type) or (
        256 if ggml_type in (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K) else 32
    )
    values = dequantize(ggml_type, blocks.reshape(-1), (8192, elements))

    assert abs(values.mean()) < 0.03 * 0.04
    assert 0.9 < values.std() / 0.03 < 1.1


@pytest.mark.parametrize("quantization", mostly_slow(["F16", "Q8_0", "Q4_K_M"], quick=["Q4_K_M"]))
def test_the_bytes_depend_on_the_seed_and_on_nothing_else(tmp_path, quantization):
    files = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synth(tmp_path / name, small(), quantization, seed=seed)
        files[name] = (tmp_path / name).read_bytes()

    assert files["a"] == files["b"]
    assert files["a"] != files["c"]


@pytest.mark.parametrize("ggml_type", [GGMLType.Q8_0, GGMLType.BF16, GGMLType.Q4_K])
def test_a_unit_of_weights_is_the_same_whatever_comes_before_it(monkeypatch, ggml_type):
    monkeypatch.setattr(synth_module, "UNIT_ELEMENTS", 4096)
    whole = list(synth_module._weights("blk.0.attn_q.weight", ggml_type, (64, 256), 3))
    half = list(synth_module._weights("blk.0.attn_q.weight", ggml_type, (32, 256), 3))

    assert len(whole) == 4
    assert np.array_equal(np.concatenate(whole[:2]), np.concatenate(half))
    assert not np.array_equal(whole[0], whole[1])


def test_no_piece_is_larger_than_a_unit():
    shape = (FULL_VOCABULARY, 1024)
    for ggml_type in (GGMLType.F16, GGMLType.Q8_0):
        pieces = synth_module._weights("token_embd.weight", ggml_type, shape, 0)
        assert next(pieces).nbytes <= 2 * synth_module.UNIT_ELEMENTS


def test_progress_rises_to_the_bytes_of_all_tensors(tmp_path):
    calls = []
    written = synth(tmp_path / "m.gguf", small(), on_progress=lambda *call: calls.append(call))

    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert {total for _, total in calls} == {done[-1]} == {sum(written.type_bytes.values())}


# --- refused


def test_an_existing_file_is_kept_unless_forced(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(SynthError, match="exists already; --force replaces it"):
        synth(path, small())
    assert path.read_bytes() == b"mine"

    synth(path, small(), force=True)
    assert GGUFFile.open(path).metadata["general.architecture"] == "qwen3"


def test_an_interrupted_file_leaves_nothing_behind(tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth(tmp_path / "m.gguf", small(), on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_and_a_folder_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder; name the file to write"):
        synth(tmp_path, small())
    with pytest.raises(UsageError, match="no such folder"):
        synth(tmp_path / "no" / "m.gguf", small())


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synth_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(SynthError, match=r"needs 0\.0 GB, and the disk has 0\.0 GB left"):
        synth(tmp_path / "m.gguf", small())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_one_line(tmp_path):
    (tmp_path / "m.gguf.unfinished").symlink_to("/dev/full")
    with pytest.raises(SynthError, match="cannot be written: No space left on device"):
        synth(tmp_path / "m.gguf", small())
    assert list(tmp_path.iterdir()) == []


# --- the vocabulary


@pytest.fixture(scope="module")
def full_spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "full.gguf"
    synth(path, small(hidden_size=32, intermediate_size=32, vocab_size=FULL_VOCABULARY), "Q4_0")
    with GGUFFile.open(path) as file:
        return spec_from_gguf(file)


@pytest.mark.slow
def test_at_full_size_qwen_s_own_tokens_have_qwen_s_ids(full_spec):
    ids = {"!": 0, "<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645, "<|image_pad|>": 151_655}
    ids |= {"<tool_call>": 151_657, "<think>": 151_667, "</think>": 151_668, "[PAD151669]": 151_669}

    assert {token: full_spec.tokens.index(token) for token in ids} == ids
    assert len(full_spec.tokens) == FULL_VOCABULARY
    assert len(full_spec.merges) == 151_387


def test_it_is_sound_byte_level_bpe(full_spec):
    full_spec.check_vocabulary()
    assert full_spec.eos_token_ids == {151_643, 151_645}
    assert [full_spec.token_types[i] for i in (151_645, 151_667, 151_935)] == [
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
        TokenType.UNUSED,
    ]


@pytest.mark.slow
def test_text_survives_it_and_every_encoder_agrees(full_spec):
    texts = [
        "Once upon a time, there was a fox.",
        "naïve 漢字 😀\n\n\tdef f(x):  return 42",
        "<|im_start|>user\nHi<|im_end|>",
    ]
    encoded = []
    for prefer in ("fast", "reference", "auto"):
        tokenizer = Tokenizer(full_spec, prefer=prefer)
        encoded.append([tokenizer.encode(text, allow_special=True) for text in texts])
        assert [tokenizer.decode(ids) for ids in encoded[-1]] == texts

    assert encoded[0] == encoded[1] == encoded[2]
    assert len(encoded[0][0]) < len(texts[0])  # merges did apply
    assert encoded[0][2][0] == 151_644


@pytest.mark.parametrize("size", [MIN_VOCABULARY, 284, 1000, 20_000])
def test_any_size_is_exact_and_sound(size):
    vocabulary = synthetic_vocabulary(size)
    assert len(vocabulary.tokens) == len(vocabulary.token_types) == len(set(vocabulary.tokens)) == size
    assert len(vocabulary.merges) == size - 26 - 256


def test_the_smallest_vocabulary_makes_a_file_that_loads(tmp_path):
    synth(tmp_path / "m.gguf", small(vocab_size=MIN_VOCABULARY))
    with open_weights(tmp_path / "m.gguf") as weights:
        assert Tokenizer(weights.tokenizer_spec()).encode("abc") == [64, 65, 66]


def test_a_vocabulary_without_room_for_qwen_s_tokens_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a vocabulary of 282 is too small"):
        synth(tmp_path / "m.gguf", small(vocab_size=282))
    assert list(tmp_path.iterdir()) == []
