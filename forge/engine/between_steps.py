"""What may be asked of an engine between two steps: requests come and are checked, ended, read and forgotten.

Everything here leaves an engine that can go on. An exception may have ended a step or an abort between any two of its
lines (Ctrl-C, a full memory); whoever asks next settles that first: the tokens that were chosen are taken, and all else
begins again from the tokens alone, with an empty cache. What was computed can be computed again, as after a preemption,
and nothing half-done has to be understood.
"""

import secrets
import time
from collections.abc import Sequence as Items
from functools import partial
from itertools import count
from threading import RLock

from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import KvStorage
from forge.engine.accounts import Accounts, Work
from forge.engine.answers import OneShotResult
from forge.engine.choosing import OnLogits
from forge.engine.generations import Generation, PromptLimits
from forge.engine.lookahead import Flight
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
from forge.errors import UsageError
from forge.model.model import Model
from forge.speculation.leases import Lease
from forge.speculation.speculator import Learned, Speculator
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import ArriveRecord, FinishReason, FinishRecord, RejectRecord

_NEXT_TOKEN = OneShotTask(sample=True)


class BetweenSteps:
    """An engine at rest."""

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
        self.lock = RLock()
        """For callers in several threads: held by whoever works with the engine, which itself never takes it."""
        self.lease = Lease("target", model)
        self.tokenizer = tokenizer
        self.cache = cache
        self.storage = storage
        self._bytes_of = partial(_bytes_of, self.lease)  # of the lease alone, so that nothing refers back to the engine
        self.scheduler = Scheduler(cache, config, scratch, self._bytes_of)
        self.speculation = speculation or Speculator()
        self.scheduler.guess_room.speculator = self.speculation
        self.on_logits: OnLogits | None = None
        self.report_probabilities = False
        """Put the model's probability of each token into its record. Over a large vocabulary that takes a while."""
        self.checks_invariants = False
        """Look after every step whether all rules of the scheduler and the cache hold. Takes longer than the step."""
        self._runs_ahead = model.runs_ahead
        self._eos_token_ids = tokenizer.eos_token_ids
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
            if task.pooling is None and not self.model.generates and not (task.candidates and self.model.labels):
                uses = "it classifies: forge classify, forge rerank" if self.model.labels else "it embeds: forge embed"
                raise UsageError(f"this model generates no text; {uses}")
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

    # Ends and mishaps

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

    def _drop_empty_flight(self) -> None:
        """Nothing comes of a step in flight all of whose sequences have ended."""
        if self._ahead is not None and not self._ahead.has_any_of(self.scheduler.running):
            self._in_vain += len(self._ahead.plan.items)
            self._ahead = None

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


def _bytes_of(lease: Lease[Model], num_rows: int, num_logit_rows: int) -> int:
    """About what a forward of so many rows needs for itself."""
    return 0 if lease.revoked else lease.lent.temporary_bytes(num_rows, num_logit_rows)
