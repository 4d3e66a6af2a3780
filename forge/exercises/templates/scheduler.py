"""Exercise 7: a scheduler's decision.

Read chapter 6 first (forge batching). Each step has a budget of tokens. Running sequences come first: one token to each
that decodes, then what is left to prompts under way. Then waiting sequences are admitted, in order, until one does not
fit. Nothing passes a sequence that does not fit, however small: else a large request would wait for ever.

Fill in the three functions. Then:

    forge build check 7      scenarios by the step, then whole workloads
    forge build run 7        the engine, scheduled by your code
"""

from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder
from forge.exercises.scheduler import MaxNumSeqs, NoBlocks, NoBudget, SchedulerBase, WaitReason

# MaxNumSeqs(limit), NoBudget(limit) and NoBlocks(needed, free) are the reasons to wait; WaitReason is any of them.


class MyScheduler(SchedulerBase):
    """You have `self.running` (a dictionary from id to sequence, in the order of admission), `self.queue` (iterate over
    it: the waiting sequences, in order), `self.cache`, `self.config.max_num_seqs`, and of a plan `plan.budget` (tokens
    left), `plan.limit` (tokens of a whole step) and `plan.preempted`.

    Given, too:
    `self.reserve(sequence, plan)` reserves the slots of all tokens of a running sequence. It may preempt others, which
    then no longer run; False if the sequence itself had to give way.
    `self.compute(sequence, num_tokens, plan)` schedules that many of a running sequence's tokens, from the first that
    is not computed on, and lowers the budget.
    `self.blocks_to_begin(sequence)` is how many blocks it takes to admit a waiting sequence.
    `self.begin(sequence, plan)` admits it, and schedules as many of its tokens as the budget has.
    `self.wait(sequence, reason, plan)` notes why a sequence waits.
    """

    def schedule_running(self, plan: PlanBuilder) -> None:
        """Schedule the running sequences: those that decode, then prompts under way, for as long as there is budget.

        A sequence has `len(sequence.token_ids)` tokens, of which `self.cache.computed_length(seq_id)` are computed. If
        one is left it decodes, and needs `reserve`. If more are left its prompt is under way: its slots are reserved.
        A prompt gets as much of what is left of the budget as it can use. Decodes come in any order, and there is
        always budget for all of them.
        """
        raise NotImplementedError("schedule_running")

    def reason_to_wait(self, sequence: Sequence, plan: PlanBuilder) -> WaitReason | None:
        """Return why a waiting sequence cannot be admitted now; None if it can. Changes nothing. If several reasons
        hold, any of them.

        `MaxNumSeqs(limit)`: as many run as may. `NoBudget(plan.limit)`: no token of the budget is left.
        `NoBlocks(needed, free)`: it needs more blocks than are available (`self.cache.num_available`).
        """
        raise NotImplementedError("reason_to_wait")

    def admit(self, plan: PlanBuilder) -> None:
        """Admit waiting sequences in order, until one has to wait, and note why that one does (`self.wait`); none in a
        step that has preempted one. `begin` takes the sequence out of the queue."""
        raise NotImplementedError("admit")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
