"""Draft slots: room for draft tokens in a step, as far as all other sequences leave it.

Speculation never preempts, never overruns the budget and never ends a sequence early: the number of draft tokens
shrinks to what fits, to zero if need be. A second proposer's draft tokens for the same sequence are verified beside the
first's, in a fork that lives for one step.
"""

from itertools import count

from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.engine.sequence import Sequence
from forge.engine.speculation import Speculation
from forge.engine.step_plan import ForkSlots, PlanBuilder, PlanItem


class DraftSlots:
    """Reserves slots for draft tokens once every scheduled sequence has its own."""

    def __init__(self, cache: KvCache, speculation: Speculation):
        """speculation: says how many draft tokens, and how many forks, a sequence wants."""
        self._cache = cache
        self._speculation = speculation
        self._fork_ids = count(-1, -1)

    def reserve(self, plan: PlanBuilder) -> None:
        """Extend the plan's items by slots for draft tokens."""
        swapped_in = {swap.seq_id for swap in plan.swap_ins}
        for item in list(plan.items.values()):
            if item.remaining or not item.sequence.num_output_tokens:
                continue
            num_draft_slots = self._num_draft_slots(item.sequence, plan)
            if not num_draft_slots:
                continue
            plan.copies += self._cache.reserve(item.seq_id, num_draft_slots)
            plan.budget -= num_draft_slots
            rows = range(item.logit_rows.start, item.logit_rows.stop + num_draft_slots)
            table = self._cache.block_table(item.seq_id)
            item = item._replace(logit_rows=rows, num_draft_slots=num_draft_slots, block_table=table)
            # What is being swapped in cannot be forked yet.
            if item.phase == "decode" and item.seq_id not in swapped_in:
                item = item._replace(forks=self._forks(item, plan))
            plan.items[item.seq_id] = item

    def end_forks(self, item: PlanItem, owner: int) -> tuple[BlockCopy, ...]:
        """Keep what the winning draft, `owner`'s, has computed as the sequence's own; drop the rest."""
        copies: tuple[BlockCopy, ...] = ()
        if owner != item.seq_id:
            self._cache.remove(item.seq_id)
            copies = self._cache.fork(owner, item.seq_id)
        for fork in item.forks:
            self._cache.remove(fork.seq_id)
        return copies

    def _num_draft_slots(self, sequence: Sequence, plan: PlanBuilder) -> int:
        """Return how many draft tokens the sequence wants, at most what the step has room for."""
        cache, seq_id = self._cache, sequence.seq_id
        fitting = min(
            self._speculation.wanted(sequence),
            sequence.max_output_tokens - sequence.num_output_tokens - 1,  # the last token needs no slot
            plan.budget,
            cache.max_sequence_length - len(sequence.token_ids),
        )
        while fitting > 0 and cache.blocks_needed(seq_id, fitting) > cache.num_available:
            fitting -= 1
        return max(0, fitting)

    def _forks(self, item: PlanItem, plan: PlanBuilder) -> tuple[ForkSlots, ...]:
        """Reserve room for further drafts, as many as are wanted and fit."""
        cache, forks, num_rows = self._cache, [], item.num_tokens + item.num_draft_slots
        for _ in range(self._speculation.wanted_forks(item.sequence)):
            if num_rows > plan.budget:
                break
            fork_id = next(self._fork_ids)
            try:
                copies = cache.fork(item.seq_id, fork_id)
                plan.copies += (*copies, *cache.reserve(fork_id, num_rows))
            except OutOfBlocks:
                if fork_id in cache:
                    cache.remove(fork_id)
                break
            plan.budget -= num_rows
            forks.append(ForkSlots(fork_id, cache.block_table(fork_id)))
        return tuple(forks)
