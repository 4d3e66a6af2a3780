"""A GGUF file is a Qwen3 model only if its hyper-parameters make sense and its tensors are exactly the model's."""

import gguf
import numpy as np
import pytest

from forge.gguf import SUPPORTED_TYPES, GGMLType, GGUFError, GGUFFile, GGUFValueType, row_nbytes
from forge.gguf.writer import TypedValue, write_gguf
from forge.model.config import Qwen3Config, check_tensors, expected_tensors
from tests.gguf.raw_file import checked
from tests.small_models import (
    MERGES,
    array_tensor,
    byte_alphabet,
    small_config,
    small_metadata,
    small_tensors,
    write_small_qwen3,
)

CONFIG = small_config()
WITHOUT = object()


@pytest.fixture
def write(tmp_path):
    """write(metadata changes, tensors) -> path; a change to WITHOUT takes the entry out."""

    def write_file(changes=None, tensors=None):
        entries = small_metadata(CONFIG) | (changes or {})
        entries = {key: value for key, value in entries.items() if value is not WITHOUT}
        tensors = small_tensors(CONFIG, GGMLType.F32) if tensors is None else tensors
        return write_gguf(tmp_path / "model.gguf", entries, tensors)

    return write_file


def load(path) -> Qwen3Config:
    with GGUFFile.open(path) as file:
        config = Qwen3Config.from_gguf(file)
        check_tensors(file, config)
        return config


def refusal(path) -> GGUFError:
    with pytest.raises(GGUFError) as caught:
        load(path)
    return checked(caught.value, path)


def assert_refused_at(path, key: str, words: str) -> None:
    """Refused with the key, the byte of its value, and `words`."""
    error = refusal(path)
    with GGUFFile.open(path) as file:
        assert error.field == f"metadata '{key}'"
        assert error.offset == (file.fields[key].offset if key in file.fields else None)
    assert words in error.problem


# --- what runs


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("tensor_type", sorted(SUPPORTED_TYPES), ids=lambda t: t.name)
def test_small_models_of_every_supported_type_are_accepted(tmp_path, tensor_type, tie):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 256, "tie": tie}
    path = write_small_qwen3(tmp_path / "model.gguf", tensor_type=tensor_type, **sizes)
    config = load(path)
    assert config == small_config(**sizes)
    with GGUFFile.open(path) as file:
        assert file.tensors["blk.1.ffn_down.weight"].ggml_type == tensor_type
        for tensor in file.tensors.values():
            values = tensor.dequantize()
            assert np.isfinite(values).all() and 0 < values.std() < 0.2


def test_small_models_are_the_same_for_the_same_arguments(tmp_path):
    first, again, other = (
        write_small_qwen3(tmp_path / f"{name}.gguf", tensor_type="Q8_0", seed=seed).read_bytes()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again != other


def test_small_models_have_a_byte_level_tokenizer(tmp_path):
    with GGUFFile.open(write_small_qwen3(tmp_path / "model.gguf", vocab_size=300)) as file:
        tokens = file.string_array("tokenizer.ggml.tokens")
        types = file.int_array("tokenizer.ggml.token_type")
        assert len(tokens) == len(types) == len(set(tokens)) == 300
        assert tokens[:256] == byte_alphabet()
        assert len(set(byte_alphabet())) == 256
        assert byte_alphabet()[ord(" ")] == "Ġ" and byte_alphabet()[ord("a")] == "a"
        for merge in MERGES:
            left, right = merge.split(" ")
            assert {left, right, left + right} <= set(tokens)
        assert tokens[file.require("tokenizer.ggml.eos_token_id", int)] == "<|im_end|>"
        assert file.require("tokenizer.ggml.add_bos_token", bool) is False
    with pytest.raises(ValueError, match="too small"):
        write_small_qwen3(tmp_path / "model.gguf", vocab_size=100)


def test_expected_tensors_are_those_that_the_gguf_package_knows_for_qwen3():
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN3]
    names = {gguf.TENSOR_NAMES[tensor] for tensor in known if tensor != gguf.MODEL_TENSOR.ROPE_FREQS}
    config = small_config(num_layers=1, tie=False)
    ours = {name.removesuffix(".weight").replace("blk.0.", "blk.{bid}.") for name in expected_tensors(config)}
    assert ours == names


def test_absent_hyper_parameters_have_llama_cpps_defaults(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    config = small_config(**sizes)
    names = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    dropped = {f"qwen3.{name}" for name in names}
    entries = {key: value for key, value in small_metadata(config).items() if key not in dropped}
    path = write_gguf(tmp_path / "model.gguf", entries, small_tensors(config, GGMLType.F32))
    loaded = load(path)
    assert (loaded.num_key_value_heads, loaded.head_dim, loaded.rope_theta) == (4, 16, 10_000.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"qwen3.rope.scaling.type": "none"},
        {"qwen3.rope.scaling.type": "linear"},
        {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 1.0},
        {"qwen3.rope.scaling.factor": 0.0},
        {"qwen3.rope.dimension_count": 32},
        {"qwen3.expert_count": 0},
        {"qwen3.vocab_size": 288},
        {"split.count": TypedValue(1, GGUFValueType.UINT16)},
        {"general.some.unknown": "entry"},
    ],
    ids=str,
)
def test_entries_that_change_nothing_are_accepted(write, changes):
    assert load(write(changes)) == load(write())


