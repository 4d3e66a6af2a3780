"""forge as a contender: `Qwen3.forward` on the cpu device, without sampling, as `llama_decode` is without it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from forge.bench.worker import peak_memory, serve, take_turn, timed
else:
    from worker import peak_memory, serve, take_turn, timed

BLOCK_SIZE = 16
CHUNK = 512
"""Tokens of a sequence that are filled in at a time."""


class ForgeContender:
    """One loaded model, and the batch that is timed."""

    def __init__(self):
        self._llm = None
        self._batch = self._storage = None
        self._expected = 0.0

    def load(self, model: str, threads: int, max_context: int) -> Mapping[str, Any]:
        import forge.backends.cpu.backend  # noqa: F401 (loading libraries is no part of loading a file)
        from forge import LLM, __version__
        from forge.model.qwen3 import Qwen3

        compiled: list[int] = []
        llm = self._llm = LLM(
            model,
            device="cpu",
            threads=threads,
            max_model_len=max_context,
            max_num_seqs=1,
            block_size=BLOCK_SIZE,
            on_compile_progress=lambda done, total: compiled.append(done),
        )
        assert isinstance(llm.model, Qwen3)
        return {
            "description": f"forge {__version__}, {llm.device_description}, KV {llm.kv_dtype}",
            "seconds": llm.load_seconds,
            "first_time": bool(compiled),
            "weight_bytes": _packed_bytes(llm.model.weights),
        }

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        sequences, length = len(token_ids), len(token_ids[0])
        blocks = -(-length // BLOCK_SIZE)
        model = self._llm.model
        self._storage = model.new_storage(model.kv_layout(sequences * blocks, BLOCK_SIZE, self._llm.kv_dtype))
        for index, ids in enumerate(token_ids):
            for start in range(0, context, CHUNK):
                stop = min(context, start + CHUNK)
                model.forward(batch_of([ids[start:stop]], start, blocks, first=index), self._storage)
        self._batch = batch_of([ids[context:] for ids in token_ids], context, blocks)
        self._expected = self._step()
        return {"setting": f"{self._llm.kv_dtype} KV", "seconds": self._expected}

    def turn(self, min_steps: int, min_seconds: float) -> Mapping[str, Any]:
        seconds = take_turn(self._step, min_steps, min_seconds, self._expected)
        self._expected = seconds[-1]
        return {"seconds": seconds, "top_tokens": self._top_tokens}

    def _step(self) -> float:
        logits, seconds = timed(lambda: self._llm.model.forward(self._batch, self._storage))
        self._top_tokens = logits.argmax(axis=1).tolist()
        return seconds


def batch_of(token_ids: list[list[int]], start: int, blocks: int, first: int = 0):
    """Rows of sequences `first`, `first + 1`, … from position `start` on, with the logits of each one's last."""
    import numpy as np

    from forge.model.forward_batch import ForwardBatch

    sequences, count = len(token_ids), len(token_ids[0])
    tables = np.arange(first * blocks, (first + sequences) * blocks, dtype=np.int32).reshape(sequences, blocks)
    positions = np.tile(np.arange(start, start + count, dtype=np.int32), sequences)
    owner = np.repeat(np.arange(sequences), count)
    cu_seqlens = np.arange(0, sequences * count + 1, count, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(token_ids, np.int32).reshape(-1),
        positions=positions,
        cu_seqlens=cu_seqlens,
        slot_mapping=(tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32),
        block_tables=tables,
        context_lens=np.full(sequences, start + count, np.int32),
        logit_rows=cu_seqlens[1:] - 1,
    )


def _packed_bytes(weights) -> int:
    """Bytes of all matrices as forge has laid them out in memory, a tied one once."""
    matrices = {id(weights.embedding): weights.embedding, id(weights.head): weights.head}
    for layer in weights.layers:
        matrices |= {id(value): value for value in vars(layer).values() if hasattr(value, "packed")}
    return sum(matrix.packed.nbytes for matrix in matrices.values())


if __name__ == "__main__":
    contender = ForgeContender()
    serve({"load": contender.load, "prepare": contender.prepare, "turn": contender.turn, "memory": peak_memory})
