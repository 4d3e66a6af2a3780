"""Random workloads of every kind of request under every option, held against the same requests each run alone.

A `Case` is a value: how the engine is set, and a list of requests with the steps at which each comes and perhaps is
aborted. Requests are generations of one or several samples, prefill-only, scores, candidates and embeddings; they have
grammars and token filters, continue earlier ones, and are handed over. `Play` runs a case, with every invariant checked
after every step. `shortest_failure` cuts a failing case down: it drops requests, interruptions and settings for as long
as the rest still fails.

The model hangs on every token of its context as the cache has it (`HashModel`), so a sequence that loses, repeats or
mixes up anything says something else from there on.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from unittest.mock import patch
from zlib import crc32

import numpy as np

from forge.cache.eviction import EVICTION_POLICIES
from forge.cache.factory import CacheSize, create_kv_cache
from forge.engine import readout
from forge.engine.async_scheduling import AsyncEngine
from forge.engine.engine import Engine
from forge.engine.handoff import KvHandoff, add_handed_over, hand_off
from forge.engine.outputs import CompletionOutput
from forge.engine.policies import ADMISSION_ORDERS, VICTIM_POLICIES, SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.step_plan import StepPlan
from forge.engine.structured_output import MatcherError, StructuredOutput
from forge.engine.task import GENERATE, Task
from forge.errors import UsageError
from forge.model.hash_model import HashModel
from forge.reasons import Deferred
from forge.speculation.controller import Costs
from forge.speculation.draft import DraftProposer
from forge.speculation.lookup import ForcedProposer, NgramProposer
from forge.speculation.speculator import Speculator
from forge.trace.records import StepRecord
from tests.engine.late_model import LateModel
from tests.engine.schedules import waiting
from tests.engine.scripted import PieceTokenizer

PIECES = ("<eos>", "a", "b", "ab", "c")
MAX_MODEL_LEN = 26
MAX_PROMPT = 12
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
    task: Task = GENERATE
    is_handed_over: bool = False
    """Whether another engine has computed its prompt."""
    retains_cache: bool = False
    continues: int | None = None
    """The request whose retained cache it takes over."""

    def __str__(self) -> str:
        params = _changed(self.params, SamplingParams())
        return _changed(replace(self, params=params), Request((), ""))


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
    preempt: str = "lifo"
    evict: str = "lru"
    preemption: str = "recompute"
    num_host_blocks: int = 64
    prefill_only: bool = False
    prefix_planning: bool = False
    prefill_only_tokens: int = 64
    drafts: tuple[float, ...] = ()
    """Draft models: how often each proposes what the model says."""
    lookups: tuple[str, ...] = ()
    """Proposers without a model: `ngram` and `grammar`."""
    max_k: int = 3
    is_fixed: bool = True
    """Whether all draft tokens that there is room for are asked for; otherwise as many as have paid."""
    draft_cost: float = 0.01
    """Of a draft token, against a row of the model, as assumed."""
    slice_rows: int | None = None
    """Rows of logits with more of which a sequence has forwards of its own; None for as many as there are."""
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
        settings = _changed(replace(self, requests=()), Case())
        return "\n  ".join([f"{settings}, requests:", *map(str, self.requests)])


def _changed(value, default) -> str:
    """A dataclass's fields that differ from `default`'s."""
    pairs = [(each.name, getattr(value, each.name), getattr(default, each.name)) for each in fields(value)]
    changed = [f"{name}={found if name == 'params' else repr(found)}" for name, found, usual in pairs if found != usual]
    return f"{type(value).__name__}({', '.join(changed)})"


class Hidden:
    """Hidden states of a `HashModel`: its logits."""

    embeds = True

    def hidden(self, batch, storage) -> np.ndarray:
        return HashModel.forward(self, batch, storage)


class EmbeddingModel(Hidden, HashModel):
    pass


class LateEmbeddingModel(Hidden, LateModel):
    pass


class TrialGrammar:
    """A `Grammar` and its `Matcher`: the bits of a hash of the output so far say which tokens may come."""

    def __init__(self, structured: StructuredOutput):
        self._pattern = structured.regex.encode()

    def new_matcher(self) -> "TrialGrammar":
        return self

    def mask(self, output) -> np.ndarray:
        if self._pattern == b"fails" and len(output) == 3:
            raise MatcherError("this grammar needs more work")
        bits = crc32(self._pattern + bytes(output)) >> 5
        mask = np.array([bits >> token & 1 for token in range(len(PIECES))], bool)
        mask[0] = len(output) % 4 == 3
        mask[1 + bits % (len(PIECES) - 1)] = True
        return mask

    def num_allowed(self, output, token_ids) -> int:
        for index, token_id in enumerate(token_ids):
            if self._pattern == b"fails" and len(output) + index == 3:
                return index
            if not self.mask([*output, *token_ids[:index]])[token_id]:
                return index
        return len(token_ids)

    def forced(self, output) -> tuple[int, ...]:
        if self._pattern == b"fails":
            return ()
        only = np.flatnonzero(self.mask(output)).tolist()
        return tuple(only) if len(only) == 1 else ()


def num_rows(plan: StepPlan) -> int:
    """The rows that a step computes at most: there may be fewer draft tokens than slots for them."""
    items = (*plan.items, *plan.separate)
    return sum((item.num_tokens + item.num_draft_slots) * (1 + len(item.forks)) for item in items)


def new_model(agreement: float = 1.0, runs_ahead: bool = False) -> HashModel:
    kind = LateEmbeddingModel if runs_ahead else EmbeddingModel
    said = range(1, len(PIECES))
    return kind(
        len(PIECES), emitted=said, eos_token_id=0, eos_probability=1 / 16, agreement=agreement, runs_ahead=runs_ahead
    )


def new_speculator(case: Case) -> Speculator:
    """Each draft has room for about two sequences."""
    limits = {"vocab_size": len(PIECES), "max_num_seqs": 2, "max_model_len": MAX_MODEL_LEN, "block_size": 4}
    drafts = [
        DraftProposer(new_model(agreement), name=f"draft {index}", **limits)
        for index, agreement in enumerate(case.drafts)
    ]
    lookups = [{"ngram": NgramProposer(1, 2), "grammar": ForcedProposer()}[name] for name in case.lookups]
    priced = [(proposer, Costs(token=case.draft_cost)) for proposer in (*drafts, *lookups)]
    return Speculator(priced, max_k=case.max_k, vocab_size=len(PIECES), fixed=case.is_fixed)


def new_engine(case: Case, max_model_len: int = MAX_MODEL_LEN) -> Engine:
    size = CacheSize(MAX_MODEL_LEN, case.max_num_seqs, case.block_size, 8, case.pool_blocks)
    kv_cache = create_kv_cache(case.kv, size, case.evict)
    model = new_model(runs_ahead=case.runs_ahead)
    scratch = range(kv_cache.num_blocks, kv_cache.num_blocks + 12 * MAX_MODEL_LEN)
    storage = model.new_storage(model.kv_layout(scratch.stop, case.block_size))
    storage.keys[:] = storage.values[:] = -1
    config = SchedulerConfig(
        case.max_num_seqs,
        case.max_num_batched_tokens,
        case.chunked_prefill,
        case.order,
        case.preempt,
        case.preemption,
        case.num_host_blocks,
        case.prefix_planning,
        case.prefill_only,
        case.prefill_only_tokens,
    )
    create = AsyncEngine if model.runs_ahead else Engine
    engine = create(
        model,
        PieceTokenizer(PIECES),
        kv_cache,
        storage,
        max_model_len,
        config,
        scratch,
        speculation=new_speculator(case) if case.drafts or case.lookups else None,
    )
    engine.compile_grammar = TrialGrammar
    return engine


# Making cases up


def random_case(seed: int, kv: str, runs_ahead: bool = False) -> Case:
    """`runs_ahead`: the model does, and there is enough that is nothing but decoding."""
    rng = np.random.default_rng([seed, len(kv), ord(kv[0])])

    def one_of(*choices):
        return choices[rng.integers(len(choices))]

    block_size = one_of(1, 2, 3, 4, 8)
    max_num_seqs = one_of(1, 2, 3, 4, 6)
    least = -(-MAX_PROMPT // block_size)  # every prompt fits
    speculates = rng.random() < (0.3 if runs_ahead else 0.5)
    case = Case(
        seed=seed,
        interrupted=frozenset(rng.integers(0, 60, 2).tolist()) if rng.random() < 0.15 else frozenset(),
        kv=kv,
        block_size=block_size,
        num_blocks=least + int(rng.integers(0, one_of(2, least, 2 * least))),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(0, one_of(2, 8, 40))),
        chunked_prefill=rng.random() < 0.75,
        order=one_of("fcfs", "fcfs", *ADMISSION_ORDERS),
        preempt=one_of(*VICTIM_POLICIES),
        evict=tuple(EVICTION_POLICIES)[seed % 2] if kv == "prefix" else "lru",
        preemption=one_of("recompute", "swap"),
        num_host_blocks=one_of(0, 2, least, 64, 64),
        prefill_only=rng.random() < 0.7,
        prefix_planning=rng.random() < 0.6,
        prefill_only_tokens=one_of(1, 12, 30, 64),
        drafts=one_of((), (0.7,), (0.9, 0.4)) if speculates else (),
        lookups=one_of((), ("ngram",), ("grammar",), ("ngram", "grammar")) if speculates else (),
        max_k=one_of(1, 3, 5),
        is_fixed=rng.random() < 0.7,
        draft_cost=one_of(0.01, 0.01, 2.0),
        slice_rows=one_of(None, None, 1, 4) if not runs_ahead else None,  # late logits outlive one forward, not several
        runs_ahead=runs_ahead,
    )
    plain = runs_ahead and rng.random() < 0.4
    requests: list[Request] = []
    for step in np.cumsum(rng.integers(0, one_of(1, 3, 9), rng.integers(1, 13))).tolist():
        request = _random_request(rng, step)
        if plain:
            request = replace(request, task=GENERATE, params=SamplingParams(request.params.max_tokens))
        requests.append(_continued(rng, request, requests, case.longest) if rng.random() < 0.2 else request)
    return replace(case, requests=tuple(requests))


def _random_request(rng: np.random.Generator, arrives: int) -> Request:
    """One of few prompts and few ways to sample, so that prompts begin alike and runs alone are soon all known."""
    length = int(rng.integers(1, MAX_PROMPT + 1))
    word = int(rng.integers(4))
    tasks = (Task(candidates=(1, 3)), Task(score_from=1, top=2), Task(score_from=3, candidates=(2,)))
    tasks += (Task(pooling="mean"), Task(pooling="last"), Task(sample=True, score_from=2))
    return Request(
        prompt=tuple(1 + (word >> position % 2 & 1) for position in range(length)),
        params=_random_params(rng, word),
        task=tasks[rng.integers(len(tasks))] if length > 4 and rng.random() < 0.15 else GENERATE,
        priority=int(rng.integers(3)),
        salt="" if rng.random() < 0.8 else "other",
        arrives=arrives,
        aborted=arrives + int(rng.integers(0, 20)) if rng.random() < 0.2 else None,
        is_handed_over=length > 1 and bool(rng.random() < 0.15),
        retains_cache=bool(rng.random() < 0.2),
    )


def _random_params(rng: np.random.Generator, word: int) -> SamplingParams:
    """What requests ask of the sampler: one in three for something beside its temperature and stop strings."""
    temperature = float(rng.choice([0, 0, 1]))
    options = [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.01}, {"presence_penalty": 1.0}][word if temperature else 0]
    further = (
        {"logprobs": 2},
        {"min_tokens": 1},
        {"logit_bias": {1: 2.0}, "logprobs": 0},
        {"repetition_penalty": 1.3},
        {"bad_words": ("ab",)},
        {"allowed_token_ids": (0, 1, 3)},
        {"stop_token_ids": (3,), "include_stop_str_in_output": True},
        {"num_speculative_tokens": 1},
        {"structured": StructuredOutput(regex=f"pattern {word}")},
        {"structured": StructuredOutput(regex="fails")},
    )
    if rng.random() < 0.35:
        options = options | further[rng.integers(len(further))]
    has_form = "structured" in options
    return SamplingParams(
        max_tokens=int(rng.choice([1, 1, 1, 2, 5, 9, 14])),
        temperature=temperature,
        seed=word,
        stop=[(), ("bc",), ("aab", "cc")][rng.integers(3)],
        n=int(rng.choice([1, 1, 1, 2, 3])),
        prompt_logprobs=1 if rng.random() < 0.15 else None,
        ignore_eos=not has_form and bool(rng.random() < 0.3),
        **options,
    )


def _continued(rng: np.random.Generator, request: Request, earlier: list[Request], longest: int) -> Request:
    """A continuation of one of the `earlier` requests, with some of its output in the prompt."""
    chosen = [index for index, one in enumerate(earlier) if one.retains_cache and one.task is GENERATE]
    if not chosen:
        return request
    index = chosen[rng.integers(len(chosen))]
    before = earlier[index]
    (token_ids, *_), *_ = alone(before.prompt, before.params, longest)[0]
    prompt = (*before.prompt, *token_ids, *request.prompt)[: max(len(request.prompt), len(before.prompt) + 1)]
    salt = before.salt if rng.random() < 0.9 else "another"
    return replace(request, prompt=prompt[:MAX_PROMPT], salt=salt, continues=index, task=GENERATE)


# Playing one


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams, longest: int, task: Task = GENERATE) -> tuple:
    """What a caller sees of each sample, and the prompt's log probabilities, with no other request in the engine."""
    engine = new_engine(Case(block_size=1, num_blocks=longest * params.n, max_num_seqs=params.n), longest)
    engine.add_request("alone", prompt, params, task=task)
    while engine.has_unfinished():
        engine.step()
    output = engine.output("alone")
    return tuple(seen_of(sample, task) for sample in output.outputs), output.prompt_logprobs


