"""The numbers of the GGUF format: value types of metadata, and ggml's tensor types with their block sizes.

The members have the numbers of `gguf.GGUFValueType` and `gguf.GGMLQuantizationType`, so each compares equal to its
twin; they are repeated here because importing the gguf package costs more than reading a model's header. A test holds
both against the package.
"""

from enum import IntEnum
from typing import NamedTuple


class GGUFValueType(IntEnum):
    """What a metadata value is, as stored before the value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class BlockSize(NamedTuple):
    """A row of a tensor is a whole number of blocks; a block is `elements` values in `nbytes` bytes."""

    elements: int
    nbytes: int


class GGMLType(IntEnum):
    """How a tensor's elements are stored: its number in the format, and its blocks (elements, bytes)."""

    block: BlockSize

    def __new__(cls, number: int, elements: int = 0, nbytes: int = 0) -> "GGMLType":
        member = int.__new__(cls, number)
        member._value_ = number
        member.block = BlockSize(elements, nbytes)
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18


FLOAT_TYPES = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
_QUANTIZED = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
QUANTIZED_TYPES = frozenset(GGMLType[name] for name in _QUANTIZED.split())
SUPPORTED_TYPES = FLOAT_TYPES | QUANTIZED_TYPES
"""The tensor types that forge computes with. The reader knows the sizes of the others, so that a file that uses one can
be read and then refused by the type's name."""


def row_nbytes(ggml_type: GGMLType, columns: int) -> int:
    """Return the bytes of one row of `columns` elements. Raises ValueError unless the row is a whole number of
    blocks."""
    block = ggml_type.block
    if columns % block.elements:
        blocks = f"{ggml_type.name}'s blocks of {block.elements}"
        raise ValueError(f"a row of {columns} elements is not a multiple of {blocks}")
    return columns // block.elements * block.nbytes
