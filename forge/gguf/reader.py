"""An open GGUF file: its metadata by key, with the checks that a consumer needs, and its tensors by name.

The file is memory-mapped. Opening it parses the header (`forge.gguf.header`); a tensor's bytes are read when used. A
file opens, or raises a `GGUFError`; so does every typed read of its metadata. What stays outside of that promise is a
file that another process cuts short while it is open: the operating system then ends the process with SIGBUS.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Any, TypeVar, cast, overload

import numpy as np

from forge.gguf import block_formats
from forge.gguf.header import GGUFError, MetadataField, TensorEntry, parse_header
from forge.mapped_file import MappedFile, printable

Scalar = TypeVar("Scalar", int, float, bool, str)
_KIND_NAMES = {int: "an integer", float: "a number", bool: "a bool", str: "a string"}


@dataclass(frozen=True)
class GGUFTensor(TensorEntry):
    """A tensor of an open file: `name`, `shape`, `ggml_type`, `offset`, `nbytes`; its data is read when asked for."""

    _buffer: mmap.mmap = field(repr=False, compare=False)

    def raw(self) -> np.ndarray:
        """Return the tensor's bytes, uint8 [nbytes]: a read-only view of the file, which keeps the mapping alive."""
        return np.frombuffer(self._buffer, dtype=np.uint8, count=self.nbytes, offset=self.offset)

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
        header = parse_header(self.path, self._buffer)
        self.version = header.version
        self.fields: Mapping[str, MetadataField] = MappingProxyType(header.fields)
        self.metadata: Mapping[str, Any] = MappingProxyType({key: entry.value for key, entry in header.fields.items()})
        self.tensors: Mapping[str, GGUFTensor] = MappingProxyType(
            {name: GGUFTensor(**vars(entry), _buffer=self._buffer) for name, entry in header.tensors.items()}
        )
        self.alignment = header.alignment
        self.data_offset = header.data_offset

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
