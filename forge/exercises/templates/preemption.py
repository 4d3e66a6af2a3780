"""Exercise 8: a victim policy, and what preemption does.

Read chapter 6 first (forge batching). A running sequence needs blocks and there are none: a victim gives its blocks up.
It loses its keys and values, never its tokens, so it says the same in the end. It goes back into the queue, and is
computed again from its tokens when it is admitted the next time.

Fill in the three functions. Then:

    forge build check 8      does every request end, and say what it says alone?
    forge build run 8        the engine, in a pool that is too small
"""

from collections.abc import Sequence as Items

from forge.cache.kv_cache import OutOfBlocks  # what reserve raises: it has `needed` and `free`
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder
from forge.exercises.preemption import NoBlocks, PoolExhausted, PreemptionBase, PreemptRecord

# NoBlocks(needed, free): a shortage. PoolExhausted(max_tokens): why a sequence can never go on. PreemptRecord: below.


def victim(running: Items[Sequence], requester: Sequence) -> Sequence | None:
    """Choose the sequence that gives its blocks up.

    running: all that run, in the order of their admission; requester: one of them, which needs blocks. Return one of
    `running`, also the requester if you like, or None if the requester runs alone; which one is up to you, and always
    the same for the same sequences. A sequence has `token_ids`, `num_output_tokens`, `arrival`, `seq_id`.
    """
    raise NotImplementedError("victim")


class MyPreemption(PreemptionBase):
    """Frees blocks for running sequences.

    You have: `self._cache` (a `KvCache`), `self._queue` (`add(sequence)`), `self._running` (a dictionary from id to
    sequence) and `self._choose_victim` (your policy).
    """

    def reserve(self, sequence: Sequence, num_tokens: int, plan: PlanBuilder) -> bool:
        """Reserve slots for a running sequence, preempting others until they are there; False if it gives way itself.

        `self._cache.reserve(seq_id, num_tokens)` returns block copies, which belong into `plan.copies`, or raises
        `OutOfBlocks`. Then ask the policy, with a tuple of all that run and with the sequence, and preempt the victim:
        `self.preempt(victim, sequence, NoBlocks(needed, free), plan)`. Try again until it fits. Without a victim the
        pool is the sequence's limit: set `sequence.length_limit` to `PoolExhausted(self._cache.max_sequence_length)`,
        add the sequence to `plan.exhausted`, and return False.
        """
        raise NotImplementedError("reserve")

    def preempt(self, victim: Sequence, requester: Sequence, shortage: NoBlocks, plan: PlanBuilder) -> None:
        """Take a running sequence's blocks and put it back into the queue.

        - It leaves the plan: `plan.drop(seq_id, blocks)`, with the blocks of its table, so that no copy is made into
          them any more.
        - It no longer runs, the cache no longer has it, and it waits in the queue.
        - `times_preempted` counts.
        - `plan.preempted` gets a `PreemptRecord(seq_id, requester's seq_id, shortage.needed, shortage.free, "mine",
          "recompute", tokens_lost, blocks_freed)`. Tokens lost are those that the cache had computed; blocks freed is
          how much `self._cache.num_available` has grown.
        """
        raise NotImplementedError("preempt")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
