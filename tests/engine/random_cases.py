"""Random runs of the whole engine, held against the same requests each run alone.

A `Case` is a value: how the scheduler is set, and a list of requests with the steps at which each comes and perhaps is
aborted. `run` plays it, with every invariant checked after every step. `shortest_failure` cuts a failing case down: it
drops requests, interruptions and settings for as long as the rest still fails.

The model hangs on every token of its context as the cache has it (`HashModel`), so a sequence that loses, repeats or
mixes up anything says something else from there on.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from forge.cache.factory import CacheSize, create_kv_cache
from forge.engine.engine import Engine
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.step_plan import StepPlan
from forge.model.hash_model import HashModel
from forge.speculation.controller import Costs
from forge.speculation.draft import DraftProposer
from forge.speculation.speculator import Speculator
from forge.trace.records import Deferred, StepRecord
from tests.engine.late_model import LateModel
from tests.engine.scripted import PieceTokenizer

PIECES = ("<eos>", "a", "b", "ab", "c")
MAX_MODEL_LEN = 26
MOST_STEPS = 4_000
"""Of one case: more than that is going round in circles."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    arrives: int = 0
    """The step before which it is added."""
    aborted: int | None = None
    """The step before which it is aborted, if it is still running."""


@dataclass(frozen=True)
class Case:
    seed: int = 0
    requests: tuple[Request, ...] = ()
    interrupted: frozenset[int] = frozenset()
    """Forward passes, counted from 0, that an exception ends."""
    kv: str = "paged"
    block_size: int = 4
    num_blocks: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    chunked_prefill: bool = True
    order: str = "fcfs"
    victim: str = "lifo"
    preemption: str = "recompute"
    num_host_blocks: int = 64
    prefill_only: bool = False
    prefix_planning: bool = False
    prefill_only_tokens: int = 64
    drafts: tuple[float, ...] = ()
    """Proposers: how often each guesses what the model says. Sequences are greedy then."""
    max_k: int = 3
    runs_ahead: bool = False
    """Whether the model computes while the host does something else."""

    @property
    def pool_blocks(self) -> int | None:
        """What the pool is asked to have: where runs are taken whole, a few times one run."""
        runs = -(-MAX_MODEL_LEN // self.block_size)
        return {"off": None, "basic": (1 + self.num_blocks % 3) * runs}.get(self.kv, self.num_blocks)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        pool = self.num_blocks * self.block_size if self.kv in ("paged", "prefix") else MAX_MODEL_LEN
        return min(MAX_MODEL_LEN, pool)

    def __str__(self) -> str:
        default = Case()
        settings = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if each.name != "requests" and getattr(self, each.name) != getattr(default, each.name)
        ]
        return "\n  ".join([f"Case({', '.join(settings)}), requests:", *map(str, self.requests)])


def new_model(agreement: float = 1.0, runs_ahead: bool = False) -> HashModel:
    kind = LateModel if runs_ahead else HashModel
    said = range(1, len(PIECES))
    return kind(
        len(PIECES), said=said, eos_token_id=0, eos_probability=1 / 16, agreement=agreement, runs_ahead=runs_ahead
    )


def new_speculator(case: Case) -> Speculator:
    """Each draft has room for about two sequences."""
    limits = {"vocab_size": len(PIECES), "max_num_seqs": 2, "max_model_len": MAX_MODEL_LEN, "block_size": 4}
    drafts = [
        DraftProposer.of_model(new_model(agreement), name=f"draft {index}", **limits)
        for index, agreement in enumerate(case.drafts)
    ]
    costs = Costs(token=0.01)
    return Speculator([(draft, costs) for draft in drafts], max_k=case.max_k, vocab_size=len(PIECES), fixed=True)


