"""Every way in which a safetensors header can be wrong is refused with field and byte, and at no great cost."""

import json
import os
import random
import struct
import tracemalloc

import numpy as np
import pytest

from forge.gguf import GGMLType
from forge.model import safetensors_file
from forge.model.safetensors_file import MAX_HEADER_BYTES, SafetensorsError, SafetensorsFile
from tests.model.raw_safetensors import encoded, entry, packed, raw, refused

HUGE = (2**31, 2**40, 2**63, 2**64 - 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def error_of(path, data: bytes) -> SafetensorsError:
    path.write_bytes(data)
    return refused(path)


def one(**changes) -> dict:
    """A header of one tensor `a` of four bytes, with changes to its entry."""
    return {"a": entry([1], 0, 4) | changes}


# --- sound files


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_tensor_has_its_values_shape_and_type(path, dtype):
    values = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    path.write_bytes(packed({"a": ((3, 4), encoded(values, dtype)), "b": ((12,), encoded(values, dtype))}, dtype))
    file = SafetensorsFile.open(path)

    tensor = file.tensors["a"]
    assert list(file.tensors) == ["a", "b"]
    assert (tensor.shape, tensor.dtype, tensor.ggml_type) == ((3, 4), dtype, GGMLType[dtype])
    assert tensor.raw().tobytes() == encoded(values, dtype)
    assert np.array_equal(tensor.dequantize(), values)


def test_numbers_that_the_file_does_not_align_are_read_all_the_same(path):
    header = json.dumps({"a": entry([2], 0, 8)})
    values = np.array([1.5, -2.5], np.float32)
    for padding in range(4):
        path.write_bytes(raw(header + " " * padding, values.tobytes()))
        tensor = SafetensorsFile.open(path).tensors["a"]
        assert np.array_equal(tensor.dequantize(), values)
        assert tensor.raw().ctypes.data % 4 == 0


def test_files_of_the_safetensors_package_are_read(path):
    numpy_writer = pytest.importorskip("safetensors.numpy")
    tensors = {"x": np.random.default_rng(0).random((5, 7), np.float32), "y": np.ones(3, np.float16)}
    numpy_writer.save_file(tensors, path, metadata={"format": "pt"})

    file = SafetensorsFile.open(path)
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"x": (5, 7), "y": (3,)}
    assert all(np.array_equal(file.tensors[name].dequantize(), value) for name, value in tensors.items())


def test_released_pages_are_read_again_from_the_file(path):
    values = np.random.default_rng(0).random(100_000).astype(np.float32)
    path.write_bytes(packed({"a": (values.shape, values.tobytes())}))
    file = SafetensorsFile.open(path)
    view = file.tensors["a"].raw()
    file.release("a")
    assert view.tobytes() == values.tobytes()


# --- the file itself


def test_a_missing_file_a_folder_a_pipe_and_an_empty_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    assert str(refused(tmp_path / "none")) == f"{tmp_path / 'none'}: does not exist"
    assert "is a directory" in str(refused(tmp_path))
    assert "not an ordinary file" in str(refused(tmp_path / "pipe"))
    assert "is empty" in str(refused(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"GGUF", "GGUF file"),
        (b"PK\x03\x04", "zip archive"),
        (b"version https", "LFS pointer"),
        (b"<!doctype", "web page"),
    ],
)
def test_another_kind_of_file_is_named(path, start, hint):
    error = error_of(path, start + bytes(100))
    assert (error.field, error.offset) == ("header length", 0)
    assert hint in error.problem


# --- the header


@pytest.mark.parametrize("length", HUGE)
def test_a_header_longer_than_the_file_is_refused(path, length):
    error = error_of(path, raw(one(), bytes(4), length=length))
    assert (error.field, error.offset) == ("header length", 0)
    assert f"{length} bytes cannot fit in the" in error.problem


def test_a_header_longer_than_any_model_needs_is_refused(path):
    error = error_of(path, raw("{" + " " * MAX_HEADER_BYTES + "}"))
    assert f"at most {MAX_HEADER_BYTES} are allowed" in error.problem


def test_a_file_cut_anywhere_is_refused(path):
    whole = packed({"a": ((2, 2), bytes(16)), "b": ((1,), bytes(4))})
    for length in range(1, len(whole)):
        assert error_of(path, whole[:length]).offset < len(whole)


