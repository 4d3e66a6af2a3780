"""Exercise 8: a victim policy, and preemption itself. The check runs requests in pools that are too small, looks at the
engine after each preemption and each step, and compares the tokens with those of each request alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from forge.cache.kv_storage import BlockCopy
from forge.engine.policies import VICTIM_POLICIES, VictimPolicy, lifo
from forge.engine.preemption import Preemption
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence as TokenSequence
from forge.engine.step_plan import PlanBuilder
from forge.exercises.exercise import BROKEN, Costs, Exercise, Part, Trial, to_write, words_of
from forge.exercises.trials import GREEDY, EngineTrial, oldest_first
from forge.llm import LLM
from forge.pieces import standing_in
from forge.reasons import NoBlocks, PoolExhausted
from forge.trace.records import PreemptRecord

_BLOCK = 4


@to_write("reserve", "preempt")
class PreemptionBase(Preemption):
    """Given with exercise 8: the scheduler's own containers."""


def new_llm(preemption: type[Preemption], num_blocks: int, policy: VictimPolicy = lifo) -> LLM:
    """Create a small engine that preempts with this class."""
    with standing_in(preemption=preemption):
        return LLM("hash", kv="paged", block_size=_BLOCK, num_blocks=num_blocks, preempt=policy)


class PreemptionTrial(EngineTrial):
    """Runs the reader's preemption in a small pool and checks each of its calls."""

    def __init__(self, piece: ModuleType, num_blocks: int, n: int = 1, policy: VictimPolicy | None = None):
        """policy: replaces the reader's."""
        super().__init__(
            piece,
            "from forge import SamplingParams; from forge.exercises.preemption import new_llm, oldest_first",
            f"llm = new_llm(piece.MyPreemption, {num_blocks}, {'oldest_first' if policy else 'piece.victim'})",
        )
        self.n = n
        self.chosen: TokenSequence | None = None
        self.gave_way: TokenSequence | None = None
        self.llm = new_llm(self._observed(piece), num_blocks, self._policy(policy or piece.victim))

    requester: TokenSequence
    """The one that needs blocks now."""

    def _policy(self, choose: VictimPolicy) -> VictimPolicy:
        def mine(running: Sequence[TokenSequence], requester: TokenSequence) -> TokenSequence | None:
            all_running = list(self.llm.engine.scheduler.running.values())
            ids = [sequence.seq_id for sequence in running]
            finding = f"it was asked about {ids} for {getattr(requester, 'seq_id', requester)}"
            is_all = len(running) == len(all_running) and all(map(is_, running, all_running))
            self.require(is_all, "policy", f"{finding}; {[sequence.seq_id for sequence in all_running]} run")
            self.require(requester is self.requester, "policy", f"{finding}; {self.requester.seq_id} needs blocks")
            chosen = choose(running, requester)
            finding = f"of {ids} it chose {getattr(chosen, 'seq_id', chosen)} for {requester.seq_id}"
            _require_victim(self, chosen, running, finding)
            self.chosen = chosen
            return chosen

        return mine

    def _observed(self, piece: ModuleType) -> type[Preemption]:
        trial = self

        class Observed(piece.MyPreemption):  # type: ignore[name-defined, misc]
            """The reader's preemption, with a check of each call."""

            def reserve(self, sequence: TokenSequence, num_tokens: int, plan: PlanBuilder) -> bool:
                length = self._cache.reserved_length(sequence.seq_id) + num_tokens
                seq_id, splits = sequence.seq_id, self._cache.stats().splits
                trial.requester = sequence
                done = super().reserve(sequence, num_tokens, plan)
                trial.require(done in (True, False), "result", f"reserve returned {done!r}")
                if done:
                    got = self._cache.reserved_length(seq_id) if seq_id in self._cache else 0
                    finding = f"{seq_id} needs {length} slots in all; it returned True with {got}"
                    trial.require(got == length, "until-enough", finding)
                    split, table = self._cache.stats().splits > splits, self._cache.block_table(seq_id)
                    copied = any(copy.destination in table for copy in plan.copies)
                    trial.require(copied or not split, "copies", f"no copy is made into a block of {table}")
                    return True
                gave_way = seq_id not in self._running
                finding = f"it returned {done!r}; {seq_id} still runs"
                trial.require(gave_way or trial.is_exhausted(sequence, plan), "exhausted", finding)
                trial.require(not gave_way or trial.gave_way is sequence, "gives-way", f"{seq_id} was not chosen")
                return False

            def preempt(
                self, victim: TokenSequence, requester: TokenSequence, shortage: NoBlocks, plan: PlanBuilder
            ) -> None:
                cache = self._cache
                finding = f"the policy chose {getattr(trial.chosen, 'seq_id', None)}, and {victim.seq_id} is preempted"
                trial.require(victim is trial.chosen and requester is trial.requester, "policy", finding)
                missing = len(requester.token_ids) - cache.reserved_length(requester.seq_id)
                needed = cache.blocks_needed(requester.seq_id, missing)
                finding = f"{needed} blocks are needed, {cache.num_available} are available"
                trial.require(needed > cache.num_available, "no-more", finding)
                noted = shortage.needed, shortage.free
                expected = needed, cache.num_available
                trial.require(noted == expected, "recorded", f"the shortage is {noted}, and should be {expected}")
                trial.chosen, trial.gave_way = None, victim
                trial.preempting(super().preempt, victim, requester, shortage, plan)

        Observed.__name__ = "MyPreemption"
        return Observed

    def preempting(
        self, preempt: Any, victim: TokenSequence, requester: TokenSequence, shortage: NoBlocks, plan: PlanBuilder
    ) -> None:
        """Call `preempt` and check everything that it has to change."""
        scheduler, cache = self.llm.engine.scheduler, self.llm.engine.cache
        seq_id, times, before = victim.seq_id, victim.times_preempted, cache.num_available
        computed, table = cache.computed_length(seq_id), cache.block_table(seq_id)
        tokens, recorded = list(victim.token_ids), len(plan.preempted)
        scheduled = plan.items[seq_id].num_tokens if seq_id in plan.items else 0
        budget, copies = plan.budget, [copy for copy in plan.copies if copy.destination not in table]
        other_ids = {name for name in plan.items if name != seq_id}
        returned = preempt(victim, requester, shortage, plan)
        name = f"sequence {seq_id}"
        self.require(returned is None, "result", f"preempt returned {returned!r}")
        self.require(seq_id not in scheduler.running, "left-running", f"{name} is still among the running ones")
        self.require(seq_id not in cache, "left-cache", f"the cache still has {name}")
        self.require(seq_id in scheduler.queue.sequences, "waits", f"{name} is not in the queue")
        scheduler.queue.check_invariants()
        self.require(seq_id not in plan.items, "left-plan", f"{name} is still in plan.items")
        finding = f"the budget was {budget}, {name} had {scheduled} tokens of it, and it is {plan.budget}"
        self.require(plan.budget == budget + scheduled and plan.items.keys() == other_ids, "left-plan", finding)
        finding = f"{name} had blocks {table}; the copies are {plan.copies}, and should be {copies}"
        self.require(plan.copies == copies, "copies-into", finding)
        self.require(victim.token_ids == tokens, "tokens", f"{name} had {len(tokens)} tokens")
        self.require(victim.times_preempted == times + 1, "counted", f"it is {victim.times_preempted}")
        self.require(len(plan.preempted) == recorded + 1, "recorded", f"there is no one record of {name}")
        freed = cache.num_available - before
        expected = PreemptRecord(
            seq_id, requester.seq_id, shortage.needed, shortage.free, "mine", "recompute", computed, freed
        )
        finding = f"the record is {plan.preempted[-1]}, and should be {expected}"
        self.require(plan.preempted[-1] == expected, "recorded", finding)

    def is_exhausted(self, sequence: TokenSequence, plan: PlanBuilder) -> bool:
        limit = PoolExhausted(self.llm.engine.cache.max_sequence_length)
        return plan.exhausted.count(sequence) == 1 and sequence.length_limit == limit

    def copies_into_a_victim(self) -> None:
        """Preempt one of several sequences whose blocks are destinations of the plan's copies."""
        steps = iter(self.llm.start([[97 + number] * 5 for number in range(3)], SamplingParams(**GREEDY)))
        next(steps)
        scheduler, cache = self.llm.engine.scheduler, self.llm.engine.cache
        requester, victim, bystander = scheduler.running.values()
        plan = PlanBuilder(512, 512)
        plan.copies = [
            BlockCopy(9, cache.block_table(bystander.seq_id)[0]),
            BlockCopy(9, cache.block_table(victim.seq_id)[1]),
            BlockCopy(8, cache.block_table(requester.seq_id)[1]),
        ]
        self.calls += [
            "# three sequences of two blocks run, and the plan has a copy into one block of each",
            "scheduler.preemption.preempt(victim, requester, NoBlocks(2, 1), plan)",
        ]
        preempt: Any = partial(self.piece.MyPreemption.preempt, scheduler.preemption)
        try:
            self.preempting(preempt, victim, requester, NoBlocks(2, 1), plan)
        except BROKEN as error:
            raise self.mistake_of(error) from None

    def outgrow(self) -> None:
        """Let a single sequence request more than the pool has."""
        run = self.llm.start([[97] * 5], SamplingParams(**GREEDY))
        next(iter(run))
        self.calls += [
            f"run = llm.start([[97] * 5], SamplingParams(**{GREEDY})); next(iter(run))".replace("'", '"'),
            "from forge.engine.step_plan import PlanBuilder; plan = PlanBuilder(512, 512)",
            "scheduler = llm.engine.scheduler; (sequence,) = scheduler.running.values()",
        ]
        scheduler, plan = self.llm.engine.scheduler, PlanBuilder(512, 512)
        (sequence,) = scheduler.running.values()
        sequence.length_limit = None
        reserve = scheduler.preemption.reserve
        done = self.call("scheduler.preemption.reserve(sequence, 100, plan)", reserve, sequence, 100, plan)
        finding = (
            f"it returned {done!r}; plan.exhausted is {plan.exhausted!r:.80}, length_limit {sequence.length_limit}"
        )
        self.require(done is False and self.is_exhausted(sequence, plan), "exhausted", finding)