def seen_of(sample: CompletionOutput, task: Task) -> tuple:
    """What a caller sees of a sample. (The readout of prompt log probabilities is in its request's output.)"""
    answer = sample.readout if task is not GENERATE else None
    vector = answer.embedding.tobytes() if answer is not None and answer.embedding is not None else None
    scores = (answer.candidates, answer.scores) if answer is not None else None
    return sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, sample.logprobs, scores, vector


@cache
def handed_over(prompt: tuple[int, ...], block_size: int, salt: str) -> KvHandoff:
    """What another engine has computed of a prompt."""
    engine = new_engine(Case(block_size=block_size))
    (seq_id,) = engine.add_request("prefill", prompt[:-1], SamplingParams(1), salt=salt, retain_cache=True)
    engine.step()
    return hand_off(engine, seq_id)


class Interrupted(Exception):
    pass


class Play:
    """A case under way."""

    def __init__(self, case: Case):
        self.case = case
        with self.slices():
            self.engine = new_engine(case)
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
        schedule, model = self.scheduler.schedule, self.engine.model

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

        def interrupting(compute):
            def computed(batch, storage):
                self.forwards += 1
                self.rows["computed"] += batch.num_rows
                rows = compute(batch, storage)
                if self.forwards - 1 in self.case.interrupted:
                    raise Interrupted
                return rows

            return computed

        self.scheduler.schedule = watched
        model.forward, model.hidden = interrupting(model.forward), interrupting(model.hidden)
        asynchronous = self.engine
        if isinstance(asynchronous, AsyncEngine):
            plan_next, asynchronous._plan_next = asynchronous._plan_next, planning

    def run(self) -> Counter[str]:
        with self.slices():
            return self._run()

    def slices(self) -> AbstractContextManager:
        rows = self.case.slice_rows
        return nullcontext() if rows is None else patch.multiple(readout, SLICE_BYTES=0, MIN_SLICE_ROWS=rows)

    def _run(self) -> Counter[str]:
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
        for seq_id in list(self.scheduler.retained.sequences):
            self.engine.release(seq_id)
        self.check_nothing_is_held()
        return self.seen

    def add(self, index: int, request: Request) -> None:
        options = {"priority": request.priority, "salt": request.salt, "task": request.task}
        options |= {"retain_cache": request.retains_cache}
        if request.continues is not None:
            options["continues_from"] = self.seq_ids.get(request.continues, (999,))[0]
        if request.is_handed_over and self.engine.cache.persistent:
            handoff = handed_over(request.prompt, self.case.block_size, request.salt)
            seq_ids = add_handed_over(self.engine, handoff, str(index), request.prompt, request.params, **options)
        else:
            seq_ids = self.engine.add_request(str(index), request.prompt, request.params, **options)
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
            with self.engine.operation:
                pass  # it recovers
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
        assert num_rows(plan) <= limit, "more tokens than the budget"
        if generations and case.chunked_prefill:
            assert num_rows(whole) <= limit, "prefill-only requests beside generations exceed the budget"
        undeferred = [one for one in plan.waiting if not isinstance(one.reason, Deferred)]
        assert len(undeferred) <= 2, "more than the heads of the two queues wait for lack of something"
        admitted = [one.seq_id for one in plan.admitted]
        preempted = [one.seq_id for one in plan.preempted]
        assert len(set(admitted)) == len(admitted) and not set(admitted) & set(running_before)
        assert set(preempted) <= set(running_before), "who was admitted gave way in the same step"
        exhausted = {sequence.seq_id for sequence in plan.exhausted}
        left = [one for one in running_before if one not in preempted and one not in exhausted]
        assert [one for one in scheduler.running if one not in exhausted] == [*left, *admitted]
        items = {item.seq_id: item for item in plan.items}
        assert len(items) == len(plan.items) and items.keys() <= scheduler.running.keys()
        assert not items.keys() & {*preempted, *exhausted}, "a victim is still in the plan"
        self.check_shares(plan, left)
        for one in plan.preempted:
            assert one.needed > one.free
            assert one.fallback is None or (one.preemption == "recompute" and one.fallback.needed > one.fallback.free)
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
            for position in range(item.start, item.start + item.num_tokens + item.num_draft_slots):
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
            map(len, (waiting(scheduler), scheduler.running, scheduler.host_pool.entries))
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
            seen[one.preemption] += 1
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
        planned = (*self.plan.items, *self.plan.separate)
        seen["task in chunks"] += any(one.phase == "prefill" and one.sequence.task is not GENERATE for one in planned)
        seen["separate"] += bool(self.plan.separate)
        seen["mixed"] += len({item.phase for item in record.items}) > 1

    def check_outputs(self) -> None:
        for index, request in enumerate(self.case.requests):
            output = self.engine.output(str(index))
            expected, prompt_logprobs = alone(request.prompt, request.params, self.case.longest, request.task)
            seq_ids = self.seq_ids[index]
            for seq_id, found, sample in zip(seq_ids, output.outputs, expected, strict=True):
                assert list(found.token_ids) == self.said[seq_id], "not what its records said"
                if found.finish_reason == "abort":
                    self.seen["aborted"] += 1
                    assert request.aborted is not None and not self.ended[seq_id]
                    tokens = sample[0][: len(found.token_ids)]
                    assert found.token_ids == tokens, f"request {index} has other tokens: {found.token_ids}, {tokens}"
                    continue
                assert self.ended[seq_id] == 1, f"sequence {seq_id} ended {self.ended[seq_id]} times"
                seen = seen_of(found, request.task)
                assert seen == sample, f"request {index}: {seen}, alone {sample}"
                self.count(request)
            if output.outputs[0].finish_reason != "abort":
                self.seen["prefill_only"] += self.engine._requests[str(index)].sequences[0].prefill_only
                assert output.prompt_logprobs == prompt_logprobs, f"request {index}: other prompt log probabilities"
            self.engine.forget(str(index))

    def count(self, request: Request) -> None:
        """That a request of this kind has ended."""
        self.seen["task"] += request.task is not GENERATE
        self.seen["form"] += request.params.structured is not None
        self.seen["filter"] += request.params.filters_tokens
        self.seen["continues"] += request.continues is not None
        self.seen["handed over"] += request.is_handed_over
        self.seen["samples"] += request.params.n > 1

    def check_nothing_is_held(self) -> None:
        scheduler, stats = self.scheduler, self.engine.cache.stats()
        assert (stats.used_blocks, stats.tokens_held) == (0, 0), "blocks are still held"
        assert not (
            scheduler.queue.sequences
            or scheduler.running
            or scheduler.host_pool.entries
            or scheduler.retained.sequences
        )
        assert scheduler.host_pool.num_free == scheduler.host_pool.num_blocks, "the host's pool is not empty"
        assert not (self.engine._requests or self.engine.timeline.requests() or self.engine._batch_builder._tables)
        for draft in self.engine.proposers[: len(self.case.drafts)]:
            assert draft.cache.stats().used_blocks == 0, "a draft still holds blocks"
        assert scheduler.num_finished == len(self.said)
        in_flight = isinstance(self.engine, AsyncEngine) and self.engine._in_flight
        assert not in_flight, "a step is in flight without sequences"
        if not self.seen["interrupted"]:
            assert self.rows["computed"] == self.rows["told"] + self.engine._records.discarded, (
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
    """None if all goes well; otherwise a case that fails in the same way, from which nothing more can be left out, and
    its error."""
    error = failure(case)
    if error is None:
        return None
    while (smaller := next((one for one in _smaller(case) if type(failure(one)) is type(error)), None)) is not None:
        case = smaller
    return f"{type(error).__name__}: {failure(case)}\n{case}"


def _smaller(case: Case) -> Iterator[Case]:
    """The same with one thing less."""
    for index in range(len(case.requests)):
        yield replace(case, requests=tuple(_without(case.requests, index)))
    for each in fields(Case):
        default = getattr(Case(), each.name)
        if each.name not in ("seed", "requests", "kv") and getattr(case, each.name) != default:
            yield replace(case, **{each.name: default})
    for index, request in enumerate(case.requests):
        for simpler in _simpler(request):
            yield replace(case, requests=(*case.requests[:index], simpler, *case.requests[index + 1 :]))


def _without(requests: tuple[Request, ...], dropped: int) -> Iterator[Request]:
    """All but one; those that continue it begin from nothing."""
    for index, request in enumerate(requests):
        before = request.continues
        if before is not None and before >= dropped:
            request = replace(request, continues=before - 1 if before > dropped else None)
        if index != dropped:
            yield request


def _simpler(request: Request) -> Iterator[Request]:
    for each in fields(Request):
        if each.name not in ("prompt", "params") and getattr(request, each.name) != each.default:
            yield replace(request, **{each.name: each.default})
    params, default = request.params, SamplingParams(request.params.max_tokens)
    for each in fields(SamplingParams):
        if getattr(params, each.name) != getattr(default, each.name):
            with suppress(UsageError):
                yield replace(request, params=replace(params, **{each.name: getattr(default, each.name)}))
    if len(request.prompt) > 1:
        yield replace(request, prompt=request.prompt[:-1])
    if request.params.max_tokens > 1:
        yield replace(request, params=replace(request.params, max_tokens=request.params.max_tokens - 1))
