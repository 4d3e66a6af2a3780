"""The arrays of the KV cache: one key and one value per layer and token slot, in blocks.

Storage knows bytes and nothing else; `KvCache` decides which sequence owns a block, what is shared and what is evicted.
Every cache kind reads and writes the same storage through the same two indirections, the slot mapping (writing) and the
block table (reading), so there is one attention kernel for all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KV_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
KV_DTYPES = tuple(KV_ITEM_BYTES)
DEFAULT_KV_DTYPES = {"cpu": "int8", "cuda": "bfloat16", "reference": "float32"}
"""How each device keeps keys and values unless `--kv-dtype` says otherwise."""
LEAST_BFLOAT16 = np.float32(2.0**-50)
"""bfloat16: a number nearer to zero is stored as zero, so that instructions which take subnormal numbers for zero add
the same as those that do not."""
SCALE_BYTES = 4
"""int8: behind the numbers of a key or value lies their scale, a float32."""


def vector_bytes(head_dim: int, kv_dtype: str) -> int:
    """Return how many bytes one key, or one value, of one head takes."""
    return head_dim * KV_ITEM_BYTES[kv_dtype] + (SCALE_BYTES if kv_dtype == "int8" else 0)


@dataclass(frozen=True)
class KvLayout:
    """The shape of a storage: `[num_blocks, block_size, num_kv_heads, head_dim]` for K and for V, in each layer."""

    num_layers: int
    num_blocks: int
    """Blocks in all."""
    block_size: int
    """Token slots per block."""
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "float32"
    """What a key or value is rounded to before any attention sees it: one of `KV_DTYPES`."""

    @property
    def bytes_per_token(self) -> int:
        """The number of bytes that one token's keys and values take in all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * vector_bytes(self.head_dim, self.kv_dtype)


@dataclass(frozen=True)
class BlockCopy:
    """Copy block `source` onto block `destination`, in every layer, before the step writes anything."""

    source: int
    destination: int


def rounded(values: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Round float32 `[..., head_dim]` to the nearest numbers of `kv_dtype`, ties to even; return float32 again."""
    if kv_dtype == "float32":
        return values
    if kv_dtype == "int8":
        quants, scales = quantized(values)
        restored: np.ndarray = quants * scales[..., None]
        return restored
    if kv_dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = np.where(np.abs(values) < LEAST_BFLOAT16, np.float32(0), values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize float32 `[..., head_dim]` to int8 of the same shape, with a float32 scale for each key or value.

    The scale is that of one head of one token, its largest magnitude / 127, so what is stored never depends on another
    token or head: a block can be shared, copied or computed again in pieces, with the same bytes.
    """
    largest = np.abs(values).max(axis=-1)
    there = largest > np.float32(1e-30)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(there, np.float32(127) / largest, np.float32(0))
        quants = np.rint(values * inverse[..., None]).astype(np.int8)
    return quants, np.where(there, largest / np.float32(127), np.float32(0))


class KvStorage(ABC):
    """The arrays of keys and values on one device. Made by `Backend.new_storage`, which fixes the layout for its
    life."""

    layout: KvLayout

    @abstractmethod
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Perform the copies of a plan, in order."""

    @abstractmethod
    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """Copy these blocks to the host's memory, all layers, in a form that `write_blocks` accepts."""

    @abstractmethod
    def write_blocks(self, blocks: Sequence[int], data: Any) -> None:
        """Write the result of `read_blocks` into as many blocks, the same or different ones."""

    @abstractmethod
    def gather(self, layer: int, block_table: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of positions 0 to `length` - 1, each float32 `[length, num_kv_heads, head_dim]`.

        A copy on the host, for tests and views; kernels read the blocks where they lie.
        """


class NumpyKvStorage(KvStorage):
    """K and V as two NumPy arrays `[num_layers, num_blocks, block_size, num_kv_heads, head_dim]`, one behind the other.

    The pages come from the operating system when they are first written, so a long reservation costs address space
    and not memory.
    """

    def __init__(self, layout: KvLayout):
        self.layout = layout
        shape = (layout.num_layers, layout.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._both = np.zeros((2, *shape), np.float32)
        self.keys, self.values = self._both

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._both[:, :, copy.destination] = self._both[:, :, copy.source]

    def read_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        return self._both[:, :, list(blocks)]

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        self._both[:, :, list(blocks)] = data

    def gather(self, layer: int, block_table: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = np.asarray(block_table, np.int64)[: -(-length // self.layout.block_size)]
        both = self._both[:, layer, blocks].reshape(2, -1, self.layout.num_kv_heads, self.layout.head_dim)
        return both[0, :length], both[1, :length]
