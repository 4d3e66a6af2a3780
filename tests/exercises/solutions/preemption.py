from forge.cache.kv_cache import OutOfBlocks
from forge.engine.preemption import Preemption
from forge.reasons import NoBlocks, PoolExhausted
from forge.trace.records import PreemptRecord


def victim(running, requester):
    if len(running) == 1:
        return None
    return max(running, key=lambda one: (one.arrival, one.seq_id))


class MyPreemption(Preemption):
    def reserve(self, sequence, num_tokens, plan):
        while True:
            try:
                plan.copies += self._cache.reserve(sequence.seq_id, num_tokens)
                return True
            except OutOfBlocks as error:
                shortage = NoBlocks(error.needed, error.free)
            chosen = self._choose_victim(tuple(self._running.values()), sequence)
            if chosen is None:
                sequence.length_limit = PoolExhausted(self._cache.max_sequence_length)
                plan.exhausted.append(sequence)
                return False
            self.preempt(chosen, sequence, shortage, plan)
            if chosen is sequence:
                return False

    def preempt(self, victim, requester, shortage, plan):
        seq_id = victim.seq_id
        computed = self._cache.computed_length(seq_id)
        available = self._cache.num_available
        plan.drop(seq_id, self._cache.block_table(seq_id))
        del self._running[seq_id]
        self._cache.remove(seq_id)
        self._queue.add(victim)
        victim.times_preempted += 1
        freed = self._cache.num_available - available
        plan.preempted.append(
            PreemptRecord(
                seq_id, requester.seq_id, shortage.needed, shortage.free, "mine", "recompute", computed, freed
            )
        )
