"""The loop: plan a step, run it, choose tokens, take the results. One loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ choose ─▶ commit() ─▶ StepRecord
                     └▶ propose() ─┘                                 (or verify)

The engine prints nothing and knows no view. Whoever wants to see what happens reads the `StepRecord` that each step
returns.

A step happens whole or not at all. The moment the last of its tokens is chosen they are noted down in one assignment;
before that an exception (Ctrl-C, a full memory) undoes the step, after it the tokens are taken. Either way the next
call begins again from the tokens alone, with an empty cache: what was computed can be computed again, as after a
preemption, and nothing half-done has to be understood.

The model is lent to the engine. Once its lease is revoked the next step ends every sequence with that error.
"""

import secrets
import time
from collections.abc import Sequence as Items
from itertools import count

from forge.backends.logits import greatest
from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import KvStorage
from forge.engine.accounts import Accounts, Work
from forge.engine.answers import OneShotResult
from forge.engine.choosing import Choices, OnLogits
from forge.engine.generations import Generation, PromptLimits
from forge.engine.lookahead import Flight, plan_ahead, without_ended
from forge.engine.oneshot import OneShotRequest, OneShotTask
from forge.engine.oneshot_requests import OneShotRequests
from forge.engine.output_text import OutputText
from forge.engine.outputs import RequestOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.row_layout import RowLayout
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, StepPlan
from forge.engine.step_records import cache_record, item_records, map_of_written
from forge.errors import UsageError
from forge.model.qwen3 import Model
from forge.speculation.leases import Lease, LeaseRevoked
from forge.speculation.speculator import Learned, Speculator, Spent
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import ArriveRecord, FinishReason, FinishRecord, RejectRecord, StepRecord

_NEXT_TOKEN = OneShotTask(sample=True)


