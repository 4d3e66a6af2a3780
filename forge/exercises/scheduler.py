"""Exercise 7: a scheduler's decision. Workloads on the hash model, each step's plan held against the rules."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from forge.engine.admission import Admission, generation_item
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanBuilder, StepPlan
from forge.exercises.engine_trial import EngineTrial
from forge.exercises.exercise import Exercise, Rule
from forge.llm import LLM
from forge.trace.records import MaxNumSeqs, NoBlocks, NoBudget, PoolExhausted, PreemptRecord, WaitReason, WaitRecord

_BLOCK, _BUDGET, _MAX_SEQS = 4, 12, 4


class SchedulerBase(Scheduler):
    """What exercise 7 gives: everything of a scheduler but its decision."""

    _given: Admission
    """The engine's own, set by `put`."""

    def schedule_running(self, plan: PlanBuilder) -> None:
        raise NotImplementedError("schedule_running")

    def reason_to_wait(self, sequence: Sequence, plan: PlanBuilder) -> WaitReason | None:
        raise NotImplementedError("reason_to_wait")

    def admit(self, plan: PlanBuilder) -> None:
        raise NotImplementedError("admit")

    def reserve(self, sequence: Sequence, plan: PlanBuilder) -> bool:
        missing = len(sequence.token_ids) - self.cache.reserved_length(sequence.seq_id)
        return self._preemption.reserve(sequence, missing, plan)

    def compute(self, sequence: Sequence, num_tokens: int, plan: PlanBuilder) -> None:
        start = self.cache.computed_length(sequence.seq_id)
        plan.add(generation_item(self.cache, sequence, start, num_tokens))

    def blocks_to_begin(self, sequence: Sequence) -> int:
        return self._given._cost(sequence, None)[1]

    def begin(self, sequence: Sequence, plan: PlanBuilder) -> None:
        self._given._begin(sequence, None, plan)

    def wait(self, sequence: Sequence, reason: WaitReason, plan: PlanBuilder) -> None:
        plan.waiting.append(WaitRecord(sequence.seq_id, reason))
        if isinstance(reason, NoBlocks) and not self.running:  # it could never be admitted
            sequence.length_limit = PoolExhausted(self.cache.max_sequence_length)
            plan.exhausted.append(sequence.seq_id)

    def _schedule_running(self, plan: PlanBuilder) -> None:
        self.schedule_running(plan)


def put(llm: LLM, piece: Any) -> None:
    """Let the reader's class decide for the engine of this model."""
    scheduler: Any = llm.engine.scheduler
    scheduler.__class__ = piece.MyScheduler
    scheduler._given = scheduler._admission
    scheduler._admission = SimpleNamespace(admit=scheduler.admit)


RULES = {
    "budget": Rule("A step computes at most as many tokens as its budget has.", "What is the least of three numbers?"),
    "decodes-first": Rule(
        "Each running sequence that decodes gets its token in each step, before any prompt.",
        "What is left of the budget for decodes once a long prompt has taken its part?",
    ),
    "prompts": Rule(
        "What is left of the budget goes to prompts under way.", "How many tokens of this prompt fit into the budget?"
    ),
    "reserved": Rule(
        "A sequence that decodes reserves its slot before it is scheduled.", "Into which slot is its key written?"
    ),
    "preempted": Rule(
        "A sequence that was preempted in this step no longer runs, and is not scheduled.",
        "Which sequences may stop running while the loop is under way?",
    ),
    "max-num-seqs": Rule("At most max_num_seqs sequences run.", "How many run when the next one is admitted?"),
    "no-overtaking": Rule(
        "Waiting sequences are admitted in order; nothing passes one that does not fit.",
        "What becomes of a large request if small ones may always pass it?",
    ),
    "idle": Rule(
        "The first in the queue is admitted as soon as a slot, budget and blocks are there.", "What did it wait for?"
    ),
    "after-preemption": Rule(
        "A step that preempts a sequence admits none.", "Whose blocks would the admitted sequence take?"
    ),
    "blocks": Rule("A sequence is admitted with blocks for all of its tokens.", "How many blocks are available?"),
    "reason": Rule("The plan says why the first one waits.", "Which of the three reasons holds?"),
    "ends": Rule("Every request ends.", "Which request waits for ever, and for what?"),
    "same-tokens": Rule("A request says what it says alone.", "Which tokens were computed, and where?"),
    "conforms": Rule("Every rule of the scheduler holds after every step.", "Which container was not told?"),
}


