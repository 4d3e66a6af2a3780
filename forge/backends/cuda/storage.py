"""Arrays that stay in a torch device's memory between steps: the KV cache, and the table of rotations (cos and sin of
every position and frequency, for rotary position embedding).
"""

from collections.abc import Sequence

import numpy as np
import torch

from forge.backends.cuda.shapes import next_power_of_2
from forge.cache.kv_storage import BlockCopy, KvLayout, KvStorage
from forge.model.rope import Rope

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchKvStorage(KvStorage):
    """K and V as two tensors `[num_layers, num_blocks, block_size, num_kv_heads, head_dim]`.

    A token's key for one head is one run of bytes (256 for bfloat16 and 128 numbers), which is all that attention asks
    of the order: it fetches keys one by one through the block table.
    """

    def __init__(self, layout: KvLayout, device: torch.device):
        """Raises `MemoryError` if the device has no room."""
        self.layout = layout
        shape = (layout.num_layers, layout.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype = TORCH_DTYPES[layout.kv_dtype]
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # also `torch.OutOfMemoryError`; the CPU, and sizes past 64 bits, raise it plain
            if not any(word in str(error).lower() for word in ("memory", "overflow")):
                raise
            raise MemoryError(str(error).splitlines()[0]) from None

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy in order: a copy whose source an earlier one wrote begins a new batch of copies."""
        for batch in _independent(copies):
            sources = self._numbers([copy.source for copy in batch])
            destinations = self._numbers([copy.destination for copy in batch])
            for array in (self.keys, self.values):
                array.index_copy_(1, destinations, array.index_select(1, sources))

    def read_blocks(self, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy `blocks` to host memory, for `write_blocks` into any equal number of blocks: keys and values, each
        `[num_layers, len(blocks), block_size, num_kv_heads, head_dim]` in the storage's dtype."""
        numbers = self._numbers(blocks)
        return self.keys.index_select(1, numbers).cpu(), self.values.index_select(1, numbers).cpu()

    def write_blocks(self, blocks: Sequence[int], data: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write into `blocks` what `read_blocks` returned."""
        numbers = self._numbers(blocks)
        for array, stored in zip((self.keys, self.values), data, strict=True):
            array.index_copy_(1, numbers, stored.to(array.device))

    def gather(self, layer: int, block_table: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.of_sequence(layer, self._numbers(block_table), length)
        return keys.float().cpu().numpy(), values.float().cpu().numpy()

    def of_sequence(self, layer: int, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions 0 to `length` - 1 on the device, `[length, num_kv_heads, head_dim]`."""
        blocks = block_table[: -(-length // self.layout.block_size)].long()
        token_shape = (-1, self.layout.num_kv_heads, self.layout.head_dim)
        keys, values = self.keys[layer, blocks], self.values[layer, blocks]
        return keys.reshape(token_shape)[:length], values.reshape(token_shape)[:length]

    def _numbers(self, blocks: Sequence[int]) -> torch.Tensor:
        """Move numbers to the device without waiting for what runs there."""
        numbers = torch.tensor(list(blocks), dtype=torch.int64, pin_memory=self.keys.device.type == "cuda")
        return numbers.to(self.keys.device, non_blocking=True)


def _independent(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Split `copies` into runs in which no block that is written is read or written again."""
    runs: list[list[BlockCopy]] = []
    written: set[int] = set()
    for copy in copies:
        if not runs or copy.source in written or copy.destination in written:
            runs.append([])
            written = set()
        runs[-1].append(copy)
        written.add(copy.destination)
    return runs


class HostBuffer:
    """int32 in pinned memory of the host, copied to or from the device; an event marks the end of the last copy."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        on_gpu = device.type == "cuda"
        self.tensor = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        self.numbers = self.tensor.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy; either end is a part of this buffer's tensor."""
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the last copy has been made."""
        if self._copied is not None:
            self._copied.synchronize()


LEAST_POSITIONS = 4096
"""Positions that the table has at least: always a power of two, so that it rarely grows."""


class Rotations:
    """float32 `[positions, head_dim / 2]`, computed in float64, so that position 40,000 keeps its fraction.

    Tables, not arithmetic in the kernel: an angle of 40,000 in float32 is off by a few thousandths.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.cos = self.sin = torch.zeros(0, 0)

    def reach(self, length: int, rope: Rope) -> bool:
        """Make the table cover positions below `length`. Returns whether it moved in memory."""
        if length <= len(self.cos):
            return False
        positions = max(LEAST_POSITIONS, next_power_of_2(length))
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.from_numpy(rope.frequencies())
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.cos, self.sin = cos.float().to(self._device), sin.float().to(self._device)
        return True
