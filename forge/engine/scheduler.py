"""Who runs in the next step: a machine of values between two queues.

`schedule()` looks at the queues and the cache's policy, reserves what the step will write, and returns a `StepPlan`.
`commit()` takes what came of it. Neither touches a model or an array.

Admission is first come, first served: running sequences go on by one token each, and waiting ones join as long as the
cache has room for their prompts. A sequence is in exactly one container: `waiting`, `running`, or (ended, but with its
cache kept for a continuation) `kept`.
"""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.engine.sequence import Sequence
from forge.engine.step_plan import MaxNumSeqs, NoBlocks, PlanItem, StepPlan, Waiting
from forge.trace.records import FinishReason


@dataclass(frozen=True)
class Outcome:
    """What a step brought for one sequence."""

    seq_id: int
    token_id: int | None
    """The token chosen, or None where none was asked for."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Scheduler:
    def __init__(self, cache: KvCache, max_num_seqs: int):
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.kept: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve the slots that it writes.

        Between steps the computed length of a running sequence is the position of the first token not yet computed;
        with the cache off that is 0, and the step computes all of them.
        """
        copies: list[BlockCopy] = []
        items = [self._reserve(sequence, copies) for sequence in self.running.values()]
        admitted: list[int] = []
        waiting: tuple[Waiting, ...] = ()
        while self.waiting:
            sequence = self.waiting[0]
            refusal = self._admit(sequence, copies, items)
            if refusal is not None:
                waiting = (Waiting(sequence.seq_id, refusal),)
                break
            self.waiting.popleft()
            self.running[sequence.seq_id] = sequence
            admitted.append(sequence.seq_id)
        return StepPlan(tuple(items), tuple(copies), tuple(admitted), waiting)

    def commit(self, plan: StepPlan, outcomes: Items[Outcome]) -> list[Sequence]:
        """Record what a plan's forward pass wrote and chose; return the sequences that ended with it."""
        for item in plan.items:
            tokens = self.running[item.seq_id].token_ids
            self.cache.commit(item.seq_id, tokens[item.start : item.start + item.num_tokens])
        ended = []
        for outcome in outcomes:
            sequence = self.running[outcome.seq_id]
            if outcome.token_id is not None:
                sequence.token_ids.append(outcome.token_id)
            if outcome.finish_reason is not None:
                self._retire(sequence, outcome.finish_reason, outcome.stop_reason)
                ended.append(sequence)
        return ended

    def abort(self, seq_id: int) -> Sequence | None:
        """End a sequence between steps, wherever it is; None if it has already ended."""
        for sequence in [*self.waiting, *self.running.values()]:
            if sequence.seq_id == seq_id:
                self._retire(sequence, "abort", None)
                return sequence
        return None

    def release(self, seq_id: int) -> None:
        """Give up a kept sequence's cache."""
        del self.kept[seq_id]
        self.cache.remove(seq_id)

    def check_invariants(self) -> None:
        """Raise AssertionError if a sequence is in two containers or the cache disagrees with its tokens."""
        ids = [s.seq_id for s in self.waiting] + list(self.running) + list(self.kept)
        assert len(ids) == len(set(ids)), "a sequence is in two containers"
        assert len(self.running) <= self.max_num_seqs, "more sequences run than may"
        for seq_id, sequence in self.running.items():
            if self.cache.kind != "off":
                assert self.cache.computed_length(seq_id) == len(sequence.token_ids) - 1
        self.cache.check_invariants()

    def _admit(self, sequence: Sequence, copies: list[BlockCopy], items: list[PlanItem]) -> NoBlocks | MaxNumSeqs | None:
        """Begin a waiting sequence, or say why not with everything as it was."""
        if len(self.running) >= self.max_num_seqs:
            return MaxNumSeqs(self.max_num_seqs)
        try:
            if sequence.continues is not None:
                self._take_over(sequence)
            else:
                wants_prompt = sequence.params.prompt_logprobs is not None
                self.cache.add(
                    sequence.seq_id,
                    sequence.token_ids,
                    max_cached=0 if wants_prompt else len(sequence.token_ids) - 1,
                )
        except OutOfBlocks as shortage:
            return NoBlocks(shortage.needed, shortage.free)
        try:
            items.append(self._reserve(sequence, copies))
        except OutOfBlocks as shortage:
            self.cache.remove(sequence.seq_id)
            return NoBlocks(shortage.needed, shortage.free)
        return None

    def _take_over(self, sequence: Sequence) -> None:
        """Continue from a kept sequence's cache: what the two have in common stays, the rest is forgotten."""
        kept = self.kept.pop(sequence.continues)
        sequence.continues = None  # from here on it is an ordinary sequence, recomputed if it must be
        common = 0
        for ours, theirs in zip(sequence.token_ids, kept.token_ids, strict=False):
            if ours != theirs:
                break
            common += 1
        # The last prompt token is computed again in any case: its logits choose the first output token.
        self.cache.truncate(sequence.seq_id, min(common, len(sequence.token_ids) - 1))

    def _reserve(self, sequence: Sequence, copies: list[BlockCopy]) -> PlanItem:
        start = self.cache.computed_length(sequence.seq_id)
        num_tokens = len(sequence.token_ids) - start
        copies += self.cache.reserve(sequence.seq_id, num_tokens)
        wants_prompt = sequence.params.prompt_logprobs is not None and sequence.num_output_tokens == 0
        return PlanItem(
            sequence.seq_id,
            start,
            num_tokens,
            logit_rows=range(0 if wants_prompt else num_tokens - 1, num_tokens),
            samples=sequence.max_output_tokens > 0,
            phase="prefill" if sequence.num_output_tokens == 0 else "decode",
            block_table=self.cache.block_table(sequence.seq_id),
        )

    def _retire(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        """The one way out for every sequence, whatever ended it."""
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if self.running.pop(sequence.seq_id, None) is None:
            self.waiting.remove(sequence)
            return
        if sequence.keep_cache:
            self.kept[sequence.seq_id] = sequence
        else:
            self.cache.remove(sequence.seq_id)
