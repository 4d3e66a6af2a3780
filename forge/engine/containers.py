"""Where the sequences of a scheduler are: the queue, the running ones, the host pool, and the retained caches.

The queue has two lanes, because two kinds of sequences wait for different things: a generation waits for a slot in the
batch and for blocks of the pool, a prefill-only sequence for a step's spare tokens and scratch blocks. One order runs
through both lanes. A lane that is blocked does not block the other. A preempted sequence keeps its place in the order,
so it stands before all that never ran. A swapped one waits in the queue too; its keys and values are in the host pool.

A retained cache is a convenience: keys and values of an ended sequence, left in place for a continuation, such as the
next turn of a chat. Where a sequence would otherwise find no block, the oldest is released; a continuation that finds
nothing is computed from its tokens, as any other sequence.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from heapq import merge
from typing import Any, NamedTuple

from forge.cache.host_pool import HostPool
from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import BlockCopy
from forge.engine.policies import SchedulerConfig
from forge.engine.prefix_planner import PrefixPlanner
from forge.engine.sequence import Sequence

_Entry = tuple[tuple[Any, ...], Sequence]


class RequestQueue:
    """Waiting sequences, each with the key by which it is ordered. Adding and removing one costs O(log n)
    comparisons."""

    def __init__(self, order: Callable[[Sequence], tuple[Any, ...]], planner: PrefixPlanner):
        """order: of two sequences the one with the smaller key comes first; equal keys in the order of arrival.
        planner: counts what the waiting sequences begin with."""
        self._order, self._planner = order, planner
        self.sequences: dict[int, Sequence] = {}
        """All that wait, by sequence id. To be read."""
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._lanes: tuple[list[_Entry], list[_Entry]] = [], []
        """Generations, and prefill-only sequences."""

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in merge(*self._lanes))

    def add(self, sequence: Sequence) -> None:
        key = (*self._order(sequence), sequence.arrival, sequence.seq_id)  # no two are equal
        self.sequences[sequence.seq_id], self._keys[sequence.seq_id] = sequence, key
        insort(self._lanes[sequence.prefill_only], (key, sequence))
        if sequence.prefix_keys:
            self._planner.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence. Raises `KeyError` if it does not wait."""
        del self.sequences[sequence.seq_id]
        lane = self._lanes[sequence.prefill_only]
        del lane[bisect_left(lane, (self._keys.pop(sequence.seq_id), sequence))]
        if sequence.prefix_keys:
            self._planner.remove(sequence)

    def move_to_generations(self, sequence: Sequence) -> None:
        """Turn a waiting prefill-only sequence into a generation: its prompt takes several steps."""
        self.remove(sequence)
        sequence.prefill_only = False
        self.add(sequence)

    def clear(self) -> None:
        self.sequences.clear()
        self._keys.clear()
        for container in (*self._lanes, self._planner):
            container.clear()

    def in_order(self, blocked: set[bool]) -> Iterator[Sequence]:
        """Yield the sequences of both lanes in order, one at a time.

        A lane that the caller puts into `blocked` (False for generations, True for prefill-only) yields no more. The
        caller may remove the sequence that was yielded last, or move it to the generations, of which it comes next.
        """
        places = [0, 0]
        while True:
            heads = [
                lane[place]
                for prefill_only, lane, place in zip((False, True), self._lanes, places, strict=True)
                if prefill_only not in blocked and place < len(lane)
            ]
            if not heads:
                return
            _, sequence = min(heads)
            lane = sequence.prefill_only
            yield sequence
            places[lane] += sequence.seq_id in self.sequences and sequence.prefill_only == lane

    def check_invariants(self) -> None:
        """Raise AssertionError if a lane is out of order or the two views disagree."""
        for lane in self._lanes:
            assert lane == sorted(lane), "the queue is out of order"
        assert sum(map(len, self._lanes)) == len(self.sequences) == len(self._keys), "the queue's views differ"


class RetainedCaches:
    """Holds the blocks of ended sequences, by sequence id, the oldest first."""

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

    def trim_to_common(self, sequence: Sequence) -> int | None:
        """Cut the retained cache that a sequence continues down to their common tokens, and return its id; None if it
        is gone or belongs to another salt."""
        retained = self.sequences.get(sequence.continues_from) if sequence.continues_from is not None else None
        if retained is None or retained.salt != sequence.salt:
            return None
        common = num_common(sequence.token_ids, retained.token_ids)
        self._cache.truncate(retained.seq_id, min(common, sequence.max_cacheable_tokens))
        return retained.seq_id

    def hand_over(self, seq_id: int, sequence: Sequence) -> int:
        """Give a retained cache to `sequence`; return how many of its tokens are computed."""
        del self.sequences[seq_id]
        self._cache.rename(seq_id, sequence.seq_id)
        return self._cache.computed_length(sequence.seq_id)


class Containers(NamedTuple):
    """What the parts of a scheduler share: its containers, and by what they decide."""

    cache: KvCache
    config: SchedulerConfig
    planner: PrefixPlanner
    queue: RequestQueue
    running: dict[int, Sequence]
    """Generations that hold slots and blocks, in the order of their admission."""
    host_pool: HostPool
    retained: RetainedCaches

    @classmethod
    def empty(cls, cache: KvCache, config: SchedulerConfig) -> "Containers":
        """Create the containers of a scheduler."""
        planner = PrefixPlanner(cache.block_size)
        queue = RequestQueue(config.admission_order, planner)
        return cls(cache, config, planner, queue, {}, HostPool(config.num_host_blocks), RetainedCaches(cache))


def num_common(ours: Items[int], theirs: Items[int]) -> int:
    """Return how many tokens two texts begin with in common: by halves, as comparing slices is faster than a loop."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
