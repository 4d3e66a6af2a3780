"""The registry: every request that an engine knows, from its arrival until it is forgotten.

Requests are added, aborted, read and forgotten between steps; `Engine.step` advances them. Each of these is an
operation that happens whole or not at all (`operation`). If one never ended, the next one calls `_recover` first: the
tokens that had been chosen stay, and each unfinished sequence begins again from its tokens, as after a preemption.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager

from forge.cache.host_pool import HostEntry
from forge.cache.kv_cache import OutOfBlocks
from forge.cache.kv_storage import KvStorage
from forge.engine.outputs import RequestOutput
from forge.engine.proposer import Proposer
from forge.engine.requests import PromptLimits, RequestState, SequenceBuilder, check_answerable, check_drafts
from forge.engine.sampler import StepResults
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.speculation import Speculation
from forge.engine.step_plan import Outcome, StepPlan
from forge.engine.step_record import RecordBuilder
from forge.engine.structured_output import CompileGrammar, Grammar
from forge.engine.task import GENERATE, Logprobs, Task
from forge.engine.token_filter import TokenFilter
from forge.errors import UsageError
from forge.model.model import Model, ModelUnavailable
from forge.reasons import FinishReason
from forge.tokenizer import Tokenizer
from forge.trace.records import ArriveRecord, FinishRecord, RejectRecord
from forge.trace.timeline import Timeline


class Operation(AbstractContextManager[None]):
    """Guards one change of the engine at a time. `forge.engine.engine.Interruptible` implements it."""

    unfinished = False
    """Whether the last change began and never ended (Ctrl-C, a full memory): the next one recovers first."""


class RequestRegistry(ABC):
    """Adds, aborts, reads and drops the requests of an engine, which derives from it."""

    model: Model
    storage: KvStorage
    speculation: Speculation | None
    operation: Operation
    """What changes the engine runs inside."""
    compile_grammar: CompileGrammar | None = None
    """For requests with structured output; without it they are refused."""

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits, scheduler: Scheduler, records: RecordBuilder):
        self.tokenizer, self.scheduler, self._limits, self._records = tokenizer, scheduler, limits, records
        has_scratch = bool(scheduler.prefill_only.scratch)
        self._sequence_builder = SequenceBuilder(tokenizer, limits, scheduler.config, has_scratch)
        self.timeline = Timeline()
        """Times, waits and metrics of every request that has not been forgotten."""
        self._requests: dict[str, RequestState] = {}
        """Every request that has not been forgotten. What is not in here does not exist."""
        self._num_sequences = self._num_forks = 0
        """Sequences of requests, and forks of retained caches, which no request has. Each takes the next id."""
        self._unavailable: ModelUnavailable | None = None
        """The error that ended every sequence, once the model is gone."""
        self._decided: Items[Outcome] = ()
        """The outcomes of a step whose tokens are all chosen, until they are committed: `_recover` applies them."""
        self._plan: StepPlan | None = None
        """The plan that the last step carried out: `fail_step` ends its requests. None until a step is planned."""

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """The proposers in use; none without speculation."""
        return self.speculation.proposers if self.speculation is not None else ()

    @abstractmethod
    def _drop_state(self, seq_id: int) -> None:
        """Drop what further steps would need of a sequence that has ended."""

    def _drop_steps(self) -> None:  # noqa: B027 (optional: a synchronous engine has none)
        """Drop the steps in flight: every sequence begins again from its tokens."""

    # Requests in

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
        computed: HostEntry | None = None,
    ) -> tuple[int, ...]:
        """Queue a request; return the ids of its `params.n` sequences.

        task: what is wanted; generated tokens, or what one forward pass can answer. priority: lower is served first,
        where the scheduler's order is by priority. salt: requests with different salts share nothing in the cache.
        retain_cache: leave the cache in place when it ends. continues_from: the id of such an ended sequence, whose
        cache is taken over if it is still there. computed: keys and values of the prompt's beginning, from another
        engine (`handoff`).

        Raises `UsageError`, with nothing changed, for what cannot run, and `ModelUnavailable` once the model is gone.
        """
        if self._unavailable is not None:
            raise self._unavailable
        try:
            token_ids = self._checked(request_id, prompt_token_ids, params, task)
            grammar = self._grammar(params)
        except UsageError as error:
            self._records.rejected.append(RejectRecord(request_id, str(error)))
            raise
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        with self.operation:
            first = Sequence(
                seq_id=self._num_sequences + self._num_forks,
                request_id=request_id,
                sample_index=0,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                max_output_tokens=params.max_tokens,
                params=params,
                seed=seed,
                output_text=self._sequence_builder.new_text(params),
                task=GENERATE if task == GENERATE else task,  # compared by identity in every step
                matcher=grammar.new_matcher() if grammar is not None else None,
                priority=priority,
                salt=salt,
                retain_cache=retain_cache,
                continues_from=continues_from,
            )
            sequences = self._sequence_builder.complete(first, grammar, begins_computed=computed is not None)
            first.waiting_samples = [*sequences[1:]]
            request = self._requests[request_id] = RequestState(prompt, sequences)
            # From here on the request exists.
            self._num_sequences += len(sequences)
            self.scheduler.add(first, computed)
            self._announce(request)
            return request.seq_ids

    def append_emitted(self, request_id: str, emitted: Items[tuple[Items[int], Items[Logprobs]]]) -> None:
        """Append output tokens, with their log probabilities, that another engine has chosen to each sample of a
        request that no step has seen. Its samples wait apart, as after a preemption. See `forge.engine.handoff`."""
        sequences = self._requests[request_id].sequences
        with self.operation:
            for sequence, (token_ids, logprobs) in zip(sequences, emitted, strict=True):
                sequence.token_ids += token_ids
                sequence.logprobs += logprobs
                self._sequence_builder.rebuild_text(sequence)
            samples, sequences[0].waiting_samples = sequences[0].waiting_samples, []
            for sample in samples:
                self.scheduler.queue.add(sample)

    def _announce(self, request: RequestState) -> None:
        """Put an arrival into the timeline and the next record, unless it is there."""
        first, now = request.sequences[0], time.perf_counter()
        length, limit = first.num_prompt_tokens, first.max_output_tokens
        arrival = ArriveRecord(first.request_id, request.seq_ids, length, limit, now, first.priority)
        if not any(record.request_id == first.request_id for record in self._records.arrived[-1:]):
            self._records.arrived.append(arrival)
        self.timeline.journal.append(arrival)

    def _checked(self, request_id: str, prompt_token_ids: Items[int], params: SamplingParams, task: Task) -> list[int]:
        """Return the prompt's tokens. Raises `UsageError` if the request asks for what cannot be done."""
        token_ids = self._limits.checked(prompt_token_ids)
        self._limits.check_bias(params)
        check_drafts(params.drafts or (), [proposer.name for proposer in self.proposers])
        self._limits.check_ids(task.candidates)
        check_answerable(task, self.model)
        if request_id in self._requests:
            raise UsageError(f"request {request_id!r} is already known: take another id, or forget that one")
        return token_ids

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Return what restricts a request's tokens: the compiled grammar of its structured output, its token filter, or
        both. Raises `UsageError`."""
        form = None
        if params.structured is not None:
            if self.compile_grammar is None:
                raise UsageError("this engine has no grammars: leave structured output out")
            form = self.compile_grammar(params.structured)
        return TokenFilter(params, self.tokenizer, self._limits.vocab_size, form) if params.filters_tokens else form

    # Requests out

    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        if self.operation.unfinished:
            return any(map(self.is_unfinished, self._requests))
        return self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """True while a sequence of a request has yet to end. Raises `KeyError` for a request that is not known."""
        decided = {outcome.seq_id for outcome in self._decided if outcome.finish_reason is not None}
        sequences = self._requests[request_id].sequences
        return any(sequence.finish_reason is None and sequence.seq_id not in decided for sequence in sequences)

    def output(self, request_id: str) -> RequestOutput:
        """Return a request's output so far. Raises `KeyError` for a request that is not known."""
        request = self._requests[request_id]
        with self.operation:
            return request.output(self.timeline.metrics)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request's unfinished sequences, keeping what they produced. Raises `KeyError` for an unknown one."""
        request = self._requests[request_id]
        with self.operation:
            self._end_sequences([request], reason)

    def fail_step(self) -> tuple[str, ...]:
        """After an exception from `step`: end the requests that took part in that step as `error`, so that all others
        can go on. Returns their ids: all unfinished ones, if the step failed before it was planned. A step that was
        launched ahead was planned by the step before it."""
        if self._plan is None:
            failed = [*filter(self.is_unfinished, self._requests)]
        else:
            took_part = {item.sequence.request_id for item in (*self._plan.items, *self._plan.separate)}
            failed = [request_id for request_id in self._requests if request_id in took_part]
        for request_id in failed:
            self.abort(request_id, "error")
        return tuple(failed)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request whose sequences have all ended. Raises `KeyError` for an unknown one."""
        request = self._requests[request_id]
        assert not self.is_unfinished(request_id), "it is still running"
        with self.operation:
            for seq_id in request.seq_ids:
                self.timeline.forget(seq_id)
            del self._requests[request_id]

    def _end_all(self, error: ModelUnavailable) -> StepResults:
        """Recover after the model is gone, and end every sequence with what it has."""
        self._recover()
        self._unavailable = error
        return StepResults(finished=self._end_sequences(self._requests.values(), "error", str(error)))

    def _end_sequences(
        self, requests: Iterable[RequestState], reason: FinishReason, error: str | None = None
    ) -> list[FinishRecord]:
        """End the unfinished sequences of these requests between steps, wherever they are."""
        finished, sequences = [], [sequence for request in requests for sequence in request.sequences]
        for sequence in [sequence for sequence in sequences if sequence.finish_reason is None]:
            if error is not None:
                sequence.add_error(error)
            self.scheduler.retire(sequence, reason)
            record = FinishRecord(sequence.seq_id, reason, sequence.output_text.finish(), error=error)
            self.timeline.journal.append(record)
            self._drop_state(sequence.seq_id)
            finished.append(record)
        return finished

    # Retained caches

    def is_retained(self, seq_id: int) -> bool:
        """True if an ended sequence's cache can be continued. It is released when others need its blocks."""
        return not self.operation.unfinished and seq_id in self.scheduler.retained.sequences

    def release(self, seq_id: int) -> None:
        """Release the retained cache of an ended sequence, if it still has one."""
        with self.operation:
            self.scheduler.retained.release(seq_id)

    def fork_retained(self, seq_id: int) -> int | None:
        """Retain an ended sequence's cache a second time; return the id under which it can be continued too.

        None if it is no longer there, or where the cache cannot share blocks and has no room for a copy.
        """
        with self.operation:
            child = self._num_sequences + self._num_forks
            try:
                copies = self.scheduler.retained.fork(seq_id, child)
            except (KeyError, OutOfBlocks):
                return None
            self._num_forks += 1
            self.storage.copy_blocks(copies)
            return child

    # Interrupted operations

    def _recover(self) -> None:
        """Recover from an operation that never ended: apply the outcomes that were decided, and begin again from the
        tokens. If this is interrupted, the next operation repeats it."""
        sequences = {sequence.seq_id: sequence for state in self._requests.values() for sequence in state.sequences}
        for outcome in self._decided:
            sequence = sequences[outcome.seq_id]
            if len(sequence.token_ids) == outcome.position:
                sequence.token_ids += outcome.token_ids
            if outcome.finish_reason is not None:
                sequence.stop_reason, sequence.finish_reason = outcome.stop_reason, outcome.finish_reason
        self._num_sequences = max(self._num_sequences, max(sequences, default=-1) + 1 - self._num_forks)
        unfinished = [sequence for sequence in sequences.values() if sequence.finish_reason is None]
        self.scheduler.restart(unfinished, self._num_sequences - len(unfinished))
        for sequence in unfinished:
            self._sequence_builder.rebuild_text(sequence)
        for sequence in sequences.values():
            if sequence.finish_reason is not None:
                self._drop_state(sequence.seq_id)
        self._drop_steps()
        for request in self._requests.values():
            if request.seq_ids[0] not in self.timeline:
                self._announce(request)
        self.scheduler.cache.take_events()
        self._decided = ()