class SchedulerTrial(EngineTrial):
    """An engine whose plans are looked at as they are made."""

    def __init__(self, piece: ModuleType, num_blocks: int):
        options = (
            f'kv="paged", block_size={_BLOCK}, num_blocks={num_blocks}, max_num_seqs={_MAX_SEQS}, '
            f"max_num_batched_tokens={_BUDGET}, prefill_only=False"
        )
        super().__init__(
            piece,
            "from forge import LLM, SamplingParams; from forge.exercises.scheduler import put",
            f'llm = LLM("hash", {options}); put(llm, piece)',
        )
        self.llm = LLM(
            "hash",
            kv="paged",
            block_size=_BLOCK,
            num_blocks=num_blocks,
            max_num_seqs=_MAX_SEQS,
            max_num_batched_tokens=_BUDGET,
            prefill_only=False,
        )
        put(self.llm, SimpleNamespace(MyScheduler=self._observed(piece)))

    def _observed(self, piece: ModuleType) -> type:
        trial = self

        class Observed(piece.MyScheduler):  # type: ignore[name-defined, misc]
            """What one step of the reader's scheduler decided."""

            def begin(self, sequence: Sequence, plan: PlanBuilder) -> None:
                needed, free = self.blocks_to_begin(sequence), self.cache.num_available
                first, name = next(iter(self.queue)), f"sequence {sequence.seq_id}"
                said = f"{name} is admitted, and sequence {first.seq_id} stands before it"
                trial.require(first is sequence, "no-overtaking", said)
                trial.require(not plan.preempted, "after-preemption", f"{name} is admitted after a preemption")
                few = len(self.running) < self.config.max_num_seqs
                trial.require(few, "max-num-seqs", f"{len(self.running)} run, and {name} is admitted")
                trial.require(plan.budget > 0, "budget", f"{name} is admitted, and the budget is {plan.budget}")
                trial.require(needed <= free, "blocks", f"{name} needs {needed} blocks, {free} are available")
                super().begin(sequence, plan)

            def compute(self, sequence: Sequence, num_tokens: int, plan: PlanBuilder) -> None:
                seq_id = sequence.seq_id
                trial.require(seq_id in self.running, "preempted", f"sequence {seq_id} no longer runs")
                end = self.cache.computed_length(seq_id) + num_tokens
                slots = self.cache.reserved_length(seq_id)
                late = f"sequence {seq_id} is to compute position {end - 1}, and has {slots} slots"
                trial.require(end <= slots, "reserved", late)
                decodes = end == len(sequence.token_ids) and num_tokens == 1
                said = f"sequence {seq_id} decodes, and nothing is left of the budget"
                trial.require(plan.budget > 0 or not decodes, "decodes-first", said)
                trial.require(0 < num_tokens <= plan.budget, "budget", f"{num_tokens} tokens of {plan.budget} left")
                super().compute(sequence, num_tokens, plan)

            def schedule(self) -> StepPlan:
                trial.reorder(self)
                before = dict(self.running)
                plan = super().schedule()
                trial.look(self, before, plan)
                return plan

        Observed.__name__ = "MyScheduler"
        return Observed

    def reorder(self, scheduler: Any) -> None:
        """Put prompts under way in front of the running sequences: decodes come first wherever they stand."""
        cache, running = scheduler.cache, scheduler.running
        one_left = {name: len(one.token_ids) - cache.computed_length(name) == 1 for name, one in running.items()}
        for seq_id in [name for name, decodes in one_left.items() if decodes]:
            running[seq_id] = running.pop(seq_id)

    def admit_after_preemption(self) -> None:
        """A plan that has preempted a sequence, and a queue whose first would fit."""
        self.llm.start([[97] * 3], SamplingParams(max_tokens=2))
        self.calls += [
            "run = llm.start([[97] * 3], SamplingParams(max_tokens=2))",
            "from forge.engine.step_plan import PlanBuilder; from forge.trace.records import PreemptRecord",
            'record = PreemptRecord(9, 8, 1, 0, "lifo", "recompute", 5, 2)',
            "plan = PlanBuilder(12, 12, preempted=[record])",
        ]
        record = PreemptRecord(9, 8, 1, 0, "lifo", "recompute", 5, 2)
        plan = PlanBuilder(_BUDGET, _BUDGET, preempted=[record])
        self.call("llm.engine.scheduler.admit(plan)", self.llm.engine.scheduler.admit, plan)  # type: ignore[attr-defined]

    def look(self, scheduler: Any, before: dict[int, Sequence], plan: StepPlan) -> None:
        items, cache = {item.seq_id: item for item in plan.items}, scheduler.cache
        left = _BUDGET - plan.num_tokens
        for seq_id, sequence in before.items():
            if seq_id not in scheduler.running or seq_id in plan.exhausted:
                continue
            remaining = len(sequence.token_ids) - cache.computed_length(seq_id)
            if remaining == 1:
                self.require(seq_id in items, "decodes-first", f"sequence {seq_id} decodes, and got no token")
            else:
                got = items[seq_id].num_tokens if seq_id in items else 0
                said = f"{left} tokens are left, and sequence {seq_id} computes {got} of {remaining}"
                self.require(got == remaining or left <= 0, "prompts", said)
        head = next(iter(scheduler.queue), None)
        if head is None or plan.preempted or plan.exhausted:
            return
        needed, free = scheduler.blocks_to_begin(head), cache.num_available
        reasons = {
            MaxNumSeqs: len(scheduler.running) >= _MAX_SEQS,
            NoBudget: left <= 0,
            NoBlocks: needed > free,
        }
        said = f"sequence {head.seq_id} waits: {len(scheduler.running)} run, budget {left}, {needed} of {free} blocks"
        self.require(any(reasons.values()), "idle", said)
        noted = next((one.reason for one in plan.waiting if one.seq_id == head.seq_id), None)
        self.require(reasons.get(type(noted)), "reason", f"{said}; the reason is {noted}")


