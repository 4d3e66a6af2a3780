"""What a good file reads as: values and types, tensors as views of the file, and typed access with clear refusals."""

import ctypes
import math
import mmap
import os
import struct
import subprocess
import sys
from unittest.mock import patch

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.gguf import GGMLType, GGUFError, GGUFFile, GGUFValueType, reader
from forge.gguf.writer import NewTensor, TypedValue, encode, write_gguf
from tests.gguf.raw_file import ARRAY, STRING, RawFile, RawTensor, array, checked, opened, string, u32
from tests.small_models import write_small_qwen3


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_small_qwen3(tmp_path_factory.mktemp("gguf") / "small.gguf", tensor_type="Q8_0", tie=False)


@pytest.fixture
def model(model_path):
    with GGUFFile.open(model_path) as file:
        yield file


def values_file(tmp_path) -> GGUFFile:
    entries = {
        "general.architecture": "qwen3",
        "an.int": 3,
        "a.negative": -4,
        "a.big": 2**40,
        "a.float": 0.5,
        "a.bool": True,
        "a.string": "héllo 😀",
        "an.empty": "",
        "nan": math.nan,
        "inf": math.inf,
        "ints": [1, -2, 3],
        "floats": [0.5, 1.5],
        "bad.floats": [0.5, math.inf],
        "strings": ["", "a", "Ġthe", "😀"],
        "bools": [True, False],
    }
    return opened(write_gguf(tmp_path / "values.gguf", entries, []))


def test_constants_are_those_of_the_gguf_package():
    for ours, theirs in ((GGUFValueType, gguf.GGUFValueType), (GGMLType, gguf.GGMLQuantizationType)):
        for member in theirs:
            assert ours[member.name] == member
    for ggml_type, size in gguf.GGML_QUANT_SIZES.items():
        assert GGMLType(ggml_type).block == size


def test_metadata_values_have_python_types(tmp_path):
    file = values_file(tmp_path)
    assert file.version == 3
    assert file.metadata["an.int"] == 3 and type(file.metadata["an.int"]) is int
    assert file.metadata["a.negative"] == -4
    assert file.metadata["a.big"] == 2**40
    assert file.metadata["a.float"] == 0.5 and type(file.metadata["a.float"]) is float
    assert file.metadata["a.bool"] is True
    assert file.metadata["a.string"] == "héllo 😀"
    assert file.metadata["an.empty"] == ""
    assert file.metadata["strings"] == ["", "a", "Ġthe", "😀"]
    assert file.metadata["ints"].tolist() == [1, -2, 3]
    assert file.metadata["bools"].tolist() == [True, False]
    assert not file.metadata["ints"].flags.writeable


@pytest.mark.parametrize(
    ("value_type", "code", "value"),
    [
        (GGUFValueType.UINT8, "B", 255),
        (GGUFValueType.INT8, "b", -128),
        (GGUFValueType.UINT16, "H", 65535),
        (GGUFValueType.INT16, "h", -32768),
        (GGUFValueType.UINT32, "I", 2**32 - 1),
        (GGUFValueType.INT32, "i", -(2**31)),
        (GGUFValueType.UINT64, "Q", 2**64 - 1),
        (GGUFValueType.INT64, "q", -(2**63)),
        (GGUFValueType.FLOAT32, "f", -1.5),
        (GGUFValueType.FLOAT64, "d", 1e300),
    ],
)
def test_every_number_type_reads_alone_and_in_arrays(tmp_path, value_type, code, value):
    stored = struct.pack(f"<{code}", value)
    raw = RawFile(metadata=[("one", value_type, stored), ("many", ARRAY, array(value_type, [stored] * 3))])
    file = opened(raw.write(tmp_path / "numbers.gguf"))
    assert file.metadata["one"] == value and type(file.metadata["one"]) in (int, float)
    assert file.metadata["many"].tolist() == [value] * 3
    assert file.fields["one"].type_name == value_type.name.lower()
    assert file.fields["one"].offset == raw.at["entry 0 value"]
    assert file.fields["many"].type_name == f"array of {value_type.name.lower()}"


def test_empty_and_nested_arrays_read(tmp_path):
    nested = array(ARRAY, [array(STRING, [string("a"), string("b")]), array(GGUFValueType.UINT8, [])])
    raw = RawFile(
        metadata=[
            ("no.strings", ARRAY, array(STRING, [])),
            ("no.numbers", ARRAY, array(GGUFValueType.FLOAT32, [])),
            ("no.bools", ARRAY, array(GGUFValueType.BOOL, [])),
            ("nested", ARRAY, nested),
        ]
    )
    file = opened(raw.write(tmp_path / "arrays.gguf"))
    assert file.string_array("no.strings") == []
    assert file.metadata["no.numbers"].shape == (0,)
    assert file.metadata["no.bools"].shape == (0,)
    assert file.metadata["nested"][0] == ["a", "b"]
    assert file.metadata["nested"][1].shape == (0,)


