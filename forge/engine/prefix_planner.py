"""Prefix planning: of several sequences that begin with the same blocks, not yet cached, one computes them.

Before a sequence is admitted its prompt is looked up in the prefix index. If another sequence is computing what it
would compute next, in this step or in the later ones of its prompt, that one is the *prefix owner*: the sequence is
deferred, lets others pass, and finds the blocks cached a step later. An owner that is aborted or preempted owned
nothing: the next step finds another.

A prefill-only sequence leaves nothing in the pool but a prefix that is worth caching: one that another waiting sequence
begins with too, or that an earlier one began with.
"""

from collections import Counter
from itertools import takewhile

from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder
from forge.reasons import Deferred

MAX_DEFERRALS = 8
"""Steps that a sequence waits for prefix owners at most; then it computes for itself what they may be computing too."""
MAX_SEEN = 4096
"""Block keys that are remembered of prefill-only sequences that published nothing."""


class PrefixPlanner:
    """Counts the block keys with which the waiting sequences begin. Cost: a counter entry per block of a waiting
    prompt."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._beginnings: Counter[int] = Counter()
        """Of each block key, how many waiting sequences begin with it."""
        self._seen: dict[int, None] = {}
        """Block keys that prefill-only sequences began with, the oldest first."""

    def add(self, sequence: Sequence) -> None:
        """Count the keys of a sequence that begins to wait."""
        self._beginnings.update(sequence.prefix_keys)

    def remove(self, sequence: Sequence) -> None:
        """Stop counting a sequence that begins to run or has ended."""
        for key in sequence.prefix_keys:
            self._beginnings[key] -= 1
            if not self._beginnings[key]:
                del self._beginnings[key]

    def clear(self) -> None:
        """Remove all waiting sequences, and remember which keys were seen."""
        self._beginnings.clear()

    def deferral(self, sequence: Sequence, num_cached: int, plan: PlanBuilder) -> Deferred | None:
        """Return the owner of the block that this sequence would compute next, if waiting for it pays."""
        keys = sequence.prefix_keys[num_cached // self._block_size :]
        owner = plan.prefix_owners.get(keys[0]) if keys else None
        if owner is None or sequence.times_deferred >= MAX_DEFERRALS:
            return None
        return Deferred(owner, self._block_size * sum(plan.prefix_owners.get(key) == owner for key in keys))

    def claim(self, sequence: Sequence, num_cached: int, plan: PlanBuilder, end: int | None = None) -> None:
        """Make a sequence the owner of its prompt's blocks from `num_cached` tokens on (up to block `end`)."""
        for key in sequence.prefix_keys[num_cached // self._block_size : end]:
            plan.prefix_owners.setdefault(key, sequence.seq_id)

    def num_worth_caching(self, sequence: Sequence) -> int:
        """Return how many of its blocks, from the first on, another sequence begins with too."""
        shared = takewhile(lambda key: key in self._seen or self._beginnings[key] > 1, sequence.prefix_keys)
        return sum(1 for _ in shared)

    def remember(self, sequence: Sequence) -> None:
        """Remember the keys of a computed prefill-only sequence: if its beginning comes again, it is worth caching."""
        self._seen.update(dict.fromkeys(sequence.prefix_keys))
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
