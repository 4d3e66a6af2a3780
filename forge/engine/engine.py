"""The loop: plan a step, run it, choose tokens, take the results. One loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ choose ─▶ commit() ─▶ StepRecord
                     └▶ propose() ─┘                                 (or verify)

The engine prints nothing and knows no view. Whoever wants to see what happens reads the `StepRecord` that each step
returns.

A step happens whole or not at all. The moment the last of its tokens is chosen they are noted down in one assignment;
before that an exception (Ctrl-C, a full memory, logits that are no numbers) undoes the step, after it the tokens are
taken. Either way the next call begins again from the tokens alone, with an empty cache: what was computed can be
computed again, as after a preemption, and nothing half-done has to be understood.

The model is lent to the engine. Once its lease is revoked the next step ends every sequence with that error.
"""

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import count
from operator import index

import numpy as np

from forge.backends.logits import greatest
from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import KvStorage
from forge.engine.answers import OneShotResult
from forge.engine.oneshot import OneShotRequest, OneShotTask
from forge.engine.oneshot_requests import OneShotRequests
from forge.engine.output_text import OutputText
from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.row_layout import RowLayout, Runs
from forge.engine.sampling import Choice, check_greatest, check_logits, choose, log_sum_exp, top_logprobs
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Outcome, Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem, StepPlan
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch
from forge.model.qwen3 import Model
from forge.speculation.leases import Lease, LeaseRevoked
from forge.speculation.speculator import Learned, Speculator, Spent, StepGuesses
from forge.speculation.verification import Verification, verify_forks, verify_likeliest
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import (
    ArriveRecord,
    BlockMap,
    CacheRecord,
    FinishReason,
    FinishRecord,
    ItemRecord,
    RejectRecord,
    RequestMetrics,
    StepRecord,
    TokenRecord,
)

_NEXT_TOKEN = OneShotTask(sample=True)


