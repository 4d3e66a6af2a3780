"""Every way in which a GGUF file can be wrong is refused with the field's name and its byte, and at no great cost."""

import os
import tracemalloc
from pathlib import Path

import pytest

from forge.gguf import GGUFError, GGUFFile, reader
from forge.gguf.ggml_types import GGMLType
from tests.gguf.raw_file import (
    ARRAY,
    BOOL,
    HUGE_NUMBERS,
    INT32,
    STRING,
    U32,
    RawFile,
    RawTensor,
    array,
    opened,
    overwrite,
    refused,
    string,
    u32,
    u64,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def two_tensors() -> RawFile:
    return RawFile(
        metadata=[("general.architecture", STRING, string("qwen3")), ("some.number", U32, u32(7))],
        tensors=[RawTensor("first", (32, 4)), RawTensor("second", (64,))],
    )


# --- the file itself


def test_missing_file_is_one_clear_line(path):
    error = refused(path)
    assert str(error) == f"{path}: does not exist"
    assert (error.field, error.offset) == ("file", None)


def test_directory_is_refused(tmp_path):
    assert "is a directory" in str(refused(tmp_path))


def test_empty_file_is_refused(path):
    path.write_bytes(b"")
    assert "is empty" in str(refused(path))


def test_pipe_is_refused_without_waiting_for_a_writer(path):
    os.mkfifo(path)
    assert "not an ordinary file" in str(refused(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused_with_the_systems_reason(path):
    two_tensors().write(path).chmod(0)
    assert "cannot be read: Permission denied" in str(refused(path))


def test_file_reached_through_a_file_is_refused(path):
    two_tensors().write(path)
    assert "cannot be read: Not a directory" in str(refused(path / "model.gguf"))


def test_path_with_control_characters_is_escaped_in_the_message(tmp_path):
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(tmp_path / "a\x1b[31mb.gguf")
    assert str(caught.value).isprintable()


# --- magic, version, counts


@pytest.mark.parametrize(
    ("magic", "hint"),
    [
        (b"ABCD", "not a GGUF file"),
        (b"\x1b[2J", "not a GGUF file"),
        (b"tjgg", "before GGUF"),
        (b"PK\x03\x04", "zip archive"),
        (b"vers", "Git LFS pointer"),
        (b"<!DO", "web page"),
    ],
)
def test_bad_magic_is_named_with_what_the_file_seems_to_be(path, magic, hint):
    error = refused(RawFile(magic=magic).write(path))
    assert (error.field, error.offset) == ("magic", 0)
    assert hint in error.problem


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (0, "0 is not a version"),
        (1, "version 1 is no longer read"),
        (4, "version 4 is newer"),
        (2**32 - 1, "newer"),
        (0x02000000, "big-endian"),
        (0x03000000, "big-endian"),
    ],
)
def test_versions_other_than_2_and_3_are_named(path, version, words):
    error = refused(RawFile(version=version).write(path))
    assert (error.field, error.offset) == ("version", 4)
    assert words in error.problem


@pytest.mark.parametrize("count", HUGE_NUMBERS)
def test_tensor_count_beyond_the_file_is_refused(path, count):
    error = refused(RawFile(tensor_count=count).write(path))
    assert (error.field, error.offset) == ("tensor count", 8)
    assert f"{count} entries cannot fit in the" in error.problem


@pytest.mark.parametrize("count", HUGE_NUMBERS)
def test_metadata_count_beyond_the_file_is_refused(path, count):
    error = refused(RawFile(metadata_count=count).write(path))
    assert (error.field, error.offset) == ("metadata count", 16)
    assert f"{count} entries cannot fit in the" in error.problem


@pytest.mark.parametrize(("field", "offset"), [("tensor_count", 8), ("metadata_count", 16)])
def test_more_entries_than_any_model_has_are_refused(path, field, offset):
    raw = RawFile(**{field: reader.MAX_ENTRIES + 1})
    path.write_bytes(raw.build() + bytes(40 * reader.MAX_ENTRIES))
    error = refused(path)
    assert (error.field, error.offset) == (field.replace("_", " "), offset)
    assert "at most 65536" in error.problem


def test_a_file_cut_anywhere_is_refused_at_a_position_inside_it(path):
    whole = two_tensors().build()
    for length in range(1, len(whole)):
        overwrite(path, whole[:length])
        assert 0 <= refused(path).offset < len(whole)


# --- metadata


@pytest.mark.parametrize("length", HUGE_NUMBERS)
def test_key_length_beyond_the_file_is_refused(path, length):
    raw = RawFile(metadata_count=1)
    path.write_bytes(raw.build()[:24] + u64(length) + bytes(64))
    error = refused(path)
    assert (error.field, error.offset) == ("key of metadata entry 0 length", 24)
    assert f"{length} bytes cannot fit in the 64 bytes that remain" in error.problem


def test_key_longer_than_the_format_allows_is_refused(path):
    raw = RawFile(metadata=[("k" * 65_536, U32, u32(1))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("key of metadata entry 0 length", 24)
    assert "at most 65535" in error.problem
    opened(RawFile(metadata=[("k" * 65_535, U32, u32(1))]).write(path))


def test_empty_key_is_refused(path):
    error = refused(RawFile(metadata=[("", U32, u32(1))]).write(path))
    assert (error.field, error.offset, error.problem) == ("key of metadata entry 0", 24, "is empty")


def test_duplicate_key_is_refused_with_both_positions(path):
    raw = RawFile(metadata=[("a.b", U32, u32(1)), ("c", U32, u32(1)), ("a.b", U32, u32(1))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a.b'", raw.at["entry 2 key"])
    assert f"duplicate key; its first value is at byte {raw.at['entry 0 value']}" in error.problem


@pytest.mark.parametrize("value_type", [13, 255, 2**32 - 1])
def test_unknown_value_type_is_refused(path, value_type):
    raw = RawFile(metadata=[("a", value_type, u64(0))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a' value type", raw.at["entry 0 type"])
    assert f"unknown value type {value_type}" in error.problem


def test_unknown_element_type_is_refused_even_in_an_empty_array(path):
    raw = RawFile(metadata=[("a", ARRAY, array(99, []))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a' element type", raw.at["entry 0 value"])


@pytest.mark.parametrize("length", HUGE_NUMBERS)
def test_string_length_beyond_the_file_is_refused(path, length):
    raw = RawFile(metadata=[("a", STRING, u64(length) + bytes(40))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a' length", raw.at["entry 0 value"])


@pytest.mark.parametrize("element", list(range(13)))
@pytest.mark.parametrize("count", HUGE_NUMBERS)
def test_array_count_beyond_the_file_is_refused(path, element, count):
    raw = RawFile(metadata=[("a", ARRAY, array(element, [bytes(64)], count=count))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a' count", raw.at["entry 0 value"] + 4)
    assert f"{count} entries cannot fit in the" in error.problem


@pytest.mark.parametrize(("element", "nbytes"), [(0, 1), (3, 2), (4, 4), (6, 4), (7, 1), (8, 8), (9, 12), (12, 8)])
def test_array_count_is_refused_when_it_is_one_too_many(path, element, nbytes):
    raw = RawFile(metadata=[("a", ARRAY, array(element, [bytes(nbytes * 5)], count=6))])
    path.write_bytes(raw.build()[: raw.at["directory end"]])
    assert refused(path).field == "metadata 'a' count"


@pytest.mark.parametrize("length", HUGE_NUMBERS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_length_of_a_string_in_an_array_is_refused_with_its_index(path, length, index):
    items = [string("ab"), string("c"), string("")]
    items[index] = u64(length)
    raw = RawFile(metadata=[("a", ARRAY, array(STRING, items))])
    error = refused(raw.write(path))
    start = raw.at["entry 0 value"] + 12 + sum(len(item) for item in items[:index])
    assert (error.field, error.offset) == (f"metadata 'a' string {index} length", start)


@pytest.mark.parametrize("item", [string(b"ab\xc3"), u64(2**20) + b"ab", u64(2**62)])
def test_one_wrong_string_of_thousands_is_named(path, item):
    items = [string(f"token {number}") for number in range(6000)]
    items[4321] = item
    raw = RawFile(metadata=[("a", ARRAY, array(STRING, items))])
    error = refused(raw.write(path))
    start = raw.at["entry 0 value"] + 12 + sum(map(len, items[:4321]))
    is_text = item == string(b"ab\xc3")
    assert error.field == f"metadata 'a' string 4321{'' if is_text else ' length'}"
    assert error.offset == start + 8 * is_text


@pytest.mark.parametrize("items", [[u64(9), bytes(8)], [u64(8), b"x" * 8]])
def test_a_string_may_not_eat_the_lengths_of_those_after_it(path, items):
    path.write_bytes(RawFile(metadata=[("a", ARRAY, array(STRING, items))]).build()[: 24 + 9 + 4 + 12 + 16])
    assert refused(path).field == "metadata 'a' string 0 length"


@pytest.mark.parametrize("data", [b"\xff", b"ab\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_invalid_utf8_is_refused_wherever_text_is(path, data):
    key = RawFile(metadata=[(b"k" + data, U32, u32(1))])
    error = refused(key.write(path))
    assert (error.field, error.offset) == ("key of metadata entry 0", 32)

    value = RawFile(metadata=[("a", STRING, string(data))])
    error = refused(value.write(path))
    assert (error.field, error.offset) == ("metadata 'a'", value.at["entry 0 value"] + 8)
    assert "is not UTF-8" in error.problem

    item = RawFile(metadata=[("a", ARRAY, array(STRING, [string("fine"), string(data)]))])
    error = refused(item.write(path))
    assert (error.field, error.offset) == ("metadata 'a' string 1", item.at["entry 0 value"] + 12 + 12 + 8)

    name = RawFile(tensors=[RawTensor(data)])
    assert refused(name.write(path)).field == "name of tensor 0"


@pytest.mark.parametrize("stored", [2, 255])
def test_bool_other_than_0_or_1_is_refused(path, stored):
    raw = RawFile(metadata=[("a", BOOL, bytes([stored]))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a'", raw.at["entry 0 value"])
    raw = RawFile(metadata=[("a", ARRAY, array(BOOL, [b"\0", b"\1", bytes([stored])]))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a'", raw.at["entry 0 value"] + 12 + 2)


def nested(depth: int) -> bytes:
    return array(U32, [u32(5)]) if depth == 1 else array(ARRAY, [nested(depth - 1)])


def test_arrays_nest_to_a_limit(path):
    assert opened(RawFile(metadata=[("a", ARRAY, nested(4))]).write(path)).metadata["a"][0][0][0].tolist() == [5]
    for depth in (5, 500):
        error = refused(RawFile(metadata=[("a", ARRAY, nested(depth))]).write(path))
        assert (error.field, error.problem) == ("metadata 'a'", "arrays are nested more than 4 deep")


def test_arrays_in_arrays_are_limited_in_sum(path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_ENTRIES", 5)
    three = array(ARRAY, [array(U32, [])] * 3)
    opened(RawFile(metadata=[("a", ARRAY, three)]).write(path))
    raw = RawFile(metadata=[("a", ARRAY, three), ("b", ARRAY, three)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'b' count", raw.at["entry 1 value"] + 4)


# --- alignment


@pytest.mark.parametrize("alignment", [0, 1, 4, 2**22, 2**31, 2**32 - 1])
def test_alignment_out_of_range_is_refused(path, alignment):
    raw = RawFile(metadata=[("general.alignment", U32, u32(alignment))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'general.alignment'", raw.at["entry 0 value"])
    assert f"{alignment} is not from 8 to 2097152" in error.problem


@pytest.mark.parametrize("alignment", [24, 33, 48, 2**20 + 8])
def test_alignment_that_is_no_power_of_two_is_refused(path, alignment):
    raw = RawFile(metadata=[("general.alignment", U32, u32(alignment))])
    assert f"{alignment} is not a power of two" in refused(raw.write(path)).problem


@pytest.mark.parametrize(("value_type", "payload"), [(STRING, string("32")), (INT32, u32(32)), (BOOL, b"\1")])
def test_alignment_of_another_type_is_refused(path, value_type, payload):
    raw = RawFile(metadata=[("general.alignment", value_type, payload)])
    assert "must be uint32" in refused(raw.write(path)).problem


@pytest.mark.parametrize("alignment", [8, 16, 64, 4096])
def test_other_alignments_are_followed(path, alignment):
    raw = two_tensors()
    raw.alignment = alignment
    raw.metadata.append(("general.alignment", U32, u32(alignment)))
    file = opened(raw.write(path))
    assert file.alignment == alignment
    assert file.data_offset == raw.at["data"]
    assert all(tensor.offset % alignment == 0 for tensor in file.tensors.values())


# --- the tensor directory


def test_duplicate_tensor_name_is_refused_with_both_positions(path):
    raw = RawFile(tensors=[RawTensor("t"), RawTensor("u"), RawTensor("t")])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("tensor 't'", raw.at["tensor 2 name"])
    assert f"the first is at byte {raw.at['tensor 0 name']}" in error.problem


def test_tensor_names_have_the_length_that_llama_cpp_allows(path):
    assert list(opened(RawFile(tensors=[RawTensor("t" * 63)]).write(path)).tensors) == ["t" * 63]
    raw = RawFile(tensors=[RawTensor("fine"), RawTensor("t" * 64)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("name of tensor 1 length", raw.at["tensor 1 name"])
    assert "at most 63" in error.problem
    assert refused(RawFile(tensors=[RawTensor("")]).write(path)).problem == "is empty"


@pytest.mark.parametrize("num_dimensions", [0, 5, 2**32 - 1])
def test_too_many_or_no_dimensions_are_refused(path, num_dimensions):
    raw = RawFile(tensors=[RawTensor("t", num_dimensions=num_dimensions)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("tensor 't' number of dimensions", raw.at["tensor 0 number of dimensions"])
    assert f"{num_dimensions} is not from 1 to 4" in error.problem


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_zero_dimension_is_refused(path, axis):
    dimensions = [32, 2, 2]
    dimensions[axis] = 0
    raw = RawFile(tensors=[RawTensor("t", tuple(dimensions))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == (f"tensor 't' dimension {axis}", raw.at[f"tensor 0 dimension {axis}"])
    assert error.problem == "is zero"


@pytest.mark.parametrize(
    ("dimensions", "axis"),
    [((2**63,), 0), ((2**64 - 1,), 0), ((2**32, 2**32), 1), ((2**31, 2**31, 2), 2), ((1, 1, 1, 2**63), 3)],
)
def test_overflowing_number_of_elements_is_refused(path, dimensions, axis):
    raw = RawFile(tensors=[RawTensor("t", dimensions, nbytes=64)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == (f"tensor 't' dimension {axis}", raw.at[f"tensor 0 dimension {axis}"])
    assert "more than 2^63 - 1" in error.problem


@pytest.mark.parametrize("number", [4, 5, 31, 36, 99, 2**32 - 1])
def test_unknown_tensor_type_is_refused(path, number):
    raw = RawFile(tensors=[RawTensor("t", ggml_type=number, nbytes=128)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("tensor 't' type", raw.at["tensor 0 type"])
    assert f"unknown tensor type {number}" in error.problem


@pytest.mark.parametrize(("ggml_type", "columns"), [(GGMLType.Q8_0, 33), (GGMLType.Q4_0, 16), (GGMLType.Q4_K, 128)])
def test_row_that_is_not_whole_blocks_is_refused(path, ggml_type, columns):
    raw = RawFile(tensors=[RawTensor("t", (columns, 256), ggml_type)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("tensor 't' dimension 0", raw.at["tensor 0 dimension 0"])
    assert f"{columns} is not a multiple of {ggml_type.name}'s blocks" in error.problem


@pytest.mark.parametrize("offset", [1, 8, 31, 33, 2**63 + 1])
def test_misaligned_offset_is_refused(path, offset):
    raw = RawFile(tensors=[RawTensor("t", offset=offset)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("tensor 't' offset", raw.at["tensor 0 offset"])
    assert f"{offset} is not a multiple of the alignment 32" in error.problem


@pytest.mark.parametrize("offset", [32, 2**32, 2**62, 2**64 - 32])
def test_offset_outside_of_the_file_is_refused(path, offset):
    raw = RawFile(tensors=[RawTensor("t", offset=offset)])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("tensor 't' offset", raw.at["tensor 0 offset"])
    assert f"end past the end of the file, which has {path.stat().st_size}" in error.problem


def test_tensor_larger_than_the_file_is_refused(path):
    raw = RawFile(tensors=[RawTensor("t", (2**20, 2**40), nbytes=64)])
    assert "end past the end of the file" in refused(raw.write(path)).problem


@pytest.mark.parametrize("offset", [0, 32, 64])
def test_overlapping_tensors_are_refused(path, offset):
    raw = RawFile(tensors=[RawTensor("long", (32,)), RawTensor("late", (32,), offset=offset), RawTensor("end", (32,))])
    raw.tensors[2].offset = 256
    error = refused(raw.write(path))
    assert error.field in ("tensor 'late' offset", "tensor 'long' offset")
    assert error.offset in (raw.at["tensor 0 offset"], raw.at["tensor 1 offset"])
    assert "overlaps" in error.problem


def test_overlap_by_a_single_byte_is_refused(path):
    raw = RawFile(tensors=[RawTensor("a", (33,), GGMLType.I8, offset=0), RawTensor("b", (32,), GGMLType.I8, offset=32)])
    assert refused(raw.write(path)).field == "tensor 'b' offset"
    opened(RawFile(tensors=[RawTensor("a", (32,), GGMLType.I8), RawTensor("b", (33,), GGMLType.I8)]).write(path))


def test_tensors_may_lie_in_any_order(path):
    raw = RawFile(tensors=[RawTensor("b", (32,), offset=128), RawTensor("a", (32,), offset=0)])
    file = opened(raw.write(path))
    assert [tensor.offset - file.data_offset for tensor in file.tensors.values()] == [128, 0]


def test_truncated_data_names_the_tensor_that_is_cut(path):
    raw = two_tensors()
    path.write_bytes(raw.build()[:-1])
    error = refused(path)
    assert (error.field, error.offset) == ("tensor 'second' offset", raw.at["tensor 1 offset"])
    assert "cut short" in error.problem


# --- what it costs, and what it prints


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "x" * 60_000, "\u202eback", "\0"])
def test_text_from_the_file_is_escaped_and_cut_in_messages(path, text):
    for raw in (
        RawFile(metadata=[(text, 99, b"")]),
        RawFile(metadata=[(text, U32, u32(1)), (text, U32, u32(1))]),
        RawFile(tensors=[RawTensor(text[:60], (0,))]),
    ):
        assert refused(raw.write(path)).field  # `refused` has checked that the message is one short printable line


@pytest.mark.parametrize("number", HUGE_NUMBERS)
def test_hostile_numbers_cost_no_memory(path, number):
    files = [
        RawFile(tensor_count=number).build(),
        RawFile(metadata_count=number).build(),
        RawFile(metadata_count=1).build()[:24] + u64(number) + bytes(64),
        RawFile(metadata=[("a", STRING, u64(number) + bytes(40))]).build(),
        *(RawFile(metadata=[("a", ARRAY, array(kind, [bytes(64)], count=number))]).build() for kind in range(13)),
        RawFile(tensors=[RawTensor("t", (number,), nbytes=64)]).build(),
        RawFile(tensors=[RawTensor("t", (2, number), nbytes=64)]).build(),
        RawFile(tensors=[RawTensor("t", offset=number)]).build(),
    ]
    tracemalloc.start()
    try:
        for data in files:
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            refused(path)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_may_not_be_endless(path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 4096)
    raw = RawFile(metadata=[("a", STRING, string("x" * 5000))])
    error = refused(raw.write(path))
    assert (error.field, error.offset) == ("metadata 'a' length", raw.at["entry 0 value"])
    assert "left of the 4096 of a header" in error.problem
    opened(RawFile(metadata=[("a", STRING, string("x" * 4000))], tensors=[RawTensor("t", (8192,))]).write(path))


def test_a_huge_sparse_file_of_empty_strings_is_refused_by_its_count(path):
    count = 2**32
    data = RawFile(metadata=[("a", ARRAY, array(STRING, [], count=count))]).build()
    path.write_bytes(data)
    try:
        os.truncate(path, 2**36)
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    error = refused(path)
    assert error.field == "metadata 'a' count"
    assert "left of the 67108864 of a header" in error.problem
