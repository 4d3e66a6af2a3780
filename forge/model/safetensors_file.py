"""An untrusted safetensors file: its header checked before it is used, its tensors by name.

The format, little-endian (https://github.com/huggingface/safetensors#format):

    length of the header u64 | header, JSON in UTF-8, spaces at its end as padding | data

    header   {"name": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}, ...,
              "__metadata__": {"text": "text", ...}}

Offsets count from the start of the data. As in the format's own implementation, the tensors cover the data without gap
or overlap, and no name is there twice. The file is memory-mapped: opening it reads the header only.

What is wrong raises a `SafetensorsError` that names the file, the field and its byte, as a `GGUFError` does. Every
length is held against the bytes that are there before anything is allocated for it, and the header against
`MAX_HEADER_BYTES`, so a hostile file costs bounded time and memory.

Without the safetensors package: it gives no bfloat16 to NumPy and no view of the file, only copies; it takes a name
that is there twice, an unknown key and nine dimensions, names no byte, and a header of 67 MB costs it 12 s and 277 MB;
and a model on a device must load where nothing but NumPy and torch is installed.
"""

import json
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from forge.gguf import GGMLType, block_formats
from forge.mapped_file import OTHER_KINDS_OF_FILE, MappedFile, ModelFileError, printable, tensor_bytes

MAX_HEADER_BYTES = 4 << 20
"""Some thirty thousand tensors; the largest Qwen3 has under a thousand in a file."""

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**63 - 1

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
GGML_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
"""The dtypes that forge computes with. The reader knows the sizes of the others, so that a file that uses one can be
read and then refused by the dtype's name."""


class SafetensorsError(ModelFileError):
    """A safetensors file that is missing, malformed, or of a kind that forge does not run."""


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor of an open file; its data is read when asked for.

    dtype   as the file names it
    offset  of the data, from the start of the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    _buffer: mmap.mmap = field(repr=False, compare=False)

    @property
    def ggml_type(self) -> GGMLType:
        """The same type by ggml's name. KeyError for one that forge does not compute with (see `GGML_TYPES`)."""
        return GGML_TYPES[self.dtype]

    def raw(self) -> np.ndarray:
        """Return the tensor's bytes, uint8 [nbytes]: a read-only view of the file, which keeps the mapping alive.

        A copy where the file does not align the numbers, which the format does not promise."""
        view = tensor_bytes(self._buffer, self.offset, self.nbytes)
        return view if self.offset % _DTYPE_BYTES[self.dtype] == 0 else view.copy()

    def dequantize(self) -> np.ndarray:
        """Convert the values to a new float32 array of `shape`."""
        return block_formats.dequantize(self.ggml_type, self.raw(), self.shape)


class _DuplicateKey(ValueError):
    """Raised from inside the JSON parser."""


