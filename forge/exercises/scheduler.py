"""Exercise 7: a scheduler's decision. The check runs workloads on the hash model and holds each step's plan against the
rules."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

from forge.cache.kv_cache import KvCache
from forge.engine.admission import generation_item
from forge.engine.policies import VictimPolicy
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder, StepPlan
from forge.exercises.exercise import Costs, Exercise, Part, words_of
from forge.exercises.trials import EngineTrial, oldest_first
from forge.llm import LLM
from forge.pieces import standing_in
from forge.reasons import MaxNumSeqs, NoBlocks, NoBudget, PoolExhausted, WaitReason
from forge.trace.records import PreemptRecord, WaitRecord

_BLOCK, _BUDGET, _MAX_SEQS = 4, 12, 4


class SchedulerBase(Scheduler):
    """Given with exercise 7: everything of a scheduler except its decision."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._given = self.admission
        """The engine's own."""
        self.admission: Any = SimpleNamespace(admit=lambda plan: self.admit(plan), admit_short=lambda *_: None)

    def schedule_running(self, plan: PlanBuilder) -> None:
        raise NotImplementedError("schedule_running")

    def reason_to_wait(self, sequence: Sequence, plan: PlanBuilder) -> WaitReason | None:
        raise NotImplementedError("reason_to_wait")

    def admit(self, plan: PlanBuilder) -> None:
        raise NotImplementedError("admit")

    def reserve(self, sequence: Sequence, plan: PlanBuilder) -> bool:
        missing = len(sequence.token_ids) - self.cache.reserved_length(sequence.seq_id)
        return self.preemption.reserve(sequence, missing, plan)

    def compute(self, sequence: Sequence, num_tokens: int, plan: PlanBuilder) -> None:
        start = self.cache.computed_length(sequence.seq_id)
        plan.add(generation_item(self.cache, sequence, start, num_tokens))

    def blocks_to_begin(self, sequence: Sequence) -> int:
        return self._given.cost(sequence, None).num_blocks

    def begin(self, sequence: Sequence, plan: PlanBuilder) -> None:
        self._given.begin(sequence, None, plan)

    def wait(self, sequence: Sequence, reason: WaitReason, plan: PlanBuilder) -> None:
        plan.waiting.append(WaitRecord(sequence.seq_id, reason))
        if isinstance(reason, NoBlocks) and not self.running:  # it could never be admitted
            sequence.length_limit = PoolExhausted(self.cache.max_sequence_length)
            plan.exhausted.append(sequence)


def new_llm(
    scheduler: type[Scheduler], num_blocks: int, policy: str | VictimPolicy = "lifo", budget: int = _BUDGET
) -> LLM:
    """Create a small engine that this class schedules."""
    sizes: dict[str, Any] = {"block_size": _BLOCK, "num_blocks": num_blocks, "max_num_seqs": _MAX_SEQS}
    with standing_in(scheduler=scheduler):
        return LLM("hash", kv="paged", **sizes, max_num_batched_tokens=budget, prefill_only=False, preempt=policy)


