"""The scheduler: which sequences run in the next step, and what becomes of the results.

`schedule()` looks at the queue and the cache's policy, reserves what the step will write, and returns a `StepPlan`.
`commit()` takes what came of it. Neither touches a model or an array.

A step is decided in this order (iteration-level scheduling: Yu et al. 2022, Orca):

1. running sequences: one token for each that decodes, the rest of the budget for prompts under way, but for a share
   that goes to short sequences that wait; a sequence that finds no block preempts another (`preemption`);
2. waiting ones are admitted while tokens and blocks last (`admission`, `prefill_only`), unless the step preempted;
3. draft tokens get the room that is left (`draft_slots`).

No sequence starves: a request that could never fit is refused when it arrives, and each preemption lets a sequence
compute a token in that very step.

A sequence's state is the container that holds it: the queue (waiting; with an entry in the host pool: swapped),
`running`, the `waiting_samples` of the sequence that computes its prompt, or, ended with its cache left in place,
`retained`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items

from forge.cache.host_pool import HostEntry
from forge.cache.kv_cache import CacheStats, KvCache, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.engine.admission import Admission, generation_item
from forge.engine.containers import Containers
from forge.engine.draft_slots import DraftSlots
from forge.engine.policies import SchedulerConfig
from forge.engine.preemption import Preemption
from forge.engine.prefill_only import PrefillOnly
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, PlanBuilder, PlanItem, StepPlan
from forge.reasons import FinishReason
from forge.trace.records import BlockMap, Queues

_UNLIMITED = 1 << 62
"""A budget that is never used up."""
_ONE_ROW = range(1)


class Scheduler:
    """Holds every unfinished sequence in exactly one container and decides, step by step, which of them compute."""

    def __init__(
        self,
        cache: KvCache,
        config: SchedulerConfig,
        scratch: range = range(0),
        max_logit_rows: int = _UNLIMITED,
        preemption: Callable[..., Preemption] = Preemption,
    ):
        """scratch: blocks past the cache's own, for prefill-only sequences. max_logit_rows: a sequence with logits of
        more rows gets forwards of its own."""
        self.cache = cache
        self.config = config
        containers = Containers.empty(cache, config)
        self.prefix_planner, self.queue, self.running = containers.planner, containers.queue, containers.running
        self.host_pool, self.retained = containers.host_pool, containers.retained
        self.draft_slots: DraftSlots | None = None
        """Set where a proposer proposes draft tokens."""
        self.num_finished = 0
        self.stats: CacheStats = cache.stats()
        """The cache as the last step left it, with the sequences that ended in it still there."""
        self.block_map: BlockMap | None = None
        """Every block as the last step left it, where `keep_block_map` is set."""
        self.keep_block_map = False
        self.prefill_only = PrefillOnly(containers, scratch)
        self.preemption = preemption(containers)
        self.admission = Admission(containers, self.prefill_only)
        # With the cache off every step computes whole sequences, so no budget can cut one.
        self._token_budget = config.token_budget if cache.persistent else _UNLIMITED
        self._max_logit_rows = max_logit_rows  # bounds the memory of one array of logits: see `readout`
        self._num_arrived = 0

    # Deciding a step

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve the slots that it writes."""
        plan = PlanBuilder(limit=self._token_budget, budget=self._token_budget)
        self.schedule_running(plan)
        if self.queue.sequences:
            self.admission.admit(plan)
        if not self.config.chunked_prefill and plan.prefill_tokens:  # sequences that decode sit this step out
            for item in [item for item in plan.items.values() if item.phase == "decode"]:
                plan.drop(item.seq_id)
        if plan.needs_hidden or plan.limit - plan.budget > self._max_logit_rows:  # else no item has as many rows
            plan.set_apart(self._max_logit_rows)
        if self.draft_slots is not None:
            self.draft_slots.reserve(plan)
        return plan.build()

    def schedule_running(self, plan: PlanBuilder) -> None:
        """Give one token to each sequence that decodes, then the rest of the budget to prompts under way.

        The computed length of a running sequence is the position of the first token not yet computed; with the cache
        off that is 0 between steps, and every step computes all of them. One that decodes lacks its last token alone:
        it reserves one slot, which `commit` counts as computed.
        """
        cache, prefills = self.cache, []
        for seq_id, sequence in list(self.running.items()):
            if plan.preempted and seq_id not in self.running:
                continue
            length, start = len(sequence.token_ids), cache.computed_length(seq_id)
            if start < length - 1 and cache.persistent:  # a prompt computed in chunks; all of its slots are reserved
                prefills.append((sequence, start))
                continue
            try:
                plan.copies += cache.reserve(seq_id, length - cache.reserved_length(seq_id))  # for a decode: 1 slot
            except OutOfBlocks:
                if not self.preemption.reserve(sequence, length - cache.reserved_length(seq_id), plan):
                    continue
            # A decode lacks its last token alone, an output token. For speed no `generation_item` and `plan.add` here.
            if start == length - 1 >= sequence.num_prompt_tokens:
                table = cache.block_table(seq_id)
                plan.items[seq_id] = PlanItem(seq_id, sequence, start, 1, _ONE_ROW, True, "decode", table)
                plan.budget -= 1
            else:
                plan.add(generation_item(cache, sequence, start, length - start))
        prefills = [(sequence, start) for sequence, start in prefills if sequence.seq_id in self.running]
        if self.queue.sequences:
            self.admission.admit_short(plan, sum([len(sequence.token_ids) - start for sequence, start in prefills]))
        for sequence, start in prefills:
            if plan.budget > 0:
                num_tokens = min(len(sequence.token_ids) - start, plan.budget)
                plan.add(generation_item(cache, sequence, start, num_tokens))
                self.prefix_planner.claim(sequence, start, plan)

    # Taking the results

    def commit(self, plan: StepPlan, outcomes: Iterable[Outcome]) -> tuple[BlockCopy, ...]:
        """Take over what a plan's forward pass computed and the outcomes that were chosen from it.

        Each item and each exhausted sequence has an outcome, and so has each sample that begins or ends with one of
        them. Returns block copies to perform at once: where a kind of cache cannot share blocks, a fork needs copies.
        """
        cache, outcome_of = self.cache, {outcome.seq_id: outcome for outcome in outcomes}
        ended: list[tuple[Sequence, FinishReason, Outcome]] = []
        copies: list[BlockCopy] = []
        for swap in plan.swap_ins:  # also of sequences that sit this step out
            num_tokens = self.host_pool.entries.pop(swap.seq_id).num_tokens
            cache.commit(swap.seq_id, self.running[swap.seq_id].token_ids[:num_tokens])
        for item in (*plan.items, *plan.separate) if plan.separate else plan.items:
            outcome, sequence, token_ids = outcome_of[item.seq_id], item.sequence, item.sequence.token_ids
            token_ids += outcome.token_ids  # the sequence's own list: from here on it has them
            if outcome.finish_reason is not None:
                ended.append((sequence, outcome.finish_reason, outcome))
            if item.phase == "prefill_only":
                self.prefill_only.commit(item, broken=outcome.finish_reason == "error")
            elif item.num_draft_slots:
                copies += self._commit_draft_tokens(item, outcome)
            elif outcome.finish_reason != "error":  # the plain case; what a broken forward wrote must serve no other
                # The rows just computed: of a decode the token before the new one, which the next step computes.
                cache.commit(item.seq_id, token_ids[item.start : item.start + item.num_tokens])
            if sequence.waiting_samples and (outcome.finish_reason or not item.remaining):
                copies += self._begin_samples(sequence, outcome_of)
        for sequence in plan.exhausted:
            outcome = outcome_of[sequence.seq_id]
            ended.append((sequence, outcome.finish_reason or "length", outcome))
            self._begin_samples(sequence, outcome_of)  # they end too
        self.stats = cache.stats()  # for the step's record
        self.block_map = cache.block_map() if self.keep_block_map else None
        for sequence, reason, outcome in ended:
            self.retire(sequence, reason, outcome.stop_reason)
        return tuple(copies)

    def _commit_draft_tokens(self, item: PlanItem, outcome: Outcome) -> tuple[BlockCopy, ...]:
        """Keep the accepted draft tokens of the winning draft, and roll the rest back."""
        end = item.start + item.num_tokens + outcome.num_accepted
        owner = item.seq_id if outcome.winner is None else outcome.winner
        if outcome.finish_reason != "error":
            self.cache.commit(owner, item.sequence.token_ids[item.start : end])
        if item.num_draft_slots > outcome.num_accepted:
            self.cache.truncate(owner, end)
        return self.draft_slots.end_forks(item, owner) if item.forks and self.draft_slots is not None else ()

    def _begin_samples(self, parent: Sequence, outcome_of: Mapping[int, Outcome]) -> list[BlockCopy]:
        """Begin the samples whose prompt is now computed: they fork its cache. Those without a slot wait for one, as
        preempted sequences do, with their first token. One that ended with that token retires, and so do all samples of
        a parent that ended before."""
        copies: list[BlockCopy] = []
        children, parent.waiting_samples = parent.waiting_samples, []
        for child in children:
            outcome = outcome_of[child.seq_id]
            child.token_ids += outcome.token_ids
            if outcome.finish_reason is not None:
                self.retire(child, outcome.finish_reason, outcome.stop_reason)
                continue
            try:
                if len(self.running) < self.config.max_num_seqs:
                    copies += self.cache.fork(parent.seq_id, child.seq_id)
                    self.running[child.seq_id] = child
                    continue
            except OutOfBlocks:
                pass
            self.queue.add(child)
        return copies

    # Between steps

    def add(self, sequence: Sequence, computed: HostEntry | None = None) -> None:
        """Queue a new sequence, and its waiting samples with it.

        computed: keys and values of its beginning; dropped where the host pool has no room for them.
        """
        for sample in (sequence, *sequence.waiting_samples):
            sample.arrival = self._num_arrived
        self._num_arrived += 1
        if self.config.prefix_planning:
            cacheable = sequence.token_ids[: sequence.max_cacheable_tokens]
            sequence.prefix_keys = self.cache.prefix_keys(cacheable, sequence.salt)
        self.queue.add(sequence)
        if computed is None or sequence.prefill_only:
            return
        if computed.num_blocks <= self.host_pool.num_free and 0 < computed.num_tokens <= sequence.max_cacheable_tokens:
            self.host_pool.add(sequence.seq_id, computed)

    def has_unfinished(self) -> bool:
        return bool(self.queue.sequences or self.running)

    def unfinished(self) -> Iterator[Sequence]:
        """Yield every sequence that has not ended, whichever container holds it."""
        for sequence in [*self.queue, *self.running.values()]:
            yield sequence
            yield from sequence.waiting_samples

    @property
    def queues(self) -> Queues:
        num_swapped = len(self.host_pool.entries)
        return Queues(len(self.queue.sequences) - num_swapped, len(self.running), num_swapped, self.num_finished)

    def restart(self, sequences: Items[Sequence], num_finished: int) -> None:
        """Begin again from the tokens of these unfinished sequences, whatever state everything else is in.

        The cache is emptied and every sequence waits, as after a preemption. May itself be interrupted and repeated.
        """
        for container in (self.queue, self.running, self.retained.sequences, self.host_pool.entries):
            container.clear()
        self.cache.clear()
        first_samples: dict[str, Sequence] = {}
        for sequence in sequences:
            sequence.waiting_samples = []
            # The first sample without output computes the prompt; the others without any wait for it.
            first = sequence if sequence.num_output_tokens else first_samples.setdefault(sequence.request_id, sequence)
            if first is sequence:
                self.queue.add(sequence)
            else:
                first.waiting_samples.append(sequence)
        self.num_finished = num_finished
        self.stats = self.cache.stats()

    # Containers

    def retire(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence, wherever it is. Every end comes through here."""
        sequence.stop_reason, sequence.finish_reason = stop_reason, reason
        self.num_finished += 1
        seq_id = sequence.seq_id
        if seq_id in self.running:
            del self.running[seq_id]
            if sequence.retain_cache:
                self.retained.retain(sequence)
            else:
                self.cache.remove(seq_id)
        elif seq_id in self.queue.sequences:
            self.queue.remove(sequence)
            self.host_pool.entries.pop(seq_id, None)

    def check_invariants(self) -> None:
        """Raise AssertionError if a sequence is in two containers or the cache disagrees with its tokens."""
        cache = self.cache
        ids = [sequence.seq_id for sequence in self.unfinished()] + list(self.retained.sequences)
        assert len(ids) == len(set(ids)), "a sequence is in two containers"
        assert len(self.running) <= self.config.max_num_seqs, "more sequences run than may"
        self.queue.check_invariants()
        assert self.host_pool.entries.keys() <= self.queue.sequences.keys(), "one in the host pool does not wait"
        assert self.host_pool.num_free >= 0, "the host pool holds more than it has room for"
        for seq_id, sequence in self.running.items():
            computed, reserved = cache.computed_length(seq_id), cache.reserved_length(seq_id)
            assert computed <= reserved <= len(sequence.token_ids), "slots are reserved past the known tokens"
            assert computed < len(sequence.token_ids), "the cached length is past the next position"
            if cache.persistent and computed < len(sequence.token_ids) - 1:
                assert reserved == len(sequence.token_ids), "a prompt under way has not all of its slots"
        for waiting in self.unfinished():
            assert waiting.seq_id in self.running or waiting.seq_id not in cache, "a sequence that waits holds blocks"
        cache.check_invariants()