def _require_victim(trial: Trial, chosen: object, running: Sequence[object], finding: str) -> None:
    if len(running) == 1:
        trial.require(chosen is None, "alone", finding)
    else:
        trial.require(chosen is not None, "someone", finding)
        trial.require(any(chosen is sequence for sequence in running), "one-of-running", finding)


def _check_preemption(piece: ModuleType) -> None:
    short = [[97 + number] * (3 + number) for number in range(3)]
    many = [[97 + number] * (3 + 5 * number % 23) for number in range(8)]
    PreemptionTrial(piece, 12).copies_into_a_victim()
    runs = ((8, 1, short), (7, 1, short), (14, 1, many), (7, 3, short), (8, 3, short), (9, 3, short))
    for num_blocks, n, prompts in runs:
        PreemptionTrial(piece, num_blocks, n).compare(prompts)
        PreemptionTrial(piece, num_blocks, n, oldest_first).compare(prompts)
    PreemptionTrial(piece, 4).outgrow()


def _ask_policy(piece: ModuleType) -> None:
    """Check the policy alone, on made-up sequences."""
    trial = Trial(piece, "from types import SimpleNamespace as S")
    running = [
        SimpleNamespace(seq_id=number, arrival=number, num_output_tokens=7 - number, token_ids=[1] * (9 - number))
        for number in range(4)
    ]
    names = ", ".join(
        f"S(seq_id={fake.seq_id}, arrival={fake.arrival}, num_output_tokens={fake.num_output_tokens}, token_ids=[])"
        for fake in running
    )
    trial.calls.append(f"running = [{names}]")
    for several in (running[:1], running[:2], running):
        for requester in several:
            line = f"piece.victim(running[:{len(several)}], running[{requester.seq_id}])"
            chosen = trial.call(line, piece.victim, tuple(several), requester)
            finding = f"it returned {getattr(chosen, 'seq_id', chosen)!r}"
            _require_victim(trial, chosen, several, finding)
            again = trial.call(line, piece.victim, tuple(several), requester)
            trial.require(again is chosen, "again", f"{finding}, and then {getattr(again, 'seq_id', again)!r}")
            del trial.calls[-2:]


@contextmanager
def engine(piece: ModuleType) -> Iterator[None]:
    with standing_in(preemption=piece.MyPreemption), patch.dict(VICTIM_POLICIES, lifo=piece.victim):
        yield


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    kind, policy = (piece.MyPreemption, piece.victim) if piece else (Preemption, lifo)

    def work() -> None:
        llm = new_llm(kind, 3 * number, policy)
        llm.generate([[97] * 6] * number, SamplingParams(max_tokens=20, ignore_eos=True))

    return work


_NAMES = ("victim", "MyPreemption.reserve", "MyPreemption.preempt")

EXERCISE = Exercise(
    **words_of("preemption"),
    parts=(Part(_NAMES[:1], _ask_policy), Part(_NAMES, _check_preemption)),
    costs=Costs("{} requests in a pool of 3 blocks each", (2, 4, 8), _cost),
    engine=engine,
    options={"kv": "paged", "num_blocks": 12, "max_model_len": 160},
    beside=("scheduler",),
    prompts=("Once upon a time", "The fox and the lantern", "An owl", "A turtle on a bridge"),
    params=({"max_tokens": 60, "ignore_eos": True},),
    view="scheduler",
)
