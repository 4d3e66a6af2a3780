"""What `write_gguf` writes reads back the same, with the types that were meant, and only whole files appear."""

import numpy as np
import pytest

from forge.gguf import GGMLType, GGUFFile, GGUFValueType, dequantize
from forge.gguf.writer import NewTensor, TypedValue, encode, write_gguf
from tests.gguf.raw_file import opened
from tests.small_models import array_tensor

ARCHITECTURE = {"general.architecture": "qwen3"}


def test_values_get_the_narrowest_usual_type(tmp_path):
    entries = {
        "a": 1,
        "b": -1,
        "c": 2**32,
        "d": -(2**31) - 1,
        "e": 0.5,
        "f": False,
        "g": "x",
        "h": [1],
        "i": np.ones(2),
    }
    file = opened(write_gguf(tmp_path / "a.gguf", ARCHITECTURE | entries, []))
    assert {key: entry.type_name for key, entry in file.fields.items()} == {
        "general.architecture": "string",
        "a": "uint32",
        "b": "int32",
        "c": "uint64",
        "d": "int64",
        "e": "float32",
        "f": "bool",
        "g": "string",
        "h": "array of int32",
        "i": "array of float32",
    }


def test_a_typed_value_is_written_as_it_says(tmp_path):
    entries = {
        "a": TypedValue(1, GGUFValueType.UINT16),
        "b": TypedValue(1.0, GGUFValueType.FLOAT64),
        "c": TypedValue([1, 2], GGUFValueType.ARRAY, GGUFValueType.UINT8),
    }
    file = opened(write_gguf(tmp_path / "a.gguf", ARCHITECTURE | entries, []))
    assert [file.fields[key].type_name for key in "abc"] == ["uint16", "float64", "array of uint8"]


def test_tensors_are_quantized_or_taken_raw(tmp_path):
    values = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    blocks = np.random.default_rng(1).integers(0, 255, (3, 2 * 144), dtype=np.uint8)
    tensors = [
        array_tensor("f32", GGMLType.F32, values),
        array_tensor("f16", GGMLType.F16, values),
        array_tensor("bf16", GGMLType.BF16, values),
        array_tensor("q8_0", GGMLType.Q8_0, values),
        array_tensor("q4_k", GGMLType.Q4_K, blocks),
        NewTensor("later", GGMLType.Q8_0, (4, 64), lambda: (encode(GGMLType.Q8_0, row) for row in values)),
    ]
    with GGUFFile.open(write_gguf(tmp_path / "a.gguf", ARCHITECTURE, tensors)) as file:
        assert [tensor.ggml_type for tensor in file.tensors.values()] == [
            GGMLType.F32,
            GGMLType.F16,
            GGMLType.BF16,
            GGMLType.Q8_0,
            GGMLType.Q4_K,
            GGMLType.Q8_0,
        ]
        np.testing.assert_array_equal(file.tensors["f32"].dequantize(), values)
        np.testing.assert_array_equal(file.tensors["f16"].dequantize(), values.astype(np.float16))
        q8_0 = dequantize(GGMLType.Q8_0, encode(GGMLType.Q8_0, values).reshape(-1), (4, 64))
        np.testing.assert_array_equal(file.tensors["q8_0"].dequantize(), q8_0)
        np.testing.assert_array_equal(file.tensors["later"].dequantize(), q8_0)
        assert file.tensors["q4_k"].shape == (3, 512)
        np.testing.assert_array_equal(file.tensors["q4_k"].raw(), blocks.reshape(-1))


def test_alignment_of_the_metadata_is_followed(tmp_path):
    tensors = [array_tensor(name, GGMLType.F32, np.ones(3, np.float32)) for name in "ab"]
    file = opened(write_gguf(tmp_path / "a.gguf", ARCHITECTURE | {"general.alignment": 64}, tensors))
    assert file.alignment == 64
    assert [tensor.offset - file.data_offset for tensor in file.tensors.values()] == [0, 64]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", ARCHITECTURE | {"which": "old"}, [])

    def fail() -> np.ndarray:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError):
        write_gguf(path, ARCHITECTURE | {"which": "new"}, [NewTensor("a", GGMLType.F32, (4,), fail)])
    assert opened(path).metadata["which"] == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.gguf"]


def test_what_cannot_be_written_is_a_callers_error(tmp_path):
    with pytest.raises(TypeError, match="dict"):
        write_gguf(tmp_path / "a.gguf", ARCHITECTURE | {"a": {}}, [])
    short = NewTensor("a", GGMLType.F32, (2,), lambda: [np.ones(1, np.float32)])
    with pytest.raises(ValueError, match="4 bytes of data where its shape takes 8"):
        write_gguf(tmp_path / "a.gguf", ARCHITECTURE, [short])
    with pytest.raises(ValueError, match="multiple"):
        write_gguf(tmp_path / "a.gguf", ARCHITECTURE, [NewTensor("a", GGMLType.Q8_0, (2, 33), list)])
