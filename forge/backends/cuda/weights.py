"""Weights on the device: dense for large products, packed for those that read every weight for a few rows.

A matrix `[out_features, in_features]` (below: `[out, in]`) is *dense* (the backend's dtype), or *packed*, or both.
Packed is what a quantized file says, with the parts of a block in arrays of their own, so that 16 bytes of quants are
one aligned load:

    Q8     Q8_0            values int8 [out, in]         scales float16 [out, in / 32]
    Q4     Q4_0            values uint8 [out, in / 2]    scales float16 [out, in / 32]
    Q4_K   Q4_K            values uint8 [out, in / 2]    scales uint8 [out, in / 32, 2]: scale, minimum
                                                         factors float16 [out, in / 256, 2]: d, dmin

In `values` of four bits, 16 bytes hold a group of 32 columns: byte j has column j in its low half and column j + 16 in
its high half. Nothing is rounded: packed stands for exactly the file's numbers. Other quantized types become dense.

Matrices that read the same input are fused into one, so that one kernel does their products: `stacked` puts them under
each other (queries, keys, values), `interleaved` takes their rows in turn (gate, up), which puts the two numbers that
SwiGLU combines side by side. The parts stay what they were, as views of the whole.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forge.gguf import GGMLType
from forge.model.backend import Tensor

DENSE, Q8, Q4, Q4_K = range(4)
GROUP = 32
SUPERBLOCK = 256

_FLOATS = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}


@dataclass(frozen=True)
class Packed:
    """A quantized matrix in the layout that this module's docstring draws."""

    kind: int
    values: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor | None = None

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        return tuple(array for array in (self.values, self.scales, self.factors) if array is not None)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize to float32 and round each number once to `dtype`: `[out, in]`."""
        return torch.cat([self._multiplied(rows).to(dtype) for rows in _row_runs(self.values)])

    def _multiplied(self, rows: slice) -> torch.Tensor:
        values, scales = self.values[rows], self.scales[rows]
        if self.kind == Q8:
            return (values.view(len(values), -1, GROUP).float() * scales.float()[..., None]).flatten(1)
        halves = values.view(len(values), -1, GROUP // 2)
        quants = torch.cat([halves & 15, halves >> 4], dim=-1).float()  # [rows, groups, 32]
        if self.kind == Q4:
            return ((quants - 8) * scales.float()[..., None]).flatten(1)
        assert self.factors is not None, "of a K type"
        factors = self.factors[rows].float().repeat_interleave(SUPERBLOCK // GROUP, dim=1)
        scale, minimum = (factors * scales.float()).unbind(-1)
        return (quants * scale[..., None] - minimum[..., None]).flatten(1)


@dataclass(eq=False)
class Matrix:
    """A loaded matrix `[out, in]`, under its name in the file."""

    name: str
    out_features: int
    in_features: int
    dense: torch.Tensor | None = None
    packed: Packed | None = None

    @property
    def kind(self) -> int:
        """The format in which kernels read it."""
        return DENSE if self.packed is None else self.packed.kind

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def read_bytes(self) -> int:
        """The bytes that a product with a few rows reads."""
        return self.own_dense().nbytes if self.packed is None else self.packed.nbytes

    def own_dense(self) -> torch.Tensor:
        """`dense`, for a matrix that is not packed."""
        assert self.dense is not None
        return self.dense

    def make_dense(self, dtype: torch.dtype) -> None:
        if self.dense is None:
            assert self.packed is not None
            self.dense = self.packed.dense(dtype)


def load_matrix(
    tensor: Tensor, device: torch.device, dtype: torch.dtype, *, keep_packed: bool, quantize: str | None = None
) -> Matrix:
    """Load `tensor` onto `device`: packed if its type is, or is quantized to, one that kernels read; otherwise dense.

    keep_packed: False makes everything dense.
    """
    name, (rows, columns) = tensor.name, tensor.shape
    if tensor.ggml_type in _FLOATS:
        values = _bytes_on(device, tensor.raw()).view(_FLOATS[tensor.ggml_type]).view(rows, columns)
        if quantize is not None and columns % GROUP == 0:
            return _quantized(name, quantized_to_q8(values), keep_packed, dtype)
        return Matrix(name, rows, columns, dense=values.to(dtype))
    if tensor.ggml_type in _PACK:
        blocks = _bytes_on(device, tensor.raw()).view(rows, -1, tensor.ggml_type.block.nbytes)
        return _quantized(name, _PACK[tensor.ggml_type](blocks), keep_packed, dtype)
    return Matrix(name, rows, columns, dense=torch.from_numpy(tensor.dequantize()).to(device).to(dtype))


def _quantized(name: str, packed: Packed, keep_packed: bool, dtype: torch.dtype) -> Matrix:
    rows, width = packed.values.shape
    matrix = Matrix(name, rows, width if packed.kind == Q8 else 2 * width, packed=packed)
    if not keep_packed:
        matrix.make_dense(dtype)
        matrix.packed = None
    return matrix


def quantized_to_q8(values: torch.Tensor) -> Packed:
    """Quantize float values to Q8_0: per 32 columns, the scale that maps the largest to 127."""
    groups = values.float().view(len(values), -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    quants = (groups * inverse[..., None]).round().to(torch.int8)
    return Packed(Q8, quants.flatten(1), scales.to(torch.float16))


def stacked(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Stack `matrices` in order, into as few matrices as their kinds allow."""
    runs: list[list[Matrix]] = []
    for matrix in matrices:
        if not runs or runs[-1][0].kind != matrix.kind:
            runs.append([])
        runs[-1].append(matrix)
    return [run[0] if len(run) == 1 else _fused(run, _concatenated) for run in runs]