def test_version_2_reads_like_version_3(tmp_path):
    raw = RawFile(version=2, metadata=[("a", STRING, string("b"))], tensors=[RawTensor("t", (32, 4))])
    file = opened(raw.write(tmp_path / "v2.gguf"))
    assert file.version == 2
    assert file.metadata == {"a": "b"}
    assert file.tensors["t"].shape == (4, 32)


def test_file_without_metadata_or_tensors_opens(tmp_path):
    file = opened(RawFile().write(tmp_path / "bare.gguf"))
    assert (dict(file.metadata), dict(file.tensors), file.alignment, file.size) == ({}, {}, 32, 32)


def test_reads_what_the_gguf_package_reads(model, model_path):
    theirs = gguf.GGUFReader(model_path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        ours = model.metadata[key]
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents()
    assert len(theirs.tensors) == len(model.tensors)
    for tensor in theirs.tensors:
        ours = model.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.ggml_type, ours.offset, ours.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(ours.raw(), tensor.data.reshape(-1).view(np.uint8))


def test_tensor_is_a_read_only_view_of_the_file(model, model_path):
    tensor = model.tensors["blk.0.attn_q.weight"]
    raw = tensor.raw()
    assert raw.dtype == np.uint8 and raw.shape == (tensor.nbytes,)
    assert not raw.flags.writeable and not raw.flags.owndata
    stored = model_path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    assert raw.tobytes() == stored
    assert tensor.dequantize().shape == tensor.shape == (128, 64)
    assert tensor.ggml_type == GGMLType.Q8_0


def test_views_outlive_the_closed_file(model_path):
    with GGUFFile.open(model_path) as file:
        raw = file.tensors["output_norm.weight"].raw()
        before = raw.copy()
    np.testing.assert_array_equal(raw, before)
    file.close()  # a second time does no harm


def test_closing_without_views_unmaps(model_path):
    with GGUFFile.open(model_path) as file:
        pass
    with pytest.raises(ValueError):
        file.tensors["output_norm.weight"].raw()


# --- typed access


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("an.int", int, 3),
        ("a.negative", int, -4),
        ("a.float", float, 0.5),
        ("an.int", float, 3.0),
        ("a.bool", bool, True),
        ("a.string", str, "héllo 😀"),
    ],
)
def test_require_gives_the_kind_that_was_asked_for(tmp_path, key, kind, value):
    got = values_file(tmp_path).require(key, kind)
    assert got == value and type(got) is kind


@pytest.mark.parametrize(
    ("key", "kind", "problem"),
    [
        ("a.bool", int, "must be an integer, not bool"),
        ("a.bool", float, "must be a number, not bool"),
        ("a.float", int, "must be an integer, not float32"),
        ("an.int", bool, "must be a bool, not uint32"),
        ("an.int", str, "must be a string, not uint32"),
        ("a.string", int, "must be an integer, not string"),
        ("ints", int, "must be an integer, not array of int32"),
        ("strings", str, "must be a string, not array of string"),
        ("nan", float, "must be a finite number, not nan"),
        ("inf", float, "must be a finite number, not inf"),
    ],
)
def test_require_refuses_another_kind_with_key_and_byte(tmp_path, key, kind, problem):
    file = values_file(tmp_path)
    for read in (lambda: file.require(key, kind), lambda: file.get(key, kind, None)):
        with pytest.raises(GGUFError) as caught:
            read()
        error = checked(caught.value, file.path)
        assert (error.field, error.problem) == (f"metadata '{key}'", problem)
        assert error.offset == file.fields[key].offset


def test_missing_key_is_named_and_has_a_default_where_one_is_given(tmp_path):
    file = values_file(tmp_path)
    assert file.get("no.such", int, 5) == 5
    assert file.get("no.such", str) is None
    for read in (
        lambda: file.require("no.such", int),
        lambda: file.string_array("no.such"),
        lambda: file.int_array("no.such"),
    ):
        with pytest.raises(GGUFError) as caught:
            read()
        assert (caught.value.field, caught.value.offset) == ("metadata 'no.such'", None)
        assert "does not have this entry" in caught.value.problem