# --- hyper-parameters that are refused


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "\x1b[31m"])
def test_another_architecture_is_refused_by_name(write, architecture):
    path = write({"general.architecture": architecture})
    assert_refused_at(path, "general.architecture", f"this file holds {architecture!r}; forge runs 'qwen3'")


@pytest.mark.parametrize(
    "name",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_hyper_parameter_is_named(write, name):
    assert_refused_at(write({f"qwen3.{name}": WITHOUT}), f"qwen3.{name}", "does not have this entry")


def test_missing_architecture_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    assert_refused_at(tmp_path / "model.gguf", "general.architecture", "does not have this entry")


def test_missing_vocabulary_is_named(write):
    assert_refused_at(write({"tokenizer.ggml.tokens": WITHOUT}), "tokenizer.ggml.tokens", "does not have this entry")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_count", 0, "0 is not from 1"),
        ("block_count", 2**31, "2147483648 layers cannot be in a file of 24 tensors"),
        ("block_count", 25, "25 layers cannot be in a file of 24 tensors"),
        ("block_count", -1, "-1 is not from 1"),
        ("block_count", 2.0, "must be an integer, not float32"),
        ("block_count", "2", "must be an integer, not string"),
        ("block_count", True, "must be an integer, not bool"),
        ("block_count", 2**63, "is not from 1"),
        ("embedding_length", 0, "0 is not from 1"),
        ("embedding_length", 2**32 - 1, "is not from 1 to 1048576"),
        ("feed_forward_length", [96, 96], "whose layers differ"),
        ("context_length", 0, "0 is not from 1"),
        ("context_length", 2**31, "is not from 1 to 2147483647"),
        ("attention.head_count", 0, "0 is not from 1"),
        ("attention.head_count", [4, 4], "whose layers differ"),
        ("attention.head_count_kv", 3, "3 key and value heads cannot be shared by 4 query heads"),
        ("attention.head_count_kv", 8, "8 key and value heads cannot be shared by 4 query heads"),
        ("attention.head_count_kv", 0, "0 is not from 1"),
        ("attention.key_length", 31, "31 is odd"),
        ("attention.key_length", 0, "0 is not from 1"),
        ("attention.value_length", 16, "16 is not the 32 of qwen3.attention.key_length"),
        ("rope.dimension_count", 16, "16 is not the 32 of qwen3.attention.key_length"),
        ("attention.layer_norm_rms_epsilon", 0.0, "0.0 is not between 0 and 1"),
        ("attention.layer_norm_rms_epsilon", -1e-6, "is not between 0 and 1"),
        ("attention.layer_norm_rms_epsilon", 1, "1.0 is not between 0 and 1"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "must be a finite number"),
        ("rope.freq_base", 0.5, "0.5 is not at least 1"),
        ("rope.freq_base", float("inf"), "must be a finite number"),
        ("rope.freq_base", "1e6", "must be a number, not string"),
        ("rope.scaling.type", "longrope", "RoPE scaling 'longrope' is not supported"),
        ("rope.scaling.type", "longrope", "RoPE scaling 'longrope' is not supported"),
        ("rope.scaling.factor", 4.0, "RoPE scaling by 4.0 is not supported"),
        ("rope.scale_linear", 2.0, "RoPE scaling by 2.0 is not supported"),
        ("expert_count", 128, "qwen3 has no experts"),
        ("attention.causal", False, "causal attention only"),
        ("vocab_size", 289, "289 is not the number of tokens in tokenizer.ggml.tokens, 288"),
    ],
)
def test_senseless_or_unsupported_hyper_parameters_are_refused(write, name, value, words):
    assert_refused_at(write({f"qwen3.{name}": value}), f"qwen3.{name}", words)


def test_heads_that_do_not_divide_the_width_need_a_key_length(write):
    path = write({"qwen3.attention.key_length": WITHOUT, "qwen3.attention.head_count": 6})
    assert_refused_at(path, "qwen3.attention.head_count", "6 heads do not divide the width 64")


def test_split_file_is_refused_by_name(write):
    path = write({"split.count": TypedValue(3, GGUFValueType.UINT16), "split.no": 0})
    assert_refused_at(path, "split.count", "split into 3 files")


def test_vocabulary_of_another_type_is_refused(write):
    assert_refused_at(
        write({"tokenizer.ggml.tokens": [1, 2, 3]}), "tokenizer.ggml.tokens", "must be an array of strings"
    )


# --- tensors that are refused


