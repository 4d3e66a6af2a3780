"""An untrusted GGUF file: its header checked before it is used, its metadata by key, its tensors by name.

A GGUF file, all little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

    magic 'GGUF' | version u32 | number of tensors u64 | number of metadata entries u64
    metadata     per entry:   key string | value type u32 | value
    directory    per tensor:  name string | number of dimensions u32 | dimensions u64 each, innermost first
                              | ggml type u32 | offset u64, from the start of the data
    padding to a multiple of `general.alignment` (32 unless said otherwise)
    data         per tensor:  its blocks, at a multiple of the alignment

A string is a u64 length and that many bytes of UTF-8; an array is an element type u32, a u64 count and the elements.

The file is memory-mapped. Opening it parses the header; a tensor's bytes are read when used. A file opens with every
tensor inside it, or raises a `GGUFError` that names field and byte; so does every typed read of its metadata. Lengths
and counts are held against the bytes that remain before anything is allocated for them, and the header as a whole
against `MAX_HEADER_BYTES`, so a hostile file costs bounded time and memory. What stays outside of that promise is a
file that another process cuts short while it is open: the operating system then ends the process with SIGBUS.

The header of a model with Qwen's 151,936 tokens and 151,387 merges parses in 0.03 s (the gguf package's own reader:
6 s), nearly all of it in `_read_strings`.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast, overload

import numpy as np

from forge.gguf import block_formats
from forge.gguf.ggml_types import GGMLType, GGUFValueType
from forge.mapped_file import OTHER_KINDS_OF_FILE, MappedFile, ModelFileError, printable, tensor_bytes

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8
MAX_ALIGNMENT = 2 << 20
"""Two megabytes, a huge page: no real file has more."""

MAX_HEADER_BYTES = 64 << 20
"""Bytes of metadata and tensor directory together, at most. Large vocabularies take some twenty megabytes."""

MAX_ENTRIES = 65_536
"""Entries at most, of metadata, of tensors, and of arrays inside arrays: these take far more memory than their bytes in
the file."""

MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 63
"""The same limit as llama.cpp's: GGML_MAX_NAME is 64 with the terminating zero."""

MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**63 - 1
MAX_ARRAY_DEPTH = 4

_SMALLEST_METADATA_ENTRY = 8 + 1 + 4 + 1  # a key of one byte and a value of one byte
_SMALLEST_TENSOR_ENTRY = 8 + 1 + 4 + 8 + 4 + 8  # a name of one byte and one dimension
_SMALLEST_STRING = 8
_SMALLEST_ARRAY = 4 + 8

_WINDOW = 1 << 18
"""Bytes in which short strings are looked for at a time."""
_ONE_BY_ONE = 1000
"""So many strings are read one by one where those that follow cannot be read together."""

_U64 = struct.Struct("<Q")

_NOT_NUMBERS = (GGUFValueType.BOOL, GGUFValueType.STRING, GGUFValueType.ARRAY)
_NUMBERS = {kind: np.dtype(kind.name.lower()).newbyteorder("<") for kind in GGUFValueType if kind not in _NOT_NUMBERS}

Member = TypeVar("Member", GGUFValueType, GGMLType)
Scalar = TypeVar("Scalar", int, float, bool, str)
_KIND_NAMES = {int: "an integer", float: "a number", bool: "a bool", str: "a string"}
_BEFORE_GGUF = (b"lmgg", b"fmgg", b"tjgg")


class GGUFError(ModelFileError):
    """A GGUF file that is missing, malformed, or of a kind that forge does not run."""


@dataclass(frozen=True)
class MetadataField:
    """One metadata entry: its value, its declared type (`uint32`, `array of string`), the byte where the value is."""

    key: str
    value: Any
    type_name: str
    offset: int


