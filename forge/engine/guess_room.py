"""Room for guesses in a step: as many as fit into what everybody else leaves.

Guessing never preempts, never overruns the budget and never ends a sequence early: the number of guesses shrinks to
what fits, to none if need be. A second proposer's guesses for the same sequence are computed beside the first's, in a
fork that lives for one step.
"""

from itertools import count

from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.engine.proposer import NoSpeculation, Speculation
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Draft, ForkSlots, PlanItem


class GuessRoom:
    def __init__(self, cache: KvCache):
        self._cache = cache
        self._fork_ids = count(-1, -1)
        self.speculation: Speculation = NoSpeculation()
        """Who says how many guesses a sequence would have verified."""

    @property
    def is_wanted(self) -> bool:
        return len(self.speculation.proposers) > 0

    def guesses(self, sequence: Sequence, draft: Draft) -> int:
        """As many guesses as the sequence wants and fit into what the step has left; taken off its budget."""
        wanted = self.speculation.wanted(sequence)
        if wanted <= 0:
            return 0
        cache, seq_id, length = self._cache, sequence.seq_id, len(sequence.token_ids)
        room = min(
            sequence.max_output_tokens - sequence.num_output_tokens - 1,  # the last token needs no slot
            draft.budget,
            cache.max_sequence_length - length,
        )
        guesses = max(0, min(wanted, room))
        still_needed = sum(draft.needs.values()) - draft.needs[seq_id]  # of those whose slots come after these
        present = cache.reserved_length(seq_id)
        while guesses and cache.blocks_needed(seq_id, length + guesses - present) > cache.num_available - still_needed:
            guesses -= 1
        draft.budget -= guesses
        return guesses

    def forks(self, sequence: Sequence, num_rows: int, draft: Draft) -> tuple[ForkSlots, ...]:
        """Room for further runs of guesses, as many as are wanted and fit. One that was swapped in in this very step
        has nothing to fork yet."""
        if sequence.seq_id in draft.starts:
            return ()
        cache, forks = self._cache, []
        for _ in range(self.speculation.wanted_forks(sequence)):
            if num_rows > draft.budget:
                break
            seq_id = next(self._fork_ids)
            try:
                copies = cache.fork(sequence.seq_id, seq_id)
            except OutOfBlocks:
                break
            if cache.blocks_needed(seq_id, num_rows) > cache.num_available - sum(draft.needs.values()):
                cache.remove(seq_id)
                break
            draft.copies += (*copies, *cache.reserve(seq_id, num_rows))
            draft.budget -= num_rows
            forks.append(ForkSlots(seq_id, cache.block_table(seq_id)))
        return tuple(forks)

    def end_forks(self, item: PlanItem, owner: int) -> tuple[BlockCopy, ...]:
        """Only what the run of guesses that was right has computed, `owner`'s, stays, as the sequence's own."""
        copies: tuple[BlockCopy, ...] = ()
        if owner != item.seq_id:
            self._cache.remove(item.seq_id)
            copies = self._cache.fork(owner, item.seq_id)
        for fork in item.forks:
            self._cache.remove(fork.seq_id)
        return copies