def check(piece: ModuleType) -> None:
    short = [[97 + number] * (3 + number) for number in range(6)]
    mixed = [[97 + number] * (30 if number % 3 == 1 else 4) for number in range(7)]
    many = [[97 + number] * (3 + 5 * number % 23) for number in range(9)]
    for num_blocks, prompts in ((64, short), (64, mixed), (15, mixed), (14, many), (8, short)):
        SchedulerTrial(piece, num_blocks).compare(prompts)
    SchedulerTrial(piece, 64).admit_after_preemption()


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    yield _OPTIONS | {"prepare": lambda llm: put(llm, piece)}


_OPTIONS = {
    "kv": "paged",
    "num_blocks": 24,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "prefill_only": False,
}

EXERCISE = Exercise(
    names=("MyScheduler",),
    rules=RULES,
    hints=(
        "schedule_running is two loops: the sequences that decode, then the prompts. The first loop may preempt, so it "
        "walks over a copy: list(self.running.values()).",
        "A sequence may have been preempted by one before it in the same loop: ask whether its id is still in "
        "self.running.",
        "A prompt gets min(what is left of it, plan.budget) tokens, and nothing if the budget is used up.",
        "admit: for each waiting sequence, in order (over a copy), ask for a reason to wait. With one: note it and "
        "stop. Without: begin.",
    ),
    solution=("forge.engine.scheduler.Scheduler._schedule_running", "forge.engine.admission.Admission.admit"),
    check=check,
    engine=engine,
    own=_OPTIONS,
    prompts=("Once upon a time", "The fox and the lantern", "An owl", "A turtle on a bridge", "The hen", "A mill"),
    params={"max_tokens": 40, "ignore_eos": True},
    view="scheduler",
)