class SafetensorsFile(MappedFile[SafetensorsTensor]):
    """An open safetensors file: `tensors` by name in the order of the header, `size` in bytes. Made by `open`."""

    error_type = SafetensorsError

    def _read_header(self) -> None:
        self._header = self._header_bytes()
        self._data_offset = _LENGTH_BYTES + len(self._header)
        entries = self._parse()
        metadata = entries.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._entry_error(_METADATA, _METADATA, "must be an object of strings")
        tensors = {name: self._tensor(name, entry) for name, entry in entries.items()}
        if not tensors:
            raise self._error("header", "the file holds no tensors", 0)
        self._check_cover(list(tensors.values()))
        self.tensors: Mapping[str, SafetensorsTensor] = MappingProxyType(tensors)

    def tensor_error(self, name: str, part: str, problem: str) -> SafetensorsError:
        """Build a SafetensorsError about `part` (`shape`, `dtype` or '') of the tensor called `name`, which need not be
        here; for the caller to raise."""
        return self._entry_error(name, f"tensor {printable(name)} {part}".rstrip(), problem)

    def _header_bytes(self) -> bytes:
        if self.size < _LENGTH_BYTES:
            raise self._length_error(f"the file has only {self.size} bytes; it is cut short")
        (length,) = struct.unpack_from("<Q", self._buffer)
        first = self._buffer[:4]
        if first == b"GGUF" or first in OTHER_KINDS_OF_FILE:
            raise self._length_error(OTHER_KINDS_OF_FILE.get(first, "this is a GGUF file").format(kind="safetensors"))
        if length > self.size - _LENGTH_BYTES:
            problem = f"{length} bytes cannot fit in the {self.size - _LENGTH_BYTES} that remain; the file is cut short"
            raise self._length_error(f"{problem} or is no safetensors file")
        if length > MAX_HEADER_BYTES:
            raise self._length_error(f"{length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        return self._buffer[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def _parse(self) -> dict[str, Any]:
        if not self._header.startswith(b"{"):
            raise self._error("header", f"begins with {printable(self._header[:8])} where a JSON object belongs", 0)
        try:
            text = self._header.decode("utf-8")
            header: dict[str, Any] = json.loads(text, object_pairs_hook=_without_duplicates)
            return header
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8: {printable(self._header[error.start : error.start + 8])}"
            raise self._error("header", problem, error.start) from None
        except json.JSONDecodeError as error:
            at = len(text[: error.pos].encode("utf-8"))
            raise self._error("header", f"is not JSON: {error.msg}", at) from None
        except _DuplicateKey as error:
            key = str(error)
            raise self._entry_error(key, f"key {printable(key)}", "is there twice") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
            problem = "nests too deep" if isinstance(error, RecursionError) else "holds a number that is too long"
            raise self._error("header", problem, 0) from None

    def _tensor(self, name: str, entry: Any) -> SafetensorsTensor:
        if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
            raise self.tensor_error(name, "", "must have dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
            raise self.tensor_error(name, "dtype", f"{printable(dtype)} is unknown")
        if not _is_counts(shape) or len(shape) > MAX_DIMENSIONS:
            raise self.tensor_error(name, "shape", f"must be a list of at most {MAX_DIMENSIONS} whole numbers")
        if prod(shape) > MAX_ELEMENTS:
            raise self.tensor_error(name, "shape", "has more than 2^63 - 1 elements")
        nbytes = prod(shape) * _DTYPE_BYTES[dtype]
        problem = self._offsets_problem(offsets, nbytes)
        if problem is not None:
            raise self.tensor_error(name, "data_offsets", problem)
        return SafetensorsTensor(name, dtype, tuple(shape), self._data_offset + offsets[0], nbytes, self._buffer)

    def _offsets_problem(self, offsets: Any, nbytes: int) -> str | None:
        """Return what is wrong with the offsets of a tensor that takes `nbytes`."""
        if not _is_counts(offsets) or len(offsets) != 2:
            return "must be two whole numbers, where the data begins and ends"
        begin, end = offsets
        if begin > end:
            return f"{begin} is past its end, {end}"
        data_bytes = self.size - self._data_offset
        if end > data_bytes:
            problem = f"the data ends at {end}, and the file has {data_bytes} bytes of data"
            return f"{problem}; it is cut short or damaged"
        return f"{end - begin} bytes where dtype and shape take {nbytes}" if end - begin != nbytes else None

    def _check_cover(self, tensors: list[SafetensorsTensor]) -> None:
        """Check that the tensors lie end to end from the first byte of the data to the last. Raises the file's
        error."""
        end, previous = self._data_offset, ""
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset < end:
                problem = f"its data overlaps that of tensor {printable(previous)}"
                raise self.tensor_error(tensor.name, "data_offsets", problem)
            if tensor.offset > end:
                problem = f"the {tensor.offset - end} bytes before its data belong to no tensor"
                raise self.tensor_error(tensor.name, "data_offsets", problem)
            end, previous = tensor.offset + tensor.nbytes, tensor.name
        rest = self.size - end
        if rest:
            problem = f"the {rest} bytes after its data, to the end of the file, belong to no tensor"
            raise self.tensor_error(previous, "data_offsets", problem)

    def _entry_error(self, key: str, subject: str, problem: str) -> SafetensorsError:
        """Build an error about the entry called `key`. Its place is looked for only now: for all entries it would take
        long."""
        quoted = re.escape(json.dumps(key, ensure_ascii=False).encode("utf-8", errors="replace"))
        match = re.search(quoted + rb"\s*:", self._header)
        return self._error(subject, problem, match.start() if match else 0)

    def _length_error(self, problem: str) -> SafetensorsError:
        return SafetensorsError(self.path, "header length", problem, 0)

    def _error(self, subject: str, problem: str, at: int) -> SafetensorsError:
        """Build an error about byte `at` of the header."""
        return SafetensorsError(self.path, subject, problem, _LENGTH_BYTES + at)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise _DuplicateKey(key)
        entries[key] = value
    return entries


def _is_counts(value: Any) -> bool:
    """Return whether a value is a list of whole numbers from 0 on; True is no whole number."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_ELEMENTS for item in value)
