"""Writing GGUF files, by way of the gguf package's `GGUFWriter`: models made of random weights.

The gguf package is imported when something is written or quantized; nothing that only reads models imports it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from forge.gguf.ggml_types import GGMLType, GGUFValueType, row_nbytes


@dataclass(frozen=True)
class TypedValue:
    """A metadata value with its exact type, where the one that `write_gguf` would choose is not the one that is meant.

    `element` is the element type of an array.
    """

    value: Any
    value_type: GGUFValueType
    element: GGUFValueType | None = None


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write, `shape` in elements: [rows, columns].

    `pieces` is called when the tensor's turn comes, and gives its bytes as stored, uint8, piece by piece, so that not
    even one tensor is in memory whole.
    """

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """The number of bytes as stored."""
        return prod(self.shape[:-1]) * row_nbytes(self.ggml_type, self.shape[-1])


def encode(ggml_type: GGMLType, values: np.ndarray) -> np.ndarray:
    """Encode float `values` [..., columns] as uint8 [..., bytes of a row]; not to the K types, which gguf cannot
    write."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if ggml_type == GGMLType.F32:
        return values.view(np.uint8)
    import gguf

    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType(ggml_type))
    return np.ascontiguousarray(stored).view(np.uint8)


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[NewTensor],
    on_progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a version 3 file. `metadata` must have `general.architecture`; a list becomes an array.

    An int is written as uint32 where it fits, otherwise as int32, uint64 or int64; a list of ints as int32; a float as
    float32. The file appears under its name only once it is whole. `on_progress` is called with the number of bytes of
    each piece of data after it was written. ValueError for an empty list: gguf writes none.
    """
    import gguf

    path = Path(path)
    entries = dict(metadata)
    writer = gguf.GGUFWriter(None, arch=entries.pop("general.architecture"))
    for key, value in entries.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        else:
            typed = value if isinstance(value, TypedValue) else _typed(value)
            element = None if typed.element is None else gguf.GGUFValueType(typed.element)
            writer.add_key_value(key, typed.value, gguf.GGUFValueType(typed.value_type), element)
    pending = list(tensors)
    for tensor in pending:
        ggml_type = gguf.GGMLQuantizationType(tensor.ggml_type)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=ggml_type)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in pending:
            writer.write_tensor_data(cast(np.ndarray, _Data(tensor, on_progress)))
        writer.close()
        os.replace(unfinished, path)
    finally:
        try:
            writer.close()  # which may fail once more, on a full disk
        finally:
            unfinished.unlink(missing_ok=True)
    return path


class _Data:
    """A tensor's data as `GGUFWriter.write_tensor_data` takes it: it asks an array for these two things only."""

    def __init__(self, tensor: NewTensor, on_progress: Callable[[int], None] | None):
        self._tensor, self._on_progress = tensor, on_progress
        self.nbytes = tensor.nbytes

    def tofile(self, file: BinaryIO) -> None:
        written = 0
        for piece in self._tensor.pieces():
            written += file.write(np.ascontiguousarray(piece).data.cast("B"))
            if self._on_progress is not None:
                self._on_progress(piece.nbytes)
        if written != self.nbytes:
            name = self._tensor.name
            raise ValueError(f"tensor {name!r} has {written} bytes of data where its shape takes {self.nbytes}")


def _typed(value: Any) -> TypedValue:
    if isinstance(value, bool | np.bool_):
        return TypedValue(bool(value), GGUFValueType.BOOL)
    if isinstance(value, int | np.integer):
        return TypedValue(int(value), _integer_type(int(value)))
    if isinstance(value, float | np.floating):
        return TypedValue(float(value), GGUFValueType.FLOAT32)
    if isinstance(value, str):
        return TypedValue(value, GGUFValueType.STRING)
    if isinstance(value, np.ndarray | list | tuple):
        items = value.tolist() if isinstance(value, np.ndarray) else list(value)
        return TypedValue(items, GGUFValueType.ARRAY)
    raise TypeError(f"GGUF metadata cannot hold a {type(value).__name__}")


def _integer_type(value: int) -> GGUFValueType:
    if value >= 0:
        return GGUFValueType.UINT32 if value < 2**32 else GGUFValueType.UINT64
    return GGUFValueType.INT32 if value >= -(2**31) else GGUFValueType.INT64