@dataclass
class _Work:
    """What a sequence has cost so far; becomes its `RequestMetrics`."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    forward_ms: list[float] = field(default_factory=list)
    forward_tokens: list[int] = field(default_factory=list)
    tokens_cached: int = 0
    tokens_recomputed: int = 0
    tokens_lost: int = 0
    """By its last preemption, while it waits: when it begins again the cache may still have some of them."""

    def metrics(self, sequence: Sequence) -> RequestMetrics:
        return RequestMetrics(
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            self.arrived,
            self.first_token,
            self.last_token,
            tuple(self.forward_ms),
            tuple(self.forward_tokens),
            self.admitted,
            sequence.times_preempted,
            self.tokens_recomputed,
            self.tokens_cached,
        )


@dataclass(frozen=True)
class _Request:
    request_id: str
    prompt: str | None
    seed: int
    sequences: tuple[Sequence, ...]


class _Choices:
    """What a step brings its sequences, as it is being chosen."""

    def __init__(self):
        self.tokens: list[TokenRecord] = []
        self.finished: list[FinishRecord] = []
        self.outcomes: list[Outcome] = []
        self.verified: dict[int, Verification] = {}


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
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(cache, config, scratch, self._bytes_of)
        self.speculation = speculation or Speculator()
        self.scheduler.wanted_guesses = self.speculation.wanted
        self.scheduler.wanted_forks = self.speculation.wanted_forks
        self.on_logits: Callable[[int, np.ndarray], None] | None = None
        """Called with (sequence id, logits float32 `[vocab]`) before each choice. The array is the caller's to keep."""
        self.report_probabilities = False
        """Put the model's probability of each token into its record. Over a large vocabulary that takes a while."""
        self._requests: dict[str, _Request] = {}
        self._oneshots = OneShotRequests(model.vocab_size, storage, tokenizer)
        self._work: dict[int, _Work] = {}
        self._sequence_ids = count()
        self._steps = 0
        self._rejected: list[RejectRecord] = []
        self._arrived: list[ArriveRecord] = []
        self._unsettled = False
        """A step or an abort ended in an exception, and nobody has cleared up after it yet."""
        self._decided: tuple[list[Outcome], Learned] | None = None
        """What has come of the step whose tokens are chosen and not yet committed."""
        self._rows = RowLayout(storage.layout.block_size)

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
        try:
            token_ids = self._checked_prompt(prompt_token_ids)
            self._check_bias(params)
            self._check_unused(request_id)
        except UsageError as error:
            self._rejected.append(RejectRecord(request_id, str(error)))
            raise
        room = self._longest_sequence - len(token_ids) + 1  # the last output token is never computed: it needs no slot
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
        self._requests[request_id] = _Request(request_id, prompt, seed, (first, *others))
        now = time.perf_counter()
        for sequence in (first, *others):
            self._work[sequence.seq_id] = _Work(now)
        self.scheduler.add(first)
        seq_ids = tuple(sequence.seq_id for sequence in (first, *others))
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

        Raises `UsageError`, with nothing changed, for a prompt that cannot run.
        """
        try:
            token_ids = self._checked_prompt(prompt_token_ids)
            self._check_unused(request_id)
            if task.pooling is not None and not self.model.embeds:
                raise UsageError("this model has no hidden states: take a real one for embeddings")
            for token_id in task.candidates:
                if not 0 <= token_id < self.model.vocab_size:
                    raise UsageError(f"token id {token_id} is outside the vocabulary of {self.model.vocab_size} tokens")
        except UsageError as error:
            self._rejected.append(RejectRecord(request_id, str(error)))
            raise
        return self._queue_oneshot(request_id, token_ids, task, params or SamplingParams(), prompt, salt)

    def result(self, request_id: str) -> OneShotResult | None:
        """The answer to a request that keeps nothing; None if it has none, because it goes on or was aborted."""
        self._settle()
        return self._oneshots.result(request_id)

    def has_unfinished(self) -> bool:
        self._settle()
        return self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """Whether any sequence of a request has yet to end."""
        self._settle()
        if request_id in self._oneshots:
            return self._oneshots.is_unfinished(request_id)
        return any(sequence.finish_reason is None for sequence in self._requests[request_id].sequences)

    def step(self) -> StepRecord:
        """Run one step. Call only while `has_unfinished()`; after an exception from it, whatever it was, too."""
        self._settle()
        try:
            return self._step()
        except BaseException:
            self._unsettled = True
            raise

    def _step(self) -> StepRecord:
        try:
            return self._run_step()
        except LeaseRevoked as error:
            self._unsettled = True
            self._settle()
            return self._end_all(str(error))

    def _run_step(self) -> StepRecord:
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan.items or plan.oneshots or plan.exhausted, f"nothing can run: {plan.waiting}"
        running = self.scheduler.running
        guesses = self.speculation.propose(plan, running)
        for seq_id, failure in guesses.failures.items():
            running[seq_id].note(failure.message)
        joining = self._oneshots.joining(plan.oneshots)
        batch = self._rows.batch(plan, running, guesses.runs, joining) if plan.items or joining else None
        self._move_blocks(plan)
        scheduled = time.perf_counter()
        with self.lease.use() as model:  # raises `LeaseRevoked` if it was taken back before; from here on it cannot be
            logits = model.forward(batch, self.storage) if batch is not None else None
            answers = self._oneshots.run_apart(plan.oneshots, model, self.on_logits, self.report_probabilities)
        computed = time.perf_counter()
        forward_ms = (computed - scheduled) * 1e3
        choices = self._choose(plan, guesses, logits)
        answers |= self._oneshots.answer(joining, logits, self.on_logits, self.report_probabilities)
        ended_at = time.perf_counter()
        num_rows = batch.num_rows if batch is not None else 0
        spent = Spent(num_rows, forward_ms, (ended_at - started) * 1e3 - guesses.total_ms)
        learned = self.speculation.learn(plan, guesses, choices.verified, choices.outcomes, running, spent)
        self._decided = choices.outcomes, learned  # from here on the step has happened
        self._account(plan, guesses, forward_ms, started, choices, ended_at)
        answered = self._oneshots.end(plan.oneshots, answers, forward_ms, started, ended_at)
        self.speculation.take(learned)
        self.storage.copy_blocks(self.scheduler.commit(plan, choices.outcomes))
        self._decided = None
        for finish in choices.finished:
            self.speculation.forget(finish.seq_id)
        self._steps += 1
        rejected, self._rejected = tuple(self._rejected), []
        arrived, self._arrived = tuple(self._arrived), []
        return StepRecord(
            step=self._steps,
            items=tuple(
                [_item_record(item, guesses) for item in plan.items] + [_item_record(one.item) for one in plan.oneshots]
            ),
            tokens=(*choices.tokens, *answered.tokens),
            finished=(*choices.finished, *answered.finished),
            cache=self._cache_record(),
            schedule_ms=(scheduled - started) * 1e3 - guesses.total_ms,
            forward_ms=forward_ms,
            sample_ms=(ended_at - computed) * 1e3,
            started=started,
            ended=ended_at,
            execution_class=plan.execution_class,
            queues=self.scheduler.queues,
            admitted=plan.admitted,
            waiting=plan.waiting,
            preempted=plan.preempted,
            rejected=rejected,
            arrived=arrived,
            block_table_entries=sum([len(item.block_table) for item in plan.items]),
            temporary_bytes=self._bytes_of(batch.num_rows, len(batch.logit_rows)) if batch is not None else 0,
            events=self.cache.take_events(),
            blocks=self._block_map(batch),
            cycles=learned.cycles,
            execution=getattr(logits, "execution", None),
        )

    def _end_all(self, error: str) -> StepRecord:
        """The model is gone: every sequence ends, with what it has."""
        started = time.perf_counter()
        finished = []
        for sequence in reversed(list(self.scheduler.unfinished())):  # forks before those whose prompt they share
            finished.append(self._end_sequence(sequence, "error", error))
        for request in list(self.scheduler.oneshots.requests()):
            finished.append(self._oneshots.abort(request.request_id, "error", self.scheduler))
        self._steps += 1
        rejected, self._rejected = tuple(self._rejected), []
        return StepRecord(
            step=self._steps,
            items=(),
            tokens=(),
            finished=tuple(finished),
            cache=self._cache_record(),
            schedule_ms=0.0,
            forward_ms=0.0,
            sample_ms=0.0,
            started=started,
            ended=time.perf_counter(),
            queues=self.scheduler.queues,
            rejected=rejected,
        )

    def abort(self, request_id: str) -> None:
        """End a request's unfinished sequences, keeping what they produced."""
        self._end(request_id, "abort")

    def fail(self, request_id: str) -> None:
        """End a request's unfinished sequences as `error`: something went wrong with it that others need not suffer."""
        self._end(request_id, "error")

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
        text = sequence.output_text.finish()
        self._rows.forget(sequence.seq_id)
        self.speculation.forget(sequence.seq_id)
        return FinishRecord(sequence.seq_id, reason, text, error=error)

    def release(self, seq_id: int) -> None:
        """Give up the cache of an ended sequence, if it is still kept."""
        self.scheduler.release(seq_id)

    def is_kept(self, seq_id: int) -> bool:
        """Whether an ended sequence's cache is there to be continued. It may be given up when others need the room."""
        return seq_id in self.scheduler.kept

    def output(self, request_id: str) -> RequestOutput:
        """A request's output as it stands."""
        self._settle()
        if request_id in self._oneshots:
            return self._oneshots.output(request_id)
        request = self._requests[request_id]
        first = request.sequences[0]
        return RequestOutput(
            request_id,
            request.prompt,
            tuple(first.token_ids[: first.num_prompt_tokens]),
            tuple(self._completion(sequence) for sequence in request.sequences),
            tuple(first.prompt_logprobs) if first.params.prompt_logprobs is not None else None,
            request.seed,
        )

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a request whose sequences have all ended."""
        if request_id in self._oneshots:
            self._oneshots.forget(request_id)
            return
        sequences = self._requests[request_id].sequences
        assert all(sequence.finish_reason is not None for sequence in sequences), "it is still running"
        del self._requests[request_id]
        for sequence in sequences:
            self._work.pop(sequence.seq_id, None)
            self.speculation.forget(sequence.seq_id)

    @property
    def _longest_sequence(self) -> int:
        """Tokens that the context and the cache have room for."""
        return min(self.max_model_len, self.cache.max_sequence_length)

    def _cache_record(self) -> CacheRecord:
        stats, layout = self.scheduler.stats, self.storage.layout
        return CacheRecord(
            self.cache.kind,
            layout.block_size,
            stats.num_blocks,
            stats.used_blocks,
            stats.tokens_held,
            stats.tokens_held * layout.bytes_per_token,
            stats.used_blocks * layout.block_size * layout.bytes_per_token,
            stats.cached_blocks,
            stats.slots_reserved,
            stats.slots_filled,
            stats.blocks_saved,
            stats.prefix_queries,
            stats.prefix_hits,
            stats.splits,
            stats.evictions,
        )

    def _block_map(self, batch: ForwardBatch | None) -> BlockMap | None:
        """Where every block is, and which ones the step wrote, where somebody wants to know."""
        block_map = self.scheduler.block_map
        if block_map is None or batch is None:
            return block_map
        written = np.unique(batch.slot_mapping // self.storage.layout.block_size)
        return replace(block_map, written=tuple(written[written >= 0].tolist()))

    def _move_blocks(self, plan: StepPlan) -> None:
        """Carry out what a plan moves before it writes: nothing is overwritten before it has been read."""
        storage, host = self.storage, self.scheduler.host
        for swap in plan.swap_outs:
            host.fill(swap.seq_id, storage.read_blocks(swap.blocks))
        if plan.copies:
            storage.copy_blocks(plan.copies)
        for swap in plan.swap_ins:
            storage.write_blocks(swap.blocks, host.data(swap.seq_id))

    def _settle(self) -> None:
        """After an exception: take the tokens of a step if they were chosen, and begin again from the tokens.

        Does nothing where there was none. May itself be interrupted and called again.
        """
        if not self._unsettled:
            return
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

    def _checked_prompt(self, prompt_token_ids: Items[int]) -> list[int]:
        try:
            token_ids = list(map(index, prompt_token_ids))
        except TypeError:
            raise UsageError("a prompt is text or a list of token ids, which are whole numbers") from None
        if not token_ids:
            raise UsageError(
                "the prompt is empty: a model continues text, and this one has no beginning-of-text token to "
                "start from, so give it at least one word"
            )
        size = self.model.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise UsageError(f"token id {wrong} is outside the vocabulary of {size} tokens")
        if len(token_ids) > self.max_model_len:
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens and the context holds {self.max_model_len}: shorten the "
                "prompt, or raise --max-model-len where the model allows it"
            )
        if len(token_ids) > self.cache.max_sequence_length:
            size = self.cache.block_size
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens, which take {-(-len(token_ids) // size)} blocks of {size}, "
                f"and the whole pool has {self.cache.max_sequence_length // size}: shorten it, or raise --num-blocks"
            )
        return token_ids

    def _keeps_nothing(self, params: SamplingParams, room: int) -> bool:
        """Whether a generation ends with its first token at the latest, and there are blocks to compute it in."""
        few = params.n == 1 and min(params.max_tokens, room) <= 1
        return few and self.scheduler.config.oneshot and len(self.scheduler.scratch) > 0

    def _check_bias(self, params: SamplingParams) -> None:
        for token_id, _ in params.logit_bias[-1:]:  # they ascend
            if token_id >= self.model.vocab_size:
                raise UsageError(
                    f"logit_bias: token id {token_id} is outside the vocabulary of {self.model.vocab_size}"
                )

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._requests or request_id in self._oneshots:
            raise UsageError(f"request {request_id!r} is already running")

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

    def _bytes_of(self, num_rows: int, num_logit_rows: int) -> int:
        """About what a forward of so many rows needs for itself."""
        return 0 if self.lease.revoked else self.lease.lent.temporary_bytes(num_rows, num_logit_rows)

    def _choose(self, plan: StepPlan, guesses: StepGuesses, logits: np.ndarray | None) -> _Choices:
        """Choose the next tokens of every item that samples. `logits` has the rows of all items, in order."""
        choices = _Choices()
        likeliest, tops = greatest(logits) if plan.items and len(logits) else ([], [])
        first_row = 0
        for item in plan.items:
            last_row = first_row + len(item.logit_rows) - item.num_guesses - 1  # that of the last known token
            sequence = self.scheduler.running[item.seq_id]
            if sequence.needs_prompt_logprobs:
                self._score_prompt(sequence, item.start + item.logit_rows.start, logits[first_row : last_row + 1])
            runs = guesses.runs.get(item.seq_id, ()) if item.num_guesses else ()
            first_row = last_row + 1
            if runs:
                first_row = last_row + sum([len(run) + 1 for run in runs])
                choices.outcomes.append(self._verified(item, runs, last_row, logits, likeliest, choices))
            elif item.samples:
                row = logits, last_row, likeliest[last_row], tops[last_row]
                forked = [self._outcome(fork, *row, choices) for fork in sequence.forks]
                outcome = self._outcome(sequence, *row, choices)
                choices.outcomes.append(outcome._replace(forked=tuple(forked)) if forked else outcome)
            elif item.remaining:
                choices.outcomes.append(Outcome(item.seq_id, len(sequence.token_ids), (), None))
            else:
                choices.outcomes.append(self._ended(sequence, "length", None, choices))
        for seq_id in plan.exhausted:
            choices.outcomes.append(self._ended(self.scheduler.find(seq_id), "length", None, choices))
        return choices

    def _outcome(
        self, sequence: Sequence, logits: np.ndarray, row: int, likeliest: int, greatest: float, choices: _Choices
    ) -> Outcome:
        """Choose a sequence's next token from row `row`, whose greatest logit is `greatest`, at token `likeliest`."""
        plain = self._is_plain(sequence)
        own = None if plain and self.on_logits is None else logits[row]
        if plain:
            check_greatest(greatest)
            choice = likeliest, None, None  # a `Choice` in all but name: making one takes as long as all the rest
        else:
            choice = choose(
                own,
                sequence.params,
                sequence.token_ids,
                sequence.seed,
                sequence.sample_index,
                len(sequence.token_ids),
                sequence.num_prompt_tokens,
            )
        return self._emit(sequence, (choice,), (own,), choices)

    def _verified(
        self,
        item: PlanItem,
        runs: Runs,
        first_row: int,
        logits: np.ndarray,
        likeliest: list[int],
        choices: _Choices,
    ) -> Outcome:
        """Decide about an item's runs of guesses, whose rows begin at `first_row`."""
        sequence = self.scheduler.running[item.seq_id]
        rows, greatest = [], []
        for run in runs:
            end_row = first_row + len(run) + 1
            rows.append(logits[first_row:end_row])
            greatest.append(likeliest[first_row:end_row])
            first_row = end_row
        if self._is_plain(sequence):
            found = verify_likeliest(greatest, rows, runs)
        else:
            found = verify_forks(
                rows,
                runs,
                sequence.params,
                sequence.token_ids,
                sequence.seed,
                sequence.sample_index,
                sequence.num_prompt_tokens,
            )
        choices.verified[item.seq_id] = found
        outcome = self._emit(sequence, found.choices, rows[found.winner], choices)
        # Where the sequence ended on a guess, that guess counts as its last token, whose keys nobody needs.
        num_accepted = min(found.num_accepted, len(outcome.token_ids) - 1)
        winner = item.forks[found.winner - 1].seq_id if found.winner else None
        return outcome._replace(num_accepted=num_accepted, winner=winner)

    def _is_plain(self, sequence: Sequence) -> bool:
        """Whether a sequence's tokens are the likeliest, and nobody asks how likely they were."""
        return sequence.params.plain_greedy and not self.report_probabilities

    def _emit(
        self, sequence: Sequence, chosen: Items[Choice], rows: Items[np.ndarray | None], choices: _Choices
    ) -> Outcome:
        """Take the tokens chosen, each from its row of logits (None where nobody looks at one), up to the one that ends
        the sequence."""
        token_ids: list[int] = []
        position = len(sequence.token_ids)
        last = sequence.num_prompt_tokens + sequence.max_output_tokens - 1
        for (token_id, probability, logprobs), logits in zip(chosen, rows, strict=False):
            if self.on_logits is not None:
                self.on_logits(sequence.seq_id, logits.copy())
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            is_eos = self._is_eos(sequence, token_id)
            text = "" if is_eos else sequence.output_text.push(token_id)
            token_ids.append(token_id)
            choices.tokens.append(TokenRecord(sequence.seq_id, position, token_id, text, probability, logprobs))
            if is_eos:
                return self._ended(sequence, "stop", token_id, choices, tuple(token_ids))
            if sequence.output_text.stopped_by is not None:
                return self._ended(sequence, "stop", sequence.output_text.stopped_by, choices, tuple(token_ids))
            if position >= last:
                return self._ended(sequence, "length", None, choices, tuple(token_ids))
            position += 1
        return Outcome(sequence.seq_id, len(sequence.token_ids), tuple(token_ids), None)

    def _ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | int | None,
        choices: _Choices,
        token_ids: tuple[int, ...] = (),
    ) -> Outcome:
        """The sequence ends with these tokens. EOS or a stop string on the last allowed one is a `stop`."""
        text = sequence.output_text.finish()
        if reason == "length" and sequence.output_text.stopped_by is not None:  # completed by the last bytes
            reason, stop = "stop", sequence.output_text.stopped_by
        choices.finished.append(FinishRecord(sequence.seq_id, reason, text, stop))
        self._rows.forget(sequence.seq_id)
        return Outcome(sequence.seq_id, len(sequence.token_ids), token_ids, reason, stop)

    def _is_eos(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in self._eos_token_ids and not sequence.params.ignore_eos

    def _score_prompt(self, sequence: Sequence, position: int, rows: np.ndarray) -> None:
        """Log probabilities of prompt tokens given those before them. `rows` are the logits after the tokens from
        `position` on; those of the last one are about the output."""
        wanted, scores = sequence.params.prompt_logprobs, sequence.prompt_logprobs
        if not scores:
            scores.append(None)  # nothing precedes the first token
        for logits in rows[: sequence.num_prompt_tokens - 1 - position]:
            position += 1
            if position == len(scores):
                log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
                scores.append(top_logprobs(logits, log_total, wanted, sequence.token_ids[position]))

    def _account(
        self,
        plan: StepPlan,
        guesses: StepGuesses,
        forward_ms: float,
        started: float,
        choices: _Choices,
        now: float,
    ) -> None:
        """Add a step to what its sequences have cost."""
        work = self._work
        for admission in plan.admitted:
            own = work[admission.seq_id]
            if own.admitted is None:
                own.admitted, own.tokens_cached = started, admission.num_cached
            own.tokens_recomputed += max(0, own.tokens_lost - admission.num_cached)
            own.tokens_lost = 0
        for preemption in plan.preempted:
            work[preemption.seq_id].tokens_lost = preemption.tokens_lost
        for item in plan.items:
            own = work[item.seq_id]
            own.forward_ms.append(forward_ms)
            own.forward_tokens.append(item.num_tokens + _num_guess_rows(item, guesses))
        for token in choices.tokens:
            own = work[token.seq_id]
            if own.first_token is None:
                own.first_token = now
                own.admitted = own.admitted if own.admitted is not None else started
            own.last_token = now

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        return CompletionOutput(
            index=sequence.sample_index,
            text=sequence.output_text.text,
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
            metrics=self._work[sequence.seq_id].metrics(sequence),
            errors=tuple(sequence.errors),
        )


def _item_record(item: PlanItem, guesses: StepGuesses | None = None) -> ItemRecord:
    num_guesses = _num_guess_rows(item, guesses) if item.num_guesses and guesses is not None else 0
    return ItemRecord(item.seq_id, item.phase, item.start, item.num_tokens, item.remaining, num_guesses)


def _num_guess_rows(item: PlanItem, guesses: StepGuesses) -> int:
    """Rows of an item beyond its known tokens."""
    if not item.num_guesses or item.seq_id not in guesses.runs:
        return 0
    return sum([item.num_tokens + len(run) for run in guesses.runs[item.seq_id]]) - item.num_tokens