def interleaved(first: Matrix, second: Matrix, dtype: torch.dtype) -> Matrix:
    """Interleave rows: 0, 1, 2, 3, … are `first`'s 0, `second`'s 0, `first`'s 1, …; dense if their kinds differ."""
    if first.kind != second.kind:
        for matrix in (first, second):
            matrix.make_dense(dtype)
            matrix.packed = None
    return _fused([first, second], _in_turn)


def _fused(matrices: Sequence[Matrix], fuse) -> Matrix:
    """Make one matrix of several, each of which becomes a view of it, so that the memory is taken once."""
    first = matrices[0]
    whole = Matrix("+".join(m.name for m in matrices), sum(m.out_features for m in matrices), first.in_features)
    if first.packed is None:
        whole.dense, parts = fuse([matrix.dense for matrix in matrices])
        for matrix, part in zip(matrices, parts, strict=True):
            matrix.dense = part
        return whole
    packed = [matrix.packed.arrays for matrix in matrices if matrix.packed is not None]
    fused = [fuse(arrays) for arrays in zip(*packed, strict=True)]
    whole.packed = Packed(first.kind, *(array for array, _ in fused))
    for index, matrix in enumerate(matrices):
        matrix.packed = Packed(first.kind, *(parts[index] for _, parts in fused))
    return whole


def _concatenated(arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    whole = torch.cat(list(arrays))
    return whole, whole.split([len(array) for array in arrays])


def _in_turn(arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    whole = torch.stack(list(arrays), dim=1).flatten(0, 1)
    return whole, [whole[index :: len(arrays)] for index in range(len(arrays))]


def _bytes_on(device: torch.device, raw: np.ndarray) -> torch.Tensor:
    """Copy a file's bytes to the device, flat and aligned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the file is mapped read-only, and nothing writes to it
        return torch.from_numpy(raw.reshape(-1)).to(device, copy=True)


def _row_runs(values: torch.Tensor) -> list[slice]:
    """Yield runs of rows whose float32 form takes a few hundred megabytes at most."""
    step = max(1, (1 << 26) // values.shape[1])
    return [slice(start, start + step) for start in range(0, len(values), step)]


def _float16(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return blocks[..., start:stop].contiguous().view(torch.float16)


def _pack_q8_0(blocks: torch.Tensor) -> Packed:
    # 34 bytes: d as float16, 32 quants as int8
    return Packed(Q8, blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _float16(blocks, 0, 2).flatten(1))


def _pack_q4_0(blocks: torch.Tensor) -> Packed:
    # 18 bytes: d as float16, 16 bytes with columns 0 to 15 in their low halves and 16 to 31 in their high halves
    return Packed(Q4, blocks[..., 2:].flatten(1), _float16(blocks, 0, 2).flatten(1))


def _pack_q4_k(blocks: torch.Tensor) -> Packed:
    # 144 bytes: d, dmin | 12 bytes of 6-bit scales and minima | 4 runs of 32 bytes, low halves one group, high the next
    runs = blocks[..., 16:].unflatten(-1, (4, 32))
    groups = torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3, -2)  # [rows, blocks, 8 groups, 32]
    values = groups[..., :16] | (groups[..., 16:] << 4)
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=-1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=-1)
    both = torch.stack([scales, minimums], dim=-1).flatten(1, 2)  # [rows, groups, 2]
    return Packed(Q4_K, values.flatten(1), both.contiguous(), _float16(blocks, 0, 4))


_PACK = {GGMLType.Q8_0: _pack_q8_0, GGMLType.Q4_0: _pack_q4_0, GGMLType.Q4_K: _pack_q4_k}
