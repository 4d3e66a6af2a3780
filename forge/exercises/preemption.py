"""Exercise 8: a victim policy, and what preemption does. Requests in pools that are too small, looked at after each
preemption and after each step, and compared with what each request says alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from forge.engine.policies import VictimPolicy
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence as TokenSequence
from forge.engine.step_plan import PlanBuilder
from forge.exercises.engine_trial import GREEDY, EngineTrial
from forge.exercises.exercise import Exercise, Rule, Trial
from forge.llm import LLM
from forge.trace.records import NoBlocks

_BLOCK = 4

RULES = {
    "one-of-running": Rule("The victim is one of the running sequences.", "Which sequences may be chosen from?"),
    "alone": Rule(
        "If the requester runs alone there is no victim: None.", "What would be won if it gave its blocks to itself?"
    ),
    "someone": Rule(
        "If others run beside the requester there is a victim.", "What becomes of the requester if there is none?"
    ),
    "left-running": Rule("A victim no longer runs.", "In which container is it after the preemption?"),
    "left-cache": Rule("A victim's blocks are free for the requester.", "Who else has them now?"),
    "waits": Rule("A victim waits in the queue for its next admission.", "Who would compute it again?"),
    "left-plan": Rule(
        "A victim that the plan has scheduled leaves the plan.",
        "The step would compute it: into which blocks would it write?",
    ),
    "tokens": Rule("A victim keeps its tokens.", "From what is it computed again?"),
    "counted": Rule("times_preempted counts each preemption.", "Who tells a view how often it happened?"),
    "recorded": Rule(
        "plan.preempted has a record of each preemption: the victim, the requester, tokens lost and blocks freed.",
        "When are the computed tokens counted: before the cache drops the sequence, or after?",
    ),
    "until-enough": Rule(
        "reserve returns True only with the slots reserved, however many victims that takes.",
        "How many blocks does one victim free, and how many are needed?",
    ),
    "gives-way": Rule(
        "reserve returns False if the sequence itself gave way, and it has no slots then.",
        "What does the loop do once the victim is the requester itself?",
    ),
    "exhausted": Rule(
        "Without a victim the sequence ends: its id is in plan.exhausted, and length_limit says why.",
        "How does the scheduler learn that the pool is the sequence's limit?",
    ),
    "copies": Rule(
        "The block copies that the cache asks for are in plan.copies.", "What does `reserve` of the cache return?"
    ),
    "ends": Rule("Every request ends.", "Does each preemption let some sequence compute a token in that very step?"),
    "same-tokens": Rule(
        "A request says what it says alone, however often it is preempted.", "What must not change in a preemption?"
    ),
    "conforms": Rule("Every rule of the scheduler holds after every step.", "Which container was not told?"),
}


class PreemptionTrial(EngineTrial):
    """An engine in a small pool, with the reader's preemption under observation."""

    def __init__(self, piece: ModuleType, num_blocks: int, n: int = 1, policy: VictimPolicy | None = None):
        """policy: one in place of the reader's."""
        options = f'kv="paged", block_size={_BLOCK}, num_blocks={num_blocks}'
        super().__init__(
            piece,
            "from forge import LLM, SamplingParams; from forge.exercises.preemption import oldest_first, put",
            f'llm = LLM("hash", {options}, preempt={"oldest_first" if policy else "piece.victim"}); put(llm, piece)',
        )
        chosen = policy or self._policy(piece)
        self.llm = LLM("hash", kv="paged", block_size=_BLOCK, num_blocks=num_blocks, preempt=chosen)
        self.n = n
        put(self.llm, SimpleNamespace(MyPreemption=self._observed(piece)))

    def _policy(self, piece: ModuleType) -> Any:
        def mine(running: Sequence[TokenSequence], requester: TokenSequence) -> TokenSequence | None:
            found = piece.victim(running, requester)
            ids = [one.seq_id for one in running]
            said = f"of {ids} it chose {getattr(found, 'seq_id', found)} for {requester.seq_id}"
            if len(running) == 1:
                self.require(found is None, "alone", said)
            else:
                self.require(found is not None, "someone", said)
                self.require(any(found is one for one in running), "one-of-running", said)
            return found

        return mine

    def _observed(self, piece: ModuleType) -> type:
        trial = self

        class Observed(piece.MyPreemption):  # type: ignore[name-defined, misc]
            """What one run with the reader's policy showed."""

            def reserve(self, sequence: TokenSequence, num_tokens: int, plan: PlanBuilder) -> bool:
                wanted = self._cache.reserved_length(sequence.seq_id) + num_tokens
                seq_id, splits = sequence.seq_id, self._cache.stats().splits
                done = super().reserve(sequence, num_tokens, plan)
                if done:
                    got = self._cache.reserved_length(seq_id) if seq_id in self._cache else 0
                    said = f"{seq_id} needs {wanted} slots in all; it returned True with {got}"
                    trial.require(got == wanted, "until-enough", said)
                    split, table = self._cache.stats().splits > splits, self._cache.block_table(seq_id)
                    copied = any(copy.destination in table for copy in plan.copies)
                    trial.require(copied or not split, "copies", f"no copy is made into a block of {table}")
                    return True
                gave_way = seq_id not in self._running
                exhausted = seq_id in plan.exhausted and sequence.length_limit is not None
                trial.require(gave_way or exhausted, "exhausted", f"it returned {done!r}; {seq_id} still runs")
                return False

            def _preempt(
                self, victim: TokenSequence, requester: TokenSequence, shortage: NoBlocks, plan: PlanBuilder
            ) -> None:
                seq_id, cache, times = victim.seq_id, self._cache, victim.times_preempted
                computed, before = cache.computed_length(seq_id), cache.num_available
                tokens, recorded = list(victim.token_ids), len(plan.preempted)
                super()._preempt(victim, requester, shortage, plan)
                name = f"sequence {seq_id}"
                trial.require(seq_id not in self._running, "left-running", f"{name} is still among the running ones")
                trial.require(seq_id not in cache, "left-cache", f"the cache still has {name}")
                trial.require(seq_id in self._queue.sequences, "waits", f"{name} is not in the queue")
                trial.require(seq_id not in plan.items, "left-plan", f"{name} is still in plan.items")
                trial.require(victim.token_ids == tokens, "tokens", f"{name} had {len(tokens)} tokens")
                trial.require(victim.times_preempted == times + 1, "counted", f"it is {victim.times_preempted}")
                trial.require(len(plan.preempted) == recorded + 1, "recorded", f"there is no record of {name}")
                record = plan.preempted[-1]
                found = record.seq_id, record.victim_of, record.tokens_lost, record.blocks_freed
                expected = seq_id, requester.seq_id, computed, cache.num_available - before
                said = f"(victim, requester, tokens lost, blocks freed) are {found}, and should be {expected}"
                trial.require(found == expected, "recorded", said)

        Observed.__name__ = "MyPreemption"
        return Observed

    def outgrow(self) -> None:
        """A single sequence asks for more than the pool has."""
        run = self.llm.start([[97] * 5], SamplingParams(**GREEDY))
        next(iter(run))
        self.calls += [
            f"run = llm.start([[97] * 5], SamplingParams(**{GREEDY})); next(iter(run))".replace("'", '"'),
            "from forge.engine.step_plan import PlanBuilder; plan = PlanBuilder(512, 512)",
            "scheduler = llm.engine.scheduler; (sequence,) = scheduler.running.values()",
        ]
        scheduler, plan = self.llm.engine.scheduler, PlanBuilder(512, 512)
        (sequence,) = scheduler.running.values()
        reserve = scheduler._preemption.reserve
        done = self.call("scheduler._preemption.reserve(sequence, 100, plan)", reserve, sequence, 100, plan)
        said = f"it returned {done!r}; plan.exhausted is {plan.exhausted}, length_limit {sequence.length_limit}"
        holds = done is False and plan.exhausted == [sequence.seq_id] and sequence.length_limit is not None
        self.require(holds, "exhausted", said)


