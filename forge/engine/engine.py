"""The engine: one loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ sample ─▶ commit() ─▶ StepRecord
                     └▶ propose() ─┘                              (or verify)

`Engine.step` is that line. Requests come and go between steps (`registry`). A model that computes while the host works
has a second stepper, which launches the step after this one ahead (`async_scheduling`).

The engine prints nothing and knows no view: what happened stands in the `StepRecord` that each step returns.
"""

import time
from collections.abc import Callable
from threading import RLock
from types import TracebackType
from weakref import WeakMethod

import numpy as np

from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import KvStorage
from forge.engine.batch_builder import BatchBuilder
from forge.engine.draft_slots import DraftSlots
from forge.engine.policies import SchedulerConfig
from forge.engine.proposer import NO_DRAFTS
from forge.engine.readout import max_logit_rows, run_separate_forwards
from forge.engine.registry import Operation, RequestRegistry
from forge.engine.requests import PromptLimits
from forge.engine.sampler import LaunchedStep, OnLogits, Sampler, StepResults
from forge.engine.scheduler import Scheduler
from forge.engine.speculation import Speculation
from forge.engine.step_plan import StepPlan
from forge.engine.step_record import RecordBuilder
from forge.errors import UsageError
from forge.model.model import Model, ModelUnavailable
from forge.tokenizer import Tokenizer
from forge.trace.records import StepRecord

MAX_UNREAD = 256
"""Records in the journal from which on the engine reads it itself, so that it stays short if nothing else does."""
_NO_LOGITS = np.empty((0, 1), np.float32)
_NO_STEP = LaunchedStep(StepPlan(()), NO_DRAFTS, None, _NO_LOGITS, [], 0.0, 0.0)


class Interruptible(Operation):
    """Guards each change of its owner: if the one before never ended (Ctrl-C, a full memory), entering calls `recover`.

    An engine recovers by rebuilding everything from its sequences' tokens; a step whose tokens were decided stands, any
    other is as if it had never begun. A `UsageError` comes before any change, so it ends an operation like a return.
    Operations do not nest.
    """

    def __init__(self, recover: Callable[[], None]):
        self._recover = WeakMethod(recover)  # its owner has this guard: a cycle would keep arrays alive

    def __enter__(self) -> None:
        if self.unfinished and (recover := self._recover()) is not None:
            recover()
        self.unfinished = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unfinished = kind is not None and not issubclass(kind, UsageError)


