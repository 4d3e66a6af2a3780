"""Exercise 3: a contiguous KV cache.

Read chapter 2 first (forge kv-cache). Each sequence gets one run of consecutive blocks when it begins, with room
for the longest sequence that there may be. No table is needed to find position p.

    run      0         1         2
    blocks   0 1 2     3 4 5     6 7 8        blocks_per_run = 3

Fill in the six functions. A new run is empty: 0 slots reserved, 0 computed. None of the calls may take longer for a
longer run. Then:

    forge build check 3      does it keep its promises?
    forge build run 3        the engine with your cache, and without any
"""

from collections.abc import Sequence

from forge.cache.kv_cache import OutOfBlocks  # OutOfBlocks(needed, free): raise it if blocks are missing
from forge.cache.kv_storage import BlockCopy  # what a cache asks to be copied; a contiguous one asks for nothing
from forge.exercises.contiguous_cache import ContiguousBase, Run  # Run(blocks, reserved=0, computed=0)


class MyContiguousCache(ContiguousBase):
    """You have `self.runs` (a `Run` per sequence id), `self.num_blocks`, `self.blocks_per_run`, `self.max_model_len`.

    A `Run` has `blocks` (a range), `reserved` (slots that the sequence may write) and `computed` (slots with keys and
    values in them). `self.all_runs()` are the runs that are taken: those of the sequences, and of snapshots of them.
    """

    def free_run(self) -> range:
        """Return the blocks of the lowest free run. Raises `OutOfBlocks(self.blocks_per_run, 0)` if none is."""
        raise NotImplementedError("free_run")

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        """Begin a sequence with a free run; return how many of its tokens are cached already, which is 0."""
        raise NotImplementedError("add")

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Own slots for `num_tokens` more tokens; return the copies that this takes: none, ().

        Raises `OutOfBlocks(needed=1, free=0)`, with nothing changed, if there would be more than `max_model_len`.
        """
        raise NotImplementedError("reserve")

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Count these tokens, which follow the computed ones, as computed: their keys and values have been written."""
        raise NotImplementedError("commit")

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop everything past the first `length` tokens, computed or reserved."""
        raise NotImplementedError("truncate")

    def remove(self, seq_id: int) -> None:
        """Drop a sequence; its run is free."""
        raise NotImplementedError("remove")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
