"""forge as a process that is measured: forward passes without sampling, as its peers', and whole requests through its
engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge import LLM, __version__
from forge.backends.devices import why_not_cuda
from forge.bench.cases import BLOCK_SIZE, WARM_ROUNDS, Load, answered, unique_prompts
from forge.bench.worker import TRIAL_TOKENS, Missing, Worker, timed
from forge.engine.sampler import argmax_rows
from forge.model.forward_batch import ForwardBatch, SequenceRows, flat_batch
from forge.model.qwen3 import Qwen3
from forge.workload.judging import run_requests

CHUNK = 512
"""Tokens of a sequence that are filled in at a time."""


class ForgeWorker(Worker):
    """One loaded model, the batch that is timed, and its engine."""

    _batch: Any = None
    _storage: Any = None

    def load(self, model: str, **options: Any) -> Mapping[str, Any]:
        """Load the model. options: those of `LLM`."""
        device = options.get("device")
        if device == "cuda" and (reason := why_not_cuda()):
            raise Missing(reason)
        if device == "cpu":
            import forge.backends.cpu.backend  # noqa: F401 (loading libraries is no part of loading a file)
        compiled: list[int] = []
        llm = self._llm = LLM(model, **options, on_compile_progress=lambda done, total: compiled.append(done))
        kv = f"{llm.kv} in {llm.kv_dtype}" if "kv" in options else llm.kv_dtype
        on_cpu = {"weight_bytes": _packed_bytes(llm.model)}
        # What a decode step reads: every matrix once and one row of the embedding, and keys and values per token.
        read = sum(getattr(matrix, "read_bytes", 0) for matrix in _matrices(llm.model, embedding=False))
        on_gpu = {"read_bytes": read, "kv_bytes": llm.kv_layout.bytes_per_token}
        return {
            "description": f"forge {__version__}, {llm.device_description}, KV {kv}",
            "seconds": llm.load_seconds,
            "first_time": bool(compiled),
            **(on_cpu if device == "cpu" else on_gpu),
        }

    def replay(self, seconds: float) -> Mapping[str, Any]:
        """Measure the device's own seconds for the last step's CUDA graph; None if that step was launched kernel by
        kernel."""
        from forge.bench.limits_worker import fastest, import_torch

        backend: Any = getattr(self._llm.model, "backend", None)  # a hash model has none
        graph = backend and backend.last_graph(self._storage)
        return {"device_seconds": graph and fastest(import_torch(), graph.replay, seconds)}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        """Fill a new cache with the first `context` tokens of every sequence, and make a batch of the rest."""
        model, sequences, blocks = self._llm.model, len(token_ids), -(-len(token_ids[0]) // BLOCK_SIZE)
        self._storage = None
        self._storage = model.new_storage(model.kv_layout(sequences * blocks, BLOCK_SIZE, self._llm.kv_dtype))
        for index, ids in enumerate(token_ids):
            for start in range(0, context, CHUNK):
                stop = min(context, start + CHUNK)
                model.forward(batch_of([ids[start:stop]], start, blocks, first=index), self._storage)
        self._batch = batch_of([ids[context:] for ids in token_ids], context, blocks)
        rounds = WARM_ROUNDS if len(self._batch.token_ids) <= TRIAL_TOKENS else 1  # a longer one takes minutes
        self._expected = min(self._step() for _ in range(rounds))
        assert isinstance(model, Qwen3)
        execution = getattr(model.backend, "execution", None)
        eager = f"{self._llm.kv_dtype} KV" if self._llm.device == "cpu" else "eager"
        setting = f"{execution.mode}: {execution.reason}" if execution is not None else eager
        return {"setting": setting, "seconds": self._expected}

    def logits(self, token_ids: list[int]) -> Mapping[str, Any]:
        """Return the logits of the last token."""
        model, blocks = self._llm.model, -(-len(token_ids) // BLOCK_SIZE)
        storage = model.new_storage(model.kv_layout(blocks, BLOCK_SIZE, self._llm.kv_dtype))
        return {"logits": np.asarray(model.forward(batch_of([token_ids], 0, blocks), storage))[0].tolist()}

    def requests(self, load: Any) -> Mapping[str, Any]:
        """Run a closed loop of requests in this process, after a warm-up of its own. load: a `Load`'s fields."""
        self._batch, self._storage, load = None, None, Load(**load)
        for count, seed in load.rounds:
            prompts = unique_prompts(count, load.prompt_tokens, self._llm.model.vocab_size, seed)
            run = run_requests(self._llm.engine, prompts, load.output_tokens, load.concurrency)
        times = zip(run.first_token_ms, run.latencies_ms, strict=True)
        return answered("in process, greedy", ((first / 1e3, end / 1e3) for first, end in times), run.seconds)

    def answer(self, prompts: Sequence[str | list[int]], output_tokens: int, concurrency: int) -> Mapping[str, Any]:
        """Run these requests in a closed loop; return output tokens per second."""
        ids = [self._llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        run = run_requests(self._llm.engine, ids, output_tokens, concurrency)
        return {"tokens_per_second": run.requests_per_second * output_tokens}

    def _step(self) -> float:
        """Run the batch once and return its seconds. On a GPU a step is over when the host knows its tokens."""
        forward = self._llm.model.forward
        if self._llm.device == "cpu":
            logits, seconds = timed(lambda: forward(self._batch, self._storage))
            self._top_tokens = logits.argmax(axis=1).tolist()
            return seconds
        (self._top_tokens, _), seconds = timed(lambda: argmax_rows(forward(self._batch, self._storage)))
        return seconds


def batch_of(token_ids: list[list[int]], start: int, blocks: int, first: int = 0) -> ForwardBatch:
    """Return rows of sequences `first`, `first + 1`, … from position `start` on, with the logits of each one's last;
    the sequences have so many `blocks` each, one behind the other."""
    last = range(len(token_ids[0]) - 1, len(token_ids[0]))
    tables = [range(number * blocks, (number + 1) * blocks) for number in range(first, first + len(token_ids))]
    return flat_batch(
        [SequenceRows(ids, start, table, last) for ids, table in zip(token_ids, tables, strict=True)], BLOCK_SIZE
    )


def _matrices(model: Any, embedding: bool) -> list[Any]:
    """Return a model's arrays of weights, a tied one once. embedding: include the embedding if it is not the head."""
    weights = getattr(model, "weights", None)
    if weights is None:
        return []
    matrices = {id(matrix): matrix for matrix in [weights.head, *([weights.embedding] if embedding else [])]}
    for layer in weights.layers:
        matrices |= {id(value): value for value in vars(layer).values()}
    return list(matrices.values())


def _packed_bytes(model: Any) -> int:
    """Return bytes of all matrices as forge has laid them out in memory."""
    packed = (getattr(matrix, "packed", None) for matrix in _matrices(model, embedding=True))
    return sum(array.nbytes for array in packed if array is not None)
