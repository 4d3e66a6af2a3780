from forge.exercises.scheduler import SchedulerBase
from forge.reasons import MaxNumSeqs, NoBlocks, NoBudget


class MyScheduler(SchedulerBase):
    def left(self, sequence):
        return len(sequence.token_ids) - self.cache.computed_length(sequence.seq_id)

    def schedule_running(self, plan):
        prompts = []
        for sequence in list(self.running.values()):
            if sequence.seq_id not in self.running:
                continue
            if self.left(sequence) > 1:
                prompts.append(sequence)
                continue
            if self.reserve(sequence, plan):
                self.compute(sequence, 1, plan)
        for sequence in prompts:
            if plan.budget <= 0:
                break
            if sequence.seq_id in self.running:
                self.compute(sequence, min(self.left(sequence), plan.budget), plan)

    def reason_to_wait(self, sequence, plan):
        if len(self.running) >= self.config.max_num_seqs:
            return MaxNumSeqs(self.config.max_num_seqs)
        if plan.budget <= 0:
            return NoBudget(plan.limit)
        needed = self.blocks_to_begin(sequence)
        if needed > self.cache.num_available:
            return NoBlocks(needed, self.cache.num_available)
        return None

    def admit(self, plan):
        if plan.preempted:
            return
        for sequence in list(self.queue):
            reason = self.reason_to_wait(sequence, plan)
            if reason is not None:
                self.wait(sequence, reason, plan)
                break
            self.begin(sequence, plan)