def new_engine(case: Case, max_model_len: int = MAX_MODEL_LEN) -> Engine:
    size = CacheSize(MAX_MODEL_LEN, case.max_num_seqs, case.block_size, 8, case.pool_blocks)
    kv_cache, storage_blocks = create_kv_cache(case.kv, size)
    model = new_model(runs_ahead=case.runs_ahead)
    scratch = range(storage_blocks, storage_blocks + 12 * MAX_MODEL_LEN)
    storage = model.new_storage(model.kv_layout(scratch.stop, case.block_size))
    storage.keys[:] = storage.values[:] = -1
    config = SchedulerConfig(
        case.max_num_seqs,
        case.max_num_batched_tokens,
        case.chunked_prefill,
        case.order,
        case.victim,
        case.preemption,
        case.num_host_blocks,
        case.prefix_planning,
        case.prefill_only,
        case.prefill_only_tokens,
    )
    return Engine(
        model,
        PieceTokenizer(PIECES),
        kv_cache,
        storage,
        max_model_len,
        config,
        scratch,
        speculation=new_speculator(case) if case.drafts else None,
    )


# Making cases up


def random_case(seed: int, kv: str, runs_ahead: bool = False) -> Case:
    """`runs_ahead`: the model does, and there is enough that is nothing but decoding."""
    rng = np.random.default_rng([seed, len(kv), ord(kv[0])])

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    block_size = one_of(1, 2, 3, 4, 8)
    max_num_seqs = one_of(1, 2, 3, 4, 6)
    least = -(-12 // block_size)  # every prompt fits
    arrivals = np.cumsum(rng.integers(0, one_of(1, 3, 9), 12)).tolist()
    drafts = one_of((), (), (0.7,), (0.9, 0.4))
    greedy = bool(drafts) or (runs_ahead and rng.random() < 0.4)
    if runs_ahead and rng.random() < 0.8:
        drafts = ()
    return Case(
        seed=seed,
        requests=tuple(_random_request(rng, step, greedy) for step in arrivals[: rng.integers(1, 13)]),
        interrupted=frozenset(rng.integers(0, 60, 2).tolist()) if rng.random() < 0.15 else frozenset(),
        kv=kv,
        block_size=block_size,
        num_blocks=least + int(rng.integers(0, 2 * least)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(0, one_of(2, 8, 40))),
        chunked_prefill=rng.random() < 0.75,
        order=one_of("fcfs", "fcfs", "priority"),
        victim=one_of("lifo", "least-progressed"),
        preemption=one_of("recompute", "swap"),
        num_host_blocks=one_of(0, 2, least, 64),
        prefill_only=rng.random() < 0.7,
        prefix_planning=rng.random() < 0.6,
        prefill_only_tokens=one_of(1, 12, 30, 64),
        drafts=drafts,
        max_k=one_of(1, 3, 5),
        runs_ahead=runs_ahead,
    )


def _random_request(rng: np.random.Generator, arrives: int, greedy: bool) -> Request:
    """One of few prompts and few ways to sample, so that prompts begin alike and runs alone are soon all known."""
    length = int(rng.integers(1, 13))
    word = int(rng.integers(4))
    temperature = 0.0 if greedy else float(rng.choice([0, 0, 1]))
    filters = [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.01}, {"presence_penalty": 1.0}][word if temperature else 0]
    return Request(
        prompt=tuple(1 + (word >> position % 2 & 1) for position in range(length)),
        params=SamplingParams(
            max_tokens=int(rng.choice([1, 1, 1, 2, 5, 9, 14])),
            temperature=temperature,
            seed=word,
            **filters,
            stop=[(), ("bc",), ("aab", "cc")][rng.integers(3)],
            n=int(rng.choice([1, 1, 1, 2, 3])),
            prompt_logprobs=1 if rng.random() < 0.15 else None,
            ignore_eos=bool(rng.random() < 0.3),
        ),
        priority=int(rng.integers(3)),
        salt="" if rng.random() < 0.8 else "other",
        arrives=arrives,
        aborted=arrives + int(rng.integers(0, 20)) if rng.random() < 0.2 else None,
    )


# Playing one


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams, longest: int) -> tuple:
    """Tokens, text and reason of each sample, and the prompt's log probabilities, with nobody beside it."""
    engine = new_engine(Case(block_size=1, num_blocks=longest * params.n, max_num_seqs=params.n), longest)
    engine.add_request("alone", prompt, params)
    while engine.has_unfinished():
        engine.step()
    output = engine.output("alone")
    samples = tuple((one.token_ids, one.text, one.finish_reason) for one in output.outputs)
    return samples, output.prompt_logprobs


class Interrupted(Exception):
    pass


