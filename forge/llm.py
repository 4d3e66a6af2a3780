"""The Python API: a model with an engine around it, in the shape that the ecosystem knows.

llm = LLM("tales", kv="basic")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge.backends.devices import DEFAULT_DEVICE, check_device, create_backend, is_gpu, is_large_gpu
from forge.cache.block_table import blocks_for
from forge.cache.factory import DEFAULT_BLOCK_SIZE, CacheFactory, CacheSize, canonical_mode, create_kv_cache
from forge.cache.kv_storage import KV_DTYPES, KvLayout, KvStorage
from forge.engine import tasks
from forge.engine.engine import Engine
from forge.engine.outputs import RequestOutput
from forge.engine.policies import (
    DEFAULT_ONESHOT_MEMORY,
    DEFAULT_ONESHOT_TOKENS,
    AdmissionOrder,
    SchedulerConfig,
    VictimPolicy,
)
from forge.engine.proposer import NoSpeculation, Proposer, Speculation
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Readout, Task
from forge.errors import ForgeError, UsageError
from forge.grammar.compiler import GrammarCompiler
from forge.model.backend import OperationTime
from forge.model.catalog import DEFAULT_MODEL
from forge.model.forward_batch import ForwardBatch
from forge.model.loader import LoadedModel, LoadProgress, load_model
from forge.model.model import Model
from forge.speculation.leases import Lease, lease_model
from forge.speculation.setup import DEFAULT_K, Target, checked_acceptance, checked_mode, load_proposers
from forge.speculation.speculator import Speculator
from forge.trace.records import Pooling, PreemptionMode, StepRecord

Prompt = str | Sequence[int]
"""Text, or token ids."""
Progress = Callable[[int, int], None]
"""Called with (done, in all)."""

MOST_ONESHOTS = 128
"""Requests that keep nothing in one step, about: the scratch blocks are counted for so many."""
CPU_ONESHOT_MEMORY = 40 << 20
"""Temporary bytes that a step takes for requests that keep nothing on the CPU: about what its caches hold. A forward
over 2,048 rows of the 0.6B shape needs 134 MB and computes 970 tokens/s; over 512 rows 1,150."""
LARGE_GPU_STEP_TOKENS = 8192
"""Tokens of a step there, for the reason given next; not measured."""
LARGE_GPU_ONESHOT_TOKENS, LARGE_GPU_ONESHOT_MEMORY = 8192, 4 << 30
"""Its products come in waves of tiles, one per multiprocessor. Counted, not measured: 2,048 rows by a matrix of 2,560
make 160 tiles of 128 x 256, two waves of which 132 multiprocessors idle through 39 %; 8,192 rows idle through 3 %."""
DEFAULT_MAX_MODEL_LEN = 4096
"""The context that is reserved for by default, where the model has as much."""


class LLM:
    """One model, loaded, with one engine. Threads that use it together take turns, a step at a time; a process that was
    forked cannot use its parent's."""

    def __init__(
        self,
        model: str | Path | LoadedModel = DEFAULT_MODEL,
        *,
        kv: str | CacheFactory = "off",
        device: str = DEFAULT_DEVICE,
        kv_dtype: str | None = None,
        quantize: str | None = None,
        invariant: bool = False,
        kernels: str | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_blocks: int | None = None,
        kv_memory: int | None = None,
        gpu_memory_utilization: float | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int | None = None,
        chunked_prefill: bool = True,
        order: str | AdmissionOrder = "fcfs",
        preempt: str | VictimPolicy = "lifo",
        mode: PreemptionMode = "recompute",
        num_host_blocks: int = 256,
        prefix_planning: bool = True,
        oneshot: bool = True,
        oneshot_tokens: int | None = None,
        oneshot_memory: int | None = None,
        speculate: str | Proposer | None = None,
        draft: str | Path | Sequence[str | Path] = (),
        k: int = DEFAULT_K,
        speculate_fixed: bool = False,
        acceptance: str = "gumbel",
        check: bool = False,
        time_operations: bool = False,
        on_load_progress: LoadProgress | None = None,
        on_compile_progress: Callable[[int, int], None] | None = None,
    ):
        """Load a model.

        model: a bundled or pulled model's name, the path of a GGUF file or a Hugging Face folder, or `hash`. kv: `off`,
        `basic`, `on` (basic), `paged` or `prefix`. device: `cpu`, `reference` or `cuda`. kv_dtype: what keys and values
        are rounded to, `float32`, `float16` or `bfloat16`; None takes the device's own. quantize: `q8_0` quantizes
        float weights as they are loaded (cpu and cuda). invariant: one tiling for every number of rows, so that a
        sequence's bits never depend on its batch (cuda; the other devices always keep that). kernels: `triton` or
        `torch` (cuda). block_size: tokens per KV block. num_blocks: the KV pool's size; or
        kv_memory: the bytes that it may take. gpu_memory_utilization: on cuda, the share of the GPU's memory that may
        be in use in all, from which the pool's size follows where neither is given; None takes what `max_num_seqs`
        sequences of `max_model_len` need, up to 0.9. threads: CPU threads, None for all that this process may use.
        max_model_len: prompt and output tokens of one sequence at most, which bounds what is reserved; None takes the
        model's context, up to 4,096. max_num_seqs: sequences that may run at once. max_num_batched_tokens: tokens that
        one step may compute; None is 8,192 on a large GPU and 512 elsewhere. chunked_prefill: whether prompts may come
        in pieces beside decodes. order: `fcfs` or
        `priority`. preempt: the victim when blocks run out, `lifo` or `least-progressed`. mode: `recompute` or `swap`
        what a victim had. num_host_blocks: the pool to swap to. prefix_planning: whether requests that begin alike wait
        while one of them computes what they share, and those that keep nothing share it at all. oneshot: whether a
        generation of one token at most is a request that keeps nothing. oneshot_tokens, oneshot_memory: what a step
        takes of such requests, in tokens and in temporary bytes; None for what suits the device. speculate: who
        proposes draft tokens, `draft`, `ngram` or `grammar` (text that structured output leaves no choice
        about); None or `off` for no speculation. draft: the draft model, or several that all guess; the bundled one if
        not given. k: draft tokens per cycle, at most unless `speculate_fixed`. acceptance: which draft tokens stand
        under sampling: `gumbel` (the same tokens as without a draft) or `rejection` (more are accepted; reproducible
        only with `speculate_fixed`). check: look after every step whether each rule of the scheduler and the cache
        holds, and raise AssertionError where one does not. time_operations: keep time per layer and operation, for
        `operation_times()`. on_load_progress: called with (bytes loaded, bytes in all). on_compile_progress: called
        with (kernels compiled, kernels in all) if any have to be, which happens once per machine.

        What is not in forge is given as it is: model, a `LoadedModel`; kv, a function from a `CacheSize` to a
        `KvCache`; order and preempt, functions of their own; speculate, a `Proposer`.

        Raises `UsageError` for an option that has no meaning, the `ForgeError` of its format for a file that is not a
        sound Qwen3 model.
        """
        _require_positive("block_size", block_size)
        speculate = checked_mode(speculate, k)
        self._acceptance = checked_acceptance(acceptance)
        if max_num_batched_tokens is None and is_large_gpu(device):
            max_num_batched_tokens = max(LARGE_GPU_STEP_TOKENS, max_num_seqs)
        config = SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            chunked_prefill,
            order,
            preempt,
            mode,
            num_host_blocks,
            prefix_planning,
            oneshot,
            oneshot_tokens if oneshot_tokens is not None else _default_oneshot_tokens(device),
            oneshot_memory if oneshot_memory is not None else _default_oneshot_memory(device),
        )
        optional = {
            "num_blocks": num_blocks,
            "kv_memory": kv_memory,
            "threads": threads,
            "max_model_len": max_model_len,
        }
        for name, value in optional.items():
            if value is not None:
                _require_positive(name, value)
        if gpu_memory_utilization is not None:
            _check_gpu_memory(device, gpu_memory_utilization, num_blocks, kv_memory)
        if kv_dtype not in (None, *KV_DTYPES):
            raise UsageError(f"unknown kv dtype {kv_dtype!r}; supported: {', '.join(KV_DTYPES)}")
        if not callable(kv):
            canonical_mode(kv)  # an unknown one is refused before anything is loaded
        started = time.perf_counter()
        check_device(device, quantize, invariant, kernels)
        loaded = load_model(
            model,
            lambda: create_backend(device, threads, quantize, on_compile_progress, invariant, kernels),
            on_load_progress,
        )
        self.path, self.model_name = loaded.path, loaded.name
        self.pooling: Pooling = loaded.pooling
        """How an embedding is made of hidden states by default."""
        self.default_sampling = loaded.default_sampling
        """The `SamplingParams` that the model's file recommends, by name; empty where it says nothing."""
        target, self.tokenizer = loaded.model, loaded.tokenizer
        self.device, self.device_description = device, loaded.device_description
        self.kv_dtype = kv_dtype or loaded.default_kv_dtype
        if time_operations:
            target.time_operations()
        self.max_model_len = _usable_context(target.max_position_embeddings, max_model_len)
        layout = target.kv_layout(0, block_size, self.kv_dtype)
        target.prepare(layout)
        if kv_memory is None and num_blocks is None and is_gpu(device):
            kv_memory = self._kv_memory_on_gpu(target, layout, config, gpu_memory_utilization)
        size = CacheSize(self.max_model_len, max_num_seqs, block_size, layout.bytes_per_token, num_blocks, kv_memory)
        self._kv, self._cache_size, self._config = kv, size, config
        self._compile_grammar = GrammarCompiler(self.tokenizer, target.vocab_size)
        self._max_k, self._speculate_fixed, self._check = k, speculate_fixed, check
        self.max_num_seqs = config.max_num_seqs
        self.engine = self._engine_of(target, config)
        self.kv = self.engine.cache.kind
        limits = self.max_model_len, max_num_seqs
        self._target = Target(self.tokenizer, target.vocab_size, self.path, *limits, device, threads, self.kv_dtype)
        self.speculate_with(speculate, draft)
        self._request_ids = count()
        self.load_seconds = time.perf_counter() - started

    def new_engine(self, **changed: Any) -> Engine:
        """An engine of its own on the same weights, with an empty cache of the same kind and size.

        `changed`: fields of `SchedulerConfig` that are to differ from this model's.
        """
        return self._engine_of(self.model, replace(self._config, **changed))

    def _engine_of(self, model: Model, config: SchedulerConfig) -> Engine:
        size = replace(self._cache_size, max_num_seqs=config.max_num_seqs)
        try:
            cache, num_blocks = create_kv_cache(self._kv, size)
        except MemoryError:
            raise UsageError(
                "the KV cache does not fit in memory: lower --max-model-len, --max-num-seqs or --num-blocks"
            ) from None
        scratch = range(num_blocks, num_blocks + self._num_scratch_blocks(config, size.block_size))
        engine = Engine(
            model,
            self.tokenizer,
            cache,
            self._new_storage(model, scratch.stop, size.block_size),
            self.max_model_len,
            config,
            scratch,
        )
        engine.compile_grammar = self._compile_grammar
        engine.checks_invariants = self._check
        return engine

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
    ) -> "Run":
        """Queue all prompts and return a `Run`, which does the work as it is iterated over.

        `keep_logits` keeps the logits of every token of the first prompt's first sample, for comparing. A run that is
        not iterated to its end goes on beside the next one; `abort()` gives it up.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params are SamplingParams for all prompts, and not of type {type(params).__name__}")
        checked = [self._encode(prompt) for prompt in _as_list(prompts)]
        requests: list[tuple[str, tuple[int, ...]]] = []
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
        self,
        prompts: Prompt | Sequence[Prompt],
        labels: Sequence[str] = (),
        *,
        on_progress: Progress = lambda done, of: None,
    ) -> list[tasks.Classification]:
        """How likely each label is to follow each prompt, from one forward per prompt where labels are single tokens.
        A model with a classification head has labels of its own, and is given none.

        Raises `UsageError` for fewer than two labels, or two that are the same tokens.
        """
        encoded = [self._encode(prompt)[1] for prompt in _as_list(prompts)]
        own = self.model.labels
        if own:
            if labels:
                raise UsageError(f"this model has labels of its own: {', '.join(own)}; leave --labels out")
            return tasks.classify_by_head(encoded, own, self._answering(on_progress))
        token_ids = [self.tokenizer.encode(label, add_special_tokens=False) for label in labels]
        return tasks.classify(encoded, token_ids, labels, self._answering(on_progress))

    def score(
        self, pairs: Sequence[tuple[Prompt, Prompt]], top: int = 0, *, on_progress: Progress = lambda done, of: None
    ) -> list[tasks.Score]:
        """Of each (prompt, continuation) the log probability of each of the continuation's tokens, and of `top`
        alternatives to each. Raises `UsageError` where there is nothing to score."""
        encoded = [(self._part(prompt, begins=True), self._part(continuation)) for prompt, continuation in pairs]
        return tasks.score(encoded, top, self._answering(on_progress))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        *,
        on_progress: Progress = lambda done, of: None,
    ) -> np.ndarray:
        """One unit vector per prompt: float32 `[prompts, hidden]`.

        pooling: `last`, the last token's hidden state, or `mean`, that of all; None takes what the model's file says,
        `last` where it says nothing.
        """
        if pooling not in (None, "last", "mean"):
            raise UsageError(f"unknown pooling {pooling!r}; supported: last, mean")
        encoded = [self._encode(prompt)[1] for prompt in _as_list(prompts)]
        return tasks.embed(encoded, pooling or self.pooling, self._answering(on_progress))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None = None,
        *,
        by: Literal["answer", "embedding"] = "answer",
        on_progress: Progress = lambda done, of: None,
    ) -> list[float]:
        """How relevant each document is to the query. by: `answer`, the probability of "yes" against "no" in the form
        that Qwen3-Reranker was trained with, from 0 to 1, by the model's classification head where it has one;
        `embedding`, the cosine of the two embeddings."""
        if by not in ("answer", "embedding"):
            raise UsageError(f"--by is answer or embedding, and not {by!r}")
        if by == "embedding":
            vectors = self.embed([query, *documents], on_progress=on_progress)
            return [float(cosine) for cosine in vectors[1:] @ vectors[0]]
        yes, no = tasks.rerank_candidates(self.tokenizer, self.model.labels)
        extra = {} if instruction is None else {"instruction": instruction}
        prompts = [tasks.rerank_prompt(self.tokenizer, query, document, **extra) for document in documents]
        return tasks.rerank(prompts, yes, no, self._answering(on_progress))

    def answer(
        self,
        requests: Sequence[tuple[Sequence[int], Task]],
        on_step: Callable[[StepRecord], None] = lambda record: None,
        on_progress: Progress = lambda done, of: None,
    ) -> list[Readout]:
        """Run requests that keep nothing, each a prompt's tokens and what is wanted of it; their results in order.

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
        """Raises `ForgeError` if there is none."""
        output = self.engine.output(request_id).outputs[0]
        if output.readout is None:
            raise ForgeError("; ".join(output.errors) or "the request was aborted")
        return output.readout

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """The logits after each of `token_ids`: float32 `[len(token_ids), vocab_size]`.

        One prefill in a storage of its own: nothing that is running is touched.
        """
        if not len(token_ids) or not all(0 <= token_id < self.model.vocab_size for token_id in token_ids):
            raise UsageError(f"logits need one or more token ids between 0 and {self.model.vocab_size - 1}")
        length, block_size = len(token_ids), self.engine.storage.layout.block_size
        num_blocks = -(-length // block_size)
        rows = np.arange(length, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=rows,
            cu_seqlens=np.array([0, length], np.int32),
            slot_mapping=rows,
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            context_lens=np.array([length], np.int32),
            logit_rows=rows,
        )
        with self.engine.lock:
            return np.asarray(self.model.forward(batch, self._new_storage(self.model, num_blocks, block_size)))

    def speculate_with(self, mode: str | Proposer, draft: str | Path | Sequence[str | Path] = ()) -> None:
        """From the next step on, guess by `draft` (the bundled one, or those given), by `ngram`, by `grammar`, by a
        proposer of one's own, or not (`off`).

        Raises `UsageError` for a draft whose tokens are not this model's.
        """
        drafts = [draft] if isinstance(draft, str | Path) else draft
        self._proposers = load_proposers(checked_mode(mode, DEFAULT_K), drafts, self._target)
        with self.engine.lock:
            self.engine.speculation = self.new_speculation()

    def new_speculation(self) -> Speculation:
        """A `Speculation` of its own with this model's proposers, for an engine of `new_engine` while no other runs."""
        if not self._proposers:
            return NoSpeculation()
        return Speculator(
            self._proposers,
            max_k=self._max_k,
            vocab_size=self.model.vocab_size,
            fixed=self._speculate_fixed,
            acceptance=self._acceptance,
        )

    @property
    def model(self) -> Model:
        """The model, or the `LeasedModel` around it."""
        return self.engine.model

    def lease(self) -> Lease:
        """The lease by which the model can be taken back, from any thread. Every sequence then ends with an error."""
        with self.engine.lock:
            return lease_model(self.engine, "target")

    @property
    def kv_layout(self) -> KvLayout:
        """The shape of the KV storage: what a token takes follows from it."""
        return self.engine.storage.layout

    def chat_session(self, system: str | None = None) -> "ChatSession":
        """A conversation that keeps its cache between turns."""
        return ChatSession(self, system)

    def time_operations(self) -> None:
        """From now on keep time per layer and operation, as `time_operations` does from the beginning."""
        self.model.time_operations()

    def operation_times(self) -> tuple[OperationTime, ...]:
        """Time by layer and operation since time began to be kept; empty without `time_operations`."""
        return self.model.operation_times()

    def _answering(self, on_progress: Progress) -> tasks.Answer:
        return partial(self.answer, on_progress=on_progress)

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        _require_items(prompt)
        return None, prompt

    def _part(self, text: Prompt, begins: bool = False) -> Sequence[int]:
        """The tokens of a part of a text; only the one that `begins` it has special tokens before it."""
        if not isinstance(text, str):
            return self._encode(text)[1]
        prefix = self.tokenizer.spec.prefix_ids if begins else ()
        return [*prefix, *self.tokenizer.encode(text, add_special_tokens=False)]

    def _kv_memory_on_gpu(
        self, model: Model, layout: KvLayout, config: SchedulerConfig, utilization: float | None
    ) -> int:
        """Bytes for the pool: what the GPU has left beside the arrays of one step and the scratch blocks; unless a
        share was asked for, at most what all sequences at full length take, so that other models have room too."""
        from forge.backends.cuda import sizes

        scratch = self._num_scratch_blocks(config, layout.block_size) * layout.block_size * layout.bytes_per_token
        left = sizes.kv_memory(utilization, scratch + model.temporary_bytes(config.token_budget, config.max_num_seqs))
        if utilization is not None:
            return left
        block_bytes = layout.block_size * layout.bytes_per_token
        return min(left, config.max_num_seqs * blocks_for(self.max_model_len, layout.block_size) * block_bytes)

    def _num_scratch_blocks(self, config: SchedulerConfig, block_size: int) -> int:
        """What one step's requests that keep nothing take, each with a last block that is filled in part."""
        return -(-max(config.oneshot_tokens, self.max_model_len) // block_size) + MOST_ONESHOTS

    def _new_storage(self, model: Model, num_blocks: int, block_size: int) -> KvStorage:
        layout = model.kv_layout(num_blocks, block_size, self.kv_dtype)
        try:
            return model.new_storage(layout)
        except (MemoryError, ValueError):  # NumPy raises the latter for more bytes than an address can hold
            gigabytes = num_blocks * block_size * layout.bytes_per_token / 1e9
            raise UsageError(
                f"a KV cache of {gigabytes:.1f} GB does not fit in memory: lower --max-model-len or --num-blocks"
            ) from None


class Run:
    """Requests on their way: iterate to advance them step by step, then read `outputs`."""

    def __init__(self, engine: Engine, requests: list[tuple[str, tuple[int, ...]]], keep_logits: bool = False):
        self._engine = engine
        self._request_ids = [request_id for request_id, _ in requests]
        self._outputs: list[RequestOutput] | None = None
        self._watched = requests[0][1][0] if keep_logits else None
        self.logits: list[np.ndarray] = []
        """With `keep_logits`: float32 `[vocab]` for each token of the first sample."""

    def __iter__(self) -> Iterator[StepRecord]:
        """Advance the engine until every request of this run has ended, yielding what each step did.

        Iterating again goes on where it stopped, after an exception too. Other runs of the same engine advance with it.
        """
        while (record := self._advance()) is not None:
            yield record

    def abort(self) -> None:
        """End what has not ended, keeping what it produced."""
        with self._engine.lock:
            if not self._has_ended():
                for request_id in self._request_ids:
                    self._engine.abort(request_id)
                self._has_ended()

    @property
    def outputs(self) -> list[RequestOutput]:
        """One per prompt, in order. Complete once the iteration has ended or after `abort()`."""
        with self._engine.lock:
            if self._has_ended() and self._outputs is not None:
                return self._outputs
            return [self._engine.output(request_id) for request_id in self._request_ids]

    @property
    def seed(self) -> int:
        """The seed in use, chosen or drawn."""
        return self.outputs[0].seed

    def _advance(self) -> StepRecord | None:
        """Do the next step; None if this run has ended."""
        with self._engine.lock:
            if self._has_ended():
                return None
            record = self._step()
            self._has_ended()  # before the caller sees the record, which may be the last one that it reads
            return record

    def _step(self) -> StepRecord:
        if self._watched is None:
            return self._engine.step()
        self._engine.on_logits = self._keep
        num_kept = len(self.logits)
        try:
            return self._engine.step()
        except BaseException:
            del self.logits[num_kept:]  # the engine undoes the step
            raise
        finally:
            self._engine.on_logits = None

    def _keep(self, seq_id: int, logits: np.ndarray) -> None:
        if seq_id == self._watched:
            self.logits.append(logits)

    def _has_ended(self) -> bool:
        """Whether every request has; the first time that it is so, their outputs are taken from the engine."""
        if self._outputs is None and not any(map(self._engine.is_unfinished, self._request_ids)):
            outputs = [self._engine.output(request_id) for request_id in self._request_ids]
            self._on_end(outputs)
            self._outputs = outputs
            for request_id in self._request_ids:
                self._engine.forget(request_id)
        return self._outputs is not None

    def _on_end(self, outputs: list[RequestOutput]) -> None:
        """Called when the run has ended."""


class ChatSession:
    """A conversation: each turn's prompt is the whole conversation, and the cache keeps what was computed of it."""

    def __init__(self, llm: LLM, system: str | None = None):
        self._llm = llm
        self._system = system
        self._retained: int | None = None
        """The sequence whose cache is retained for the next turn."""
        self._turn: ChatTurn | None = None
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        with self._llm.engine.lock:
            self._end_turn()
            self.messages = [{"role": "system", "content": self._system}] if self._system else []
            if self._retained is not None:
                self._llm.engine.release(self._retained)
                self._retained = None

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
        """A turn has ended: its messages are the conversation now, and its cache the one to continue."""
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        engine = self._llm.engine
        if engine.is_retained(seq_id):
            if self._retained is not None:
                engine.release(self._retained)
            self._retained = seq_id


class ChatTurn(Run):
    """The run of one answer; joins the conversation when it ends, or when it is aborted."""

    def __init__(
        self,
        session: ChatSession,
        messages: list[dict[str, str]],
        engine: Engine,
        requests: list[tuple[str, tuple[int, ...]]],
    ):
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


def _check_gpu_memory(device: str, utilization: float, num_blocks: int | None, kv_memory: int | None) -> None:
    if device != "cuda":
        raise UsageError(f"--gpu-memory-utilization is for --device cuda: on {device} give --kv-memory")
    if num_blocks is not None or kv_memory is not None:
        other = "--num-blocks" if num_blocks is not None else "--kv-memory"
        raise UsageError(f"--gpu-memory-utilization and {other} both say how large the KV cache is: give one of them")
    from forge.backends.cuda.sizes import checked_utilization

    checked_utilization(utilization)


def _default_oneshot_tokens(device: str) -> int:
    return LARGE_GPU_ONESHOT_TOKENS if is_large_gpu(device) else DEFAULT_ONESHOT_TOKENS


def _default_oneshot_memory(device: str) -> int:
    if is_large_gpu(device):
        return LARGE_GPU_ONESHOT_MEMORY
    return CPU_ONESHOT_MEMORY if device == DEFAULT_DEVICE else DEFAULT_ONESHOT_MEMORY


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
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
    """Refuse what could be taken for a list of prompts or of token ids and is none: the keys of a dict, say."""
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise UsageError(f"a prompt is text or a list of token ids, and not of type {type(prompt).__name__}")


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"--{name.replace('_', '-')} must be a whole number of at least 1, got {value!r}")