class SchedulerTrial(EngineTrial):
    """Runs an engine and checks each plan while the reader's scheduler builds it."""

    def __init__(
        self,
        piece: ModuleType,
        num_blocks: int,
        kind: type | None = None,
        policy: str | VictimPolicy = "lifo",
        budget: int = _BUDGET,
    ):
        """kind: a class that replaces the reader's."""
        options = ", oldest_first" if callable(policy) else f", budget={budget}" if budget != _BUDGET else ""
        super().__init__(
            piece,
            "from forge import SamplingParams; from forge.exercises.scheduler import new_llm, oldest_first",
            f"llm = new_llm(piece.MyScheduler, {num_blocks}{options})",
        )
        self.llm = new_llm(kind or self._observed(piece), num_blocks, policy, budget)

    def _observed(self, piece: ModuleType) -> type:
        trial = self

        class Observed(piece.MyScheduler):  # type: ignore[name-defined, misc]
            """The reader's scheduler, with a check of each call."""

            def begin(self, sequence: Sequence, plan: PlanBuilder) -> None:
                needed, free = self.blocks_to_begin(sequence), self.cache.num_available
                name = f"sequence {sequence.seq_id}"
                trial.require(sequence.seq_id in self.queue.sequences, "once", f"{name} does not wait")
                first = next(iter(self.queue))
                finding = f"{name} is admitted, and sequence {first.seq_id} stands before it"
                trial.require(first is sequence, "no-overtaking", finding)
                trial.require(not plan.preempted, "after-preemption", f"{name} is admitted after a preemption")
                few = len(self.running) < self.config.max_num_seqs
                trial.require(few, "max-num-seqs", f"{len(self.running)} run, and {name} is admitted")
                trial.require(plan.budget > 0, "budget", f"{name} is admitted, and the budget is {plan.budget}")
                trial.require(needed <= free, "blocks", f"{name} needs {needed} blocks, {free} are available")
                super().begin(sequence, plan)

            def compute(self, sequence: Sequence, num_tokens: int, plan: PlanBuilder) -> None:
                seq_id = sequence.seq_id
                trial.require(seq_id in self.running, "preempted", f"sequence {seq_id} no longer runs")
                trial.require(seq_id not in plan.items, "once", f"sequence {seq_id} is scheduled already")
                end = self.cache.computed_length(seq_id) + num_tokens
                slots = self.cache.reserved_length(seq_id)
                late = f"sequence {seq_id} is to compute position {end - 1}, and has {slots} slots"
                trial.require(end <= slots, "reserved", late)
                decodes = end == len(sequence.token_ids) and num_tokens == 1
                finding = f"sequence {seq_id} decodes, and nothing is left of the budget"
                trial.require(plan.budget > 0 or not decodes, "decodes-first", finding)
                trial.require(0 < num_tokens <= plan.budget, "budget", f"{num_tokens} tokens of {plan.budget} left")
                super().compute(sequence, num_tokens, plan)

            def schedule(self) -> StepPlan:
                trial.reorder(self)
                before = dict(self.running)
                plan = super().schedule()
                trial.look(self, before, plan)
                return plan

            def reason_to_wait(self, sequence: Sequence, plan: PlanBuilder) -> WaitReason | None:
                state = self.observed(plan)
                reason = super().reason_to_wait(sequence, plan)
                trial.require(self.observed(plan) == state, "asking", "the queue or the plan is another one now")
                is_reason = reason is None or isinstance(reason, MaxNumSeqs | NoBudget | NoBlocks)
                trial.require(is_reason, "result", f"it returned {reason!r}")
                return reason

            def observed(self, plan: PlanBuilder) -> tuple[Any, ...]:
                plans = plan.budget, list(plan.items), list(plan.waiting), list(plan.admitted), list(plan.preempted)
                return plans, list(self.queue.sequences), list(self.running), self.cache.block_map()

        Observed.__name__ = "MyScheduler"
        return Observed

    def reorder(self, scheduler: Any) -> None:
        """Move running prompts in front of decodes: decodes must be scheduled first at any position."""
        cache, running = scheduler.cache, scheduler.running
        for seq_id, sequence in list(running.items()):
            if len(sequence.token_ids) - cache.computed_length(seq_id) == 1:
                running[seq_id] = running.pop(seq_id)

    def admit_after_preemption(self) -> None:
        """Call `admit` on a plan that has preempted a sequence, with a queue whose first sequence would fit."""
        self.llm.start([[97] * 3], SamplingParams(max_tokens=2))
        self.calls += [
            "run = llm.start([[97] * 3], SamplingParams(max_tokens=2))",
            "from forge.engine.step_plan import PlanBuilder; from forge.trace.records import PreemptRecord",
            'record = PreemptRecord(9, 8, 1, 0, "lifo", "recompute", 5, 2)',
            "plan = PlanBuilder(12, 12, preempted=[record])",
        ]
        plan = PlanBuilder(_BUDGET, _BUDGET, preempted=[PreemptRecord(9, 8, 1, 0, "lifo", "recompute", 5, 2)])
        returned = self.call("llm.engine.scheduler.admit(plan)", self.llm.engine.scheduler.admit, plan)  # type: ignore[attr-defined]
        self.require(returned is None, "result", f"it returned {returned!r}")

    def ask(self, waiting: int, running: int, budget: int) -> None:
        """Check `reason_to_wait` alone, with sequences that forge's own scheduler has admitted."""
        scheduler: Any = self.llm.engine.scheduler
        prompts = [[97 + number] * 3 for number in range(running)]
        steps = iter(self.llm.start(prompts, SamplingParams(max_tokens=9, ignore_eos=True)) if prompts else ())
        next(steps, None)
        self.llm.start([[97] * waiting], SamplingParams(max_tokens=2))
        (sequence,) = scheduler.queue
        plan = PlanBuilder(_BUDGET, budget)
        self.calls += [f"# {running} sequences of 3 tokens run, one of {waiting} tokens waits, the budget is {budget}"]
        needed, free = scheduler.blocks_to_begin(sequence), scheduler.cache.num_available
        reasons = _reasons(running, budget, _BUDGET, needed, free)
        reason = self.call("scheduler.reason_to_wait(sequence, plan)", scheduler.reason_to_wait, sequence, plan)
        finding = f"{running} run, budget {budget}, {needed} blocks needed and {free} available; it returned {reason!r}"
        self.require(reason in reasons if reasons else reason is None, "reason" if reasons else "idle", finding)

    def look(self, scheduler: Any, before: dict[int, Sequence], plan: StepPlan) -> None:
        items, cache = {item.seq_id: item for item in plan.items}, scheduler.cache
        limit = scheduler.config.max_num_batched_tokens
        left = limit - sum(item.num_tokens for item in plan.items)
        for seq_id, sequence in before.items():
            if seq_id not in scheduler.running or sequence in plan.exhausted:
                continue
            remaining = len(sequence.token_ids) - cache.computed_length(seq_id)
            if remaining == 1:
                self.require(seq_id in items, "decodes-first", f"sequence {seq_id} decodes, and got no token")
            else:
                got = items[seq_id].num_tokens if seq_id in items else 0
                finding = f"{left} tokens are left, and sequence {seq_id} computes {got} of {remaining}"
                self.require(got == remaining or left <= 0, "prompts", finding)
        head = next(iter(scheduler.queue), None)
        if head is None or plan.preempted or plan.exhausted:
            return
        needed, free = scheduler.blocks_to_begin(head), cache.num_available
        reasons = _reasons(len(scheduler.running), left, limit, needed, free)
        finding = (
            f"sequence {head.seq_id} waits: {len(scheduler.running)} run, budget {left}, {needed} of {free} blocks"
        )
        self.require(reasons, "idle", finding)
        notes = [(wait.seq_id, wait.reason) for wait in plan.waiting]
        is_noted = len(notes) == 1 and notes[0][0] == head.seq_id and notes[0][1] in reasons
        self.require(is_noted, "reason", f"{finding}; the plan notes {notes}")


