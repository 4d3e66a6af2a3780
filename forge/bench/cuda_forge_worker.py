"""forge on the GPU as a contender: forward passes without sampling, and whole requests through its engine."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.bench.cuda_load import drive, unique_prompts
from forge.bench.forge_worker import BLOCK_SIZE, CHUNK, batch_of
from forge.bench.worker import Missing, peak_memory, serve, take_turn, timed
from forge.engine.sampler import argmax_rows
from forge.model.qwen3 import Qwen3

if TYPE_CHECKING:
    from forge import LLM

WARM_ROUNDS = 3
"""Untimed requests per slot before a load is timed: kernels compiled, graphs captured."""


class CudaForgeContender:
    """One loaded model, the batch that is timed, and its engine."""

    def __init__(self, device: str = "cuda"):
        self._device = device
        self._llm: LLM
        self._batch: Any = None
        self._storage: Any = None
        self._expected = 0.0

    def load(self, model: str, max_context: int, max_sequences: int, kv: str) -> Mapping[str, Any]:
        from forge import LLM, __version__
        from forge.backends.devices import why_not_cuda

        reason = why_not_cuda() if self._device == "cuda" else None
        if reason is not None:
            raise Missing(reason)
        blocks = max_sequences * -(-max_context // BLOCK_SIZE)
        llm = self._llm = LLM(
            model,
            device=self._device,
            kv=kv,
            max_model_len=max_context,
            max_num_seqs=max_sequences,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
        )
        return {
            "description": f"forge {__version__}, {llm.device_description}, KV {llm.kv} in {llm.kv_dtype}",
            "seconds": llm.load_seconds,
            "read_bytes": self.read_bytes,
            "kv_bytes": self.kv_bytes,
        }

    @classmethod
    def of(cls, llm) -> "CudaForgeContender":
        """One whose model is loaded already."""
        contender = cls()
        contender._llm = llm
        return contender

    @property
    def read_bytes(self) -> int:
        """Of weights that a decode step reads."""
        return _read_bytes(self._llm.model)

    @property
    def kv_bytes(self) -> int:
        """Per token."""
        return self._llm.kv_layout.bytes_per_token

    @property
    def last_graph(self):
        """The CUDA graph of the step that was timed last; None if it was launched kernel by kernel."""
        return self._llm.model.backend.last_graph(self._storage)

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        sequences, length = len(token_ids), len(token_ids[0])
        blocks = -(-length // BLOCK_SIZE)
        model = self._llm.model
        self._storage = None
        self._storage = model.new_storage(model.kv_layout(sequences * blocks, BLOCK_SIZE, self._llm.kv_dtype))
        for index, ids in enumerate(token_ids):
            for start in range(0, context, CHUNK):
                stop = min(context, start + CHUNK)
                model.forward(batch_of([ids[start:stop]], start, blocks, first=index), self._storage)
        self._batch = batch_of([ids[context:] for ids in token_ids], context, blocks)
        for _ in range(WARM_ROUNDS):
            self._expected = self._step()
        assert isinstance(model, Qwen3)
        execution = getattr(model.backend, "execution", None)
        how = f"{execution.mode}: {execution.reason}" if execution is not None else "eager"
        return {"setting": how, "seconds": self._expected}

    def turn(self, min_steps: int, min_seconds: float) -> Mapping[str, Any]:
        seconds = take_turn(self._step, min_steps, min_seconds, self._expected)
        self._expected = seconds[-1]
        return {"seconds": seconds, "top_tokens": self._top_tokens}

    def requests(
        self, prompt_tokens: int, output_tokens: int, concurrency: int, requests: int, seed: int
    ) -> Mapping[str, Any]:
        """A closed loop of requests in this process; the moments of each, after a warm-up of its own."""
        self._batch = self._storage = None
        vocab_size = self._llm.model.vocab_size
        warm = unique_prompts(WARM_ROUNDS * concurrency, prompt_tokens, vocab_size, seed + 1)
        drive(_Engine(self._llm), warm, output_tokens, concurrency)
        prompts = unique_prompts(requests, prompt_tokens, vocab_size, seed)
        moments, seconds = drive(_Engine(self._llm), prompts, output_tokens, concurrency)
        return {
            "setting": "in process, greedy",
            "seconds": seconds,
            "first_token": [each.first_token for each in moments],
            "end": [each.end for each in moments],
        }

    def _step(self) -> float:
        """A step is over when the host knows its tokens."""
        (self._top_tokens, _), seconds = timed(lambda: argmax_rows(self._llm.model.forward(self._batch, self._storage)))
        return seconds


class _Engine:
    """An `LLM`'s engine as a `LoadedEngine`."""

    def __init__(self, llm):
        from forge import SamplingParams

        self._engine, self._params, self._count = llm.engine, SamplingParams, 0
        self._request_of: dict[int, str] = {}

    def add(self, prompt: Sequence[int], output_tokens: int) -> int:
        self._count += 1
        request_id = f"bench-{id(self)}-{self._count}"
        params = self._params(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        (number,) = self._engine.add_request(request_id, prompt, params)
        self._request_of[number] = request_id
        return number

    def step(self) -> tuple[Sequence[int], Sequence[int]]:
        record = self._engine.step()
        ended = [finish.seq_id for finish in record.finished]
        for number in ended:
            self._engine.forget(self._request_of.pop(number))
        return [token.seq_id for token in record.tokens], ended


def _read_bytes(model) -> int:
    """Bytes of weights that one decode step reads: every matrix once, and of the embedding a row."""
    weights = model.weights
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [value for value in vars(layer).values() if hasattr(value, "read_bytes")]
    return sum(matrix.read_bytes for matrix in matrices)


if __name__ == "__main__":
    contender = CudaForgeContender()
    serve(
        {
            "load": contender.load,
            "prepare": contender.prepare,
            "turn": contender.turn,
            "requests": contender.requests,
            "memory": peak_memory,
        }
    )
