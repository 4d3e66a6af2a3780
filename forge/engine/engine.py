"""The loop: plan a step, run it, choose tokens, take the results. One loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ choose ─▶ commit() ─▶ StepRecord

The engine prints nothing and knows no view. Whoever wants to see what happens reads the `StepRecord` that each step
returns.

A step happens whole or not at all. Everything up to the choice of its tokens can be undone; the moment the last one is
chosen they are noted down in one assignment, and from there the step is completed, if need be by the next call. So an
exception from anywhere in it (Ctrl-C, a full memory, logits that are no numbers) leaves an engine that can go on.
"""

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import count
from operator import index

import numpy as np

from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import KvStorage
from forge.engine.output_text import OutputText
from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.sampling import check_logits, choose, log_sum_exp, top_logprobs
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Outcome, Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import StepPlan
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch
from forge.model.qwen3 import Model
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import (
    CacheRecord,
    FinishReason,
    FinishRecord,
    ItemRecord,
    RequestMetrics,
    StepRecord,
    TokenRecord,
)


@dataclass
class _Work:
    """What a sequence has cost so far; becomes its `RequestMetrics`."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    forward_ms: list[float] = field(default_factory=list)
    forward_tokens: list[int] = field(default_factory=list)

    def metrics(self, sequence: Sequence) -> RequestMetrics:
        return RequestMetrics(
            sequence.num_prompt_tokens,
            sequence.num_output_tokens,
            self.arrived,
            self.first_token,
            self.last_token,
            tuple(self.forward_ms),
            tuple(self.forward_tokens),
        )


@dataclass(frozen=True)
class _Request:
    request_id: str
    prompt: str | None
    seed: int
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True)
class _Choice:
    """What a step brings one sequence."""

    token: TokenRecord | None
    """None where none was asked for."""
    finish: FinishRecord | None
    """None while the sequence goes on."""
    outcome: Outcome
    """The same in the scheduler's words."""


