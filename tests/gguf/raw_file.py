"""GGUF files put together byte by byte, right or wrong on purpose, with the position of every field noted."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forge.gguf import GGUFError, GGUFFile
from forge.gguf.ggml_types import GGMLType, GGUFValueType

U32, STRING, ARRAY, BOOL, FLOAT32, INT32 = (
    GGUFValueType.UINT32,
    GGUFValueType.STRING,
    GGUFValueType.ARRAY,
    GGUFValueType.BOOL,
    GGUFValueType.FLOAT32,
    GGUFValueType.INT32,
)
HUGE_NUMBERS = (2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def array(element: int, items: list[bytes], count: int | None = None) -> bytes:
    return u32(element) + u64(len(items) if count is None else count) + b"".join(items)


@dataclass
class RawTensor:
    """One tensor; what is None is worked out so that the file is right. `dimensions` are innermost first, as stored."""

    name: str | bytes
    dimensions: tuple[int, ...] = (32,)
    ggml_type: int = GGMLType.F32
    num_dimensions: int | None = None
    offset: int | None = None
    nbytes: int | None = None

    def size(self) -> int:
        if self.nbytes is not None:
            return self.nbytes
        elements = 1
        for dimension in self.dimensions:
            elements *= dimension
        block = GGMLType(self.ggml_type).block
        return elements // block.elements * block.nbytes


@dataclass
class RawFile:
    """`build` gives the bytes; `at` then says where each field begins, by the names used in `build`."""

    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    metadata_count: int | None = None
    metadata: list[tuple[str | bytes, int, bytes]] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)
    alignment: int = 32
    at: dict[str, int] = field(default_factory=dict)

    def build(self) -> bytes:
        out = bytearray()

        def put(label: str, data: bytes) -> None:
            self.at[label] = len(out)
            out.extend(data)

        put("magic", self.magic)
        put("version", u32(self.version))
        put("tensor count", u64(len(self.tensors) if self.tensor_count is None else self.tensor_count))
        put("metadata count", u64(len(self.metadata) if self.metadata_count is None else self.metadata_count))
        for index, (key, value_type, payload) in enumerate(self.metadata):
            put(f"entry {index} key", string(key))
            put(f"entry {index} type", u32(value_type))
            put(f"entry {index} value", payload)
        position = 0
        data = bytearray()
        for index, tensor in enumerate(self.tensors):
            put(f"tensor {index} name", string(tensor.name))
            num_dimensions = len(tensor.dimensions) if tensor.num_dimensions is None else tensor.num_dimensions
            put(f"tensor {index} number of dimensions", u32(num_dimensions))
            for axis, dimension in enumerate(tensor.dimensions):
                put(f"tensor {index} dimension {axis}", u64(dimension))
            put(f"tensor {index} type", u32(tensor.ggml_type))
            put(f"tensor {index} offset", u64(position if tensor.offset is None else tensor.offset))
            data.extend(bytes(tensor.size()))
            data.extend(bytes(-len(data) % self.alignment))
            position = len(data)
        self.at["directory end"] = len(out)
        out.extend(bytes(-len(out) % self.alignment))
        self.at["data"] = len(out)
        out.extend(data)
        return bytes(out)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def overwrite(path: Path, data: bytes) -> None:
    """Make `data` the contents of `path`, in place: ext4 writes a file out at once when it was first cut to nothing."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate()


def refused(path: Path) -> GGUFError:
    """The error of opening `path`, which must be one printable line that begins with the file's name."""
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path)
    return checked(caught.value, path)


def checked(error: GGUFError, path: Path) -> GGUFError:
    text = str(error)
    assert text.isprintable()
    assert len(text) < len(str(path)) + 400
    assert error.path == path
    if error.offset is not None:
        assert f"at byte {error.offset}, {error.field}: " in text
    return error


def opened(path: Path) -> GGUFFile:
    """Open and close: the header's values stay."""
    with GGUFFile.open(path) as file:
        return file
