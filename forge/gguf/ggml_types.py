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


class GGMLType(IntEnum):
    """How a tensor's elements are stored."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


class BlockSize(NamedTuple):
    """A row of a tensor is a whole number of blocks; a block is `elements` values in `nbytes` bytes."""

    elements: int
    nbytes: int


BLOCK_SIZES: dict[GGMLType, BlockSize] = {
    GGMLType.F32: BlockSize(1, 4),
    GGMLType.F16: BlockSize(1, 2),
    GGMLType.Q4_0: BlockSize(32, 18),
    GGMLType.Q4_1: BlockSize(32, 20),
    GGMLType.Q5_0: BlockSize(32, 22),
    GGMLType.Q5_1: BlockSize(32, 24),
    GGMLType.Q8_0: BlockSize(32, 34),
    GGMLType.Q8_1: BlockSize(32, 40),
    GGMLType.Q2_K: BlockSize(256, 84),
    GGMLType.Q3_K: BlockSize(256, 110),
    GGMLType.Q4_K: BlockSize(256, 144),
    GGMLType.Q5_K: BlockSize(256, 176),
    GGMLType.Q6_K: BlockSize(256, 210),
    GGMLType.Q8_K: BlockSize(256, 292),
    GGMLType.IQ2_XXS: BlockSize(256, 66),
    GGMLType.IQ2_XS: BlockSize(256, 74),
    GGMLType.IQ3_XXS: BlockSize(256, 98),
    GGMLType.IQ1_S: BlockSize(256, 50),
    GGMLType.IQ4_NL: BlockSize(32, 18),
    GGMLType.IQ3_S: BlockSize(256, 110),
    GGMLType.IQ2_S: BlockSize(256, 82),
    GGMLType.IQ4_XS: BlockSize(256, 136),
    GGMLType.I8: BlockSize(1, 1),
    GGMLType.I16: BlockSize(1, 2),
    GGMLType.I32: BlockSize(1, 4),
    GGMLType.I64: BlockSize(1, 8),
    GGMLType.F64: BlockSize(1, 8),
    GGMLType.IQ1_M: BlockSize(256, 56),
    GGMLType.BF16: BlockSize(1, 2),
    GGMLType.TQ1_0: BlockSize(256, 54),
    GGMLType.TQ2_0: BlockSize(256, 66),
    GGMLType.MXFP4: BlockSize(32, 17),
    GGMLType.NVFP4: BlockSize(64, 36),
    GGMLType.Q1_0: BlockSize(128, 18),
}

FLOAT_TYPES = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
QUANTIZED_TYPES = frozenset(
    {
        GGMLType.Q8_0,
        GGMLType.Q4_0,
        GGMLType.Q4_1,
        GGMLType.Q5_0,
        GGMLType.Q5_1,
        GGMLType.Q2_K,
        GGMLType.Q3_K,
        GGMLType.Q4_K,
        GGMLType.Q5_K,
        GGMLType.Q6_K,
        GGMLType.IQ3_XXS,
        GGMLType.IQ3_S,
        GGMLType.IQ4_NL,
        GGMLType.IQ4_XS,
    }
)
SUPPORTED_TYPES = FLOAT_TYPES | QUANTIZED_TYPES
"""The tensor types that forge computes with. The reader knows the sizes of the others, so that a file that uses one can
be read and then refused by the type's name."""


def row_nbytes(ggml_type: GGMLType, columns: int) -> int:
    """Bytes of one row of `columns` elements. ValueError when the row is not a whole number of blocks."""
    block = BLOCK_SIZES[ggml_type]
    if columns % block.elements:
        raise ValueError(
            f"a row of {columns} elements is not a multiple of {ggml_type.name}'s blocks of {block.elements}"
        )
    return columns // block.elements * block.nbytes
