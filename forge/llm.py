"""The Python API: a model with an engine around it, in the shape that the ecosystem knows.

llm = LLM("tales", kv="basic")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge.backends.devices import create_backend, is_gpu, kv_memory
from forge.cache.block_pool import blocks_for
from forge.cache.factory import CacheSize
from forge.cache.kv_storage import DEFAULT_KV_DTYPES, KvLayout, KvStorage
from forge.engine import tasks
from forge.engine.async_scheduling import AsyncEngine
from forge.engine.engine import Engine
from forge.engine.outputs import RequestOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.proposer import Proposer
from forge.engine.sampling_params import SamplingParams
from forge.engine.speculation import Speculation
from forge.engine.task import Readout, Task
from forge.engine_args import EngineArgs, keywords_of
from forge.errors import ForgeError, UsageError
from forge.grammar.compiler import GrammarCompiler
from forge.grammar.sandbox import SandboxedCompiler
from forge.model.forward_batch import SequenceRows, flat_batch
from forge.model.loader import load_model
from forge.model.model import Model
from forge.model.operation_time import OperationTime
from forge.pieces import current_pieces
from forge.reasons import Pooling
from forge.run import Requests, Run
from forge.speculation.leases import Lease, lease_model
from forge.speculation.setup import DEFAULT_K, Target, checked_acceptance, checked_mode, load_proposers
from forge.speculation.speculator import Speculator
from forge.tokenizer import Tokenizer
from forge.trace.records import StepRecord

Prompt = str | Sequence[int]
"""Text, or token ids."""
Progress = Callable[[int, int], None]
"""Called with (done, in all)."""
NO_PROGRESS: Progress = lambda done, of: None  # noqa: E731 (it does nothing)

MAX_PREFILL_ONLY = 128
"""Requests that keep nothing in one step, about: the scratch blocks are counted for so many."""
DEFAULT_MAX_MODEL_LEN = 4096
"""The context that is reserved for by default, where the model has as much."""


class LLM:
    """A loaded model with one engine. Threads that use it together take turns, a step at a time; a forked process
    cannot use its parent's."""

    @keywords_of(EngineArgs)
    def __init__(self, args: EngineArgs):
        """Load a model. The arguments are the fields of `EngineArgs`.

        Raises `UsageError` for an option that has no meaning, the `ForgeError` of its format for a file that is not a
        sound Qwen3 model.
        """
        started = time.perf_counter()
        self._args, config = args, args.scheduler_config()
        self._pieces = args.pieces or current_pieces()
        device, threads = args.device, args.threads
        options = args.quantize, args.on_compile_progress, args.invariant, args.kernels
        new_backend = partial(create_backend, device, threads, *options)
        loaded = load_model(args.model, new_backend, args.on_load_progress)
        self.path, self.model_name = loaded.path, loaded.name
        self.pooling: Pooling = loaded.pooling
        """How an embedding is made of hidden states, unless a call says otherwise."""
        self.default_sampling = loaded.default_sampling
        """The `SamplingParams` that the model's file recommends, by name; empty where it says nothing."""
        target, self.tokenizer = loaded.model, loaded.tokenizer
        self.device, self.device_description = device, loaded.device_description
        self.kv_dtype = args.kv_dtype or loaded.default_kv_dtype
        if args.time_operations:
            target.time_operations()
        self.max_model_len = _usable_context(target.max_position_embeddings, args.max_model_len)
        layout = target.kv_layout(0, args.block_size, self.kv_dtype)
        target.prepare(layout)
        pool_bytes = args.pool_bytes
        if pool_bytes is None and args.num_blocks is None and is_gpu(device):
            pool_bytes = self._kv_memory_on_gpu(target, layout, config, args.gpu_memory_utilization)
        limits = self.max_model_len, config.max_num_seqs
        self._cache_size = CacheSize(*limits, args.block_size, layout.bytes_per_token, args.num_blocks, pool_bytes)
        self._config, self.max_num_seqs = config, config.max_num_seqs
        self._grammars = GrammarCompiler(self.tokenizer, target.vocab_size)
        self.engine = self._engine_of(target, config)
        self.kv = self.engine.cache.kind
        draft_device = args.draft_device or device
        elsewhere = args.kv_dtype or DEFAULT_KV_DTYPES[draft_device]
        draft_kv_dtype = self.kv_dtype if draft_device == device else elsewhere
        self._target = Target(
            self.tokenizer, target.vocab_size, self.path, *limits, draft_device, threads, draft_kv_dtype
        )
        self.speculate_with(args.speculate, args.drafts)
        self._request_ids = count()
        self.load_seconds = time.perf_counter() - started

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLM":
        """Load a model with the given `EngineArgs`."""
        return cls(**vars(args))

    def new_engine(self, **changed: Any) -> Engine:
        """Create another engine on the same weights, with an empty cache of the same kind and size.

        `changed`: fields of `SchedulerConfig` that are to differ from this model's.
        """
        return self._engine_of(self.model, replace(self._config, **changed))

    def _engine_of(self, model: Model, config: SchedulerConfig) -> Engine:
        size = replace(self._cache_size, max_num_seqs=config.max_num_seqs)
        try:
            cache = self._pieces.kv_cache(self._args.cache, size, self._args.evict)
        except MemoryError:
            cure = "lower --max-model-len, --max-num-seqs or --num-blocks"
            raise UsageError(f"the KV cache does not fit in memory: {cure}") from None
        scratch = range(cache.num_blocks, cache.num_blocks + self._num_scratch_blocks(config, size.block_size))
        create = AsyncEngine if model.runs_ahead else Engine
        storage = self._new_storage(model, scratch.stop, size.block_size)
        new_scheduler = partial(self._pieces.scheduler, preemption=self._pieces.preemption)
        engine = create(
            model, self.tokenizer, cache, storage, self.max_model_len, config, scratch, new_scheduler=new_scheduler
        )
        engine.compile_grammar = SandboxedCompiler(self._grammars)
        engine.checks_invariants = self._args.check
        return engine

    def trust_grammars(self) -> None:
        """Compile grammars without a sandbox from now on, because another process has them checked. Loads all that they
        will need, so that no step waits for it: a second or two if the vocabulary is large, in which no other thread of
        Python runs."""
        if type(self.tokenizer) is Tokenizer:
            tokenizer = Tokenizer(self.tokenizer.spec, prefer="reference")  # forced texts are short
            tokenizer.prepare()
            self._grammars = GrammarCompiler(tokenizer, self.model.vocab_size)
        self._grammars.load()
        self.engine.compile_grammar = self._grammars

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Run all prompts to their ends and return their outputs in the order of the prompts."""
        run = self.start(prompts, params)
        try:
            for _ in run:
                pass
        except BaseException:
            run.abort()  # no other code holds it
            raise
        return run.outputs

    def start(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, *, keep_logits: bool = False
    ) -> Run:
        """Queue all prompts and return a `Run`, which does the work as it is iterated over.

        `keep_logits` keeps the logits of every token of the first prompt's first sample, for comparing. A run that is
        not iterated to its end goes on beside the next one; `abort()` gives it up.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params are SamplingParams for all prompts, and not of type {type(params).__name__}")
        checked = [self._encode(prompt) for prompt in _as_list(prompts)]
        requests: Requests = []
        with self.engine.lock:
            try:
                for text, token_ids in checked:
                    request_id = f"request-{next(self._request_ids)}"
                    requests.append((request_id, self.engine.add_request(request_id, token_ids, params, prompt=text)))
            except BaseException:
                for request_id, _ in requests:  # all or none
                    self.engine.abort(request_id)
                    self.engine.forget(request_id)
                raise
        return Run(self.engine, requests, keep_logits)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], labels: Sequence[str] = (), *, on_progress: Progress = NO_PROGRESS
    ) -> list[tasks.Classification]:
        """Compute how likely each label is to follow each prompt, from one forward per prompt if labels are single
        tokens. A model with a classification head has its own labels and takes none.

        Raises `UsageError` for fewer than two labels, or two that are the same tokens.
        """
        encoded = [self._encode(prompt)[1] for prompt in _as_list(prompts)]
        head_labels = self.model.labels
        if head_labels:
            if labels:
                raise UsageError(f"this model has labels of its own: {', '.join(head_labels)}; leave --labels out")
            return self._finished(tasks.classify_by_head(encoded, head_labels), on_progress)
        token_ids = [self.tokenizer.encode(label, add_special_tokens=False) for label in labels]
        return self._finished(tasks.classify(encoded, token_ids, labels), on_progress)

    def score(
        self, pairs: Sequence[tuple[Prompt, Prompt]], top: int = 0, *, on_progress: Progress = NO_PROGRESS
    ) -> list[tasks.Score]:
        """Score each (prompt, continuation): the log probability of each of the continuation's tokens, and of `top`
        alternatives to each. Raises `UsageError` if there is nothing to score."""
        encoded = [(self._part(prompt, begins=True), self._part(continuation)) for prompt, continuation in pairs]
        return self._finished(tasks.score(encoded, top), on_progress)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling | None = None, *, on_progress: Progress = NO_PROGRESS
    ) -> np.ndarray:
        """Return one unit vector per prompt: float32 `[prompts, hidden]`.

        pooling: `last`, the last token's hidden state, or `mean`, that of all; None takes what the model's file says,
        `last` where it says nothing.
        """
        if pooling not in (None, "last", "mean"):
            raise UsageError(f"unknown pooling {pooling!r}; supported: last, mean")
        encoded = [self._encode(prompt)[1] for prompt in _as_list(prompts)]
        return self._finished(tasks.embed(encoded, pooling or self.pooling), on_progress)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None = None,
        *,
        by: Literal["answer", "embedding"] = "answer",
        on_progress: Progress = NO_PROGRESS,
    ) -> list[float]:
        """Return how relevant each document is to the query. by: `answer`, the probability of "yes" against "no" in the
        form that Qwen3-Reranker was trained with, from 0 to 1, by the model's classification head if it has one;
        `embedding`, the cosine of the two embeddings."""
        if by not in ("answer", "embedding"):
            raise UsageError(f"--by is answer or embedding, and not {by!r}")
        if by == "embedding":
            vectors = self.embed([query, *documents], on_progress=on_progress)
            return [float(cosine) for cosine in vectors[1:] @ vectors[0]]
        yes, no = tasks.rerank_candidates(self.tokenizer, self.model.labels)
        extra = {} if instruction is None else {"instruction": instruction}
        prompts = [tasks.rerank_prompt(self.tokenizer, query, document, **extra) for document in documents]
        return self._finished(tasks.rerank(prompts, yes, no), on_progress)

    def answer(
        self,
        requests: Sequence[tuple[Sequence[int], Task]],
        on_step: Callable[[StepRecord], None] = lambda record: None,
        on_progress: Progress = NO_PROGRESS,
    ) -> list[Readout]:
        """Run prefill-only requests, each a prompt's tokens and its task; return their results in order.

        Other work of the engine advances with them. All or none are queued. on_progress: called after each step with
        (answered, in all). Raises `ForgeError` if one of them ends without an answer: the model is gone, or its logits
        are no numbers.
        """
        engine, request_ids = self.engine, []
        with engine.lock:
            try:
                for token_ids, task in requests:
                    request_id = f"request-{next(self._request_ids)}"
                    engine.add_request(request_id, token_ids, SamplingParams(), task=task)
                    request_ids.append(request_id)
                waiting = request_ids
                while waiting := [request_id for request_id in waiting if engine.is_unfinished(request_id)]:
                    on_progress(len(request_ids) - len(waiting), len(request_ids))
                    on_step(engine.step())
                on_progress(len(request_ids), len(request_ids))
                return [self._answer_to(request_id) for request_id in request_ids]
            finally:
                for request_id in request_ids:
                    engine.abort(request_id)
                    engine.forget(request_id)

    def _answer_to(self, request_id: str) -> Readout:
        """Return a request's answer. Raises `ForgeError` if there is none."""
        output = self.engine.output(request_id).outputs[0]
        if output.readout is None:
            raise ForgeError("; ".join(output.errors) or "the request was aborted")
        return output.readout

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each of `token_ids`: float32 `[len(token_ids), vocab_size]`.

        One prefill in a storage of its own: nothing that is running is touched.
        """
        if not len(token_ids) or not all(0 <= token_id < self.model.vocab_size for token_id in token_ids):
            raise UsageError(f"logits need one or more token ids between 0 and {self.model.vocab_size - 1}")
        length, block_size = len(token_ids), self.engine.storage.layout.block_size
        num_blocks = -(-length // block_size)
        batch = flat_batch([SequenceRows(token_ids, 0, range(num_blocks), range(length))], block_size)
        with self.engine.lock:
            return np.asarray(self.model.forward(batch, self._new_storage(self.model, num_blocks, block_size)))

    def speculate_with(self, mode: str | Proposer | None, draft: str | Path | Sequence[str | Path] = ()) -> None:
        """Speculate from the next step on with `draft` (the bundled one, or those given), with `ngram`, `grammar`, a
        `Proposer`, or not (`off`).

        Raises `UsageError` for a draft whose tokens are not this model's.
        """
        drafts = [draft] if isinstance(draft, str | Path) else draft
        mode = checked_mode(mode, DEFAULT_K)
        self._proposers = load_proposers(self._pieces.ngram() if mode == "ngram" else mode, drafts, self._target)
        with self.engine.lock:
            self.engine.speculation = self.new_speculation()

    def new_speculation(self) -> Speculation | None:
        """Create a `Speculation` with this model's proposers, or None without one, for an engine of
        `new_engine` while no other runs."""
        if not self._proposers:
            return None
        return Speculator(
            self._proposers,
            max_k=self._args.k,
            vocab_size=self.model.vocab_size,
            fixed=self._args.speculate_fixed,
            acceptance=checked_acceptance(self._args.acceptance),
        )

    @property
    def model(self) -> Model:
        """The model, or the `LeasedModel` around it."""
        return self.engine.model

    def lease(self) -> Lease:
        """Return the lease by which any thread can take the model back. Every sequence then ends with an error."""
        with self.engine.lock:
            return lease_model(self.engine, "target")

    @property
    def kv_layout(self) -> KvLayout:
        """The shape of the KV storage, from which the bytes of a token follow."""
        return self.engine.storage.layout

    def chat_session(self, system: str | None = None) -> "ChatSession":
        """Begin a conversation that keeps its cache between turns."""
        return ChatSession(self, system)

    def time_operations(self) -> None:
        """Measure time per layer and operation from now on, as the option `time_operations` does from the beginning."""
        self.model.time_operations()

    def operation_times(self) -> tuple[OperationTime, ...]:
        """Return the time by layer and operation since the measurement began; empty without one."""
        return self.model.operation_times()

    def _finished(self, question: tasks.Question[tasks.Values], on_progress: Progress) -> tasks.Values:
        return question.finish(self.answer(question.requests, on_progress=on_progress))

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        _require_items(prompt)
        return None, prompt

    def _part(self, text: Prompt, begins: bool = False) -> Sequence[int]:
        """Encode a part of a text; only the one that `begins` it has special tokens before it."""
        if not isinstance(text, str):
            return self._encode(text)[1]
        prefix = self.tokenizer.spec.prefix_ids if begins else ()
        return [*prefix, *self.tokenizer.encode(text, add_special_tokens=False)]

    def _kv_memory_on_gpu(
        self, model: Model, layout: KvLayout, config: SchedulerConfig, utilization: float | None
    ) -> int:
        """Return the bytes for the pool: what the GPU has left beside the arrays of one step and the scratch blocks;
        unless a share was requested, at most what all sequences at full length take, so that other models have room
        too."""
        scratch = self._num_scratch_blocks(config, layout.block_size) * layout.block_size * layout.bytes_per_token
        left = kv_memory(utilization, scratch + model.temporary_bytes(config.token_budget, config.max_num_seqs))
        if utilization is not None:
            return left
        block_bytes = layout.block_size * layout.bytes_per_token
        return min(left, config.max_num_seqs * blocks_for(self.max_model_len, layout.block_size) * block_bytes)

    def _num_scratch_blocks(self, config: SchedulerConfig, block_size: int) -> int:
        """Return the blocks that one step's prefill-only requests take, each with a last block that is filled in
        part."""
        return -(-max(config.prefill_only_tokens, self.max_model_len) // block_size) + MAX_PREFILL_ONLY

    def _new_storage(self, model: Model, num_blocks: int, block_size: int) -> KvStorage:
        layout = model.kv_layout(num_blocks, block_size, self.kv_dtype)
        try:
            return model.new_storage(layout)
        except (MemoryError, ValueError):  # NumPy raises the latter for more bytes than an address can hold
            gigabytes = num_blocks * block_size * layout.bytes_per_token / 1e9
            problem = f"a KV cache of {gigabytes:.1f} GB does not fit in memory"
            raise UsageError(f"{problem}: lower --max-model-len or --num-blocks") from None


class ChatSession:
    """A conversation: each turn's prompt is the whole conversation, and the cache keeps what was computed of it."""

    def __init__(self, llm: LLM, system: str | None = None):
        self._llm = llm
        self._system = system
        self._retained: int | None = None
        """The sequence whose cache is retained for the next turn."""
        self._branches: list[tuple[list[dict[str, str]], int | None]] = []
        """For each fork of the conversation: the messages until then, and a retained cache of them."""
        self._turn: ChatTurn | None = None
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        with self._llm.engine.lock:
            self._end_turn()
            self.messages = [{"role": "system", "content": self._system}] if self._system else []
            for seq_id in (self._retained, *(seq_id for _, seq_id in self._branches)):
                if seq_id is not None:
                    self._llm.engine.release(seq_id)
            self._retained, self._branches = None, []

    @property
    def depth(self) -> int:
        """The number of places to which `back` can return."""
        return len(self._branches)

    @property
    def tokens_held(self) -> int:
        """The number of the conversation's tokens whose keys and values are in the cache."""
        engine, retained = self._llm.engine, self._retained
        with engine.lock:
            if retained is None or not engine.is_retained(retained):
                return 0
            return engine.cache.computed_length(retained)

    def fork(self) -> None:
        """Mark this place of the conversation, to come `back` to: its cache is forked, and the fork kept for then."""
        with self._llm.engine.lock:
            self._end_turn()
            kept = None if self._retained is None else self._llm.engine.fork_retained(self._retained)
            self._branches.append((list(self.messages), kept))

    def back(self) -> None:
        """Return to the last marked place and forget what was said since. Raises `UsageError` without one."""
        if not self._branches:
            raise UsageError("there is no place to go back to: mark one with /fork first")
        with self._llm.engine.lock:
            self._end_turn()
            if self._retained is not None:
                self._llm.engine.release(self._retained)
            self.messages, self._retained = self._branches.pop()

    def send(self, text: str, params: SamplingParams | None = None) -> "ChatTurn":
        """Begin the assistant's answer to `text`. An answer that has not ended is aborted first.

        Raises `UsageError`, with the conversation as it was, if the conversation no longer fits the context.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise UsageError(f"a conversation has one answer per turn, and n is {params.n}")
        self._end_turn()
        messages = [*self.messages, {"role": "user", "content": text}]
        tokenizer, engine = self._llm.tokenizer, self._llm.engine
        rendered, token_ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
        request_id = f"chat-{next(self._llm._request_ids)}"
        with engine.lock:
            seq_ids = engine.add_request(
                request_id,
                token_ids,
                params,
                prompt=rendered,
                retain_cache=True,
                continues_from=self._retained,
            )
        self._turn = ChatTurn(self, messages, engine, [(request_id, seq_ids)])
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.abort()
            self._turn = None

    def _join(self, messages: list[dict[str, str]], answer: str, seq_id: int) -> None:
        """Make a finished turn part of the conversation: its messages, and its cache to continue from."""
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        engine = self._llm.engine
        if engine.is_retained(seq_id):
            if self._retained is not None:
                engine.release(self._retained)
            self._retained = seq_id


class ChatTurn(Run):
    """The run of one answer; joins the conversation when it ends, or when it is aborted."""

    def __init__(self, session: ChatSession, messages: list[dict[str, str]], engine: Engine, requests: Requests):
        super().__init__(engine, requests)
        self._session, self._messages, self._seq_id = session, messages, requests[0][1][0]

    def _on_end(self, outputs: list[RequestOutput]) -> None:
        self._session._join(self._messages, outputs[0].outputs[0].text, self._seq_id)


def _usable_context(limit: int, max_model_len: int | None) -> int:
    if max_model_len is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > limit:
        raise UsageError(f"--max-model-len {max_model_len} is more than the {limit} tokens of this model's context")
    return max_model_len


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    _require_items(prompts)
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    if not items:
        raise UsageError("there is no prompt: give one or more texts or lists of token ids")
    return items


def _require_items(prompt: object) -> None:
    """Refuse what could be taken for a list of prompts or of token ids and is none, such as the keys of a dict."""
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise UsageError(f"a prompt is text or a list of token ids, and not of type {type(prompt).__name__}")