class Engine:
    """A model, a cache and a scheduler, turned one step at a time by `step()`."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        cache: KvCache,
        storage: KvStorage,
        max_model_len: int,
        config: SchedulerConfig,
        scratch: range = range(0),
        speculation: Speculator | None = None,
    ):
        """`scratch`: blocks of the storage past the cache's own, for requests that keep nothing. `speculation`: who
        guesses, and how many tokens; None for nobody."""
        self.lease = Lease("target", model)
        self.tokenizer = tokenizer
        self._eos_token_ids = tokenizer.eos_token_ids
        self.cache = cache
        self.storage = storage
        self.scheduler = Scheduler(cache, config, scratch, self._bytes_of)
        self.speculation = speculation or Speculator()
        self.scheduler.guess_room.wanted = self.speculation.wanted
        self.scheduler.guess_room.wanted_forks = self.speculation.wanted_forks
        self.on_logits: OnLogits | None = None
        self.report_probabilities = False
        """Put the model's probability of each token into its record. Over a large vocabulary that takes a while."""
        self._limits = PromptLimits(model.vocab_size, max_model_len, cache.max_sequence_length, cache.block_size)
        self._requests: dict[str, Generation] = {}
        self._oneshots = OneShotRequests(model.vocab_size, storage, tokenizer)
        self._work = Accounts()
        self._rows = RowLayout(storage.layout.block_size)
        self._sequence_ids = count()
        self._steps = 0
        self._rejected: list[RejectRecord] = []
        self._arrived: list[ArriveRecord] = []
        self._unsettled = False
        """A step or an abort ended in an exception, and nobody has cleared up after it yet."""
        self._decided: tuple[list[Outcome], Learned] | None = None
        """What has come of the step whose tokens are chosen and not yet committed."""
        self._plan: StepPlan | None = None
        """Of the step that was begun last, once it was decided."""
        self._runs_ahead = model.runs_ahead
        self._ahead: Flight | None = None
        """The next step, where it was launched before this one was read."""
        self._in_vain = 0
        """Rows computed for sequences that had ended, which no record has told of yet."""

    @property
    def model(self) -> Model:
        """Raises `LeaseRevoked` once it has been taken back."""
        return self.lease.lent

    @property
    def report_blocks(self) -> bool:
        """Whether records have a `BlockMap`."""
        return self.scheduler.keep_block_map

    @report_blocks.setter
    def report_blocks(self, wanted: bool) -> None:
        self.scheduler.keep_block_map = wanted

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        salt: str = "",
        keep_cache: bool = False,
        continues: int | None = None,
        drafts: tuple[str, ...] | None = None,
    ) -> tuple[int, ...]:
        """Queue a request; return the ids of its `params.n` sequences.

        `priority`: lower is served first, where the scheduler's order is by priority. `salt`: requests with different
        salts share nothing in the cache. `keep_cache` leaves the cache in place when it ends, and `continues` names
        such an ended sequence, whose id and cache are taken over; it needs `params.n` to be 1. `drafts`: the names of
        the proposers that guess for it, None for all. Raises `UsageError`, with nothing changed, for a prompt that
        cannot run, and `LeaseRevoked` when the model is gone.
        """
        assert continues is None or params.n == 1, "one cache can be continued once"
        token_ids = self._checked(request_id, prompt_token_ids, params)
        room = self._limits.longest - len(token_ids) + 1  # the last output token is never computed: it needs no slot
        if self._keeps_nothing(params, room) and not keep_cache and continues is None:
            task = _NEXT_TOKEN
            if params.prompt_logprobs is not None:
                task = OneShotTask(params.max_tokens > 0, score_from=1, top=params.prompt_logprobs)
            return (self._queue_oneshot(request_id, token_ids, task, params, prompt, salt),)
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        prompt_logprobs: list = []
        first, *others = (
            Sequence(
                seq_id=next(self._sequence_ids) if continues is None else continues,
                request_id=request_id,
                sample_index=index,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                max_output_tokens=min(params.max_tokens, room),
                params=params,
                seed=seed,
                output_text=self._new_text(params),
                priority=priority,
                salt=salt,
                keep_cache=keep_cache,
                continues=continues,
                drafts=drafts,
                prompt_logprobs=prompt_logprobs,
            )
            for index in range(params.n)
        )
        first.forks = others
        generation = self._requests[request_id] = Generation(request_id, prompt, seed, (first, *others))
        seq_ids, now = generation.seq_ids, time.perf_counter()
        for seq_id in seq_ids:
            self._work[seq_id] = Work(now)
        self.scheduler.add(first)
        self._arrived.append(ArriveRecord(request_id, seq_ids, len(token_ids), first.max_output_tokens, now, priority))
        return seq_ids

    def add_oneshot(
        self,
        request_id: str,
        prompt_token_ids: Items[int],
        task: OneShotTask,
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        salt: str = "",
    ) -> int:
        """Queue a request that wants one answer and keeps nothing; its answer is `result(request_id)`.

        Raises as `add_request` does.
        """
        params = params or SamplingParams()
        token_ids = self._checked(request_id, prompt_token_ids, params, task)
        return self._queue_oneshot(request_id, token_ids, task, params, prompt, salt)

    def _checked(
        self, request_id: str, prompt_token_ids: Items[int], params: SamplingParams, task: OneShotTask = _NEXT_TOKEN
    ) -> list[int]:
        """The prompt's tokens, if all that is asked for can be done. A refusal goes into the next step's record."""
        self.lease.check()
        try:
            token_ids = self._limits.checked(prompt_token_ids)
            self._limits.check_bias(params)
            self._limits.check_ids(task.candidates)
            if task.pooling is not None and not self.model.embeds:
                raise UsageError("this model has no hidden states: take a real one for embeddings")
            if request_id in self._requests or request_id in self._oneshots:
                raise UsageError(f"request {request_id!r} is already running")
        except UsageError as error:
            self._rejected.append(RejectRecord(request_id, str(error)))
            raise
        return token_ids

    def _keeps_nothing(self, params: SamplingParams, room: int) -> bool:
        """Whether a generation ends with its first token at the latest, and there are blocks to compute it in."""
        few = params.n == 1 and min(params.max_tokens, room) <= 1
        return few and self.scheduler.config.oneshot and len(self.scheduler.scratch) > 0

    def _queue_oneshot(
        self,
        request_id: str,
        token_ids: list[int],
        task: OneShotTask,
        params: SamplingParams,
        prompt: str | None,
        salt: str,
    ) -> int:
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        seq_id, now = next(self._sequence_ids), time.perf_counter()
        request = OneShotRequest(seq_id, request_id, tuple(token_ids), task, params, seed, salt, prompt, now)
        self._oneshots.add(request)
        self.scheduler.oneshots.add(request)
        self._arrived.append(ArriveRecord(request_id, (seq_id,), len(token_ids), int(task.sample), now))
        return seq_id

    def has_unfinished(self) -> bool:
        self._settle()
        return self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """Whether any sequence of a request has yet to end."""
        self._settle()
        if request_id in self._oneshots:
            return self._oneshots.is_unfinished(request_id)
        return self._requests[request_id].is_unfinished

    def output(self, request_id: str) -> RequestOutput:
        """A request's output as it stands."""
        self._settle()
        if request_id in self._oneshots:
            return self._oneshots.output(request_id)
        return self._requests[request_id].output(self._work)

    def result(self, request_id: str) -> OneShotResult | None:
        """The answer to a request that keeps nothing; None if it has none, because it goes on or was aborted."""
        self._settle()
        return self._oneshots.result(request_id)

    def abort(self, request_id: str) -> None:
        """End a request's unfinished sequences, keeping what they produced."""
        self._end(request_id, "abort")

    def fail(self, request_id: str) -> None:
        """End a request's unfinished sequences as `error`: something went wrong with it that others need not suffer."""
        self._end(request_id, "error")

    def fail_step(self) -> tuple[str, ...]:
        """After an exception from `step`: end the requests that took part in that step as `error`, so that all others
        can go on. Which those are; all that have not ended, if the step failed before it was decided who takes part."""
        if self._plan is None:
            seq_ids = {one.seq_id for one in (*self.scheduler.unfinished(), *self.scheduler.oneshots.requests())}
        else:
            seq_ids = {item.seq_id for item in (*self._plan.items, *[one.item for one in self._plan.oneshots])}
        failed = [name for name, known in self._requests.items() if not seq_ids.isdisjoint(known.seq_ids)]
        failed += self._oneshots.among(seq_ids)
        for request_id in failed:
            self.fail(request_id)
        return tuple(failed)

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request whose sequences have all ended."""
        if request_id in self._oneshots:
            self._oneshots.forget(request_id)
            return
        assert not self._requests[request_id].is_unfinished, "it is still running"
        for sequence in self._requests.pop(request_id).sequences:
            self._work.pop(sequence.seq_id, None)
            self._forget(sequence.seq_id)

    def is_kept(self, seq_id: int) -> bool:
        """Whether an ended sequence's cache is there to be continued. It may be given up when others need the room."""
        return seq_id in self.scheduler.kept

    def release(self, seq_id: int) -> None:
        """Give up the cache of an ended sequence, if it is still kept."""
        self.scheduler.release(seq_id)

    # A step

    def step(self) -> StepRecord:
        """Run one step. Call only while `has_unfinished()`; after an exception from it, whatever it was, too."""
        self._settle()
        try:
            try:
                return self._run_step()
            except LeaseRevoked as error:
                self._unsettled = True
                self._settle()
                return self._end_all(str(error))
        except BaseException:
            self._unsettled = True
            raise

    def _run_step(self) -> StepRecord:
        started = time.perf_counter()
        flight, self._plan = self._ahead, None
        if flight is not None:
            self.lease.check()
        self._plan = flight.plan if flight is not None else self.scheduler.schedule()
        flight = flight or self._launch(self._plan, started)
        self._ahead = self._look_ahead(flight)
        waited = time.perf_counter()
        likeliest, tops = greatest(flight.logits) if flight.plan.items and len(flight.logits) else ([], [])
        read = time.perf_counter() if self._runs_ahead else waited  # a device had to be waited for
        forward_ms = flight.launch_ms + (read - waited) * 1e3
        choices = Choices(self.scheduler, self._eos_token_ids, self.on_logits, self.report_probabilities)
        choices.choose(flight.plan, flight.guesses, flight.logits, likeliest, tops)
        answers = flight.answers | self._oneshots.answer(
            flight.joining, flight.logits, self.on_logits, self.report_probabilities
        )
        ended = time.perf_counter()
        plan, guesses, batch = flight.plan, flight.guesses, flight.batch
        running = self.scheduler.running
        if plan.ahead:
            plan = without_ended(plan, running)
            self._in_vain += len(flight.plan.items) - len(plan.items)
        items = item_records(plan.items, guesses.runs)
        num_rows = batch.num_rows if batch is not None else 0
        spent = Spent(num_rows, forward_ms, (ended - started) * 1e3 - guesses.total_ms)
        learned = self.speculation.learn(plan, guesses, choices.verified, choices.outcomes, running, spent)
        self._decided = choices.outcomes, learned  # from here on the step has happened
        self._work.enter(plan, items, choices.tokens, forward_ms, started, ended)
        answered = self._oneshots.end(plan.oneshots, answers, forward_ms, started, ended)
        for finish in answered.finished:
            if finish.error is not None and self.cache.knows(finish.seq_id):
                self.cache.remove(finish.seq_id)  # what a broken forward wrote must not serve anybody else
        self.speculation.take(learned)
        self.storage.copy_blocks(self.scheduler.commit(plan, choices.outcomes))
        self._decided = None
        for finish in choices.finished:
            self._forget(finish.seq_id)
        self._drop_empty_flight()
        return self._record(
            items=(*items, *item_records([one.item for one in plan.oneshots])),
            tokens=(*choices.tokens, *answered.tokens),
            finished=(*choices.finished, *answered.finished),
            schedule_ms=flight.schedule_ms,
            forward_ms=forward_ms,
            sample_ms=(ended - read) * 1e3,
            started=started,
            ended=ended,
            execution_class=plan.execution_class,
            admitted=plan.admitted,
            waiting=plan.waiting,
            preempted=plan.preempted,
            block_table_entries=sum([len(item.block_table) for item in plan.items]),
            temporary_bytes=self._bytes_of(batch.num_rows, len(batch.logit_rows)) if batch is not None else 0,
            events=self.cache.take_events(),
            blocks=map_of_written(self.scheduler.block_map, batch, self.cache.block_size),
            cycles=learned.cycles,
            execution=getattr(flight.logits, "execution", None),
            planned_ahead=plan.ahead,
        )

    def _look_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step after one that is under way, if what it is follows from that one alone (`lookahead`)."""
        watched = self.on_logits is not None or self.report_probabilities
        if not self._runs_ahead or watched or self.speculation.proposers or self.lease.revoked:
            return None
        started = time.perf_counter()
        plan = plan_ahead(self.scheduler, flight.plan)
        return None if plan is None else self._launch(plan, started)

    def _drop_empty_flight(self) -> None:
        """Nothing comes of a step in flight all of whose sequences have ended."""
        if self._ahead is not None and not self._ahead.has_any_of(self.scheduler.running):
            self._in_vain += len(self._ahead.plan.items)
            self._ahead = None

    def _launch(self, plan: StepPlan, started: float) -> Flight:
        """Begin to carry out a plan that was begun at `started`: guess, move blocks, and start the forward pass."""
        assert plan.items or plan.oneshots or plan.exhausted, f"nothing can run: {plan.waiting}"
        running = self.scheduler.running
        guesses = self.speculation.propose(plan, running)
        for seq_id, failure in guesses.failures.items():
            running[seq_id].note(failure.message)
        joining = self._oneshots.joining(plan.oneshots)
        batch = self._rows.batch(plan, running, guesses.runs, joining) if plan.items or joining else None
        self._move_blocks(plan)
        launched = time.perf_counter()
        with self.lease.use() as model:  # raises `LeaseRevoked` if it was taken back before; from here on it cannot be
            logits = model.forward(batch, self.storage) if batch is not None else None
            answers = self._oneshots.run_apart(plan.oneshots, model, self.on_logits, self.report_probabilities)
        launch_ms = (time.perf_counter() - launched) * 1e3
        schedule_ms = (launched - started) * 1e3 - guesses.total_ms
        return Flight(plan, guesses, joining, batch, logits, answers, schedule_ms, launch_ms)

    def _move_blocks(self, plan: StepPlan) -> None:
        """Carry out what a plan moves before it writes: nothing is overwritten before it has been read."""
        storage, host = self.storage, self.scheduler.host
        for swap in plan.swap_outs:
            host.fill(swap.seq_id, storage.read_blocks(swap.blocks))
        if plan.copies:
            storage.copy_blocks(plan.copies)
        for swap in plan.swap_ins:
            storage.write_blocks(swap.blocks, host.data(swap.seq_id))

    def _record(self, **fields) -> StepRecord:
        """A step's record: what it did, and where everything is now."""
        self._steps += 1
        rejected, self._rejected = tuple(self._rejected), []
        arrived, self._arrived = tuple(self._arrived), []
        discarded, self._in_vain = self._in_vain, 0
        return StepRecord(
            step=self._steps,
            cache=cache_record(self.cache.kind, self.storage.layout, self.scheduler.stats),
            queues=self.scheduler.queues,
            rejected=rejected,
            arrived=arrived,
            discarded=discarded,
            **fields,
        )

    def _bytes_of(self, num_rows: int, num_logit_rows: int) -> int:
        """About what a forward of so many rows needs for itself."""
        return 0 if self.lease.revoked else self.lease.lent.temporary_bytes(num_rows, num_logit_rows)

    # The end of requests, and of mishaps

    def _end_all(self, error: str) -> StepRecord:
        """The model is gone: every sequence ends, with what it has."""
        started = time.perf_counter()
        sequences = reversed(list(self.scheduler.unfinished()))  # forks before those whose prompt they share
        finished = [self._end_sequence(sequence, "error", error) for sequence in sequences]
        for request in list(self.scheduler.oneshots.requests()):
            finished.append(self._oneshots.abort(request.request_id, "error", self.scheduler, error))
        times = {"schedule_ms": 0.0, "forward_ms": 0.0, "sample_ms": 0.0, "started": started}
        return self._record(items=(), tokens=(), finished=tuple(finished), ended=time.perf_counter(), **times)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self._settle()
        try:
            if request_id in self._oneshots:
                self._oneshots.abort(request_id, reason, self.scheduler)
                return
            for sequence in reversed(self._requests[request_id].sequences):  # forks before their parents
                self._end_sequence(sequence, reason)
        except BaseException:
            self._unsettled = True
            raise

    def _end_sequence(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> FinishRecord:
        """End a sequence between steps, wherever it is, if it has not ended."""
        if error is not None:
            sequence.note(error)
        self.scheduler.abort(sequence.seq_id, reason)
        self._drop_empty_flight()
        text = sequence.output_text.finish()
        self._forget(sequence.seq_id)
        return FinishRecord(sequence.seq_id, reason, text, error=error)

    def _forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._rows.forget(seq_id)
        self.speculation.forget(seq_id)

    def _settle(self) -> None:
        """After an exception: take the tokens of a step if they were chosen, and begin again from the tokens.

        Does nothing where there was none. May itself be interrupted and called again.
        """
        if not self._unsettled:
            return
        self._ahead = None
        outcomes, learned = self._decided or ((), Learned())
        self.scheduler.recover(outcomes)
        self.speculation.take(learned)
        self._oneshots.drop_ended(self.scheduler)
        for sequence in self.scheduler.unfinished():
            self._forget_undecided(sequence)
        self.cache.take_events()
        self._decided = None
        self._unsettled = False

    def _forget_undecided(self, sequence: Sequence) -> None:
        """Make a sequence's text and log probabilities those of its tokens again."""
        del sequence.logprobs[sequence.num_output_tokens :]
        output_text = self._new_text(sequence.params)
        for token_id in sequence.output_token_ids:
            output_text.push(token_id)
        sequence.output_text = output_text

    def _new_text(self, params: SamplingParams) -> OutputText:
        return OutputText(StreamingDetokenizer(self.tokenizer), params.stop)
