"""Admission: waiting generations begin, in order, until one does not fit.

The running sequences have reserved their slots before, so admitting never preempts; in a step that preempts no
generation is admitted. A sequence is admitted with blocks for all of its tokens, however many steps they take. Those
that are deferred (`prefix_planner`) let others pass; nothing passes a sequence that lacks a slot or blocks.

A prompt that lacks tokens alone is passed: where long prompts would take whole steps, a share of each step's tokens
goes to short sequences (`Admission.admit_short`), as concurrent partial prefills do in vLLM.
"""

from itertools import islice
from typing import Literal, NamedTuple

from forge.cache.host_pool import Swap
from forge.cache.kv_cache import NO_HIT, KvCache
from forge.engine.containers import Containers
from forge.engine.prefill_only import PrefillOnly
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder, PlanItem
from forge.engine.task import GENERATE
from forge.reasons import Deferred, MaxNumSeqs, NoBlocks, NoBudget, Phase, PoolExhausted, WaitReason
from forge.trace.records import AdmitRecord, WaitRecord

MAX_DEFERRED = 256
"""Sequences that one step defers at most: those behind them are not looked at, so a long queue costs no time."""
SHORT_SHARE = 4
"""One in so many of a step's tokens goes to sequences that pass longer ones."""


class AdmissionCost(NamedTuple):
    """What it takes to admit a sequence."""

    num_cached: int
    """Tokens that need no computing."""
    num_blocks: int
    """Available blocks that it takes."""
    num_reused: int = 0
    """Of those, the ones that hold its own cached tokens."""


