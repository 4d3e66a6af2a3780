"""The engine: one loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ sample ─▶ commit() ─▶ StepRecord
                     └▶ propose() ─┘                              (or verify)

The engine prints nothing and knows no view. What happens is told by the `StepRecord` that each step returns.

A step happens whole or not at all, and so does every other operation. The engine notes that an operation has begun and
that it has ended. If the next call finds one that never ended (Ctrl-C, a full memory), `_recover` takes the tokens that
had been chosen, and everything else begins again from the tokens alone, as after a preemption.
"""

import secrets
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from threading import RLock
from typing import NamedTuple

import numpy as np

from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.cache.kv_storage import KvStorage
from forge.engine.async_scheduling import AsyncScheduling, InFlightStep
from forge.engine.batch_builder import BatchBuilder
from forge.engine.draft_slots import DraftSlots
from forge.engine.output_text import OutputText
from forge.engine.outputs import RequestOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.proposer import (
    NO_DRAFTS,
    NO_UPDATE,
    NoSpeculation,
    Speculation,
    SpeculationUpdate,
    StepCost,
    StepDrafts,
)
from forge.engine.readout import max_logit_rows, run_separate_forwards
from forge.engine.requests import PromptLimits, RequestState
from forge.engine.sampler import OnLogits, Sampler, StepLogits, StepResults
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, StepPlan, flat
from forge.engine.structured_output import CompileGrammar, Grammar, prepare_masks
from forge.engine.task import GENERATE, Task
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Model, ModelUnavailable
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import (
    ArriveRecord,
    BlockMap,
    CacheRecord,
    FinishReason,
    FinishRecord,
    ItemRecord,
    PoolExhausted,
    RejectRecord,
    StepRecord,
)
from forge.trace.timeline import Timeline

_NO_LOGITS = np.empty((0, 1), np.float32)


class StepTimes(NamedTuple):
    """Seconds on the engine's monotonic clock, and milliseconds."""

    started: float
    ended: float
    schedule_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0


