"""Writing GGUF files, by way of the gguf package's `GGUFWriter`: for tests, and for models made of random weights.

The gguf package is imported when something is written or quantized; nothing that only reads models imports it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    """A tensor to write.

    `data` is a float array, which is quantized to `ggml_type`, or uint8: the raw blocks. With `shape` given, `data` may
    be a function that returns either, called when the tensor's turn comes, so that a large model is never in memory
    whole; or one that returns an iterator of raw pieces, so that not even a tensor is.
    """

    name: str
    ggml_type: GGMLType
    data: np.ndarray | Callable[[], np.ndarray | Iterator[np.ndarray]]
    shape: tuple[int, ...] | None = None

    def element_shape(self) -> tuple[int, ...]:
        """Return the shape in elements, [rows, columns], whatever `data` is. Raises ValueError if it is not known."""
        if self.shape is not None:
            return self.shape
        if not isinstance(self.data, np.ndarray):
            raise ValueError(f"tensor {self.name!r} is made by a function and needs a shape")
        if self.data.dtype != np.uint8:
            return self.data.shape
        block = self.ggml_type.block
        return (*self.data.shape[:-1], self.data.shape[-1] // block.nbytes * block.elements)

    def nbytes(self) -> int:
        """Return the number of bytes as stored."""
        shape = self.element_shape()
        return int(np.prod(shape[:-1], dtype=np.int64)) * row_nbytes(self.ggml_type, shape[-1])

    def encoded(self) -> np.ndarray:
        """Return the bytes as stored, uint8, all at once."""
        pieces = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else np.concatenate([piece.reshape(-1) for piece in pieces])

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the bytes as stored, uint8, in one piece or several."""
        data = self.data if isinstance(self.data, np.ndarray) else self.data()
        if not isinstance(data, np.ndarray):
            yield from data
        elif data.dtype == np.uint8:
            yield np.ascontiguousarray(data)
        else:
            yield encode(self.ggml_type, data)


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
    tensors: Iterable[NewTensor | tuple[str, np.ndarray, GGMLType]],
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
    pending = [
        tensor if isinstance(tensor, NewTensor) else NewTensor(tensor[0], tensor[2], tensor[1]) for tensor in tensors
    ]
    for tensor in pending:
        shape, ggml_type = tensor.element_shape(), gguf.GGMLQuantizationType(tensor.ggml_type)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), tensor.nbytes(), raw_dtype=ggml_type)
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
        self.nbytes = tensor.nbytes()

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


_UNIT_DEVIATION = {
    GGMLType.Q2_K: (80, 13.9),
    GGMLType.Q3_K: (108, 43.4),
    GGMLType.IQ4_NL: (0, 67.5),
    GGMLType.IQ4_XS: (0, 1250.0),
    GGMLType.IQ3_S: (0, 140.0),
    GGMLType.IQ3_XXS: (0, 142.0),
}
"""The byte of a block's float16 factor, and the standard deviation of random bytes' values under a factor of 1."""

_MADE_DIRECTLY = {GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, *_UNIT_DEVIATION}


def random_weights(ggml_type: GGMLType, shape: tuple[int, ...], std: float, rng: np.random.Generator) -> np.ndarray:
    """Make raw blocks, uint8 [..., bytes of a row], of random values with mean 0 and about the given standard
    deviation.

    Normally distributed for the types that the gguf package quantizes to. For the others the blocks are made directly:
    for Q4_K, Q5_K and Q6_K uniform quants, scales within a factor of two of each other, minima that center each group;
    for the rest random bytes under a factor that gives the deviation.
    """
    if ggml_type not in _MADE_DIRECTLY:
        return encode(ggml_type, rng.standard_normal(shape, dtype=np.float32) * np.float32(std))
    elements, nbytes = ggml_type.block
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // elements, nbytes), dtype=np.uint8)
    if ggml_type in _UNIT_DEVIATION:
        at, deviation = _UNIT_DEVIATION[ggml_type]
        blocks[:, at : at + 2] = _float16_bytes(std / deviation)
        if ggml_type == GGMLType.IQ4_NL:  # whose values are not centered: as many factors are negative as positive
            blocks[:, at + 1] |= rng.integers(0, 2, len(blocks), np.uint8) << 7
        if ggml_type == GGMLType.Q2_K:
            blocks[:, 82:84] = _float16_bytes(1.5 * std / deviation)  # quants are 1.5 in the mean
    elif ggml_type == GGMLType.Q6_K:
        blocks[:, 192:208] = rng.integers(64, 128, (len(blocks), 16), dtype=np.uint8)
        blocks[:, 208:210] = _float16_bytes(std / (96 * 18.5))
    else:
        # A uniform quant of b bits deviates by 2^b / sqrt(12) around (2^b - 1) / 2; the six-bit scales are 32 to 63,
        # equal to their minima.
        largest = 15 if ggml_type == GGMLType.Q4_K else 31
        scale = std / (48 * (largest + 1) / 12**0.5)
        blocks[:, 0:2] = _float16_bytes(scale)
        blocks[:, 2:4] = _float16_bytes(scale * largest / 2)
        blocks[:, 4:16] = _six_bit_pairs(rng.integers(32, 64, (len(blocks), 8), dtype=np.uint8))
    return blocks.reshape(*shape[:-1], -1)


def _float16_bytes(value: float) -> np.ndarray:
    return np.array([value], dtype="<f2").view(np.uint8)


def _six_bit_pairs(scales: np.ndarray) -> np.ndarray:
    """Pack twelve bytes per row of eight 6-bit `scales`, each its group's minimum too: the reverse of
    `_six_bit_scales`."""
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    last = (scales[:, 4:] & 0x0F) | (scales[:, 4:] << 4)
    return np.concatenate([first, first, last], axis=1)
