"""Who runs in the next step: a machine of values between a few queues.

`schedule()` looks at the queues and the cache's policy, reserves what the step will write, and returns a `StepPlan`.
`commit()` takes what came of it. Neither touches a model or an array.

A step is decided in this order (iteration-level scheduling: Yu et al. 2022, Orca):

1. running sequences get their tokens out of the step's budget, decodes first, then what is left of prompts;
2. waiting ones are admitted while budget and blocks last. What the running ones need in this step counts as taken, so
   admitting never preempts. A sequence is admitted with room for all of its tokens, however many steps they take;
3. if the running ones need more blocks than there are, victims give theirs up;
4. slots are reserved and the plan is written down.

A sequence is in exactly one container: `waiting`, `running`, `swapped` (its blocks in the host's pool), the `forks` of
the sequence whose prompt it shares, or (ended, but with its cache left for a continuation) `kept`. A kept cache is a
convenience: the oldest is given up where a sequence would otherwise find no room.

Nobody waits forever. A request that could never fit is refused when it comes. Victims go to the front of the queue, and
each preemption buys the one that asked a token in that very step, so work never goes round in circles.

An exception may come between any two lines here (Ctrl-C). A sequence's tokens are the truth and its cache can always be
computed again; so `recover` starts from the tokens alone, whatever state the rest was left in.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import merge
from itertools import count
from typing import NamedTuple

from forge.cache.host_pool import HostPool
from forge.cache.kv_cache import NO_HIT, CacheStats, KvCache, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.engine.oneshot import MAX_DEFERRALS, OneShotBudget, OneShotItem, OneShotQueue
from forge.engine.policies import SchedulerConfig
from forge.engine.sequence import Sequence
from forge.engine.step_plan import ForkSlots, PlanItem, StepPlan, Swap
from forge.trace.records import (
    AdmitRecord,
    BlockMap,
    Deferred,
    FinishReason,
    HostPoolFull,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    Phase,
    PreemptRecord,
    Queues,
    WaitReason,
    WaitRecord,
)


class Outcome(NamedTuple):
    """What a step brought for one sequence."""

    seq_id: int
    position: int
    """Where the first of `token_ids` stands in its sequence."""
    token_ids: tuple[int, ...]
    """The tokens chosen, none where none was asked for, several where guesses were accepted."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    num_accepted: int = 0
    """Guesses whose keys and values are right."""
    winner: int | None = None
    """The fork that computed them, where that was not the item itself."""
    forked: tuple["Outcome", ...] = ()
    """Those of the samples that begin as forks of this sequence."""


@dataclass
class _Draft:
    """A plan while it is being made."""

    tokens: dict[int, int]
    """How many tokens each running sequence computes; none for those that are not in it."""
    budget: int
    """Tokens that are left."""
    needs: dict[int, int]
    """Blocks that each running sequence takes when its slots are reserved."""
    copies: list[BlockCopy] = field(default_factory=list)
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    admitted: list[AdmitRecord] = field(default_factory=list)
    waiting: list[WaitRecord] = field(default_factory=list)
    preempted: list[PreemptRecord] = field(default_factory=list)
    exhausted: list[int] = field(default_factory=list)
    leaders: dict[int, int] = field(default_factory=dict)
    """For each block that is being computed, by its key in the prefix index, the sequence that computes it."""
    starts: dict[int, int] = field(default_factory=dict)
    """Where sequences that were swapped in go on: the cache learns it when the step is committed."""


_UNLIMITED = 1 << 62
"""A budget that is never used up."""


