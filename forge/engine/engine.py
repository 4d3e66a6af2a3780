"""The loop: plan a step, run it, choose tokens, take the results. One loop for one prompt and for thousands.

    schedule() ─▶ StepPlan ─▶ ForwardBatch ─▶ model.forward ─▶ logits ─▶ choose ─▶ commit() ─▶ StepRecord

The engine prints nothing and knows no view. Whoever wants to see what happens reads the `StepRecord` that each step
returns.

A step happens whole or not at all. The moment the last of its tokens is chosen they are noted down in one assignment;
before that an exception (Ctrl-C, a full memory, logits that are no numbers) undoes the step, after it the tokens are
taken. Either way the next call begins again from the tokens alone, with an empty cache: what was computed can be
computed again, as after a preemption, and nothing half-done has to be understood.
"""

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import count
from operator import index

import numpy as np

from forge.cache.kv_cache import KvCache
from forge.cache.kv_storage import KvStorage
from forge.engine.output_text import OutputText
from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling import check_greatest, check_logits, choose, log_sum_exp, top_logprobs
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Outcome, Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import PlanItem, StepPlan
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch
from forge.model.qwen3 import Model
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import (
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
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.storage = storage
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(cache, config)
        self.on_logits: Callable[[int, np.ndarray], None] | None = None
        """Called with (sequence id, logits float32 `[vocab]`) before each choice. The array is the caller's to keep."""
        self.report_probabilities = False
        """Put the model's probability of each token into its record. Over a large vocabulary that takes a while."""
        self._requests: dict[str, _Request] = {}
        self._work: dict[int, _Work] = {}
        self._sequence_ids = count()
        self._steps = 0
        self._rejected: list[RejectRecord] = []
        self._unsettled = False
        """A step or an abort ended in an exception, and nobody has cleared up after it yet."""
        self._decided: tuple[StepPlan, list[Outcome]] | None = None
        """The step whose tokens are chosen and not yet committed."""
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        """Each sequence's block table as an array. It changes once in a block's worth of tokens."""

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
    ) -> tuple[int, ...]:
        """Queue a request; return the ids of its `params.n` sequences.

        `priority`: lower is served first, where the scheduler's order is by priority. `salt`: requests with different
        salts share nothing in the cache. `keep_cache` leaves the cache in place when it ends, and `continues` names
        such an ended sequence, whose id and cache are taken over; it needs `params.n` to be 1. Raises `UsageError`,
        with nothing changed, for a prompt that cannot run.
        """
        assert continues is None or params.n == 1, "one cache can be continued once"
        try:
            token_ids = self._checked_prompt(prompt_token_ids)
            self._check_bias(params)
            if request_id in self._requests:
                raise UsageError(f"request {request_id!r} is already running")
        except UsageError as error:
            self._rejected.append(RejectRecord(request_id, str(error)))
            raise
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        room = self._longest_sequence - len(token_ids) + 1  # the last output token is never computed: it needs no slot
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
        return tuple(sequence.seq_id for sequence in (first, *others))

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
        assert plan.items or plan.exhausted, f"nothing can run: {plan.waiting}"
        batch = self._forward_batch(plan) if plan.items else None
        self._move_blocks(plan)
        scheduled = time.perf_counter()
        logits = self.model.forward(batch, self.storage) if batch is not None else None
        computed = time.perf_counter()
        choices = self._choose(plan, logits)
        ended_at = time.perf_counter()
        self._decided = plan, choices.outcomes  # from here on the step has happened
        self._account(plan, (computed - scheduled) * 1e3, started, choices, ended_at)
        self.storage.copy_blocks(self.scheduler.commit(plan, choices.outcomes))
        self._decided = None
        self._steps += 1
        rejected, self._rejected = tuple(self._rejected), []
        return StepRecord(
            step=self._steps,
            items=tuple(
                [
                    ItemRecord(item.seq_id, item.phase, item.start, item.num_tokens, item.remaining)
                    for item in plan.items
                ]
            ),
            tokens=tuple(choices.tokens),
            finished=tuple(choices.finished),
            cache=self._cache_record(),
            schedule_ms=(scheduled - started) * 1e3,
            forward_ms=(computed - scheduled) * 1e3,
            sample_ms=(ended_at - computed) * 1e3,
            started=started,
            ended=ended_at,
            execution_class=plan.execution_class,
            queues=self.scheduler.queues,
            admitted=plan.admitted,
            waiting=plan.waiting,
            preempted=plan.preempted,
            rejected=rejected,
            block_table_entries=sum([len(item.block_table) for item in plan.items]),
            events=self.cache.take_events(),
            blocks=self._block_map(batch),
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
            for sequence in reversed(
                self._requests[request_id].sequences
            ):  # forks before those whose prompt they share
                self.scheduler.abort(sequence.seq_id, reason)
                sequence.output_text.finish()
                self._tables.pop(sequence.seq_id, None)
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
        self.scheduler.recover(self._decided[1] if self._decided is not None else ())
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
        if len(token_ids) > self.cache.max_sequence_length:
            size = self.cache.block_size
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens, which take {-(-len(token_ids) // size)} blocks of {size}, "
                f"and the whole pool has {self.cache.max_sequence_length // size}: shorten it, or raise --num-blocks"
            )
        return token_ids

    def _check_bias(self, params: SamplingParams) -> None:
        for token_id, _ in params.logit_bias[-1:]:  # they ascend
            if token_id >= self.model.vocab_size:
                raise UsageError(
                    f"logit_bias: token id {token_id} is outside the vocabulary of {self.model.vocab_size}"
                )

    def _forward_batch(self, plan: StepPlan) -> ForwardBatch:
        """Lay the plan's rows end to end."""
        block_size, running = self.cache.block_size, self.scheduler.running
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        logit_rows: list[int] = []
        cu_seqlens = [0]
        tables = np.full((len(plan.items), max([len(item.block_table) for item in plan.items])), -1, np.int32)
        for table, item in zip(tables, plan.items, strict=True):
            start, first_row, block_table = item.start, len(token_ids), item.block_table
            end = start + item.num_tokens
            table[: len(block_table)] = self._table_array(item)
            if item.num_tokens == 1:
                token_ids.append(running[item.seq_id].token_ids[start])
                positions.append(start)
                slots.append(block_table[start // block_size] * block_size + start % block_size)
            else:
                token_ids += running[item.seq_id].token_ids[start:end]
                own = np.arange(start, end)
                positions += own.tolist()
                slots += (table[own // block_size] * block_size + own % block_size).tolist()
            for row in item.logit_rows:
                logit_rows.append(first_row + row)
            cu_seqlens.append(len(token_ids))
            context_lens.append(end)
        return ForwardBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            cu_seqlens=np.array(cu_seqlens, np.int32),
            slot_mapping=np.array(slots, np.int32),
            block_tables=tables,
            context_lens=np.array(context_lens, np.int32),
            logit_rows=np.array(logit_rows, np.int32),
        )

    def _table_array(self, item: PlanItem) -> np.ndarray:
        known = self._tables.get(item.seq_id)
        if known is None or known[0] is not item.block_table:
            known = self._tables[item.seq_id] = item.block_table, np.array(item.block_table, np.int32)
        return known[1]

    def _choose(self, plan: StepPlan, logits: np.ndarray | None) -> _Choices:
        """Choose a token for every item that samples. `logits` has the rows of all items, in order."""
        choices = _Choices()
        likeliest = logits.argmax(axis=1).tolist() if logits is not None and len(logits) else []
        first_row = 0
        for item in plan.items:
            last_row = first_row + len(item.logit_rows) - 1
            sequence = self.scheduler.running[item.seq_id]
            if sequence.needs_prompt_logprobs:
                self._score_prompt(sequence, item.start + item.logit_rows.start, logits[first_row : last_row + 1])
            if item.samples:
                row, greatest = logits[last_row], likeliest[last_row]
                forked = [self._outcome(fork, row, greatest, choices) for fork in sequence.forks]
                outcome = self._outcome(sequence, row, greatest, choices)
                choices.outcomes.append(outcome._replace(forked=tuple(forked)) if forked else outcome)
            elif item.remaining:
                choices.outcomes.append(Outcome(item.seq_id, len(sequence.token_ids), (), None))
            else:
                choices.outcomes.append(self._ended(sequence, "length", None, choices))
            first_row = last_row + 1
        for seq_id in plan.exhausted:
            choices.outcomes.append(self._ended(self.scheduler.find(seq_id), "length", None, choices))
        return choices

    def _outcome(self, sequence: Sequence, logits: np.ndarray, likeliest: int, choices: _Choices) -> Outcome:
        """Choose a sequence's next token from a row of logits whose greatest is at `likeliest`."""
        position = len(sequence.token_ids)
        token = self._choose_token(sequence, position, logits, likeliest)
        choices.tokens.append(token)
        token_id = token.token_id
        if token_id in self.tokenizer.eos_token_ids and not sequence.params.ignore_eos:
            return self._ended(sequence, "stop", token_id, choices, (token_id,))
        if sequence.output_text.stopped_by is not None:
            return self._ended(sequence, "stop", sequence.output_text.stopped_by, choices, (token_id,))
        if position + 1 - sequence.num_prompt_tokens >= sequence.max_output_tokens:
            return self._ended(sequence, "length", None, choices, (token_id,))
        return Outcome(sequence.seq_id, position, (token_id,), None)

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
        self._tables.pop(sequence.seq_id, None)
        return Outcome(sequence.seq_id, len(sequence.token_ids), token_ids, reason, stop)

    def _choose_token(self, sequence: Sequence, position: int, logits: np.ndarray, likeliest: int) -> TokenRecord:
        if self.on_logits is not None:
            self.on_logits(sequence.seq_id, logits.copy())
        params = sequence.params
        if params.plain_greedy and not self.report_probabilities:
            check_greatest(logits[likeliest])
            token_id, probability, logprobs = likeliest, None, None
        else:
            choice = choose(
                logits,
                params,
                sequence.token_ids,
                sequence.seed,
                sequence.sample_index,
                position,
                sequence.num_prompt_tokens,
            )
            token_id, probability, logprobs = choice
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
        text = "" if self._is_eos(sequence, token_id) else sequence.output_text.push(token_id)
        return TokenRecord(sequence.seq_id, position, token_id, text, probability, logprobs)

    def _is_eos(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in self.tokenizer.eos_token_ids and not sequence.params.ignore_eos

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

    def _account(self, plan: StepPlan, forward_ms: float, started: float, choices: _Choices, now: float) -> None:
        """Add a step to what its sequences have cost."""
        work = self._work
        for admission in plan.admitted:
            own = work[admission.seq_id]
            if own.admitted is None:
                own.admitted, own.tokens_cached = started, admission.num_cached
        for preemption in plan.preempted:
            work[preemption.seq_id].tokens_recomputed += preemption.tokens_lost
        for item in plan.items:
            own = work[item.seq_id]
            own.forward_ms.append(forward_ms)
            own.forward_tokens.append(item.num_tokens)
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
        )
