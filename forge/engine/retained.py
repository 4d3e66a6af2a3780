"""Retained caches: keys and values of ended sequences, left in place for a continuation, such as the next turn of a
chat.

A retained cache is a convenience. Where a sequence would otherwise find no block, the oldest is released; a
continuation that finds nothing is computed from its tokens, as any other sequence.
"""

from collections.abc import Sequence as Items
from dataclasses import replace

from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import BlockCopy
from forge.engine.sequence import Sequence


class RetainedCaches:
    """Ended sequences whose blocks are still held, by sequence id, the oldest first."""

    def __init__(self, cache: KvCache):
        self._cache = cache
        self.sequences: dict[int, Sequence] = {}
        """To be read."""

    def retain(self, sequence: Sequence) -> None:
        """Hold the computed tokens of a sequence that has ended."""
        self._cache.truncate(sequence.seq_id, self._cache.computed_length(sequence.seq_id))
        self.sequences[sequence.seq_id] = sequence

    def fork(self, seq_id: int, child: int) -> tuple[BlockCopy, ...]:
        """Retain what `seq_id` holds once more, under the id `child`; return the copies that this takes.

        Raises `KeyError` if it is gone, and `OutOfBlocks` where the cache cannot share and has no room for a copy.
        """
        sequence = self.sequences[seq_id]
        copies = self._cache.fork(seq_id, child)
        self.sequences[child] = replace(sequence, seq_id=child, token_ids=list(sequence.token_ids))
        return copies

    def release(self, seq_id: int) -> None:
        """Release a sequence's retained cache. Releasing it again does nothing."""
        if self.sequences.pop(seq_id, None) is not None:
            self._cache.remove(seq_id)

    def release_oldest(self, but: int | None = None) -> bool:
        """Release the oldest retained cache, except `but`; return False if there is none."""
        oldest = next((seq_id for seq_id in self.sequences if seq_id != but), None)
        if oldest is None:
            return False
        self.release(oldest)
        return True

    def match(self, sequence: Sequence) -> int | None:
        """Return the retained sequence that this one continues, cut down to their common tokens; None if it is gone or
        belongs to another salt."""
        retained = self.sequences.get(sequence.continues_from) if sequence.continues_from is not None else None
        if retained is None or retained.salt != sequence.salt:
            return None
        common = _num_common(sequence.token_ids, retained.token_ids)
        self._cache.truncate(retained.seq_id, min(common, sequence.max_cacheable_tokens))
        return retained.seq_id

    def hand_over(self, seq_id: int, sequence: Sequence) -> int:
        """Give a retained cache to `sequence`; return how many of its tokens are computed."""
        del self.sequences[seq_id]
        self._cache.rename(seq_id, sequence.seq_id)
        return self._cache.computed_length(sequence.seq_id)

    def clear(self) -> None:
        """Forget all retained caches after the cache was cleared."""
        self.sequences.clear()


def _num_common(ours: Items[int], theirs: Items[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    shorter = min(len(ours), len(theirs))
    return next((index for index in range(shorter) if ours[index] != theirs[index]), shorter)
