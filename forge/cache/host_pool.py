"""Where swapped sequences' keys and values wait: a number of blocks' worth of the host's memory.

`num_free`, `add` and `entries` are policy: the scheduler decides which sequence is swapped without touching an array.
The engine, which carries plans out, calls `move`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from forge.cache.kv_storage import BlockCopy, KvStorage


class Swap(NamedTuple):
    """Move a sequence's keys and values between these blocks and the host pool."""

    seq_id: int
    blocks: tuple[int, ...]


@dataclass
class HostEntry:
    """The blocks of a swapped sequence, or of a beginning that another engine has computed."""

    num_blocks: int
    num_tokens: int
    """Computed tokens in those blocks."""
    data: Any = None
    """What `KvStorage.read_blocks` gave; None until the plan that swaps it out has been carried out."""


class HostPool:
    """Room on the host for swapped sequences. Holds an entry for each; promises never to hold more than its blocks."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.entries: dict[int, HostEntry] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(entry.num_blocks for entry in self.entries.values())

    def add(self, seq_id: int, entry: HostEntry) -> None:
        """Reserve room for a sequence, which must fit."""
        assert entry.num_blocks <= self.num_free, f"{entry.num_blocks} blocks do not fit into {self.num_free}"
        assert seq_id not in self.entries, f"sequence {seq_id} is already swapped out"
        self.entries[seq_id] = entry

    def move(self, storage: KvStorage, outs: Sequence[Swap], copies: Sequence[BlockCopy], ins: Sequence[Swap]) -> None:
        """Carry out what a step moves before it writes: nothing is overwritten before it has been read."""
        for swap in outs:
            self.entries[swap.seq_id].data = storage.read_blocks(swap.blocks)
        storage.copy_blocks(copies)
        for swap in ins:
            storage.write_blocks(swap.blocks, self.entries[swap.seq_id].data)