class Engine:
    """A model, a cache and a scheduler, advanced one step at a time by `step()`.

    Requests are added, aborted, read and forgotten between steps. Callers in several threads hold `lock`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        cache: KvCache,
        storage: KvStorage,
        max_model_len: int,
        config: SchedulerConfig,
        scratch: range = range(0),
        speculation: Speculation | None = None,
    ):
        """scratch: blocks of the storage past the cache's own, for prefill-only requests. speculation: proposes and
        verifies draft tokens; None for no speculation."""
        self.lock = RLock()
        """For callers in several threads; the engine itself never takes it."""
        self.tokenizer = tokenizer
        self.cache = cache
        self.storage = storage
        self.on_logits: OnLogits | None = None
        self.report_probabilities = False
        """Put the model's probability of each token into its record. Over a large vocabulary that takes a while."""
        self.compile_grammar: CompileGrammar | None = None
        """For requests with structured output; without it they are refused."""
        self._has_grammars = False
        """There has been such a request."""
        self.checks_invariants = False
        """Check all rules of the scheduler and the cache after every step. Takes longer than the step."""
        self.waits_for_model = False
        """Without its model, raise `ModelUnavailable` and keep all sequences for the next step: none of them ends."""
        self.scheduler = Scheduler(cache, config, scratch, model.temporary_bytes, max_logit_rows(model.vocab_size))
        self.model = model
        self.speculation = speculation or NoSpeculation()
        self._async = AsyncScheduling(self.scheduler) if model.runs_ahead else None
        self._batch_builder = BatchBuilder(storage.layout.block_size)
        self.timeline = Timeline()
        """Times, waits and metrics of every request that has not been forgotten."""
        self._limits = PromptLimits(model.vocab_size, max_model_len, cache.max_sequence_length, cache.block_size)
        self._requests: dict[str, RequestState] = {}
        """Every request that has not been forgotten. What is not in here does not exist."""
        self._bytes_per_token = storage.layout.bytes_per_token
        self._eos_token_ids = tokenizer.eos_token_ids
        self._unavailable: ModelUnavailable | None = None
        """The error that ended every sequence, once the model is gone."""
        self._num_sequences = self._num_steps = self._num_retained_forks = 0
        """How many there were. Retained forks have numbers of their own, apart from the requests'."""
        self._rejected: list[RejectRecord] = []
        self._arrived: list[ArriveRecord] = []
        self._operating = False
        """An operation has begun and not ended."""
        self._decided: list[Outcome] = []
        """The outcomes of a step whose tokens are all chosen, until they are committed."""
        self._plan: StepPlan | None = None
        """Of the step that was begun last."""

    @property
    def model(self) -> Model:
        """What computes. Setting it is allowed between two steps, to another of the same sizes."""
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model
        self.scheduler.prefill_only.temporary_bytes = model.temporary_bytes

    @property
    def speculation(self) -> Speculation:
        """Proposes and verifies draft tokens. Setting it is allowed between two steps."""
        return self._speculation

    @speculation.setter
    def speculation(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._speculates = not isinstance(speculation, NoSpeculation)
        self.scheduler.draft_slots = DraftSlots(self.cache, speculation) if self._speculates else None

    @property
    def report_blocks(self) -> bool:
        """Whether records have a `BlockMap`."""
        return self.scheduler.keep_block_map

    @report_blocks.setter
    def report_blocks(self, wanted: bool) -> None:
        self.scheduler.keep_block_map = wanted

    # A step

    def step(self) -> StepRecord:
        """Run one step: schedule, build the batch, forward, sample or verify, commit, record.

        Call only while `has_unfinished()`; after an exception from it, whatever it was, too. Raises AssertionError for
        a rule that does not hold, where `checks_invariants` is set, and `ModelUnavailable` where `waits_for_model` is.
        """
        self._begin()
        self._plan, started = None, time.perf_counter()
        try:
            if self._async is None:
                step = self._launch(self.scheduler.schedule(), started)  # builds the batch and runs the forward pass
            else:
                step = self._async.next_step(self._launch, self._may_look_ahead(), started)
                if self._has_grammars:
                    prepare_masks(step.plan.items)  # while the device computes
            launched = time.perf_counter()
            logits = StepLogits.of(step.logits)  # waits for a device
            read = time.perf_counter() if self._async is not None else launched
            sampler = Sampler(self._eos_token_ids, self._speculation, self.on_logits, self.report_probabilities)
            results = sampler.sample(step.plan, logits, step.drafts, step.separate)
            for seq_id in step.plan.exhausted:
                sampler.end(self.scheduler.find(seq_id))
            forward_ms, ended = step.launch_ms + (read - launched) * 1e3, time.perf_counter()
            times = StepTimes(started, ended, step.schedule_ms, forward_ms, (ended - read) * 1e3)
            record = self._commit(step, results, times)
        except ModelUnavailable as error:
            if self.waits_for_model:
                raise
            self._recover()
            record = self._end_all(error)
        if self.checks_invariants:
            self.scheduler.check_invariants()
        self._operating = False
        return record

    def _launch(self, plan: StepPlan, started: float) -> InFlightStep:
        """Begin to carry out a plan that was begun at `started`: propose, move blocks, build the batch, forward."""
        assert plan.items or plan.separate or plan.exhausted, f"nothing can run: {plan.waiting}"
        self._plan = plan
        drafts = self._propose(plan) if self._speculates else NO_DRAFTS
        batch = self._batch_builder.build(plan.items, drafts.runs) if plan.items else None
        if plan.copies or plan.swap_outs or plan.swap_ins:
            self._move_blocks(plan)
        launched = time.perf_counter()
        logits = self._model.forward(batch, self.storage) if batch is not None else _NO_LOGITS
        separate = run_separate_forwards(plan.separate, self._model, self.storage) if plan.separate else []
        launch_ms = (time.perf_counter() - launched) * 1e3
        schedule_ms = (launched - started) * 1e3 - drafts.total_ms
        return InFlightStep(plan, drafts, batch, logits, separate, schedule_ms, launch_ms)

    def _commit(self, step: InFlightStep, results: StepResults, times: StepTimes) -> StepRecord:
        """Commit a step and build its record."""
        if self._async is not None:
            step = self._async.without_ended(step)
        update = self._learn(step, results, times) if self._speculates else NO_UPDATE
        self._decided = results.outcomes  # from here on the step has happened
        copies = self.scheduler.commit(step.plan, results.outcomes)
        if copies:
            self.storage.copy_blocks(copies)
        if self._speculates:
            self.speculation.commit(update)
        self._decided = []
        for finish in results.finished:
            self._drop_state(finish.seq_id)
        return self._record(step, results, times, update)

    def _move_blocks(self, plan: StepPlan) -> None:
        """Carry out what a plan moves before it writes: nothing is overwritten before it has been read."""
        storage, host = self.storage, self.scheduler.host
        for swap in plan.swap_outs:
            host.fill(swap.seq_id, storage.read_blocks(swap.blocks))
        if plan.copies:
            storage.copy_blocks(plan.copies)
        for swap in plan.swap_ins:
            storage.write_blocks(swap.blocks, host.data(swap.seq_id))

    def _record(
        self, step: InFlightStep, results: StepResults, times: StepTimes, update: SpeculationUpdate = NO_UPDATE
    ) -> StepRecord:
        """What the step did, and where everything is now; copied out, so that a record holds nothing of the engine."""
        self._num_steps += 1
        rejected, self._rejected = tuple(self._rejected), []
        arrived, self._arrived = tuple(self._arrived), []
        plan, batch, stats = step.plan, step.batch, self.scheduler.stats
        record = StepRecord(
            step=self._num_steps,
            items=_item_records(plan, step.drafts),
            tokens=tuple(results.tokens),
            finished=tuple(results.finished),
            cache=CacheRecord(
                self.cache.kind,
                self.cache.block_size,
                *stats[:3],
                stats.tokens_held * self._bytes_per_token,
                stats.used_blocks * self.cache.block_size * self._bytes_per_token,
                *stats[3:],
            ),
            schedule_ms=times.schedule_ms,
            forward_ms=times.forward_ms,
            sample_ms=times.sample_ms,
            started=times.started,
            ended=times.ended,
            execution_class=plan.execution_class,
            queues=self.scheduler.queues,
            admitted=plan.admitted,
            waiting=plan.waiting,
            preempted=plan.preempted,
            rejected=rejected,
            arrived=arrived,
            block_table_entries=sum([len(item.block_table) for item in plan.items if item.phase != "prefill_only"]),
            temporary_bytes=self._model.temporary_bytes(batch.num_rows, len(batch.logit_rows)) if batch else 0,
            events=self.cache.take_events(),
            blocks=self.scheduler.block_map and _with_written(self.scheduler.block_map, batch, self.cache.block_size),
            cycles=update.cycles,
            execution=getattr(step.logits, "execution", None),
            planned_ahead=plan.ahead,
            discarded=self._async.take_wasted_rows() if self._async is not None else 0,
        )
        self.timeline.add(record)
        return record

    def _end_all(self, error: ModelUnavailable) -> StepRecord:
        """The model is gone: every sequence ends, with what it has."""
        self._unavailable, now = error, time.perf_counter()
        results = StepResults()
        for request in self._requests.values():
            for sequence in reversed(request.sequences):  # forks before those whose prompt they share
                if sequence.finish_reason is None:
                    results.finished.append(self._end_sequence(sequence, "error", str(error)))
        step = InFlightStep(StepPlan(()), NO_DRAFTS, None, _NO_LOGITS, [], 0.0, 0.0)
        return self._record(step, results, StepTimes(now, time.perf_counter()))

    # Speculation

    def _propose(self, plan: StepPlan) -> StepDrafts:
        drafts = self.speculation.propose(plan, self.scheduler.running)
        for seq_id, failure in drafts.failures.items():
            self.scheduler.running[seq_id].add_error(failure.message)
        return drafts

    def _learn(self, step: InFlightStep, results: StepResults, times: StepTimes) -> SpeculationUpdate:
        num_rows = step.batch.num_rows if step.batch is not None else 0
        cost = StepCost(num_rows, times.forward_ms, (times.ended - times.started) * 1e3 - step.drafts.total_ms)
        running = self.scheduler.running
        return self.speculation.learn(step.plan, step.drafts, results.verified, results.outcomes, running, cost)

    def _may_look_ahead(self) -> bool:
        watched = self.on_logits is not None or self.report_probabilities
        return not watched and not self.speculation.proposers

    # Between steps

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        *,
        task: Task = GENERATE,
        prompt: str | None = None,
        priority: int = 0,
        salt: str = "",
        retain_cache: bool = False,
        continues_from: int | None = None,
    ) -> tuple[int, ...]:
        """Queue a request; return the ids of its `params.n` sequences.

        task: what is wanted; generated tokens, or what one forward pass can answer. priority: lower is served first,
        where the scheduler's order is by priority. salt: requests with different salts share nothing in the cache.
        retain_cache: leave the cache in place when it ends. continues_from: the id of such an ended sequence, whose
        cache is taken over if it is still there.

        Raises `UsageError`, with nothing changed, for what cannot run, and `ModelUnavailable` once the model is gone.
        """
        self._begin()
        if self._unavailable is not None:
            self._operating = False
            raise self._unavailable
        try:
            token_ids = self._checked(request_id, prompt_token_ids, params, task)
            grammar = self._grammar(params)
        except UsageError as error:
            self._rejected.append(RejectRecord(request_id, str(error)))
            self._operating = False
            raise
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        room = self._limits.longest - len(token_ids) + 1  # the last output token is never computed: it needs no slot
        first = Sequence(
            seq_id=self._num_sequences,
            request_id=request_id,
            sample_index=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_output_tokens=min(params.max_tokens, room),
            params=params,
            seed=seed,
            output_text=self._new_text(params),
            task=task,
            matcher=grammar.new_matcher() if grammar is not None else None,
            priority=priority,
            salt=salt,
            retain_cache=retain_cache,
            continues_from=continues_from,
        )
        self._classify(first)
        self._register(RequestState(request_id, prompt, seed, (first, *self._samples_of(first, grammar))))
        self._operating = False
        return self._requests[request_id].seq_ids

    def _classify(self, sequence: Sequence) -> None:
        """Decide whether one forward pass answers it, and note whether the pool limits its length."""
        params, config = sequence.params, self.scheduler.config
        keeps_cache = sequence.retain_cache or sequence.continues_from is not None
        pool_size = self._limits.max_cached_len
        if sequence.max_output_tokens < params.max_tokens and self._limits.longest == pool_size:
            sequence.length_limit = PoolExhausted(pool_size)
        if sequence.task is not GENERATE:
            sequence.length_limit = None
            sequence.prefill_only, sequence.max_output_tokens = True, int(sequence.task.sample)
        elif config.prefill_only and self.scheduler.prefill_only.scratch and not keeps_cache:
            sequence.prefill_only = sequence.max_output_tokens <= 1 and params.n == 1
            if sequence.prefill_only and params.prompt_logprobs is not None:
                samples = sequence.max_output_tokens > 0
                sequence.task = Task(samples, score_from=1, top=params.prompt_logprobs)

    def _samples_of(self, first: Sequence, grammar: Grammar | None) -> list[Sequence]:
        """The further samples of a request. All share one list of prompt log probabilities."""
        if first.prefill_only:
            return []
        return [
            replace(
                first,
                seq_id=first.seq_id + index,
                sample_index=index,
                token_ids=list(first.token_ids),
                output_text=self._new_text(first.params),
                matcher=grammar.new_matcher() if grammar is not None else None,
                forks=[],
                errors=[],
                logprobs=[],
            )
            for index in range(1, first.params.n)
        ]

    def _register(self, request: RequestState) -> None:
        """Make a request known, and queue its sequences."""
        first, *others = request.sequences
        first.forks = others
        for other in others:
            other.forked_from = first
        self._requests[request.request_id] = request  # from here on the request exists
        self._num_sequences += len(request.sequences)
        self.scheduler.add(first)
        self._announce(request)

    def _announce(self, request: RequestState) -> None:
        """Put an arrival into the timeline and the next record, unless it is there."""
        first, now = request.sequences[0], time.perf_counter()
        length, limit = first.num_prompt_tokens, first.max_output_tokens
        arrival = ArriveRecord(request.request_id, request.seq_ids, length, limit, now, first.priority)
        if not any(one.request_id == request.request_id for one in self._arrived[-1:]):
            self._arrived.append(arrival)
        self.timeline.arrive(arrival)

    def _checked(self, request_id: str, prompt_token_ids: Items[int], params: SamplingParams, task: Task) -> list[int]:
        """The prompt's tokens, if all that is asked for can be done."""
        token_ids = self._limits.checked(prompt_token_ids)
        self._limits.check_bias(params)
        self._check_drafts(params)
        self._limits.check_ids(task.candidates)
        if task.pooling is not None and not self.model.embeds:
            raise UsageError("this model has no hidden states: take a real one for embeddings")
        if not getattr(self._model, "generates", True) and not task.needs_hidden:
            labels = self._model.labels
            if not (task.candidates and labels):
                uses = "it classifies: forge classify, forge rerank" if labels else "it embeds: forge embed"
                raise UsageError(f"this model generates no text; {uses}")
        if request_id in self._requests:
            raise UsageError(f"request {request_id!r} is already running")
        return token_ids

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """The compiled grammar of a request with structured output. Raises `UsageError`."""
        if params.structured is None:
            return None
        if self.compile_grammar is None:
            raise UsageError("this engine has no grammars: leave structured output out")
        self._has_grammars = True
        return self.compile_grammar(params.structured)

    def _check_drafts(self, params: SamplingParams) -> None:
        """Raises `UsageError` for a draft that this engine does not have."""
        names = [proposer.name for proposer in self._speculation.proposers]
        unknown = [name for name in params.drafts or () if name not in names]
        if unknown:
            known = f"it has {', '.join(names)}" if names else "it has none (--speculate)"
            raise UsageError(f"drafts: this engine has no {unknown[0]!r:.80}; {known}")

    def has_unfinished(self) -> bool:
        self._begin(changes=False)
        return self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """True while a sequence of a request has yet to end. Raises `KeyError` for a request that is not known."""
        self._begin(changes=False)
        return self._requests[request_id].is_unfinished

    def output(self, request_id: str) -> RequestOutput:
        """A request's output as it stands. Raises `KeyError` for a request that is not known."""
        self._begin(changes=False)
        return self._requests[request_id].output(self.timeline.metrics)

    def abort(self, request_id: str) -> None:
        """End a request's unfinished sequences, keeping what they produced. Raises `KeyError` for an unknown one."""
        self._end(request_id, "abort")

    def fail(self, request_id: str) -> None:
        """End a request's unfinished sequences as `error`, as for a fault that concerns this request only."""
        self._end(request_id, "error")

    def fail_step(self) -> tuple[str, ...]:
        """After an exception from `step`: end the requests that took part in that step as `error`, so that all others
        can go on. Returns their ids: all unfinished ones, if the step failed before it was planned."""
        plan = self._plan
        seq_ids = None if plan is None else {item.seq_id for item in (*plan.items, *plan.separate)}
        failed = [
            request_id
            for request_id, request in self._requests.items()
            if (request.is_unfinished if seq_ids is None else not seq_ids.isdisjoint(request.seq_ids))
        ]
        for request_id in failed:
            self.fail(request_id)
        return tuple(failed)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request whose sequences have all ended. Raises `KeyError` for an unknown one."""
        request = self._requests[request_id]
        assert not request.is_unfinished, "it is still running"
        self._begin()
        for seq_id in request.seq_ids:
            self.timeline.forget(seq_id)
        del self._requests[request_id]
        self._operating = False

    def is_retained(self, seq_id: int) -> bool:
        """True if an ended sequence's cache can be continued. It is released when others need its blocks."""
        self._begin(changes=False)
        return seq_id in self.scheduler.retained.sequences

    def release(self, seq_id: int) -> None:
        """Release the retained cache of an ended sequence, if it still has one."""
        self._begin()
        self.scheduler.retained.release(seq_id)
        self._operating = False

    def fork_retained(self, seq_id: int) -> int | None:
        """Retain an ended sequence's cache a second time; return the id under which it can be continued too.

        None if it is no longer there, or where the cache cannot share blocks and has no room for a copy.
        """
        self._begin()
        child: int | None = self._num_sequences
        try:
            copies = self.scheduler.retained.fork(seq_id, self._num_sequences)
            self._num_sequences += 1
            self._num_retained_forks += 1
            self.storage.copy_blocks(copies)
        except (KeyError, OutOfBlocks):
            child = None
        self._operating = False
        return child

    def _end(self, request_id: str, reason: FinishReason) -> None:
        sequences = self._requests[request_id].sequences
        self._begin()
        for sequence in reversed(sequences):  # forks before those whose prompt they share
            if sequence.finish_reason is None:
                self._end_sequence(sequence, reason)
        self._operating = False

    def _end_sequence(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> FinishRecord:
        """End a sequence between steps, wherever it is."""
        if error is not None:
            sequence.add_error(error)
        self.scheduler.abort(sequence, reason)
        if self._async is not None:
            self._async.drop_if_empty()
        text = sequence.output_text.finish()
        self.timeline.end(sequence.seq_id, reason)
        self._drop_state(sequence.seq_id)
        return FinishRecord(sequence.seq_id, reason, text, error=error)

    def _drop_state(self, seq_id: int) -> None:
        """A sequence has ended: nothing of it is needed for further steps."""
        self._batch_builder.forget(seq_id)
        if self._speculates:
            self.speculation.forget(seq_id)
        if self._async is not None:
            self._async.drop_if_empty()

    # Interrupted operations

    def _begin(self, changes: bool = True) -> None:
        """Every operation begins here. One that changes something ends with `_operating = False`."""
        if self._operating:
            self._recover()
        self._operating = changes

    def _recover(self) -> None:
        """An operation never ended: take the outcomes that were decided, and begin again from the tokens. If this is
        interrupted, the next operation repeats it."""
        sequences = {one.seq_id: one for request in self._requests.values() for one in request.sequences}
        for outcome in flat(self._decided):
            sequence = sequences[outcome.seq_id]
            if len(sequence.token_ids) == outcome.position:
                sequence.token_ids += outcome.token_ids
            if outcome.finish_reason is not None:
                sequence.stop_reason, sequence.finish_reason = outcome.stop_reason, outcome.finish_reason
        self._num_sequences = max([self._num_sequences, *(seq_id + 1 for seq_id in sequences)])
        unfinished = [sequence for sequence in sequences.values() if sequence.finish_reason is None]
        self.scheduler.restart(unfinished, self._num_sequences - self._num_retained_forks - len(unfinished))
        for sequence in unfinished:
            self._rebuild_text(sequence)
        for seq_id in sequences.keys() - {one.seq_id for one in unfinished}:
            self._drop_state(seq_id)
        if self._async is not None:
            self._async.clear()
        for request in self._requests.values():
            if request.seq_ids[0] not in self.timeline:
                self._announce(request)
        self.cache.take_events()
        self._decided = []

    def _rebuild_text(self, sequence: Sequence) -> None:
        """Make a sequence's text and log probabilities those of its tokens again."""
        del sequence.logprobs[sequence.num_output_tokens :]
        output_text = self._new_text(sequence.params)
        for token_id in sequence.output_token_ids:
            output_text.push(token_id)
        sequence.output_text = output_text

    def _new_text(self, params: SamplingParams) -> OutputText:
        detokenizer = StreamingDetokenizer(self.tokenizer)
        return OutputText(detokenizer, params.stop or (), params.include_stop_str_in_output, params.min_tokens)


def _item_records(plan: StepPlan, drafts: StepDrafts) -> tuple[ItemRecord, ...]:
    """Each item with the draft tokens that it verified."""
    records = []
    for item in (*plan.items, *plan.separate):
        num_draft_tokens = 0
        if item.num_draft_tokens and item.seq_id in drafts.runs:  # each further run computes the known tokens again
            runs = drafts.runs[item.seq_id]
            num_draft_tokens = sum([item.num_tokens + len(run) for run in runs]) - item.num_tokens
        records.append(
            ItemRecord(item.seq_id, item.phase, item.start, item.num_tokens, item.remaining, num_draft_tokens)
        )
    return tuple(records)


def _with_written(block_map: BlockMap, batch: ForwardBatch | None, block_size: int) -> BlockMap:
    """The block map with the blocks that the step wrote."""
    if batch is None:
        return block_map
    written = np.unique(batch.slot_mapping // block_size)
    return replace(block_map, written=tuple(written[written >= 0].tolist()))
