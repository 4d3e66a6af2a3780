"""GGUF, llama.cpp's model file: reading it (`GGUFFile`), its quantized blocks (`block_formats`), writing it (`writer`).

Nothing here knows a model; what a Qwen3 file must hold is `forge.model.config`. Importing this package loads NumPy and
nothing heavier: `forge.gguf.writer`, which needs the gguf package, is imported where files are written.
"""

from forge.gguf.block_formats import SuperblockScales, dequantize, superblock_scales, unpack
from forge.gguf.ggml_types import FLOAT_TYPES, QUANTIZED_TYPES, SUPPORTED_TYPES, GGMLType, GGUFValueType, row_nbytes
from forge.gguf.reader import GGUFError, GGUFFile, GGUFTensor, TensorEntry

__all__ = [
    "FLOAT_TYPES",
    "QUANTIZED_TYPES",
    "SUPPORTED_TYPES",
    "GGMLType",
    "GGUFError",
    "GGUFFile",
    "GGUFTensor",
    "GGUFValueType",
    "SuperblockScales",
    "TensorEntry",
    "dequantize",
    "row_nbytes",
    "superblock_scales",
    "unpack",
]