def oldest_first(running: Sequence[TokenSequence], requester: TokenSequence) -> TokenSequence | None:
    """Of the others the first: mostly one that the plan has scheduled already."""
    return next((one for one in running if one is not requester), None)


def put(llm: LLM, piece: Any) -> None:
    """Let the engine of this model preempt as the reader's class does."""
    scheduler = llm.engine.scheduler
    old = scheduler._preemption
    scheduler._preemption = piece.MyPreemption(
        old._cache, scheduler.config, scheduler.queue, scheduler.running, scheduler.host, scheduler.retained
    )


def check(piece: ModuleType) -> None:
    _ask_policy(piece)
    short = [[97 + number] * (3 + number) for number in range(3)]
    many = [[97 + number] * (3 + 5 * number % 23) for number in range(8)]
    for num_blocks, n, prompts in (
        (8, 1, short),
        (7, 1, short),
        (14, 1, many),
        (7, 3, short),
        (8, 3, short),
        (9, 3, short),
    ):
        PreemptionTrial(piece, num_blocks, n).compare(prompts)
        PreemptionTrial(piece, num_blocks, n, oldest_first).compare(prompts)
    PreemptionTrial(piece, 4).outgrow()


def _ask_policy(piece: ModuleType) -> None:
    """The policy alone, on made-up sequences."""
    trial = Trial(piece, "from types import SimpleNamespace as S")
    running = [
        SimpleNamespace(seq_id=number, arrival=number, num_output_tokens=7 - number, token_ids=[1] * (9 - number))
        for number in range(4)
    ]
    names = ", ".join(
        f"S(seq_id={one.seq_id}, arrival={one.arrival}, num_output_tokens={one.num_output_tokens}, token_ids=[])"
        for one in running
    )
    trial.calls.append(f"running = [{names}]")
    for several in (running[:1], running):
        for requester in several:
            line = f"piece.victim(running[:{len(several)}], running[{requester.seq_id}])"
            found = trial.call(line, piece.victim, tuple(several), requester)
            said = f"it returned {found!r}"
            if len(several) == 1:
                trial.require(found is None, "alone", said)
            else:
                trial.require(found is not None, "someone", said)
                trial.require(any(found is one for one in several), "one-of-running", said)
            trial.calls.pop()


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    yield _SMALL | {"preempt": piece.victim, "prepare": lambda llm: put(llm, piece)}


_SMALL = {"kv": "paged", "num_blocks": 12, "max_model_len": 160}

EXERCISE = Exercise(
    names=("victim", "MyPreemption"),
    rules=RULES,
    hints=(
        "A policy in one line: of the running sequences the last, which is the newest. When is there no victim at all?",
        "reserve is a loop: try; if it raises, find a victim; without one the sequence is exhausted; preempt the "
        "victim; if it was the sequence itself, return False; else try again.",
        "In _preempt, ask the cache for the table and the computed length before you remove the sequence from it.",
        "A sequence is in exactly one container. It leaves self._running and the cache, and enters self._queue.",
    ),
    solution=("forge.engine.policies.lifo", "forge.engine.preemption.Preemption"),
    check=check,
    engine=engine,
    own=_SMALL,
    prompts=("Once upon a time", "The fox and the lantern", "An owl", "A turtle on a bridge"),
    view="scheduler",
)
