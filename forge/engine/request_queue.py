"""The waiting sequences, in the order in which they are admitted.

The queue has two lanes, because two kinds of sequences wait for different things: a generation waits for a slot in the
batch and for blocks of the pool, a prefill-only sequence for a step's spare tokens and scratch blocks. One order runs
through both lanes. A lane that is blocked does not block the other.

A preempted sequence keeps its place in the order, so it stands before all that never ran. A swapped one waits here too;
its keys and values are in the host pool.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import merge
from typing import Any

from forge.engine.sequence import Sequence

_Entry = tuple[tuple[Any, ...], Sequence]


class RequestQueue:
    """Waiting sequences, each with the key by which it is ordered. Adding and removing one costs O(log n)
    comparisons."""

    def __init__(self, order: Callable[[Sequence], tuple[Any, ...]]):
        """order: of two sequences the one with the smaller key comes first; equal keys in the order of arrival."""
        self._order = order
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

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence. Raises `KeyError` if it does not wait."""
        del self.sequences[sequence.seq_id]
        lane = self._lanes[sequence.prefill_only]
        del lane[bisect_left(lane, (self._keys.pop(sequence.seq_id), sequence))]

    def move_to_generations(self, sequence: Sequence) -> None:
        """Turn a waiting prefill-only sequence into a generation: its prompt takes several steps."""
        self.remove(sequence)
        sequence.prefill_only = False
        self.add(sequence)

    def clear(self) -> None:
        self.sequences.clear()
        self._keys.clear()
        for lane in self._lanes:
            lane.clear()

    def in_order(self, blocked: set[bool]) -> Iterator[Sequence]:
        """Yield the sequences of both lanes in order, one at a time.

        A lane that the caller puts into `blocked` (False for generations, True for prefill-only) yields no more. The
        caller may remove the sequence that was yielded last, or move it to the generations, of which it comes next.
        """
        places = [0, 0]
        while True:
            heads = [
                lane[place]
                for lane, place, is_blocked in zip(
                    self._lanes, places, (False in blocked, True in blocked), strict=True
                )
                if place < len(lane) and not is_blocked
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