class Play:
    """A case under way."""

    def __init__(self, case: Case):
        self.case, self.engine = case, new_engine(case)
        self.scheduler = self.engine.scheduler
        self.seen: Counter[str] = Counter()
        """What happened, and how often."""
        self.seq_ids: dict[int, tuple[int, ...]] = {}
        self.said: dict[int, list[int]] = {}
        """By sequence: what its token records said."""
        self.ended: Counter[int] = Counter()
        self.first_position: dict[int, int] = {}
        self.forwards = 0
        self.rows = Counter()
        """`computed` by the model, and `told` of by records."""
        self.plan: StepPlan | None = None
        self.was_ahead = False
        self.is_sampled = False
        """Whether the device chose the tokens of this step."""
        self._watch()

    def _watch(self) -> None:
        """Look at each plan as it is made, and interrupt the forward passes that are to be interrupted."""
        schedule, forward = self.scheduler.schedule, self.engine.model.forward

        def watched() -> StepPlan:
            before = list(self.scheduler.running)
            self.plan = schedule()
            self.check_plan(self.plan, before)
            return self.plan

        def planning(plan: StepPlan, can_draw: bool) -> StepPlan | None:
            assert self.scheduler.running or not plan.ahead, "a step without sequences"
            following = plan_next(plan, can_draw)
            if following is not None:
                self.is_sampled = not all(item.sequence.params.plain_greedy for item in plan.items)
                self.check_writes(following)
                assert following.items and not asynchronous.may_admit()
            return following

        def interrupting(batch, storage):
            self.forwards += 1
            self.rows["computed"] += batch.num_rows
            logits = forward(batch, storage)
            if self.forwards - 1 in self.case.interrupted:
                raise Interrupted
            return logits

        self.scheduler.schedule, self.engine.model.forward = watched, interrupting
        asynchronous = self.engine._async
        if asynchronous is not None:
            plan_next, asynchronous._plan_next = asynchronous._plan_next, planning

    def run(self) -> Counter[str]:
        step, waiting = 0, dict(enumerate(self.case.requests))
        while waiting or self.engine.has_unfinished():
            for index, request in list(waiting.items()):
                if request.arrives <= step:
                    self.add(index, request)
                    del waiting[index]
            for index, request in enumerate(self.case.requests):
                if request.aborted == step and index not in waiting:
                    self.engine.abort(str(index))
                    self.check_state()
            if self.engine.has_unfinished():
                self.step()
            step += 1
            assert step < MOST_STEPS, "it does not end"
        self.check_outputs()
        self.check_nothing_is_held()
        return self.seen

    def add(self, index: int, request: Request) -> None:
        seq_ids = self.engine.add_request(
            str(index), request.prompt, request.params, priority=request.priority, salt=request.salt
        )
        self.seq_ids[index] = seq_ids
        for seq_id in seq_ids:
            self.said[seq_id], self.first_position[seq_id] = [], len(request.prompt)
        self.check_state()

    def step(self) -> None:
        self.is_sampled = False
        try:
            record = self.engine.step()
        except Interrupted:
            self.seen["interrupted"] += 1
            self.engine.has_unfinished()
        else:
            self.seen["steps"] += 1
            self.check_record(record)
        self.check_state()

    def check_state(self) -> None:
        self.scheduler.check_invariants()

    def check_plan(self, plan: StepPlan, running_before: list[int]) -> None:
        case, scheduler, whole = self.case, self.scheduler, plan
        assert plan.items or plan.separate or plan.exhausted, "a step in which nothing happens"
        generations = [item for item in plan.items if item.phase != "prefill_only"]
        plan = replace(plan, items=tuple(generations), separate=(), exhausted=plan.exhausted)
        largest = max((item.num_tokens for item in generations), default=0)
        limit = scheduler._token_budget if case.chunked_prefill else max(scheduler._token_budget, largest)
        assert plan.num_tokens <= limit, "more tokens than the budget"
        undeferred = [one for one in plan.waiting if not isinstance(one.reason, Deferred)]
        assert len(undeferred) <= 2, "more than the heads of the two queues wait for lack of something"
        admitted = [one.seq_id for one in plan.admitted]
        preempted = [one.seq_id for one in plan.preempted]
        assert len(set(admitted)) == len(admitted) and not set(admitted) & set(running_before)
        assert set(preempted) <= set(running_before), "who was admitted gave way in the same step"
        left = [one for one in running_before if one not in preempted and one not in plan.exhausted]
        assert [one for one in scheduler.running if one not in plan.exhausted] == [*left, *admitted]
        items = {item.seq_id: item for item in plan.items}
        assert len(items) == len(plan.items) and items.keys() <= scheduler.running.keys()
        assert not items.keys() & {*preempted, *plan.exhausted}, "a victim is still in the plan"
        self.check_shares(plan, left)
        for one in plan.preempted:
            assert one.needed > one.free
            assert one.fallback is None or (one.mode == "recompute" and one.fallback.needed > one.fallback.free)
        self.check_writes(whole)

    def check_shares(self, plan: StepPlan, left: list[int]) -> None:
        """Decodes come first and nobody keeps them waiting; without chunks they do not mix with prompts."""
        decoding = {item.seq_id for item in plan.items if item.phase == "decode"}
        if not self.case.chunked_prefill:
            assert len({item.phase for item in plan.items}) <= 1, "prompts and decodes in one step"
            assert not self.scheduler.cache.persistent or all(not item.remaining for item in plan.items), "a chunk"
            return
        single = [item.num_tokens == 1 and not item.remaining for item in plan.items if item.seq_id in left]
        assert single == sorted(single, reverse=True) or not self.scheduler.cache.persistent, "a prompt before a decode"
        for seq_id in left:
            sequence, computed = self.scheduler.running[seq_id], self.scheduler.cache.computed_length(seq_id)
            if sequence.num_output_tokens and computed == len(sequence.token_ids) - 1:
                assert seq_id in decoding, f"{seq_id} was kept from its next token"

    def check_writes(self, plan: StepPlan) -> None:
        """No slot is written twice, and no block that anyone else has."""
        size, slots = self.case.block_size, []
        for item in (*plan.items, *plan.separate):
            for position in range(item.start, item.start + item.num_tokens + item.num_draft_tokens):
                for table in (item.block_table, *(fork.block_table for fork in item.forks)):
                    slots.append(table[position // size] * size + position % size)
        assert len(set(slots)) == len(slots), "two rows write one slot"
        pool = getattr(self.scheduler.cache, "pool", None)
        slots = [slot for slot in slots if pool is not None and slot < pool.num_blocks * size]
        for block in {slot // size for slot in slots} if pool is not None else ():
            assert pool.reference_counts[block] == 1, f"block {block} is written and shared"

    def check_record(self, record: StepRecord) -> None:
        scheduler, seen = self.scheduler, self.seen
        queues = record.queues
        assert (queues.waiting, queues.running, queues.swapped) == tuple(
            map(len, (scheduler.waiting, scheduler.running, scheduler.swapped))
        )
        for token in record.tokens:
            said = self.said[token.seq_id]
            assert token.position == self.first_position[token.seq_id] + len(said), "a token lost or told twice"
            said.append(token.token_id)
        self.ended.update(one.seq_id for one in record.finished)
        self.rows["told"] += record.tokens_computed + record.discarded
        seen["planned ahead"] += record.planned_ahead
        seen["chosen on the device"] += self.is_sampled
        seen["discarded"] += record.discarded
        seen["scheduled after looking ahead"] += self.was_ahead and not record.planned_ahead
        self.was_ahead = record.planned_ahead
        for one in record.preempted:
            seen[one.mode] += 1
            seen["fallback"] += one.fallback is not None
            seen["gave way itself"] += one.seq_id == one.victim_of
        for one in record.admitted:
            seen[f"admitted {one.how}"] += 1
            seen["hit"] += one.how != "swap" and one.num_cached > 0
        for one in record.waiting:
            seen[type(one.reason).__name__] += 1
        seen["accepted"] += sum(sum(verdict.accepted for verdict in cycle.verdicts) for cycle in record.cycles)
        seen["rejected"] += sum(not verdict.accepted for cycle in record.cycles for verdict in cycle.verdicts)
        seen["chunk"] += any(item.remaining for item in record.items)
        seen["published"] += any(one.num_published > one.start for one in self.plan.items)
        seen["mixed"] += len({item.phase for item in record.items}) > 1

    def check_outputs(self) -> None:
        for index, request in enumerate(self.case.requests):
            output = self.engine.output(str(index))
            expected, prompt_logprobs = alone(request.prompt, request.params, self.case.longest)
            seq_ids = self.seq_ids[index]
            for seq_id, found, (token_ids, text, reason) in zip(seq_ids, output.outputs, expected, strict=True):
                assert not self.case.interrupted or list(found.token_ids) == self.said[seq_id]
                assert list(found.token_ids) == self.said[seq_id], "not what its records said"
                if found.finish_reason == "abort":
                    self.seen["aborted"] += 1
                    assert request.aborted is not None and not self.ended[seq_id]
                    assert found.token_ids == token_ids[: len(found.token_ids)], f"request {index} says something else"
                    continue
                assert self.ended[seq_id] == 1, f"sequence {seq_id} ended {self.ended[seq_id]} times"
                got = found.token_ids, found.text, found.finish_reason
                assert got == (token_ids, text, reason), f"request {index}: {got}, alone {(token_ids, text, reason)}"
            if output.outputs[0].finish_reason != "abort":
                self.seen["prefill_only"] += self.engine._requests[str(index)].sequences[0].prefill_only
                assert output.prompt_logprobs == prompt_logprobs, f"request {index}: other prompt log probabilities"
            self.engine.forget(str(index))

    def check_nothing_is_held(self) -> None:
        scheduler, stats = self.scheduler, self.engine.cache.stats()
        assert (stats.used_blocks, stats.tokens_held) == (0, 0), "blocks are still held"
        assert not (scheduler.queue.sequences or scheduler.running or scheduler.swapped or scheduler.retained.sequences)
        assert scheduler.host.num_free == scheduler.host.num_blocks, "the host's pool is not empty"
        assert not (self.engine._requests or self.engine.timeline.requests() or self.engine._batch_builder._tables)
        for draft in self.engine.speculation.proposers:
            assert draft.cache.stats().used_blocks == 0, "a draft still holds blocks"
        assert scheduler.num_finished == len(self.said)
        asynchronous = self.engine._async
        assert asynchronous is None or asynchronous.in_flight is None, "a step is in flight without sequences"
        if not self.seen["interrupted"]:
            assert self.rows["computed"] == self.rows["told"] + (asynchronous.wasted_rows if asynchronous else 0), (
                "rows that no record tells of"
            )


# Cutting a failure down


def failure(case: Case) -> Exception | None:
    try:
        Play(case).run()
    except Exception as error:
        return error
    return None


def shortest_failure(case: Case) -> str | None:
    """None if all goes well; otherwise a failing case from which nothing more can be left out, and its error."""
    error = failure(case)
    if error is None:
        return None
    while (smaller := next(filter(failure, _smaller(case)), None)) is not None:
        case = smaller
    return f"{type(error).__name__}: {failure(case)}\n{case}"


def _smaller(case: Case) -> Iterator[Case]:
    """The same with one thing less."""
    for index in range(len(case.requests)):
        yield replace(case, requests=case.requests[:index] + case.requests[index + 1 :])
    for each in fields(Case):
        default = getattr(Case(), each.name)
        if each.name not in ("seed", "requests", "kv") and getattr(case, each.name) != default:
            yield replace(case, **{each.name: default})
    for index, request in enumerate(case.requests):
        for simpler in _simpler(request):
            yield replace(case, requests=(*case.requests[:index], simpler, *case.requests[index + 1 :]))


def _simpler(request: Request) -> Iterator[Request]:
    if request.aborted is not None:
        yield replace(request, aborted=None)
    for name, default in (("priority", 0), ("salt", ""), ("arrives", 0)):
        if getattr(request, name) != default:
            yield replace(request, **{name: default})
    for name, default in (
        ("n", 1),
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("presence_penalty", 0.0),
        ("stop", ()),
        ("prompt_logprobs", None),
    ):
        if getattr(request.params, name) != default:
            yield replace(request, params=replace(request.params, **{name: default}))
    if len(request.prompt) > 1:
        yield replace(request, prompt=request.prompt[:-1])
    if request.params.max_tokens > 1:
        yield replace(request, params=replace(request.params, max_tokens=request.params.max_tokens - 1))