@dataclass(frozen=True)
class TensorEntry:
    """One entry of the tensor directory.

    shape         outermost axis first, as in NumPy; the file has the innermost first
    offset        of the data, from the start of the file
    entry_offset  of this entry itself, for messages
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int
    entry_offset: int


@dataclass(frozen=True)
class GGUFTensor(TensorEntry):
    """A tensor of an open file: `name`, `shape`, `ggml_type`, `offset`, `nbytes`; its data is read when asked for."""

    _buffer: mmap.mmap = field(repr=False, compare=False)

    def raw(self) -> np.ndarray:
        """Return the tensor's bytes, uint8 [nbytes]: a read-only view of the file, which keeps the mapping alive."""
        return tensor_bytes(self._buffer, self.offset, self.nbytes)

    def dequantize(self) -> np.ndarray:
        """Convert the values to a new float32 array of `shape`. Raises ValueError for a type outside of
        `SUPPORTED_TYPES`."""
        return block_formats.dequantize(self.ggml_type, self.raw(), self.shape)


class GGUFFile(MappedFile[GGUFTensor]):
    """An open GGUF file: its metadata, and its tensors by name. Made by `GGUFFile.open`; a context manager.

    path         as given
    version      2 or 3
    metadata     key -> int, float, bool, str; numpy array (numbers and bools, read-only); list[str]; list of arrays
    fields       key -> `MetadataField`, the same with type and position
    tensors      name -> `GGUFTensor`, in the file's order
    alignment    bytes
    data_offset  where the tensor data begins
    size         of the file, bytes
    """

    error_type = GGUFError

    def _read_header(self) -> None:
        cursor = _Cursor(self.path, self._buffer)
        self.version, fields, directory = _read_directory(cursor)
        self.alignment = _alignment(cursor, fields)
        self.data_offset = -(-cursor.position // self.alignment) * self.alignment
        placed = _place_tensors(cursor, directory, self.alignment, self.data_offset)
        self.fields: Mapping[str, MetadataField] = MappingProxyType(fields)
        self.metadata: Mapping[str, Any] = MappingProxyType({key: entry.value for key, entry in fields.items()})
        self.tensors: Mapping[str, GGUFTensor] = MappingProxyType(
            {name: GGUFTensor(**vars(entry), _buffer=self._buffer) for name, entry in placed.items()}
        )

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.metadata)} metadata entries, {len(self.tensors)} tensors)"

    def require(self, key: str, kind: type[Scalar]) -> Scalar:
        """Return the value of `key`, an `int`, `float`, `bool` or `str` as `kind` says. Raises GGUFError if absent or
        of another type.

        An integer serves for a float; a bool is no integer; a float must be finite.
        """
        entry = self._entry(key)
        value: Any = float(entry.value) if kind is float and type(entry.value) is int else entry.value
        if type(value) is not kind:
            raise self._wrong_type(entry, _KIND_NAMES[kind])
        if isinstance(value, float) and not isfinite(value):
            raise self.error(key, f"must be a finite number, not {entry.value}")
        return value

    @overload
    def get(self, key: str, kind: type[Scalar]) -> Scalar | None: ...

    @overload
    def get(self, key: str, kind: type[Scalar], default: Scalar) -> Scalar: ...

    def get(self, key: str, kind: type[Scalar], default: Scalar | None = None) -> Scalar | None:
        """Return the value of `key` as `require` does, but `default` if the file does not have it."""
        return self.require(key, kind) if key in self.fields else default

    def string_array(self, key: str) -> list[str]:
        """Return the strings of `key`. Raises GGUFError if it is absent or not an array of strings."""
        entry = self._entry(key)
        if entry.type_name != "array of string":
            raise self._wrong_type(entry, "an array of strings")
        return cast(list[str], entry.value)

    def int_array(self, key: str) -> np.ndarray:
        """Return the integers of `key`, read-only, in the file's own width. Raises GGUFError if it is absent or of
        another type."""
        entry = self._entry(key)
        if not isinstance(entry.value, np.ndarray) or entry.value.dtype.kind not in "iu":
            raise self._wrong_type(entry, "an array of integers")
        return entry.value

    def error(self, key: str, problem: str) -> GGUFError:
        """Build a GGUFError about the metadata value of `key`, for the caller to raise."""
        entry = self.fields.get(key)
        return GGUFError(self.path, f"metadata {printable(key)}", problem, entry.offset if entry else None)

    def tensor_error(self, name: str, part: str, problem: str) -> GGUFError:
        """Build a GGUFError about `part` (`shape`, `type` or '') of the tensor called `name`, for the caller to
        raise."""
        tensor = self.tensors.get(name)
        subject = f"tensor {printable(name)} {part}".rstrip()
        return GGUFError(self.path, subject, problem, tensor.entry_offset if tensor else None)

    def _entry(self, key: str) -> MetadataField:
        entry = self.fields.get(key)
        if entry is None:
            raise self.error(key, "the file does not have this entry, and forge needs it")
        return entry

    def _wrong_type(self, entry: MetadataField, expected: str) -> GGUFError:
        return self.error(entry.key, f"must be {expected}, not {entry.type_name}")