def _reasons(running: int, left: int, budget: int, needed: int, free: int) -> list[WaitReason]:
    """Return every reason for which a sequence has to wait now."""
    held_by: dict[WaitReason, bool] = {
        MaxNumSeqs(_MAX_SEQS): running >= _MAX_SEQS,
        NoBudget(budget): left <= 0,
        NoBlocks(needed, free): needed > free,
    }
    return [reason for reason, holds in held_by.items() if holds]


def _check_reason(piece: ModuleType) -> None:
    class Partial(piece.MyScheduler):  # type: ignore[name-defined, misc]
        """Gives the reader's reasons; forge's own scheduler decides what is scheduled and admitted."""

        def schedule_running(self, plan: PlanBuilder) -> None:
            Scheduler.schedule_running(self, plan)

        def admit(self, plan: PlanBuilder) -> None:
            self._given.admit(plan)

    for num_blocks in (5, 7, 8, 9, 20):
        for running in (0, 2, 3, 4):
            if running <= num_blocks // 2:
                for budget in (0, 1, 12):
                    for waiting in (3, 4, 5, 12):
                        if waiting <= _BLOCK * num_blocks:
                            SchedulerTrial(piece, num_blocks, Partial).ask(waiting, running, budget)


def _check_all(piece: ModuleType) -> None:
    short = [[97 + number] * (3 + number) for number in range(6)]
    mixed = [[97 + number] * (30 if number % 3 == 1 else 4) for number in range(7)]
    many = [[97 + number] * (3 + 5 * number % 23) for number in range(9)]
    long = [[97 + number] * (40 - 5 * number) for number in range(4)]
    for num_blocks, prompts in ((64, short), (64, mixed), (15, mixed), (14, many), (8, short), (64, long)):
        SchedulerTrial(piece, num_blocks).compare(prompts)
    under_way = [[97] * 2, [98] * 2, [99] * 2, [100] * 28]  # preempted before its last chunk
    SchedulerTrial(piece, 12, policy=oldest_first).compare(under_way)
    SchedulerTrial(piece, 64, budget=_MAX_SEQS).compare(mixed)  # decodes leave one token to a prompt
    SchedulerTrial(piece, 64).admit_after_preemption()


def engine(piece: ModuleType) -> AbstractContextManager[None]:
    def new_scheduler(cache: KvCache, *arguments: Any, **named: Any) -> Scheduler:
        """Create the reader's scheduler; the engine's own if the cache is off, which the exercise leaves out."""
        return (piece.MyScheduler if cache.persistent else Scheduler)(cache, *arguments, **named)

    return standing_in(scheduler=new_scheduler)


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    kind = piece.MyScheduler if piece else Scheduler

    def work() -> None:
        with standing_in(scheduler=kind):
            llm = LLM("hash", kv="paged", num_blocks=4 * number, max_num_seqs=64, max_num_batched_tokens=64)
        llm.generate([[97] * 20] * number, SamplingParams(max_tokens=10, ignore_eos=True))

    return work


_OPTIONS = {"kv": "paged", "num_blocks": 24, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32}
_NAMES = tuple(f"MyScheduler.{name}" for name in ("schedule_running", "reason_to_wait", "admit"))

EXERCISE = Exercise(
    **words_of("scheduler"),
    parts=(Part(_NAMES[1:2], _check_reason), Part(_NAMES, _check_all)),
    costs=Costs("{} requests", (4, 16, 64), _cost),
    engine=engine,
    options=_OPTIONS | {"prefill_only": False},
    prompts=("Once upon a time", "The fox and the lantern", "An owl", "A turtle on a bridge", "The hen", "A mill"),
    params=({"max_tokens": 40, "ignore_eos": True},),
    view="scheduler",
)