@pytest.mark.parametrize("tie", [True, False])
def test_every_tensor_is_missed_by_name(tmp_path, tie):
    config = small_config(num_layers=1, tie=tie)
    tensors = small_tensors(config, GGMLType.F32)
    for left_out in expected_tensors(config):
        if left_out == "output.weight":  # its absence means tied embeddings
            continue
        rest = [tensor for tensor in tensors if tensor.name != left_out]
        path = write_gguf(tmp_path / "model.gguf", small_metadata(config), rest)
        error = refusal(path)
        assert (error.field, error.offset) == (f"tensor '{left_out}'", None)
        assert "the file does not have it" in error.problem


SHAPES = {
    "token_embd.weight": ("tokenizer.ggml.tokens", "qwen3.embedding_length"),
    "blk.1.attn_norm.weight": ("qwen3.embedding_length",),
    "blk.1.attn_q.weight": ("qwen3.attention.head_count times", "qwen3.embedding_length"),
    "blk.1.attn_k.weight": ("qwen3.attention.head_count_kv times", "qwen3.embedding_length"),
    "blk.1.attn_v.weight": ("qwen3.attention.head_count_kv times", "qwen3.embedding_length"),
    "blk.1.attn_q_norm.weight": ("qwen3.attention.key_length",),
    "blk.1.attn_k_norm.weight": ("qwen3.attention.key_length",),
    "blk.1.attn_output.weight": ("qwen3.embedding_length", "qwen3.attention.head_count times"),
    "blk.1.ffn_norm.weight": ("qwen3.embedding_length",),
    "blk.1.ffn_gate.weight": ("qwen3.feed_forward_length", "qwen3.embedding_length"),
    "blk.1.ffn_up.weight": ("qwen3.feed_forward_length", "qwen3.embedding_length"),
    "blk.1.ffn_down.weight": ("qwen3.embedding_length", "qwen3.feed_forward_length"),
    "output_norm.weight": ("qwen3.embedding_length",),
}


@pytest.mark.parametrize(
    ("name", "axis", "reason"), [(name, axis, why) for name, sides in SHAPES.items() for axis, why in enumerate(sides)]
)
@pytest.mark.parametrize("change", [-32, 32])
def test_shape_that_contradicts_a_hyper_parameter_names_both(write, name, axis, reason, change):
    tensors = small_tensors(CONFIG, GGMLType.F32)
    shape = list(expected_tensors(CONFIG)[name])
    shape[axis] = max(1, shape[axis] + change)
    altered = array_tensor(name, GGMLType.F32, np.ones(shape, np.float32))
    path = write(tensors=[altered if tensor.name == name else tensor for tensor in tensors])
    error = refusal(path)
    with GGUFFile.open(path) as file:
        assert (error.field, error.offset) == (f"tensor '{name}' shape", file.tensors[name].entry_offset)
    assert f"{shape} has {shape[axis]} where" in error.problem
    assert reason in error.problem
    assert f"says {expected_tensors(CONFIG)[name][axis]}" in error.problem


def test_matrix_with_another_number_of_axes_is_refused(write):
    tensors = small_tensors(CONFIG, GGMLType.F32)
    tensors[2] = array_tensor("blk.0.attn_q.weight", GGMLType.F32, np.ones((2, 64, 64), np.float32))
    assert "[2, 64, 64] has 3 dimensions where the model has 2" in refusal(write(tensors=tensors)).problem


KNOWN_TO_GGUF = {GGMLType(known) for known in gguf.GGMLQuantizationType}
"""Older releases of the package, which writes the files here, know fewer types."""


@pytest.mark.parametrize("ggml_type", sorted(KNOWN_TO_GGUF - SUPPORTED_TYPES), ids=lambda t: t.name)
def test_unsupported_tensor_type_is_refused_by_name(tmp_path, ggml_type):
    config = small_config(hidden_size=256, num_layers=1)
    tensors = small_tensors(config, GGMLType.F32)
    shape = expected_tensors(config)["blk.0.ffn_up.weight"]
    blocks = np.zeros((shape[0], row_nbytes(ggml_type, shape[1])), np.uint8)
    tensors = [
        array_tensor(tensor.name, ggml_type, blocks) if tensor.name == "blk.0.ffn_up.weight" else tensor
        for tensor in tensors
    ]
    error = refusal(write_gguf(tmp_path / "model.gguf", small_metadata(config), tensors))
    assert error.field == "tensor 'blk.0.ffn_up.weight' type"
    assert f"forge does not compute with {ggml_type.name}" in error.problem
    assert "Q4_K" in error.problem


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.bias",
        "blk.1.ffn_down.bias",
        "rope_freqs.weight",
        "blk.2.attn_q.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.00.attn_q.weight",
        "cls.weight",
        "unheard.of",
    ],
)
def test_tensor_that_the_model_does_not_have_is_refused_by_name(write, name):
    extra = array_tensor(name, GGMLType.F32, np.ones(64, np.float32))
    path = write(tensors=[*small_tensors(CONFIG, GGMLType.F32), extra])
    error = refusal(path)
    assert error.field == f"tensor '{name}'"
    with GGUFFile.open(path) as file:
        assert error.offset == file.tensors[name].entry_offset
    assert "no such tensor" in error.problem