def parse_beginning(path: Path, buffer: bytes) -> tuple[dict[str, Any], list[TensorEntry]] | None:
    """Parse metadata and tensors of a file of which `buffer` is the beginning, such as what has arrived of a download.

    Returns None while the header is not whole, or if there is something wrong with it.
    """
    try:
        _, fields, directory = _read_directory(_Cursor(path, buffer))
    except GGUFError:
        return None
    return {key: entry.value for key, entry in fields.items()}, [entry for entry, _ in directory]


def _read_directory(cursor: "_Cursor") -> tuple[int, dict[str, MetadataField], list[tuple[TensorEntry, int]]]:
    """Read version, metadata and tensor directory: all that comes before the data."""
    version = _read_version(cursor)
    num_tensors = cursor.count("tensor count", _SMALLEST_TENSOR_ENTRY, MAX_ENTRIES)
    num_fields = cursor.count("metadata count", _SMALLEST_METADATA_ENTRY, MAX_ENTRIES)
    fields = _read_metadata(cursor, num_fields)
    return version, fields, [_read_tensor_entry(cursor, index) for index in range(num_tensors)]


class _Cursor:
    """A position in the header. Every read is held against the bytes that remain, then moves the position on."""

    def __init__(self, path: Path, buffer: Any):
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.limit = min(len(buffer), MAX_HEADER_BYTES)
        self.num_nested_arrays = 0

    @property
    def remaining(self) -> int:
        return self.limit - self.position

    @property
    def room(self) -> str:
        """The bytes that remain, in words."""
        left = "that remain" if self.limit == len(self.buffer) else f"left of the {MAX_HEADER_BYTES} of a header"
        return f"the {self.remaining} bytes {left}"

    def error(self, field: str, problem: str, offset: int | None = None) -> GGUFError:
        return GGUFError(self.path, field, problem, self.position if offset is None else offset)

    def u32(self, field: str) -> int:
        return int.from_bytes(self.take(4, field), "little")

    def u64(self, field: str) -> int:
        return int.from_bytes(self.take(8, field), "little")

    def member(self, kind: type[Member], field: str, kind_name: str) -> Member:
        """Read a number that stands for a member of `kind`."""
        offset = self.position
        number = self.u32(field)
        try:
            return kind(number)
        except ValueError:
            raise self.error(field, f"unknown {kind_name} {number}", offset) from None

    def take(self, nbytes: int, field: str) -> bytes:
        if nbytes > self.remaining:
            raise self.error(field, f"{nbytes} bytes cannot fit in {self.room}; the file is cut short or damaged")
        start = self.position
        self.position += nbytes
        return bytes(self.buffer[start : self.position])

    def count(self, field: str, smallest: int, maximum: int | None = None, unit: str = "entries") -> int:
        """Read a number of entries that each take at least `smallest` bytes of what follows."""
        offset = self.position
        value = self.u64(field)
        if value * smallest > self.remaining:
            raise self.error(field, f"{value} {unit} cannot fit in {self.room}", offset)
        if maximum is not None and value > maximum:
            raise self.error(field, f"{value} {unit}; at most {maximum} are allowed", offset)
        return value

    def nested_count(self, field: str) -> int:
        """Read a number of arrays inside an array. The limit is on the sum of them in the whole file."""
        offset = self.position
        value = self.count(field, _SMALLEST_ARRAY)
        self.num_nested_arrays += value
        if self.num_nested_arrays > MAX_ENTRIES:
            raise self.error(field, f"more than {MAX_ENTRIES} arrays inside arrays", offset)
        return value

    def string(self, field: str, maximum: int | None = None) -> str:
        length = self.count(f"{field} length", 1, maximum, "bytes")
        offset = self.position
        return self.decoded(self.take(length, field), field, offset)

    def decoded(self, data: bytes, field: str, offset: int) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 at its byte {error.start}: {printable(data[error.start : error.start + 8])}"
            raise self.error(field, problem, offset) from None


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "magic")
    if magic != b"GGUF":
        hint = OTHER_KINDS_OF_FILE.get(magic, "this is not a {kind} file").format(kind="GGUF")
        if magic in _BEFORE_GGUF:
            hint = "a GGML file from before GGUF; convert the model again"
        raise cursor.error("magic", f"{printable(magic)} where 'GGUF' belongs: {hint}", 0)
    version = cursor.u32("version")
    if version in SUPPORTED_VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *SUPPORTED_VERSIONS):
        problem = "the file is big-endian; forge reads little-endian files"
    elif version == 1:
        problem = "version 1 is no longer read (by llama.cpp neither); convert the model again"
    elif version == 0:
        problem = "0 is not a version"
    else:
        problem = f"version {version} is newer than the 2 and 3 that forge reads"
    raise cursor.error("version", problem, 4)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetadataField]:
    fields: dict[str, MetadataField] = {}
    for index in range(count):
        offset = cursor.position
        key = cursor.string(f"key of metadata entry {index}", MAX_KEY_BYTES)
        name = f"metadata {printable(key)}"
        if not key:
            raise cursor.error(f"key of metadata entry {index}", "is empty", offset)
        if key in fields:
            raise cursor.error(name, f"duplicate key; its first value is at byte {fields[key].offset}", offset)
        type_id = cursor.member(GGUFValueType, f"{name} value type", "value type")
        offset = cursor.position
        value, type_name = _read_value(cursor, name, type_id, depth=0)
        fields[key] = MetadataField(key, value, type_name, offset)
    return fields


