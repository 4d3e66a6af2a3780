"""Who runs in the next step: a machine of values between a few containers.

`schedule()` looks at the containers and the cache's policy, reserves what the step will write, and returns a
`StepPlan`. `commit()` takes what came of it. Neither touches a model or an array.

A step is decided in this order (iteration-level scheduling: Yu et al. 2022, Orca):

1. running sequences get their tokens out of the step's budget, decodes first, then what is left of prompts;
2. waiting ones are admitted while budget and blocks last (`admission`);
3. if the running ones need more blocks than there are, victims give theirs up (`preemption`);
4. slots are reserved and the plan is written down; guesses get what room is left (`guess_room`).

Nobody waits forever. A request that could never fit is refused when it comes. Victims go to the front of the queue, and
each preemption buys the one that asked a token in that very step, so work never goes round in circles.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import count

from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.engine.admission import admit, lead
from forge.engine.containers import Containers
from forge.engine.guess_room import GuessRoom
from forge.engine.oneshot import MAX_DEFERRALS, OneShotBudget, OneShotItem, OneShotQueue
from forge.engine.policies import SchedulerConfig
from forge.engine.preemption import make_room
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Draft, Outcome, PlanItem, StepPlan, flat
from forge.trace.records import BlockMap, MaxNumSeqs, NoBlocks, NoBudget, Phase, Queues, WaitRecord

_UNLIMITED = 1 << 62
"""A budget that is never used up."""
_ONE_ROW = range(1)


class Scheduler(Containers):
    def __init__(
        self,
        cache: KvCache,
        config: SchedulerConfig,
        scratch: range = range(0),
        temporary_bytes: Callable[[int, int], int] = lambda rows, logit_rows: 0,
    ):
        """`scratch`: blocks past the cache's own, for requests that keep nothing. `temporary_bytes`: what a forward of
        so many rows, so many of them with logits, needs for itself."""
        super().__init__(cache, config)
        self.oneshots = OneShotQueue(cache, temporary_bytes, config.prefix_planning)
        self.scratch = scratch
        self.guess_room = GuessRoom(cache)
        self.block_map: BlockMap | None = None
        """Every block as the last step left it, where `keep_block_map` is set."""
        self.keep_block_map = False
        self._refused_at: tuple[int, ...] | None = None
        self._arrivals = count()
        self._steps_passed_over = 0
        """That left nothing for requests that keep nothing, since the last that took one."""
        # Without a cache a step computes whole sequences; it has no part of one to begin or to end with.
        self._budget = config.token_budget if cache.persistent else _UNLIMITED
        if not config.chunked_prefill:
            self._budget = max(self._budget, cache.max_sequence_length)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, and its forks with it, in the queue."""
        arrival = next(self._arrivals)
        for one in (sequence, *sequence.forks):
            one.arrival = arrival
        if self.config.prefix_planning:
            cacheable = sequence.token_ids[: sequence.most_cached]
            sequence.prefix_keys = self.cache.prefix_keys(cacheable, sequence.salt)
        self.enqueue(sequence)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.oneshots)

    def may_admit(self) -> bool:
        """Whether the next step might begin somebody: not if all who wait were refused a place or blocks by the last
        step that was scheduled, and nobody has come or gone since."""
        if self.oneshots or self._refused_at != self._coming_and_going():
            return bool(self.oneshots or self.waiting or self.swapped)
        return False

    def _coming_and_going(self) -> tuple[int, ...]:
        return len(self.waiting), len(self.swapped), len(self.kept), self.num_finished

    @property
    def queues(self) -> Queues:
        return Queues(len(self.waiting) + len(self.oneshots), len(self.running), len(self.swapped), self.num_finished)

    # Deciding a step

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve the slots that it writes.

        The computed length of a running sequence is the position of the first token not yet computed; with the cache
        off that is 0 between steps, and every step computes all of them.
        """
        draft = self._begin_draft()
        admit(self, draft)
        if not self.config.chunked_prefill:
            self._separate_prefill(draft)
        make_room(self, draft)
        taking_part = [self.running[seq_id] for seq_id, tokens in draft.tokens.items() if tokens]
        items = tuple([self._plan_item(sequence, draft) for sequence in taking_part])
        refused = not draft.preempted and all(isinstance(one.reason, NoBlocks | MaxNumSeqs) for one in draft.waiting)
        self._refused_at = self._coming_and_going() if refused else None
        return draft.finished(items, self._plan_oneshots(items, draft) if self.oneshots else ())

    def _begin_draft(self) -> Draft:
        """Give the running sequences their tokens: one to each that decodes, then the rest to prompts under way."""
        tokens: dict[int, int] = {}
        needs: dict[int, int] = {}
        prompts: list[tuple[int, int]] = []
        cache, budget = self.cache, self._budget
        for seq_id, sequence in self.running.items():
            length = len(sequence.token_ids)
            remaining = length - cache.computed_length(seq_id)
            needs[seq_id] = cache.blocks_needed(seq_id, length - cache.reserved_length(seq_id))
            if remaining == 1 or not cache.persistent:
                tokens[seq_id] = remaining
                budget -= remaining
            else:
                prompts.append((seq_id, remaining))
        for seq_id, remaining in prompts:
            tokens[seq_id] = min(remaining, budget)
            budget -= tokens[seq_id]
        draft = Draft(tokens, self._budget, budget, needs, self.guess_room.is_wanted)
        for seq_id, _ in prompts:
            lead(self.running[seq_id], cache.computed_length(seq_id), cache.block_size, draft)
        return draft

    def _separate_prefill(self, draft: Draft) -> None:
        """Without chunks: if there are prompts to compute, those that decode sit this step out."""
        decoding = [
            seq_id
            for seq_id, tokens in draft.tokens.items()
            if self._phase(self.running[seq_id].num_output_tokens, tokens) == "decode"
        ]
        if len(decoding) < len(draft.tokens):
            for seq_id in decoding:
                draft.tokens[seq_id] = draft.needs[seq_id] = 0

    def _plan_item(self, sequence: Sequence, draft: Draft) -> PlanItem:
        """Reserve a sequence's slots; which of its rows come, and which of those need logits."""
        cache, seq_id = self.cache, sequence.seq_id
        length = len(sequence.token_ids)
        start = draft.starts.get(seq_id)
        if start is None:
            start = cache.computed_length(seq_id)
        num_tokens = draft.tokens[seq_id]
        remaining = length - start - num_tokens
        num_output = length - sequence.num_prompt_tokens
        phase = self._phase(num_output, num_tokens + remaining)
        guesses = self.guess_room.guesses(sequence, draft) if draft.guessing and num_output and not remaining else 0
        missing = length + guesses - cache.reserved_length(seq_id)
        if missing:
            draft.copies += cache.reserve(seq_id, missing)
        draft.needs[seq_id] = 0
        table = cache.block_table(seq_id)
        if phase == "decode" and num_tokens == 1 and not guesses:  # nearly every item of nearly every step
            return PlanItem(seq_id, start, 1, _ONE_ROW, True, phase, table)
        decodes = guesses and phase == "decode"
        forks = self.guess_room.forks(sequence, num_tokens + guesses, draft) if decodes else ()
        samples = not remaining and sequence.max_output_tokens > 0
        first_row = num_tokens - 1 if samples else num_tokens
        if sequence.needs_prompt_logprobs:
            first_row = min(first_row, max(0, len(sequence.prompt_logprobs) - 1 - start))
        last_row = num_tokens - 1 if not samples and not remaining else num_tokens + guesses
        rows = range(first_row, max(first_row, last_row))
        return PlanItem(seq_id, start, num_tokens, rows, samples, phase, table, remaining, guesses, forks)

    def _phase(self, num_output: int, num_missing: int) -> Phase:
        """`decode` where nothing but the last output token has to be computed (with the cache off: again)."""
        return "decode" if num_output and (num_missing == 1 or not self.cache.persistent) else "prefill"

    def _plan_oneshots(self, items: tuple[PlanItem, ...], draft: Draft) -> tuple[OneShotItem, ...]:
        """Requests that keep nothing, in what the step has left. Prompts in chunks can leave nothing for as long as
        they come; after some such steps there is a budget beside theirs."""
        config = self.config
        tokens = min(draft.budget, config.oneshot_tokens) if items else config.oneshot_tokens
        if tokens <= 0:
            if self._steps_passed_over < MAX_DEFERRALS:
                self._steps_passed_over += 1
                first = next(self.oneshots.requests())
                draft.waiting.append(WaitRecord(first.seq_id, NoBudget(self._budget)))
                return ()
            tokens = min(self._budget, config.oneshot_tokens)
        free = OneShotBudget(tokens, config.oneshot_memory, self.cache.num_available, list(self.scratch))
        oneshots, waits = self.oneshots.plan(free, draft.leaders)
        if oneshots:
            self._steps_passed_over = 0
        draft.waiting += waits
        return oneshots

    # Taking the results

    def commit(
        self, plan: StepPlan, outcomes: Items[Outcome], broken: frozenset[int] = frozenset()
    ) -> tuple[BlockCopy, ...]:
        """Record what a plan's forward pass wrote and chose: one outcome per item, then one for each exhausted one.
        `broken`: requests that keep nothing and got no numbers for an answer.

        Returns block copies to perform at once: where a kind of cache cannot share blocks, a fork needs copies.
        """
        copies: list[BlockCopy] = []
        for swap in plan.swap_ins:  # also those that sit this step out: what they had is back
            num_tokens = self.host.entries[swap.seq_id].num_tokens
            self.cache.commit(swap.seq_id, self.running[swap.seq_id].token_ids[:num_tokens])
            self.host.drop(swap.seq_id)
        for item, outcome in zip(plan.items, outcomes, strict=False):
            sequence = self.running[item.seq_id]
            sequence.token_ids += outcome.token_ids
            end = item.start + item.num_tokens + outcome.num_accepted
            owner = item.seq_id if outcome.winner is None else outcome.winner
            if outcome.finish_reason != "error":  # what a broken forward wrote must not serve anybody else
                self.cache.commit(owner, sequence.token_ids[item.start : end])
            if item.num_guesses > outcome.num_accepted:
                self.cache.truncate(owner, end)
            if item.forks:
                copies += self.guess_room.end_forks(item, owner)
            if outcome.forked:
                copies += self._begin_samples(sequence, outcome.forked)
        self.oneshots.finish(plan.oneshots, broken)
        self.num_finished += len(plan.oneshots)
        self.stats = self.cache.stats()
        self.block_map = self.cache.block_map() if self.keep_block_map else None
        for outcome in flat(outcomes):
            if outcome.finish_reason is not None:
                self.retire(self.find(outcome.seq_id), outcome.finish_reason, outcome.stop_reason)
        return tuple(copies)

    def _begin_samples(self, parent: Sequence, outcomes: tuple[Outcome, ...]) -> list[BlockCopy]:
        """The prompt is computed: begin the other samples of it. Those without a place wait for one, as the preempted
        do, with their first token."""
        copies: list[BlockCopy] = []
        for outcome in outcomes:
            child = parent.forks[0]
            child.token_ids += outcome.token_ids
            if outcome.finish_reason is not None or len(self.running) >= self.config.max_num_seqs:
                self.enqueue(child)
            else:
                try:
                    copies += self.cache.fork(parent.seq_id, child.seq_id)
                    self.running[child.seq_id] = child
                except OutOfBlocks:
                    self.enqueue(child)
            del parent.forks[0]
        return copies
