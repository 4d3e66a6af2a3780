"""Who runs in the next step: a machine of values between two queues.

`schedule()` looks at the queues and the cache's policy, reserves what the step will write, and returns a `StepPlan`.
`commit()` takes what came of it. Neither touches a model or an array.

Admission is first come, first served: running sequences go on by one token each, and waiting ones join as long as the
cache has room for their prompts. A sequence is in exactly one container: `waiting`, `running`, or (ended, but with its
cache kept for a continuation) `kept`. A kept cache is a convenience: the oldest is given up where a waiting sequence
would otherwise find no room.

An exception may come between any two lines here (Ctrl-C). So `commit` can be called again with the same arguments and
`roll_back` at any time: both look at what is already done, and do the rest.
"""

from collections import deque
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass

from forge.cache.kv_cache import CacheStats, KvCache, OutOfBlocks
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
        self.stats: CacheStats = cache.stats()
        """The cache as the last step left it, with the sequences that ended in it still there."""

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
            self.running[sequence.seq_id] = sequence
            self.waiting.popleft()
            admitted.append(sequence.seq_id)
        return StepPlan(tuple(items), tuple(copies), tuple(admitted), waiting)

    def commit(self, plan: StepPlan, outcomes: Items[Outcome]) -> None:
        """Record what a plan's forward pass wrote and chose: one outcome per item, in the same order."""
        pairs = list(zip(plan.items, outcomes, strict=True))
        for item, outcome in pairs:
            sequence = self.running.get(item.seq_id)
            if sequence is not None:  # None: it ended in an earlier call that was interrupted
                self._commit_item(sequence, item, outcome)
        self.stats = self.cache.stats()
        for item, outcome in pairs:
            if outcome.finish_reason is not None and item.seq_id in self.running:
                self._retire(self.running[item.seq_id], outcome.finish_reason, outcome.stop_reason)

    def roll_back(self) -> None:
        """Undo a `schedule()` that no `commit` will follow, as far as it came: nothing stays reserved.

        Whoever it admitted goes on running, and computes its prompt in the next step.
        """
        if self.waiting:
            head = self.waiting[0]
            if head.seq_id in self.running:
                self.waiting.popleft()
            elif head.seq_id not in self.kept:
                self._drop_cache(head.seq_id)
        for sequence in [*self.running.values(), *self.waiting]:
            if sequence.finish_reason is not None:
                self._retire(sequence, sequence.finish_reason, sequence.stop_reason)
        for seq_id in self.running:
            self.cache.truncate(seq_id, self.cache.computed_length(seq_id))

    def abort(self, seq_id: int) -> Sequence | None:
        """End a sequence between steps, wherever it is; None if it has already ended."""
        for sequence in [*self.waiting, *self.running.values()]:
            if sequence.seq_id == seq_id:
                self._retire(sequence, "abort", None)
                return sequence
        return None

    def release(self, seq_id: int) -> None:
        """Give up a kept sequence's cache, unless that has happened already."""
        if seq_id in self.kept:
            self._drop_cache(seq_id)
            del self.kept[seq_id]

    def check_invariants(self) -> None:
        """Raise AssertionError if a sequence is in two containers or the cache disagrees with its tokens."""
        # A sequence that continues another has that one's id, which is in `kept` until it begins.
        new = [sequence.seq_id for sequence in self.waiting if sequence.continues is None]
        ids = [*new, *self.running, *self.kept]
        assert len(ids) == len(set(ids)), "a sequence is in two containers"
        assert len(self.running) <= self.max_num_seqs, "more sequences run than may"
        for seq_id, sequence in self.running.items():
            computed, reserved = self.cache.computed_length(seq_id), self.cache.reserved_length(seq_id)
            assert computed == reserved, "slots are reserved between steps"
            if self.cache.kind != "off" and sequence.num_output_tokens:  # without output its prompt may be to come
                assert computed == len(sequence.token_ids) - 1, "the cached length is not the next position"
        self.cache.check_invariants()

    def _admit(
        self, sequence: Sequence, copies: list[BlockCopy], items: list[PlanItem]
    ) -> NoBlocks | MaxNumSeqs | None:
        """Begin a waiting sequence, or say why it has to wait."""
        if len(self.running) >= self.max_num_seqs:
            return MaxNumSeqs(self.max_num_seqs)
        while True:
            try:
                self._begin(sequence)
                items.append(self._reserve(sequence, copies))
                return None
            except OutOfBlocks as shortage:
                self._drop_cache(sequence.seq_id)
                if not self.kept:
                    return NoBlocks(shortage.needed, shortage.free)
                self.release(next(iter(self.kept)))  # the one that ended first

    def _begin(self, sequence: Sequence) -> None:
        """Give the sequence its place in the cache, with as much of its prompt as is there already.

        The last prompt token is computed in any case, for its logits; where all of them are wanted, the whole prompt.
        """
        wants_prompt = sequence.params.prompt_logprobs is not None
        max_cached = 0 if wants_prompt else len(sequence.token_ids) - 1
        kept = None if sequence.continues is None else self.kept.pop(sequence.continues, None)
        sequence.continues = None  # from here on it is an ordinary sequence, recomputed if it must be
        if kept is None:
            self.cache.add(sequence.seq_id, sequence.token_ids, max_cached=max_cached)
        else:
            self.cache.truncate(sequence.seq_id, min(_num_common(sequence.token_ids, kept.token_ids), max_cached))

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

    def _commit_item(self, sequence: Sequence, item: PlanItem, outcome: Outcome) -> None:
        end = item.start + item.num_tokens
        if sequence.finish_reason is None:
            computed = self.cache.computed_length(item.seq_id)
            if computed < end <= self.cache.reserved_length(item.seq_id):
                self.cache.commit(item.seq_id, sequence.token_ids[computed:end])
            if outcome.token_id is not None and len(sequence.token_ids) == end:
                sequence.token_ids.append(outcome.token_id)

    def _retire(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        """The one way out for every sequence, whatever ended it."""
        sequence.stop_reason = stop_reason
        sequence.finish_reason = reason
        if sequence.seq_id not in self.running:
            self.waiting.remove(sequence)
            return
        if sequence.keep_cache:
            self.kept[sequence.seq_id] = sequence
        else:
            self._drop_cache(sequence.seq_id)
        del self.running[sequence.seq_id]

    def _drop_cache(self, seq_id: int) -> None:
        """Give back what a sequence has in the cache, if it has anything."""
        with suppress(KeyError):
            self.cache.remove(seq_id)


def _num_common(ours: Items[int], theirs: Items[int]) -> int:
    """How many tokens the two begin with in common."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (our, their) in enumerate(pairs) if our != their), min(len(ours), len(theirs)))
