"""Forward passes without an engine: batches laid out by hand, in a storage of their own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from forge.cache.kv_storage import KvStorage
from forge.model import forward_batch
from forge.model.forward_batch import ForwardBatch, SequenceRows
from forge.model.model import Model


@dataclass(frozen=True)
class Part:
    """Rows `start` to `end` - 1 of a sequence of tokens whose keys and values lie in `blocks`."""

    token_ids: list[int]
    start: int
    end: int
    blocks: list[int]


def flat_batch(parts: list[Part], block_size: int, logit_rows: list[int] | None = None) -> ForwardBatch:
    """Build a batch of all parts end to end, with logits for every row unless told otherwise."""
    rows = [
        SequenceRows(part.token_ids[part.start : part.end], part.start, part.blocks, range(part.end - part.start))
        for part in parts
    ]
    batch = forward_batch.flat_batch(rows, block_size)
    return batch if logit_rows is None else replace(batch, logit_rows=np.array(logit_rows, np.int32))


def new_storage(model: Model, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvStorage:
    return model.new_storage(model.kv_layout(num_blocks, block_size, kv_dtype))


def one_prefill(model: Model, token_ids: list[int], block_size: int = 16, kv_dtype: str = "float32") -> np.ndarray:
    """Run one forward pass over all tokens; return the logits after each: float32 `[len(token_ids), vocab]`."""
    num_blocks = -(-len(token_ids) // block_size)
    batch = flat_batch([Part(token_ids, 0, len(token_ids), list(range(num_blocks)))], block_size)
    return np.asarray(model.forward(batch, new_storage(model, num_blocks, block_size, kv_dtype)))


def random_cuts(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return [start, end) of the chunks of one sequence, at random places, single tokens at the end."""
    decoded = int(rng.integers(0, min(4, length)))
    cuts = rng.integers(1, length, size=rng.integers(0, 4)).tolist() if length > 1 else []
    edges = sorted({0, *cuts, *range(length - decoded, length), length})
    return list(pairwise(edges))


def random_batches(
    sequences: list[list[int]], block_size: int, rng: np.random.Generator
) -> Iterator[list[tuple[int, Part]]]:
    """Return lists of (sequence number, part) until every sequence is computed, over a shuffled pool of blocks."""
    numbers = [-(-len(tokens) // block_size) for tokens in sequences]
    scattered = iter(rng.permutation(sum(numbers)).tolist())
    blocks = [[next(scattered) for _ in range(number)] for number in numbers]
    pending = [random_cuts(len(tokens), rng) for tokens in sequences]
    while any(pending):
        ready = [index for index, cuts in enumerate(pending) if cuts]
        chosen = rng.permutation([index for index in ready if rng.random() < 0.7] or ready[:1]).tolist()
        spans = [(index, *pending[index].pop(0)) for index in chosen]
        yield [(index, Part(sequences[index], start, end, blocks[index])) for index, start, end in spans]