class Engine:
    """A model, a cache and a scheduler, turned one step at a time by `step()`."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        cache: KvCache,
        storage: KvStorage,
        max_model_len: int,
        max_num_seqs: int,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.storage = storage
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(cache, max_num_seqs)
        self.on_logits: Callable[[int, np.ndarray], None] | None = None
        """Called with (sequence id, logits float32 `[vocab]`) before each choice. The array is the caller's to keep."""
        self._requests: dict[str, _Request] = {}
        self._work: dict[int, _Work] = {}
        self._sequence_ids = count()
        self._steps = 0
        self._unsettled = False
        """A step or an abort ended in an exception, and nobody has cleared up after it yet."""
        self._decided: tuple[StepPlan, list[Outcome]] | None = None
        """The step whose tokens are chosen and not yet committed."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        keep_cache: bool = False,
        continues: int | None = None,
    ) -> tuple[int, ...]:
        """Queue a request; return the ids of its `params.n` sequences.

        `keep_cache` leaves the cache in place when it ends, and `continues` names such an ended sequence, whose id and
        cache are taken over; it needs `params.n` to be 1. Raises `UsageError`, with nothing changed, for a prompt that
        cannot run.
        """
        assert continues is None or params.n == 1, "one cache can be continued once"
        token_ids = self._checked_prompt(prompt_token_ids)
        if request_id in self._requests:
            raise UsageError(f"request {request_id!r} is already running")
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        room = self.max_model_len - len(token_ids) + 1  # the last output token is never computed, so it needs no slot
        sequences = tuple(
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
                keep_cache=keep_cache,
                continues=continues,
            )
            for index in range(params.n)
        )
        self._requests[request_id] = _Request(request_id, prompt, seed, sequences)
        now = time.perf_counter()
        for sequence in sequences:
            self._work[sequence.seq_id] = _Work(now)
            self.scheduler.add(sequence)
        return tuple(sequence.seq_id for sequence in sequences)

    def has_unfinished(self) -> bool:
        self._settle()
        return self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """Whether any sequence of a request has yet to end."""
        self._settle()
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
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan.items, f"nothing can run: {plan.waiting}"
        batch = self._forward_batch(plan)
        self.storage.copy_blocks(plan.copies)
        self.cache.copies_performed()
        scheduled = time.perf_counter()
        logits = self.model.forward(batch, self.storage)
        computed = time.perf_counter()
        choices = self._choose(plan, logits)
        ended_at = time.perf_counter()
        self._decided = plan, [choice.outcome for choice in choices]  # from here on the step has happened
        self._account(plan, (computed - scheduled) * 1e3, choices, ended_at)
        self._settle()
        self._steps += 1
        return StepRecord(
            step=self._steps,
            items=tuple(ItemRecord(item.seq_id, item.phase, item.start, item.num_tokens) for item in plan.items),
            tokens=tuple(choice.token for choice in choices if choice.token is not None),
            finished=tuple(choice.finish for choice in choices if choice.finish is not None),
            cache=self._cache_record(),
            schedule_ms=(scheduled - started) * 1e3,
            forward_ms=(computed - scheduled) * 1e3,
            sample_ms=(ended_at - computed) * 1e3,
            started=started,
            ended=ended_at,
            events=self.cache.take_events(),
        )

    def abort(self, request_id: str) -> None:
        """End a request's unfinished sequences, keeping what they produced."""
        self._settle()
        try:
            for sequence in self._requests[request_id].sequences:
                self.scheduler.abort(sequence.seq_id)
                sequence.output_text.finish()
        except BaseException:
            self._unsettled = True
            raise

    def release(self, seq_id: int) -> None:
        """Give up the cache of an ended sequence, if it is still kept."""
        self.scheduler.release(seq_id)

    def is_kept(self, seq_id: int) -> bool:
        """Whether an ended sequence's cache is there to be continued. It may be given up when others need the room."""
        return seq_id in self.scheduler.kept

    def output(self, request_id: str) -> RequestOutput:
        """A request's output as it stands."""
        self._settle()
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
        sequences = self._requests[request_id].sequences
        assert all(sequence.finish_reason is not None for sequence in sequences), "it is still running"
        del self._requests[request_id]
        for sequence in sequences:
            self._work.pop(sequence.seq_id, None)

    def _cache_record(self) -> CacheRecord:
        stats, layout = self.scheduler.stats, self.storage.layout
        return CacheRecord(
            kind=self.cache.kind,
            block_size=layout.block_size,
            num_blocks=stats.num_blocks,
            used_blocks=stats.used_blocks,
            tokens_held=stats.tokens_held,
            bytes_held=stats.tokens_held * layout.bytes_per_token,
            bytes_reserved=stats.used_blocks * layout.block_size * layout.bytes_per_token,
            cached_blocks=stats.cached_blocks,
            slots_reserved=stats.slots_reserved,
            slots_filled=stats.slots_filled,
            blocks_saved=stats.blocks_saved,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            splits=stats.splits,
            evictions=stats.evictions,
        )

    def _settle(self) -> None:
        """Commit a step whose tokens are chosen, or undo one that an exception ended before that.

        Does nothing where neither is the case. May itself be interrupted and called again.
        """
        if self._decided is not None:
            self.scheduler.commit(*self._decided)
            self._decided = None
        elif self._unsettled:
            self.storage.copy_blocks(self.cache.owed_copies)
            self.cache.copies_performed()
            self.scheduler.roll_back()
            for sequence in self.scheduler.running.values():
                self._forget_undecided(sequence)
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
            token_ids = [index(token_id) for token_id in prompt_token_ids]
        except TypeError:
            raise UsageError("a prompt is text or a list of token ids, which are whole numbers") from None
        if not token_ids:
            raise UsageError(
                "the prompt is empty: a model continues text, and this one has no beginning-of-text token to "
                "start from, so give it at least one word"
            )
        for token_id in token_ids:
            if not 0 <= token_id < self.model.vocab_size:
                raise UsageError(f"token id {token_id} is outside the vocabulary of {self.model.vocab_size} tokens")
        if len(token_ids) > self.max_model_len:
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens and the context holds {self.max_model_len}: shorten the "
                "prompt, or raise --max-model-len where the model allows it"
            )
        return token_ids

    def _forward_batch(self, plan: StepPlan) -> ForwardBatch:
        """Lay the plan's rows end to end."""
        block_size = self.storage.layout.block_size
        token_ids: list[int] = []
        cu_seqlens, logit_rows = [0], []
        tables = np.full((len(plan.items), max(len(item.block_table) for item in plan.items)), -1, np.int32)
        positions, slots = [], []
        for table, item in zip(tables, plan.items, strict=True):
            end = item.start + item.num_tokens
            assert self.cache.computed_length(item.seq_id) == item.start, "the cache is not where the plan thinks"
            assert self.cache.reserved_length(item.seq_id) >= end, "the plan writes slots that nobody reserved"
            token_ids += self.scheduler.running[item.seq_id].token_ids[item.start : end]
            table[: len(item.block_table)] = item.block_table
            own_positions = np.arange(item.start, end, dtype=np.int32)
            positions.append(own_positions)
            slots.append(table[own_positions // block_size] * block_size + own_positions % block_size)
            logit_rows += [cu_seqlens[-1] + row for row in item.logit_rows]
            cu_seqlens.append(cu_seqlens[-1] + item.num_tokens)
        return ForwardBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.concatenate(positions),
            cu_seqlens=np.array(cu_seqlens, np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32, copy=False),
            block_tables=tables,
            context_lens=np.array([item.start + item.num_tokens for item in plan.items], np.int32),
            logit_rows=np.array(logit_rows, np.int32),
        )

    def _choose(self, plan: StepPlan, logits: np.ndarray) -> list[_Choice]:
        """Choose a token for every item that samples. `logits` has the rows of all items, in order."""
        choices = []
        row = 0
        for item in plan.items:
            rows = logits[row : row + len(item.logit_rows)]
            row += len(item.logit_rows)
            sequence = self.scheduler.running[item.seq_id]
            if sequence.params.prompt_logprobs is not None and item.phase == "prefill":
                self._score_prompt(sequence, rows)
            token = self._choose_token(sequence, rows[-1]) if item.samples else None
            choices.append(self._with_ending(sequence, token))
        return choices

    def _choose_token(self, sequence: Sequence, logits: np.ndarray) -> TokenRecord:
        if self.on_logits is not None:
            self.on_logits(sequence.seq_id, logits.copy())
        position = len(sequence.token_ids)
        choice = choose(logits, sequence.params, sequence.token_ids, sequence.seed, sequence.sample_index, position)
        if choice.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
        text = "" if self._is_eos(sequence, choice.token_id) else sequence.output_text.push(choice.token_id)
        return TokenRecord(sequence.seq_id, position, choice.token_id, text, choice.probability, choice.logprobs)

    def _with_ending(self, sequence: Sequence, token: TokenRecord | None) -> _Choice:
        """The token together with whether it ends its sequence."""
        token_id = None if token is None else token.token_id
        reason, stop = self._ending(sequence, token_id)
        finish = None
        if reason is not None:
            text = sequence.output_text.finish()
            if reason == "length" and sequence.output_text.stopped_by is not None:  # completed by the last bytes
                reason, stop = "stop", sequence.output_text.stopped_by
            finish = FinishRecord(sequence.seq_id, reason, text, stop)
        return _Choice(token, finish, Outcome(sequence.seq_id, token_id, reason, stop))

    def _ending(self, sequence: Sequence, token_id: int | None) -> tuple[FinishReason | None, str | int | None]:
        """Why the sequence ends with this token, if it does. EOS or a stop string on the last token is a `stop`."""
        if token_id is not None and self._is_eos(sequence, token_id):
            return "stop", token_id
        if sequence.output_text.stopped_by is not None:
            return "stop", sequence.output_text.stopped_by
        if token_id is None or sequence.num_output_tokens + 1 >= sequence.max_output_tokens:
            return "length", None
        return None, None

    def _is_eos(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in self.tokenizer.eos_token_ids and not sequence.params.ignore_eos

    def _score_prompt(self, sequence: Sequence, rows: np.ndarray) -> None:
        """Log probabilities of each prompt token given those before it. `rows` are the logits after each of them."""
        wanted = sequence.params.prompt_logprobs
        scores: list[tuple[tuple[int, float], ...] | None] = [None]  # nothing precedes the first token
        for logits, token_id in zip(rows[:-1], sequence.token_ids[1 : sequence.num_prompt_tokens], strict=True):
            log_total = log_sum_exp(logits, float(logits[check_logits(logits)]))
            scores.append(top_logprobs(logits, log_total, wanted, token_id))
        sequence.prompt_logprobs = scores

    def _account(self, plan: StepPlan, forward_ms: float, choices: list[_Choice], now: float) -> None:
        for item, choice in zip(plan.items, choices, strict=True):
            work = self._work[item.seq_id]
            work.forward_ms.append(forward_ms)
            work.forward_tokens.append(item.num_tokens)
            if choice.token is not None:
                work.first_token = work.first_token if work.first_token is not None else now
                work.last_token = now

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        return CompletionOutput(
            index=sequence.sample_index,
            text=sequence.output_text.text,
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
            metrics=self._work[sequence.seq_id].metrics(sequence),
        )