class Engine(RequestRegistry):
    """A model, a cache and a scheduler, advanced one step at a time by `step()`.

    Requests are added, aborted, read and forgotten between steps; what that takes, and each attribute that is not set
    here, is `RequestRegistry`'s. Callers in several threads hold `lock`.
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
        new_scheduler: Callable[..., Scheduler] = Scheduler,
    ):
        """scratch: blocks of the storage past the cache's own, for prefill-only requests. speculation: proposes and
        verifies draft tokens; None for no speculation. new_scheduler: makes the scheduler."""
        limits = PromptLimits(model.vocab_size, max_model_len, cache.max_sequence_length, cache.block_size)
        scheduler = new_scheduler(cache, config, scratch, max_logit_rows(model.vocab_size))
        super().__init__(tokenizer, limits, scheduler, RecordBuilder(scheduler, storage.layout.bytes_per_token))
        self.lock = RLock()
        """For callers in several threads; the engine itself never takes it."""
        self.operation = Interruptible(self._recover)
        self.cache = cache
        self.storage = storage
        self.on_logits: list[OnLogits] = []
        """All are called."""
        self.report_probabilities = False
        """Put the model's probability of each token into its record. Over a large vocabulary that takes a while."""
        self.checks_invariants = False
        """Check all rules of the scheduler and the cache after every step. Takes longer than the step."""
        self.waits_for_model = False
        """Without its model, raise `ModelUnavailable` and keep all sequences for the next step: none of them ends."""
        self.model = model
        self.speculation = speculation
        self._batch_builder = BatchBuilder(storage.layout.block_size)
        self._eos_token_ids = tokenizer.eos_token_ids

    @property
    def model(self) -> Model:
        """The model that computes. It may be replaced between two steps, by one of the same sizes."""
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model
        self.scheduler.prefill_only.temporary_bytes = model.temporary_bytes

    @property
    def speculation(self) -> Speculation | None:
        """What proposes and verifies draft tokens; None for no speculation. It may be replaced between two steps."""
        return self._speculation

    @speculation.setter
    def speculation(self, speculation: Speculation | None) -> None:
        self._speculation = speculation
        self.scheduler.draft_slots = DraftSlots(self.cache, speculation) if speculation is not None else None

    # A step

    def step(self) -> StepRecord:
        """Run one step: schedule, build the batch, forward, sample or verify, commit, record.

        Call only while `has_unfinished()`. After any exception it may be called again. Raises AssertionError for a rule
        that does not hold, where `checks_invariants` is set, and `ModelUnavailable` where `waits_for_model` is.

        `_plan` and `_decided` are kept for `fail_step` and `_recover`.
        """
        with self.operation:  # after an interrupted step, everything is first rebuilt from the sequences' tokens
            self._plan, started = None, time.perf_counter()
            try:
                step = self._next_step(started)
                sampling_started = time.perf_counter()
                verify = self._speculation.verify if self._speculation is not None else None
                sampler = Sampler(self._eos_token_ids, verify, self.on_logits, self.report_probabilities)
                results = sampler.sample(step)
                ended = time.perf_counter()
                step.sample_ms = (ended - sampling_started) * 1e3
                self._commit(step, results, ended - started)
            except ModelUnavailable as error:
                if self.waits_for_model:
                    raise
                step, results, ended = _NO_STEP, self._end_all(error), time.perf_counter()
            record = self._records.build(step, results, started, ended)
            self.timeline.journal.append(record)
            if self.checks_invariants:
                self.scheduler.check_invariants()
        if len(self.timeline.journal) > MAX_UNREAD:
            self.timeline.read()
        return record

    def _next_step(self, started: float) -> LaunchedStep:
        """Schedule and launch the step that began at `started`, in seconds on the engine's clock. The `AsyncEngine`
        launches the next one, too."""
        return self._launch(self.scheduler.schedule(), started)

    def _launch(self, plan: StepPlan, started: float) -> LaunchedStep:
        """Carry out a plan up to its logits: propose, build the batch, move blocks, forward."""
        assert plan.items or plan.separate or plan.exhausted, f"nothing can run: {plan.waiting}"
        self._plan = plan
        speculation = self._speculation
        drafts = speculation.propose(plan) if speculation is not None else NO_DRAFTS
        batch = self._batch_builder.build(plan.items, drafts.proposals) if plan.items else None
        if plan.copies or plan.swap_outs or plan.swap_ins:
            self.scheduler.host_pool.move(self.storage, plan.swap_outs, plan.copies, plan.swap_ins)
        forward_started = time.perf_counter()
        logits = self._model.forward(batch, self.storage) if batch is not None else _NO_LOGITS
        separate = run_separate_forwards(plan.separate, self._model, self.storage) if plan.separate else []
        schedule_ms, forward_ms = (forward_started - started) * 1e3, (time.perf_counter() - forward_started) * 1e3
        return LaunchedStep(plan, drafts, batch, logits, separate, schedule_ms - drafts.total_ms, forward_ms)

    def _commit(self, step: LaunchedStep, results: StepResults, seconds: float) -> None:
        """Commit a step: append its tokens to their sequences, and its keys and values to the cache. seconds: what it
        took until its tokens were known."""
        self._decided = results.outcomes  # from here on the step has happened
        if self._speculation is not None:
            self._speculation.learn(step, results, seconds)
        if copies := self.scheduler.commit(step.plan, results.outcomes):
            self.storage.copy_blocks(copies)
        self._decided = ()
        for finish in results.finished:
            self._drop_state(finish.seq_id)

    def _drop_state(self, seq_id: int) -> None:
        self._batch_builder.forget(seq_id)
        if self._speculation is not None:
            self._speculation.forget(seq_id)