def _read_value(cursor: _Cursor, field: str, type_id: GGUFValueType, depth: int) -> tuple[Any, str]:
    """Read one value and the name of its type."""
    if type_id == GGUFValueType.STRING:
        return cursor.string(field), "string"
    if type_id == GGUFValueType.ARRAY:
        return _read_array(cursor, field, depth + 1)
    if type_id == GGUFValueType.BOOL:
        return bool(_read_bools(cursor, field, 1)[0]), "bool"
    dtype = _NUMBERS[type_id]
    return np.frombuffer(cursor.take(dtype.itemsize, field), dtype)[0].item(), type_id.name.lower()


def _read_array(cursor: _Cursor, field: str, depth: int) -> tuple[Any, str]:
    if depth > MAX_ARRAY_DEPTH:
        raise cursor.error(field, f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
    type_id = cursor.member(GGUFValueType, f"{field} element type", "value type")
    type_name = f"array of {type_id.name.lower()}"
    if type_id == GGUFValueType.STRING:
        count = cursor.count(f"{field} count", _SMALLEST_STRING)
        return _read_strings(cursor, field, count), type_name
    if type_id == GGUFValueType.ARRAY:
        count = cursor.nested_count(f"{field} count")
        return [_read_array(cursor, field, depth + 1)[0] for _ in range(count)], type_name
    if type_id == GGUFValueType.BOOL:
        return _read_bools(cursor, field, cursor.count(f"{field} count", 1)), type_name
    dtype = _NUMBERS[type_id]
    count = cursor.count(f"{field} count", dtype.itemsize)
    return np.frombuffer(cursor.take(count * dtype.itemsize, field), dtype), type_name


def _read_bools(cursor: _Cursor, field: str, count: int) -> np.ndarray:
    offset = cursor.position
    stored = np.frombuffer(cursor.take(count, field), np.uint8)
    if count and stored.max() > 1:
        index = int(np.argmax(stored > 1))
        raise cursor.error(field, f"a bool is stored as 0 or 1, not {stored[index]}", offset + index)
    return stored.view(np.bool_)


def _read_strings(cursor: _Cursor, field: str, count: int) -> list[str]:
    """Read `count` strings. Opening a model spends its time here, so short strings are read many at a time; where that
    is not possible, the next `_ONE_BY_ONE` are read in a loop with the cursor's checks written out."""
    strings: list[str] = []
    while len(strings) < count:
        short = _read_short_strings(cursor, count - len(strings))
        strings += short
        if len(short) < _ONE_BY_ONE:
            _read_one_by_one(cursor, field, strings, count)
    return strings


def _read_short_strings(cursor: _Cursor, count: int) -> list[str]:
    """Read those of the next `count` strings that lie in the next `_WINDOW` bytes, up to the first that is not sound,
    or has not 1 to 255 bytes.

    The length of such a string is one byte and seven zeros, and text has no zeros: all of them are found at once. They
    are lengths if the first stands at the cursor and each other one where the string before it ends.
    """
    room = cursor.remaining
    data = np.frombuffer(cursor.buffer, np.uint8, min(room, _WINDOW), cursor.position)
    if len(data) < _SMALLEST_STRING:
        return []
    numbers = np.ndarray(len(data) - 7, "<u8", data, strides=(1,))
    starts = np.flatnonzero(numbers - 1 < 255)[:count]
    ends = starts + 8 + data[starts]
    reserved = np.arange(count - 1, count - 1 - len(starts), -1) * _SMALLEST_STRING  # the lengths of those after it
    is_sound = (starts == np.append(0, ends)[:-1]) & (ends <= np.minimum(len(data), room - reserved))
    num_sound = int(np.append(is_sound, False).argmin())
    starts, end = starts[:num_sound], int(ends[num_sound - 1]) if num_sound else 0
    text = data[:end].copy()
    is_kept = text != 0
    text[starts] = 0
    try:
        strings: list[str] = text[is_kept].tobytes().decode().split("\0")[1:]
    except UnicodeDecodeError:
        return []
    if end - np.count_nonzero(is_kept) != 7 * num_sound:  # a string has a zero
        return []
    cursor.position += end
    return strings


def _read_one_by_one(cursor: _Cursor, field: str, strings: list[str], count: int) -> None:
    """Read the next `_ONE_BY_ONE` strings, or those that are missing of `count`.

    `bound` is the last byte at which a string may end so that the lengths of those still to come have room: one
    comparison per string keeps every read inside the header.
    """
    buffer, position = cursor.buffer, cursor.position
    bound = cursor.limit - _SMALLEST_STRING * (count - len(strings))
    wanted = min(count, len(strings) + _ONE_BY_ONE)
    length_at = _U64.unpack_from
    append = strings.append
    try:
        for _ in range(len(strings), wanted):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            bound += 8
            if position > bound:
                break
            append(str(buffer[start:position], "utf-8"))
    except UnicodeDecodeError:
        cursor.decoded(buffer[start:position], f"{field} string {len(strings)}", start)
        raise
    if len(strings) < wanted:
        length, room = position - start, max(bound - start, 0)
        problem = f"{length} bytes do not fit in the {room} that remain for it"
        raise cursor.error(f"{field} string {len(strings)} length", problem, start - 8)
    cursor.position = position


def _alignment(cursor: _Cursor, fields: dict[str, MetadataField]) -> int:
    entry = fields.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    name = "metadata 'general.alignment'"
    if entry.type_name != "uint32":
        raise cursor.error(name, f"must be uint32, not {entry.type_name}", entry.offset)
    value: int = entry.value
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT:
        raise cursor.error(name, f"{value} is not from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}", entry.offset)
    if value & (value - 1):
        raise cursor.error(name, f"{value} is not a power of two", entry.offset)
    return value


def _read_tensor_entry(cursor: _Cursor, index: int) -> tuple[TensorEntry, int]:
    """Read an entry whose `offset` still counts from the start of the data, and the byte at which that offset is
    written."""
    entry_offset = cursor.position
    name = cursor.string(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    if not name:
        raise cursor.error(f"name of tensor {index}", "is empty", entry_offset)
    field = f"tensor {printable(name)}"
    shape = _read_shape(cursor, field)
    ggml_type = cursor.member(GGMLType, f"{field} type", "tensor type")
    block = ggml_type.block
    if shape[-1] % block.elements:
        first_dimension = cursor.position - 4 - 8 * len(shape)
        problem = f"{shape[-1]} is not a multiple of {ggml_type.name}'s blocks of {block.elements}"
        raise cursor.error(f"{field} dimension 0", problem, first_dimension)
    nbytes = prod(shape) // block.elements * block.nbytes
    offset_at = cursor.position
    offset = cursor.u64(f"{field} offset")
    return TensorEntry(name, shape, ggml_type, offset, nbytes, entry_offset), offset_at


def _read_shape(cursor: _Cursor, field: str) -> tuple[int, ...]:
    """Read a shape, outermost dimension first; the file has the innermost first."""
    offset = cursor.position
    num_dimensions = cursor.u32(f"{field} number of dimensions")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        problem = f"{num_dimensions} is not from 1 to {MAX_DIMENSIONS}"
        raise cursor.error(f"{field} number of dimensions", problem, offset)
    dimensions: list[int] = []
    for axis in range(num_dimensions):
        offset = cursor.position
        dimensions.append(cursor.u64(f"{field} dimension {axis}"))
        if dimensions[-1] == 0:
            raise cursor.error(f"{field} dimension {axis}", "is zero", offset)
        if prod(dimensions) > MAX_ELEMENTS:
            problem = f"{' x '.join(map(str, dimensions))} elements are more than 2^63 - 1"
            raise cursor.error(f"{field} dimension {axis}", problem, offset)
    return tuple(reversed(dimensions))


def _place_tensors(
    cursor: _Cursor, directory: list[tuple[TensorEntry, int]], alignment: int, data_offset: int
) -> dict[str, TensorEntry]:
    """Return the tensors by name with offsets from the start of the file: aligned, inside the file, apart from each
    other."""
    tensors: dict[str, TensorEntry] = {}
    size = len(cursor.buffer)
    for entry, offset_at in directory:
        field = f"tensor {printable(entry.name)}"
        if entry.name in tensors:
            first = tensors[entry.name].entry_offset
            raise cursor.error(field, f"duplicate tensor name; the first is at byte {first}", entry.entry_offset)
        if entry.offset % alignment:
            problem = f"{entry.offset} is not a multiple of the alignment {alignment}"
            raise cursor.error(f"{field} offset", problem, offset_at)
        start = data_offset + entry.offset
        if start + entry.nbytes > size:
            problem = f"its {entry.nbytes} bytes from byte {start} end past the end of the file, which has {size}"
            raise cursor.error(f"{field} offset", f"{problem}; it is cut short or damaged", offset_at)
        tensors[entry.name] = replace(entry, offset=start)
    _refuse_overlaps(cursor, directory)
    return tensors


def _refuse_overlaps(cursor: _Cursor, directory: list[tuple[TensorEntry, int]]) -> None:
    by_offset = sorted(directory, key=lambda placed: placed[0].offset)
    for (previous, _), (entry, offset_at) in pairwise(by_offset):
        if previous.offset + previous.nbytes > entry.offset:
            problem = f"its data overlaps that of tensor {printable(previous.name)}"
            raise cursor.error(f"tensor {printable(entry.name)} offset", problem, offset_at)