@pytest.mark.parametrize(
    ("header", "field", "words"),
    [
        (b"", "header", "begins with"),
        (b"[1]", "header", "begins with"),
        (b" {}", "header", "begins with"),
        (b"{\xff}", "header", "is not UTF-8"),
        (b'{"a": }', "header", "is not JSON"),
        (b'{"a": 1} x', "header", "is not JSON"),
        (b"{}", "header", "holds no tensors"),
        (b'{"__metadata__": {}}', "header", "holds no tensors"),
        (b'{"a": ' + b"[" * 100_000, "header", "nests too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "header", "number that is too long"),
        (b'{"__metadata__": 1}', "__metadata__", "object of strings"),
        (b'{"__metadata__": {"x": 1}}', "__metadata__", "object of strings"),
        (b'{"a": 1}', "tensor 'a'", "must have dtype, shape and data_offsets"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "tensor 'a'", "must have dtype"),
        (b'{"\\u001b[2J": 1}', "tensor '\\x1b[2J'", "must have dtype"),
        (b'{"\\ud800": 1}', "tensor '\\ud800'", "must have dtype"),
    ],
)
def test_a_header_that_is_not_what_it_should_be_is_refused(path, header, field, words):
    error = error_of(path, raw(header, bytes(4)))
    assert error.field == field
    assert words in error.problem


def test_the_position_of_an_error_is_that_in_the_file(path):
    data = raw('{"é": {}, x', bytes(4))
    assert error_of(path, data).offset == data.index(b"x")
    header = json.dumps({"first": entry([1], 0, 4), "second": entry([1], 4, 9)})
    error = error_of(path, raw(header, bytes(8)))
    assert error.offset == 8 + header.index('"second"')


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}',
        '{"a": {"dtype": "F32", "dtype": "F16"}}',
    ],
)
def test_a_name_that_is_there_twice_is_refused(path, header):
    error = error_of(path, raw(header, bytes(4)))
    assert error.problem == "is there twice"
    assert error.field in ("key 'a'", "key 'dtype'")


# --- tensors


@pytest.mark.parametrize("dtype", ["F33", "", None, 1, ["F32"], "f32"])
def test_an_unknown_dtype_is_refused(path, dtype):
    error = error_of(path, raw(one(dtype=dtype), bytes(4)))
    assert (error.field, "is unknown" in error.problem) == ("tensor 'a' dtype", True)


@pytest.mark.parametrize("shape", [None, 4, "4", [1.0], [-1], [True], [2**64], [1] * 9, [[1]]])
def test_a_shape_that_is_none_is_refused(path, shape):
    assert error_of(path, raw(one(shape=shape), bytes(4))).field == "tensor 'a' shape"


@pytest.mark.parametrize("shape", [[2**32, 2**32], [2**63 - 1, 2], [2**62, 2**62, 0, 5]])
def test_more_elements_than_can_be_counted_are_refused(path, shape):
    error = error_of(path, raw(one(shape=shape), bytes(4)))
    assert error.field in ("tensor 'a' shape", "tensor 'a' data_offsets")


@pytest.mark.parametrize("offsets", [None, [], [0], [0, 4, 8], ["0", "4"], [0.0, 4.0], [-4, 0], [False, 4], [0, 2**64]])
def test_offsets_that_are_none_are_refused(path, offsets):
    error = error_of(path, raw(one(data_offsets=offsets), bytes(4)))
    assert error.field == "tensor 'a' data_offsets"
    assert "two whole numbers" in error.problem


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([4, 0], "4 is past its end, 0"),
        ([0, 5], "the data ends at 5, and the file has 4 bytes of data"),
        ([0, 2**62], "and the file has 4 bytes"),
        ([0, 3], "3 bytes where dtype and shape take 4"),
        ([0, 0], "0 bytes where dtype and shape take 4"),
    ],
)
def test_offsets_are_held_against_the_file_and_the_shape(path, offsets, words):
    error = error_of(path, raw(one(data_offsets=offsets), bytes(4)))
    assert error.field == "tensor 'a' data_offsets"
    assert words in error.problem


@pytest.mark.parametrize(
    ("entries", "size", "words"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "overlaps that of tensor 'a'"),
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8, "overlaps that of tensor"),
        ({"a": entry([1], 4, 8)}, 8, "the 4 bytes before its data belong to no tensor"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "the 4 bytes before its data belong to no tensor"),
        ({"a": entry([1], 0, 4)}, 7, "the 3 bytes after its data, to the end of the file, belong to no tensor"),
    ],
)
def test_tensors_cover_the_data_without_gap_or_overlap(path, entries, size, words):
    error = error_of(path, raw(entries, bytes(size)))
    assert words in error.problem
    assert error.field.endswith("data_offsets")


# --- cost


def test_a_hostile_file_costs_little_memory(path):
    hostile = [
        raw(one(), bytes(4), length=2**63),
        raw({"a": entry([2**31, 2**31], 0, 2**63 - 1)}, bytes(4)),
        raw({f"t{i}": entry([1], 0, 4) for i in range(2000)}, bytes(4)),
    ]
    for data in hostile:
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(SafetensorsError):
            SafetensorsFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 * len(data) + 1_000_000


def test_random_damage_never_gives_another_error_or_a_tensor_outside_of_the_file(path):
    rng = random.Random(0)
    whole = packed({name: ((2, 3), bytes(24)) for name in ("first", "second", "third")})
    header_length = struct.unpack("<Q", whole[:8])[0]
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(8 + header_length)] = rng.choice([rng.randrange(256), *b'0123456789"[]{},: '])
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(data)
            file.truncate()
        try:
            opened = SafetensorsFile.open(path)
        except SafetensorsError as error:
            assert str(error).isprintable()
        else:
            assert all(tensor.offset + tensor.nbytes <= len(data) for tensor in opened.tensors.values())
            opened.close()


def test_the_names_of_dtypes_are_those_of_the_format():
    assert {"F32", "F16", "BF16"} == set(safetensors_file.GGML_TYPES)
