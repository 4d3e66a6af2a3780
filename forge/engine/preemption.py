"""Preemption: a running sequence that needs blocks takes them from victims.

Which sequence gives way is a policy (`policies`), and so is what becomes of its keys and values: they are dropped, to
be computed again, or swapped out to the host pool. A victim's tokens stay, and it goes back to its place in the queue,
before all sequences that never ran. Each preemption lets a sequence compute a token in that very step, so work makes
progress.
"""

from forge.cache.block_pool import blocks_for
from forge.cache.host_pool import HostEntry, Swap
from forge.cache.kv_cache import OutOfBlocks
from forge.engine.containers import Containers
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder
from forge.reasons import HostPoolFull, NoBlocks, PoolExhausted, PreemptionMode
from forge.trace.records import PreemptRecord


class Preemption:
    """Frees blocks for running sequences. Retained caches go first, then victims."""

    def __init__(self, containers: Containers):
        self._cache, config, _, self._queue, self._running, self._host_pool, self._retained = containers
        self._policy_name, self._choose_victim = config.victim_policy
        self._swaps = config.preemption == "swap"

    def reserve(self, sequence: Sequence, num_tokens: int, plan: PlanBuilder) -> bool:
        """Reserve slots for a running sequence, preempting others as needed; False if it has to give way itself."""
        while True:
            try:
                plan.copies += self._cache.reserve(sequence.seq_id, num_tokens)
                return True
            except OutOfBlocks as error:
                shortage = NoBlocks(error.needed, error.free)
            if self._retained.release_oldest():
                continue
            victim = self._choose_victim(tuple(self._running.values()), sequence)
            if victim is None:
                sequence.length_limit = PoolExhausted(self._cache.max_sequence_length)
                plan.exhausted.append(sequence)
                return False
            self.preempt(victim, sequence, shortage, plan)
            if victim is sequence:
                return False

    def preempt(self, victim: Sequence, requester: Sequence, shortage: NoBlocks, plan: PlanBuilder) -> None:
        """Take a running sequence's blocks and put it back into the queue."""
        cache, seq_id = self._cache, victim.seq_id
        table, computed, available = cache.block_table(seq_id), cache.computed_length(seq_id), cache.num_available
        swaps = self._swaps and computed > 0
        fallback = self._swap_out(victim, computed, plan) if swaps else None
        plan.drop(seq_id, table)
        del self._running[seq_id]
        cache.remove(seq_id)
        victim.times_preempted += 1
        self._queue.add(victim)
        how: PreemptionMode = "swap" if swaps and fallback is None else "recompute"
        lost, freed = 0 if how == "swap" else computed, cache.num_available - available
        numbers = requester.seq_id, shortage.needed, shortage.free
        plan.preempted.append(PreemptRecord(seq_id, *numbers, self._policy_name, how, lost, freed, fallback))

    def _swap_out(self, victim: Sequence, computed: int, plan: PlanBuilder) -> HostPoolFull | None:
        """Move a victim's computed blocks to the host pool, or say why they cannot go there."""
        blocks = self._cache.block_table(victim.seq_id)[: blocks_for(computed, self._cache.block_size)]
        if len(blocks) > self._host_pool.num_free:
            return HostPoolFull(len(blocks), self._host_pool.num_free)
        self._host_pool.add(victim.seq_id, HostEntry(len(blocks), computed))
        # Swap-outs run before copies: what the step was to copy for the victim is still where it is copied from.
        for copy in reversed(plan.copies):
            blocks = tuple([copy.source if block == copy.destination else block for block in blocks])
        plan.swap_outs.append(Swap(victim.seq_id, blocks))
        return None