def test_arrays_come_in_the_type_that_was_asked_for(tmp_path):
    file = values_file(tmp_path)
    assert file.string_array("strings") == ["", "a", "Ġthe", "😀"]
    assert file.int_array("ints").tolist() == [1, -2, 3]


@pytest.mark.parametrize("key", ["an.int", "a.string", "ints", "floats", "strings", "bools", "bad.floats"])
def test_arrays_of_another_type_are_refused_with_key_and_byte(tmp_path, key):
    file = values_file(tmp_path)
    right = {"strings": file.string_array, "ints": file.int_array}
    for own_key, read in right.items():
        if own_key == key:
            continue
        with pytest.raises(GGUFError) as caught:
            read(key)
        error = checked(caught.value, file.path)
        assert (error.field, error.offset) == (f"metadata '{key}'", file.fields[key].offset)


def test_wrong_element_types_in_tokenizer_arrays_are_refused(tmp_path):
    def arrays(**replaced) -> GGUFFile:
        entries = {"tokens": ["a"], "merges": ["a b"], "token_type": [1]} | replaced
        metadata = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
        path = write_gguf(tmp_path / "tokenizer.gguf", {"general.architecture": "qwen3"} | metadata, [])
        return opened(path)

    for name, wrong, read in (
        ("tokens", [1, 2], "string_array"),
        ("merges", [0.5], "string_array"),
        ("tokens", TypedValue([[1], [2]], GGUFValueType.ARRAY), "string_array"),
        ("token_type", ["1"], "int_array"),
        ("token_type", [1.0], "int_array"),
    ):
        file = arrays(**{name: wrong})
        with pytest.raises(GGUFError) as caught:
            getattr(file, read)(f"tokenizer.ggml.{name}")
        error = checked(caught.value, file.path)
        assert error.field == f"metadata 'tokenizer.ggml.{name}'"
        assert error.offset == file.fields[f"tokenizer.ggml.{name}"].offset
        assert "must be an array of" in error.problem


def test_strings_are_exact_for_any_unicode(tmp_path):
    texts = [chr(code) for code in range(0xD800)] + ["\U0010ffff", "a\0b", "x" * 70_000]
    raw = RawFile(metadata=[("a", ARRAY, array(STRING, [string(text) for text in texts])), ("b", 4, u32(1))])
    file = opened(raw.write(tmp_path / "unicode.gguf"))
    assert file.string_array("a") == texts
    assert file.metadata["b"] == 1


@given(st.lists(st.text("aé\0\1\5", max_size=20), max_size=30), st.integers(1, 64))
def test_strings_are_exact_where_they_look_like_lengths(tmp_path_factory, texts, window):
    raw = RawFile(metadata=[("a", ARRAY, array(STRING, [string(text) for text in texts])), ("b", 4, u32(1))])
    path = raw.write(tmp_path_factory.mktemp("strings") / "strings.gguf")
    with patch.multiple(reader, _WINDOW=window, _ONE_BY_ONE=2):
        file = opened(path)
    assert file.string_array("a") == texts
    assert file.metadata["b"] == 1


def resident_bytes(path) -> int:
    """How much of the second half of a file the system keeps in memory: the first is read ahead with the header."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        arguments = ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        assert ctypes.CDLL(None).mincore(*arguments) == 0
        del whole
    return int((pages[len(pages) // 2 :] & 1).sum()) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it keeps of a file")
def test_reading_small_tensors_reads_no_large_ones(tmp_path):
    path, norm, matrix = tmp_path / "layers.gguf", np.zeros(1024, np.float32), np.zeros((1024, 1024), np.float32)
    layers = [(f"{name}.{layer}", array) for layer in range(8) for name, array in (("norm", norm), ("w", matrix))]
    tensors = [
        NewTensor(name, GGMLType.F32, array.shape, lambda array=array: [encode(GGMLType.F32, array)])
        for name, array in layers
    ]
    write_gguf(path, {"general.architecture": "test"}, tensors)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(path) > path.stat().st_size // 8:
        pytest.skip("this file system keeps files in memory")

    with GGUFFile.open(path) as file:
        norms = [file.tensors[f"norm.{layer}"].dequantize().sum() for layer in range(8)]
        few = resident_bytes(path)
        file.tensors["w.7"].dequantize()

    assert norms == [0] * 8
    assert few < 1 << 20 < matrix.nbytes <= resident_bytes(path)


def test_importing_the_reader_loads_nothing_heavy():
    code = (
        "import sys, forge.gguf, forge.model.config\n"
        "heavy = {'gguf', 'torch', 'numba', 'tokenizers', 'transformers', 'rich', 'typer', 'yaml', 'tqdm'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