class Scheduler:
    def __init__(
        self,
        cache: KvCache,
        config: SchedulerConfig,
        scratch: range = range(0),
        temporary_bytes: Callable[[int, int], int] = lambda rows, logit_rows: 0,
    ):
        """`scratch`: blocks past the cache's own, for requests that keep nothing. `temporary_bytes`: what a forward of
        so many rows, so many of them with logits, needs for itself."""
        self.cache = cache
        self.config = config
        self.host = HostPool(config.num_host_blocks)
        self.waiting: list[Sequence] = []
        """In the order in which they will be admitted."""
        self.running: dict[int, Sequence] = {}
        """In the order of their admission."""
        self.swapped: dict[int, Sequence] = {}
        self.kept: dict[int, Sequence] = {}
        self.num_finished = 0
        self.stats: CacheStats = cache.stats()
        """The cache as the last step left it, with the sequences that ended in it still there."""
        self.block_map: BlockMap | None = None
        """The same for every block, where `keep_block_map` is set."""
        self.keep_block_map = False
        self.wanted_guesses: Callable[[Sequence], int] = lambda sequence: 0
        """How many guesses a sequence would have verified; it gets as many as fit."""
        self.wanted_forks: Callable[[Sequence], int] = lambda sequence: 0
        """How many further runs of as many guesses."""
        self._arrivals = count()
        self._steps_passed_over = 0
        """That left nothing for requests that keep nothing, since the last that took one."""
        self._fork_ids = count(-1, -1)
        self.oneshots = OneShotQueue(cache, temporary_bytes, config.prefix_planning)
        self.scratch = scratch
        self._key = config.admission_order
        # Without a cache a step computes whole sequences; it has no part of one to begin or to end with.
        self._budget = config.token_budget if cache.remembers else _UNLIMITED
        if not config.chunked_prefill:
            self._budget = max(self._budget, cache.max_sequence_length)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, and its forks with it, in the queue."""
        arrival = next(self._arrivals)
        for one in (sequence, *sequence.forks):
            one.arrival = arrival
        if self.config.prefix_planning:
            cacheable = sequence.token_ids[: _most_cached(sequence)]
            sequence.prefix_keys = self.cache.prefix_keys(cacheable, sequence.salt)
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        """To its place in the queue: one that ran before came before those that never did."""
        insort(self.waiting, sequence, key=self._key)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.oneshots)

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
        self._admit(draft)
        if not self.config.chunked_prefill:
            self._separate_prefill(draft)
        self._make_room(draft)
        taking_part = [self.running[seq_id] for seq_id, tokens in draft.tokens.items() if tokens]
        items = tuple([self._plan_item(sequence, draft) for sequence in taking_part])
        oneshots = self._plan_oneshots(items, draft) if self.oneshots else ()
        return StepPlan(
            items,
            oneshots,
            tuple(draft.copies),
            tuple(draft.swap_outs),
            tuple(draft.swap_ins),
            tuple(draft.admitted),
            tuple(draft.waiting),
            tuple(draft.preempted),
            tuple(draft.exhausted),
        )

    def _begin_draft(self) -> _Draft:
        """Give the running sequences their tokens: one to each that decodes, then the rest to prompts under way."""
        tokens: dict[int, int] = {}
        needs: dict[int, int] = {}
        prompts: list[tuple[int, int]] = []
        cache, budget = self.cache, self._budget
        for seq_id, sequence in self.running.items():
            length = len(sequence.token_ids)
            remaining = length - cache.computed_length(seq_id)
            needs[seq_id] = cache.blocks_needed(seq_id, length - cache.reserved_length(seq_id))
            if remaining == 1 or not cache.remembers:
                tokens[seq_id] = remaining
                budget -= remaining
            else:
                prompts.append((seq_id, remaining))
        for seq_id, remaining in prompts:
            tokens[seq_id] = min(remaining, budget)
            budget -= tokens[seq_id]
        draft = _Draft(tokens, budget, needs)
        for seq_id, _ in prompts:
            self._lead(self.running[seq_id], cache.computed_length(seq_id), draft)
        return draft

    def _admit(self, draft: _Draft) -> None:
        """Begin waiting sequences, in order, until one does not fit. Those that are deferred let others pass."""
        if not (self.waiting or self.swapped):
            return
        line = list(merge(self.waiting, sorted(self.swapped.values(), key=self._key), key=self._key))
        for sequence in line:
            refusal = self._try_to_begin(sequence, draft)
            if refusal is not None:
                draft.waiting.append(WaitRecord(sequence.seq_id, refusal))
                if isinstance(refusal, Deferred):
                    sequence.times_deferred += 1
                    continue
                if not self.running and not isinstance(refusal, MaxNumSeqs):
                    self._give_up(sequence, draft)
                return

    def _leader(self, sequence: Sequence, num_cached: int, draft: _Draft) -> Deferred | None:
        """The sequence that is computing what this one would compute next, if it is worth waiting for."""
        keys = sequence.prefix_keys[num_cached // self.cache.block_size :]
        leader = draft.leaders.get(keys[0]) if keys else None
        if leader is None or sequence.times_deferred >= MAX_DEFERRALS:
            return None
        return Deferred(leader, self.cache.block_size * sum(draft.leaders.get(key) == leader for key in keys))

    def _lead(self, sequence: Sequence, num_cached: int, draft: _Draft) -> None:
        """What this sequence computes others need not compute too."""
        for key in sequence.prefix_keys[num_cached // self.cache.block_size :]:
            draft.leaders.setdefault(key, sequence.seq_id)

    def _plan_oneshots(self, items: tuple[PlanItem, ...], draft: _Draft) -> tuple[OneShotItem, ...]:
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

    def _try_to_begin(self, sequence: Sequence, draft: _Draft) -> WaitReason | None:
        """Admit a sequence with room for all its tokens, or say why it has to wait."""
        if len(self.running) >= self.config.max_num_seqs:
            return MaxNumSeqs(self.config.max_num_seqs)
        own = self._adopt_kept(sequence)
        while True:
            num_cached, cost = self._cost_of_beginning(sequence, own)
            deferral = self._leader(sequence, num_cached, draft)
            if deferral is not None:
                return deferral
            uncached = len(sequence.token_ids) - num_cached
            if draft.budget < (1 if self.config.chunked_prefill else uncached):
                return NoBudget(self._budget)
            room = self.cache.num_available - sum(draft.needs.values())
            if cost <= room:
                self._begin(sequence, own, draft)
                return None
            oldest = next((seq_id for seq_id in self.kept if seq_id != own), None)
            if oldest is None:
                return NoBlocks(cost, max(0, room))
            self.release(oldest)

    def _adopt_kept(self, sequence: Sequence) -> int | None:
        """The kept sequence that this one continues, if it is still there, cut down to what the two have in common."""
        if sequence.continues not in self.kept:
            return None
        kept = self.kept[sequence.continues]
        common = _num_common(sequence.token_ids, kept.token_ids)
        self.cache.truncate(kept.seq_id, min(common, _most_cached(sequence)))
        return kept.seq_id

    def _cost_of_beginning(self, sequence: Sequence, own: int | None) -> tuple[int, int]:
        """How many tokens need no computing, and how many blocks the sequence takes. Changes nothing."""
        cache, length = self.cache, len(sequence.token_ids)
        if own is not None:
            return cache.computed_length(own), cache.blocks_needed(own, length - cache.reserved_length(own))
        if sequence.seq_id in self.swapped:
            return self.host.entries[sequence.seq_id].num_tokens, cache.blocks_to_begin(NO_HIT, length)
        hit = cache.lookup(sequence.token_ids, sequence.salt, _most_cached(sequence))
        return hit.num_tokens, cache.blocks_to_begin(hit, length)

    def _begin(self, sequence: Sequence, own: int | None, draft: _Draft) -> None:
        """Give an admitted sequence its place in the cache, and its tokens of this step."""
        cache, seq_id, length = self.cache, sequence.seq_id, len(sequence.token_ids)
        available = cache.num_available
        how = "recompute" if sequence.num_output_tokens or sequence.times_preempted else "new"
        if seq_id in self.swapped:
            how, num_cached = "swap", self.host.entries[seq_id].num_tokens
            cache.add(seq_id, (), sequence.salt)
        elif own is not None:
            num_cached = cache.computed_length(own)
            del self.kept[own]
        else:
            num_cached = cache.add(seq_id, sequence.token_ids, sequence.salt, _most_cached(sequence))
        sequence.continues = None  # from here on it is an ordinary sequence, recomputed if it must be
        draft.copies += cache.reserve(seq_id, length - cache.reserved_length(seq_id))
        self.running[seq_id] = sequence
        if how == "swap":
            table = cache.block_table(seq_id)[: self.host.entries[seq_id].num_blocks]
            draft.swap_ins.append(Swap(seq_id, table))
            draft.starts[seq_id] = num_cached
            del self.swapped[seq_id]
        else:
            self.waiting.remove(sequence)
        self._lead(sequence, num_cached, draft)
        draft.tokens[seq_id] = min(length - num_cached, draft.budget)
        draft.budget -= draft.tokens[seq_id]
        draft.needs[seq_id] = 0
        draft.admitted.append(AdmitRecord(seq_id, how, num_cached, available - cache.num_available))

    def _separate_prefill(self, draft: _Draft) -> None:
        """Without chunks: if there are prompts to compute, those that decode sit this step out."""
        decoding = [
            seq_id
            for seq_id, tokens in draft.tokens.items()
            if self._phase(self.running[seq_id].num_output_tokens, tokens) == "decode"
        ]
        if len(decoding) < len(draft.tokens):
            for seq_id in decoding:
                draft.tokens[seq_id] = draft.needs[seq_id] = 0

    def _make_room(self, draft: _Draft) -> None:
        """Take blocks from victims until there are as many as the running sequences need."""
        if sum(draft.needs.values()) <= self.cache.num_available:
            return
        served: list[Sequence] = []
        for sequence in list(self.running.values()):
            if sequence.seq_id in self.running and self._find_blocks(sequence, served, draft):
                served.append(sequence)

    def _find_blocks(self, sequence: Sequence, served: list[Sequence], draft: _Draft) -> bool:
        """Make room for one more sequence beside those that are served; False if it has to give way itself."""
        cache = self.cache
        name, choose_victim = self.config.victim_policy
        while True:
            more = len(sequence.token_ids) - cache.reserved_length(sequence.seq_id)
            needed = cache.blocks_needed(sequence.seq_id, more) if draft.tokens[sequence.seq_id] else 0
            draft.needs[sequence.seq_id] = needed
            free = cache.num_available - sum(draft.needs[other.seq_id] for other in served)
            if needed <= free:
                return True
            if self.kept:
                self.release(next(iter(self.kept)))
                continue
            victim = choose_victim(tuple(self.running.values()), sequence)
            if victim is None:
                self._give_up(sequence, draft)
                return False
            self._preempt(victim, sequence, NoBlocks(needed, max(0, free)), name, draft)
            if victim is sequence:
                return False
            if victim in served:
                served.remove(victim)

    def _preempt(self, victim: Sequence, requester: Sequence, shortage: NoBlocks, policy: str, draft: _Draft) -> None:
        """Take a running sequence's blocks. Its tokens stay, and it goes back to its place in the queue, the front."""
        cache, seq_id = self.cache, victim.seq_id
        computed, available = cache.computed_length(seq_id), cache.num_available
        fallback = None
        mode = self.config.preemption if computed else "recompute"
        if mode == "swap":
            blocks = cache.block_table(seq_id)[: -(-computed // cache.block_size)]
            if len(blocks) <= self.host.num_free:
                self.host.take(seq_id, len(blocks), computed)
                draft.swap_outs.append(Swap(seq_id, blocks))
                self.swapped[seq_id] = victim
            else:
                mode, fallback = "recompute", HostPoolFull(len(blocks), self.host.num_free)
        if mode == "recompute":
            self._enqueue(victim)
        del self.running[seq_id]
        del draft.tokens[seq_id]
        victim.times_preempted += 1
        cache.remove(seq_id)
        lost = computed if mode == "recompute" else 0
        freed = cache.num_available - available
        record = PreemptRecord(
            seq_id, requester.seq_id, shortage.needed, shortage.free, policy, mode, lost, freed, fallback
        )
        draft.preempted.append(record)

    def _give_up(self, sequence: Sequence, draft: _Draft) -> None:
        """Nobody is left who could give this sequence a block: it ends where it is."""
        draft.exhausted.append(sequence.seq_id)
        draft.tokens.pop(sequence.seq_id, None)

    def _plan_item(self, sequence: Sequence, draft: _Draft) -> PlanItem:
        cache, seq_id = self.cache, sequence.seq_id
        length = len(sequence.token_ids)
        start = draft.starts.get(seq_id)
        if start is None:
            start = cache.computed_length(seq_id)
        num_tokens = draft.tokens[seq_id]
        remaining = length - start - num_tokens
        num_output = length - sequence.num_prompt_tokens
        phase = self._phase(num_output, num_tokens + remaining)
        guesses = self._fitting_guesses(sequence, draft) if num_output and not remaining else 0
        missing = length + guesses - cache.reserved_length(seq_id)
        if missing:
            draft.copies += cache.reserve(seq_id, missing)
        draft.needs[seq_id] = 0
        forks = self._fitting_forks(sequence, num_tokens + guesses, draft) if guesses and phase == "decode" else ()
        samples = not remaining and sequence.max_output_tokens > 0
        first_row = num_tokens - 1 if samples else num_tokens
        if sequence.needs_prompt_logprobs:
            first_row = min(first_row, max(0, len(sequence.prompt_logprobs) - 1 - start))
        last_row = num_tokens - 1 if not samples and not remaining else num_tokens + guesses
        table = cache.block_table(seq_id)
        rows = range(first_row, max(first_row, last_row))
        return PlanItem(seq_id, start, num_tokens, rows, samples, phase, table, remaining, guesses, forks)

    def _phase(self, num_output: int, num_missing: int) -> Phase:
        """`decode` where nothing but the last output token has to be computed (with the cache off: again)."""
        return "decode" if num_output and (num_missing == 1 or not self.cache.remembers) else "prefill"

    def _fitting_guesses(self, sequence: Sequence, draft: _Draft) -> int:
        """As many guesses as the sequence wants and fit into what the step has left: none preempts, none ends early."""
        wanted = self.wanted_guesses(sequence)
        if wanted <= 0:
            return 0
        cache, seq_id, length = self.cache, sequence.seq_id, len(sequence.token_ids)
        room = min(
            sequence.max_output_tokens - sequence.num_output_tokens - 1,  # the last token needs no slot
            draft.budget,
            cache.max_sequence_length - length,
        )
        guesses = max(0, min(wanted, room))
        still_needed = sum(draft.needs.values()) - draft.needs[seq_id]  # of those whose slots come after these
        present = cache.reserved_length(seq_id)
        while guesses and cache.blocks_needed(seq_id, length + guesses - present) > cache.num_available - still_needed:
            guesses -= 1
        draft.budget -= guesses
        return guesses

    def _fitting_forks(self, sequence: Sequence, num_rows: int, draft: _Draft) -> tuple[ForkSlots, ...]:
        """Room for further runs of guesses, as many as are wanted and fit. One that was swapped in this very step has
        nothing to fork yet."""
        if sequence.seq_id in draft.starts:
            return ()
        cache, forks = self.cache, []
        for _ in range(self.wanted_forks(sequence)):
            if num_rows > draft.budget:
                break
            seq_id = next(self._fork_ids)
            try:
                copies = cache.fork(sequence.seq_id, seq_id)
            except OutOfBlocks:
                break
            if cache.blocks_needed(seq_id, num_rows) > cache.num_available - sum(draft.needs.values()):
                cache.remove(seq_id)
                break
            draft.copies += (*copies, *cache.reserve(seq_id, num_rows))
            draft.budget -= num_rows
            forks.append(ForkSlots(seq_id, cache.block_table(seq_id)))
        return tuple(forks)

    # Taking the results

    def commit(self, plan: StepPlan, outcomes: Items[Outcome]) -> tuple[BlockCopy, ...]:
        """Record what a plan's forward pass wrote and chose: one outcome per item, then one for each exhausted one.

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
            self.cache.commit(owner, sequence.token_ids[item.start : end])
            if item.num_guesses > outcome.num_accepted:
                self.cache.truncate(owner, end)
            if item.forks:
                copies += self._end_forks(item, owner)
            if outcome.forked:
                copies += self._begin_forks(sequence, outcome.forked)
        self.oneshots.finish(plan.oneshots)
        self.num_finished += len(plan.oneshots)
        self.stats = self.cache.stats()
        self.block_map = self.cache.block_map() if self.keep_block_map else None
        for outcome in _flat(outcomes):
            if outcome.finish_reason is not None:
                self._retire(self.find(outcome.seq_id), outcome.finish_reason, outcome.stop_reason)
        return tuple(copies)

    def _end_forks(self, item: PlanItem, owner: int) -> tuple[BlockCopy, ...]:
        """Only what the run of guesses that was right has computed stays, as the sequence's own."""
        copies: tuple[BlockCopy, ...] = ()
        if owner != item.seq_id:
            self.cache.remove(item.seq_id)
            copies = self.cache.fork(owner, item.seq_id)
        for fork in item.forks:
            self.cache.remove(fork.seq_id)
        return copies

    def _begin_forks(self, parent: Sequence, outcomes: tuple[Outcome, ...]) -> list[BlockCopy]:
        """The prompt is computed: begin the other samples of it. Those without a place wait for one, as the preempted
        do, with their first token."""
        copies: list[BlockCopy] = []
        for outcome in outcomes:
            child = parent.forks[0]
            child.token_ids += outcome.token_ids
            if outcome.finish_reason is not None or len(self.running) >= self.config.max_num_seqs:
                self._enqueue(child)
            else:
                try:
                    copies += self.cache.fork(parent.seq_id, child.seq_id)
                    self.running[child.seq_id] = child
                except OutOfBlocks:
                    self._enqueue(child)
            del parent.forks[0]
        return copies

    def _retire(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        """The one way out for every sequence, whatever ended it."""
        sequence.stop_reason = stop_reason
        sequence.finish_reason = reason
        seq_id = sequence.seq_id
        self.num_finished += 1
        if sequence.forks:  # it ended before its prompt was computed: the next sample takes its place
            heir = sequence.forks[0]
            heir.forks = sequence.forks[1:]
            self._enqueue(heir)
            sequence.forks = []
        if seq_id in self.running:
            if sequence.keep_cache:
                self.cache.truncate(seq_id, self.cache.computed_length(seq_id))
                self.kept[seq_id] = sequence
            else:
                self.cache.remove(seq_id)
            del self.running[seq_id]
        elif self.swapped.pop(seq_id, None) is None:
            self.waiting.remove(sequence)
        self.host.drop(seq_id)

    def abort(self, seq_id: int, reason: FinishReason = "abort") -> Sequence | None:
        """End a sequence between steps, wherever it is; None if it has already ended."""
        sequence = self.find(seq_id)
        if sequence is None:
            return None
        for parent in self.unfinished():
            if sequence in parent.forks:
                sequence.finish_reason = reason
                parent.forks.remove(sequence)
                self.num_finished += 1
                return sequence
        self._retire(sequence, reason, None)
        return sequence

    def release(self, seq_id: int) -> None:
        """Give up a kept sequence's cache, unless that has happened already."""
        if self.kept.pop(seq_id, None) is not None:
            self.cache.remove(seq_id)

    def recover(self, outcomes: Items[Outcome] = ()) -> None:
        """Go on after an exception, whatever state it left: outcomes that were chosen are taken, the cache is emptied,
        and everyone who has not ended waits again.

        May itself be interrupted and called again.
        """
        everyone = {sequence.seq_id: sequence for sequence in self.unfinished()}
        for outcome in _flat(outcomes):
            sequence = everyone.get(outcome.seq_id)
            if sequence is not None:
                if len(sequence.token_ids) == outcome.position:
                    sequence.token_ids += outcome.token_ids
                if outcome.finish_reason is not None:
                    sequence.stop_reason, sequence.finish_reason = outcome.stop_reason, outcome.finish_reason
        left = [sequence for sequence in everyone.values() if sequence.finish_reason is None]
        for sequence in everyone.values():
            with_parent = [one for one in sequence.forks if one in left and not one.num_output_tokens]
            sequence.forks = with_parent
            if sequence.finish_reason is not None and with_parent:
                with_parent[0].forks = with_parent[1:]
                sequence.forks = []
        forks = {fork.seq_id for sequence in left for fork in sequence.forks}
        self.num_finished += len(everyone) - len(left)
        self.waiting = sorted((one for one in left if one.seq_id not in forks), key=self._key)
        self.running, self.swapped, self.kept = {}, {}, {}
        self.host.entries.clear()
        self.cache.clear()
        self.stats = self.cache.stats()

    def check_invariants(self) -> None:
        """Raise AssertionError if a sequence is in two containers or the cache disagrees with its tokens."""
        # A sequence that continues another has that one's id, which is in `kept` until it begins.
        ids = [one.seq_id for one in self.unfinished() if one.continues not in self.kept] + list(self.kept)
        assert len(ids) == len(set(ids)), "a sequence is in two containers"
        assert len(self.running) <= self.config.max_num_seqs, "more sequences run than may"
        assert self.waiting == sorted(self.waiting, key=self._key), "the queue is out of order"
        assert self.host.entries.keys() == self.swapped.keys(), "the host's pool does not hold just the swapped"
        assert self.host.num_free >= 0, "the host's pool holds more than it has room for"
        for seq_id, sequence in self.running.items():
            computed, reserved = self.cache.computed_length(seq_id), self.cache.reserved_length(seq_id)
            assert computed <= reserved <= len(sequence.token_ids), "slots are reserved for nobody's tokens"
            assert computed < len(sequence.token_ids), "the cached length is past the next position"
            if self.cache.remembers and computed < len(sequence.token_ids) - 1:
                assert reserved == len(sequence.token_ids), "a prompt under way has not all of its slots"
        for one in self.unfinished():
            if one.seq_id not in self.running and one.continues is None:
                assert not self.cache.knows(one.seq_id), "a sequence that does not run holds something in the cache"
        self.cache.check_invariants()

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence that has not ended, whichever container holds it."""
        for sequence in [*self.waiting, *self.running.values(), *self.swapped.values()]:
            yield sequence
            yield from sequence.forks

    def find(self, seq_id: int) -> Sequence | None:
        """A sequence that has not ended."""
        if seq_id in self.running:
            return self.running[seq_id]
        return next((sequence for sequence in self.unfinished() if sequence.seq_id == seq_id), None)


def _flat(outcomes: Items[Outcome]) -> Iterator[Outcome]:
    """Every outcome, those of forks after that of the sequence whose prompt they share."""
    for outcome in outcomes:
        yield outcome
        yield from outcome.forked


def _most_cached(sequence: Sequence) -> int:
    """How much of a sequence may come from the cache. The last token is computed in any case, for its logits; where the
    prompt's log probabilities are wanted, all of it."""
    return 0 if sequence.needs_prompt_logprobs else len(sequence.token_ids) - 1


def _num_common(ours: Items[int], theirs: Items[int]) -> int:
    """How many tokens the two begin with in common."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (our, their) in enumerate(pairs) if our != their), min(len(ours), len(theirs)))