class Admission:
    """Moves sequences from the queue to the running ones, as far as slots, tokens and blocks allow."""

    def __init__(self, containers: Containers, prefill_only: PrefillOnly):
        self._cache, self._config, self._planner, self._queue, self._running, self._host_pool, self._retained = (
            containers
        )
        self._prefill_only = prefill_only

    def admit(self, plan: PlanBuilder) -> None:
        """Admit what fits, and note in the plan why the rest waits."""
        blocked = {False} if plan.preempted else set()
        if plan.preempted:
            self._note_head(plan)
        num_deferred = 0
        for sequence in self._queue.in_order(blocked):
            admit = self._prefill_only.admit if sequence.prefill_only else self._admit
            reason = admit(sequence, plan)
            if reason is None:
                continue
            if sequence.prefill_only and False not in blocked and self._prefill_only.needs_chunks(reason, plan):
                self._queue.move_to_generations(sequence)  # where it comes next
                continue
            plan.waiting.append(WaitRecord(sequence.seq_id, reason))
            if isinstance(reason, Deferred) and num_deferred < MAX_DEFERRED:
                sequence.times_deferred += 1
                num_deferred += 1
                continue
            blocked.add(sequence.prefill_only)
            if isinstance(reason, NoBlocks) and not (self._running or plan.prefill_only):
                sequence.length_limit = PoolExhausted(self._cache.max_sequence_length)
                plan.exhausted.append(sequence)

    def admit_short(self, plan: PlanBuilder, num_under_way: int) -> None:
        """Admit sequences that a share of the step's tokens completes, before longer ones, if prompts under way, which
        lack `num_under_way` tokens, or the first that waits would take the whole step.

        The first of those that are passed keeps the slot, blocks and scratch blocks that it would find now, and most of
        the tokens, so none starves. By priority nothing is passed, nor in an order of one's own.
        """
        order, chunked = self._config.order, self._config.chunked_prefill
        if plan.preempted or not chunked or order == "priority" or not isinstance(order, str):
            return
        waiting = list(islice(self._queue, MAX_DEFERRED))
        if max(num_under_way, len(waiting[0].token_ids)) < plan.budget:
            return
        share = min(plan.budget, plan.limit // SHORT_SHARE)
        rest, plan.budget = plan.budget - share, share
        passed: dict[bool, Sequence] = {}
        blocked: set[bool] = set()
        for sequence in waiting:
            lane = sequence.prefill_only
            if len(sequence.token_ids) > plan.budget:
                passed.setdefault(lane, sequence)
            elif lane not in blocked and self._leaves_room(sequence, passed.get(lane), plan):
                reason = self._prefill_only.admit(sequence, plan) if lane else self._admit(sequence, plan)
                plan.num_passing += lane and reason is None
            else:
                blocked.add(lane)
        plan.budget += rest

    def _leaves_room(self, sequence: Sequence, passed: Sequence | None, plan: PlanBuilder) -> bool:
        """True if the first that a sequence passes could begin beside it."""
        if passed is None:
            return True
        if sequence.prefill_only:
            return self._prefill_only.has_room(sequence, passed, plan)
        if self._num_slots < 2 + len(sequence.waiting_samples):
            return False
        return self.cost(sequence, None).num_blocks + self.cost(passed, None).num_blocks <= self._cache.num_available

    @property
    def _num_slots(self) -> int:
        """Free slots. Samples that wait for their prompt have one each, so that no later request takes it."""
        running = self._running.values()
        return self._config.max_num_seqs - sum([1 + len(sequence.waiting_samples) for sequence in running])

    def _note_head(self, plan: PlanBuilder) -> None:
        """Note why the first in the queue that is no victim waits: running sequences lacked blocks, so it does too."""
        victims = {preemption.seq_id for preemption in plan.preempted}
        others = (sequence for sequence in self._queue if sequence.seq_id not in victims)
        head = next((sequence for sequence in others if not sequence.prefill_only), None)
        if head is not None:
            shortage = NoBlocks(self.cost(head, None).num_blocks, plan.preempted[0].free)
            plan.waiting.append(WaitRecord(head.seq_id, shortage))

    def _admit(self, sequence: Sequence, plan: PlanBuilder) -> WaitReason | None:
        """Admit a generation with blocks for all its tokens, or say why it has to wait."""
        if self._num_slots <= 0:
            return MaxNumSeqs(self._config.max_num_seqs)
        is_swapped = sequence.seq_id in self._host_pool.entries
        retained = self._retained.trim_to_common(sequence) if self._retained.sequences and not is_swapped else None
        while True:
            cost = self.cost(sequence, retained)
            deferral = self._planner.deferral(sequence, cost.num_cached, plan) if sequence.prefix_keys else None
            if deferral is not None:
                return deferral
            if not self._fits_budget(len(sequence.token_ids) - cost.num_cached, plan):
                return NoBudget(plan.limit)
            available = self._cache.num_available
            if cost.num_blocks <= available:
                self.begin(sequence, retained, plan)
                return None
            if not self._retained.release_oldest(but=retained):
                return NoBlocks(cost.num_blocks - cost.num_reused, available - cost.num_reused)

    def _fits_budget(self, num_tokens: int, plan: PlanBuilder) -> bool:
        if self._config.chunked_prefill or not self._cache.persistent:
            return plan.budget > 0
        # Without chunks decodes sit out a step with prompts. A prompt that exceeds the budget is computed alone.
        prefill_tokens = plan.prefill_tokens
        return prefill_tokens + num_tokens <= plan.limit or not prefill_tokens

    def cost(self, sequence: Sequence, retained: int | None) -> AdmissionCost:
        """Return what it takes to admit a sequence. Changes nothing."""
        cache, length = self._cache, len(sequence.token_ids)
        if retained is not None:
            more = length - cache.reserved_length(retained)
            return AdmissionCost(cache.computed_length(retained), cache.blocks_needed(retained, more))
        if sequence.seq_id in self._host_pool.entries:
            num_swapped = self._host_pool.entries[sequence.seq_id].num_tokens
            return AdmissionCost(num_swapped, cache.blocks_to_begin(NO_HIT, length))
        hit = cache.lookup(sequence.token_ids, sequence.salt, sequence.max_cacheable_tokens)
        return AdmissionCost(hit.num_tokens, cache.blocks_to_begin(hit, length), hit.num_unreferenced)

    def begin(self, sequence: Sequence, retained: int | None, plan: PlanBuilder) -> None:
        """Give an admitted sequence its place in the cache, and its tokens of this step."""
        cache, seq_id, length = self._cache, sequence.seq_id, len(sequence.token_ids)
        available = cache.num_available
        begun_before = sequence.num_output_tokens or sequence.times_preempted
        how: Literal["new", "recompute", "swap", "handoff"] = "recompute" if begun_before else "new"
        swapped = self._host_pool.entries.get(seq_id)
        if swapped is not None:
            how, start = "swap" if sequence.times_preempted else "handoff", swapped.num_tokens
            cache.add(seq_id, (), sequence.salt)
        elif retained is not None:
            start = self._retained.hand_over(retained, sequence)
        else:
            start = cache.add(seq_id, sequence.token_ids, sequence.salt, sequence.max_cacheable_tokens)
        plan.copies += cache.reserve(seq_id, length - cache.reserved_length(seq_id))
        if swapped is not None:
            plan.swap_ins.append(Swap(seq_id, cache.block_table(seq_id)[: swapped.num_blocks]))
        self._queue.remove(sequence)
        self._running[seq_id] = sequence
        if sequence.prefix_keys:
            self._planner.claim(sequence, start, plan)
        num_tokens = min(length - start, plan.budget) if self._config.chunked_prefill else length - start
        plan.add(generation_item(cache, sequence, start, num_tokens))
        plan.admitted.append(AdmitRecord(seq_id, how, start, available - cache.num_available))


def generation_item(cache: KvCache, sequence: Sequence, start: int, num_tokens: int) -> PlanItem:
    """Build the item that computes `num_tokens` rows of a generation from position `start` on; its slots are
    reserved."""
    seq_id, length = sequence.seq_id, len(sequence.token_ids)
    remaining = length - start - num_tokens
    # A decode: nothing but the last output token has to be computed (with the cache off: again).
    decodes = sequence.num_output_tokens and (num_tokens + remaining == 1 or not cache.persistent)
    phase: Phase = "decode" if decodes else "prefill"
    chooses_token = not remaining and sequence.max_output_tokens > 0
    rows = range(num_tokens - chooses_token, num_tokens)
    if sequence.task is not GENERATE:
        rows = sequence.pending_task.chunk_rows(start, num_tokens, length)
    table = cache.block_table(seq_id)
    return PlanItem(seq_id, sequence, start, num_tokens, rows, chooses_token, phase, table, remaining)
