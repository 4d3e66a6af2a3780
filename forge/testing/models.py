"""Whether a model is deterministic, and exact: its logits follow from a sequence's tokens, and from nothing else.

That is all that the engine asks of a model, and what lets every technique change the cost and never the tokens. Each
check below varies one thing that must not be seen in the logits, to the bit: first in forward passes laid out by hand,
then through the whole engine. The oracle is the model itself: one sequence alone, one prefill.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from forge.cache.kv_storage import KvStorage
from forge.engine.proposer import Proposer
from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM
from forge.model.forward_batch import ForwardBatch
from forge.model.loader import LoadedModel
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill, random_batches
from forge.speculation.lookup import ReplayProposer

_BLOCK = 16
_LENGTHS = (1, 2, 15, 16, 17, 33, 47)
"""Lengths around the edges of blocks."""
_NEW_TOKENS = 10


def check_model(loaded: LoadedModel) -> None:
    """Raise AssertionError, saying which promise is broken, if the model breaks one."""
    for check in MODEL_CHECKS:
        check(loaded)


def logits_are_a_float32_row_for_each_that_is_wanted(loaded: LoadedModel) -> None:
    """Check that there is a float32 row for each of `logit_rows`, in that order, and that all logits are finite."""
    tokens = _random_tokens(loaded, 20)
    every = _alone(loaded, tokens)
    for rows in ([], [19], [0, 7, 19], list(range(20))):
        batch = flat_batch([Part(tokens, 0, 20, [0, 1])], _BLOCK, logit_rows=rows)
        logits = _forward(loaded, batch, _used_storage(loaded, 2))
        assert logits.dtype == np.float32, f"logits are not float32 but {logits.dtype}"
        shape = (len(rows), loaded.model.vocab_size)
        assert logits.shape == shape, f"logits of {len(rows)} rows have the shape {logits.shape} and not {shape}"
        _equal(logits, every[rows], "which other rows have logits too can be seen in a row's logits")
    assert np.isfinite(every).all(), f"of {every.size} logits {np.sum(~np.isfinite(every))} are not numbers"


def the_same_input_gives_the_same_bits(loaded: LoadedModel) -> None:
    """Check that the same input gives the same bits at any time, and that a later forward leaves earlier logits
    alone."""
    ours, different = _random_tokens(loaded, 40), _random_tokens(loaded, 40, seed=1)
    first = _alone(loaded, ours)
    kept = first.copy()
    _alone(loaded, different)
    _equal(first, kept, "a later forward writes into the logits of an earlier one: they are the caller's to keep")
    _equal(_alone(loaded, ours), kept, "the same forward again gives other logits")


def a_token_changes_nothing_before_it(loaded: LoadedModel) -> None:
    """Check that attention is causal."""
    tokens = _random_tokens(loaded, 24)
    changed = [*tokens[:12], (tokens[12] + 1) % loaded.model.vocab_size, *tokens[13:]]
    ours, theirs = _alone(loaded, tokens), _alone(loaded, changed)
    _equal(ours[:12], theirs[:12], "a token can be seen in the logits of rows before it: attention is not causal")


def rows_beside_it_cannot_be_seen(loaded: LoadedModel) -> None:
    """Check that a row has the same bits alone and in a batch of any size and order (batch invariance)."""
    for number in (2, 3, 5, 8, 17):
        sequences = [_random_tokens(loaded, _LENGTHS[index % len(_LENGTHS)], index) for index in range(number)]
        blocks = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(number)]
        parts = [Part(tokens, 0, len(tokens), table) for tokens, table in zip(sequences, blocks, strict=True)]
        logits = _forward(loaded, flat_batch(parts, _BLOCK), _used_storage(loaded, 3 * number))
        expected = np.concatenate([_alone(loaded, tokens) for tokens in sequences])
        _equal(logits, expected, f"beside the rows of {number - 1} other sequences a row has other logits than alone")


def how_a_prompt_is_cut_cannot_be_seen(loaded: LoadedModel) -> None:
    """Check that one prefill, several chunks, and one token at a time give the same logits."""
    tokens = _random_tokens(loaded, 47)
    expected = _alone(loaded, tokens)
    for size in (1, 7, 16, 30):
        storage = _used_storage(loaded, 3)
        for start in range(0, len(tokens), size):
            end = min(start + size, len(tokens))
            logits = _forward(loaded, flat_batch([Part(tokens, start, end, [0, 1, 2])], _BLOCK), storage)
            _equal(logits, expected[start:end], f"in chunks of {size} a token has other logits than in one prefill")


def where_keys_and_values_lie_cannot_be_seen(loaded: LoadedModel) -> None:
    """Check that block size, block order and a block's earlier contents do not change the logits."""
    tokens = _random_tokens(loaded, 47)
    expected = _alone(loaded, tokens)
    for block_size in (1, 3, 16, 64):
        number = -(-len(tokens) // block_size)
        blocks = np.random.default_rng(block_size).permutation(2 * number)[:number].tolist()
        storage = _used_storage(loaded, 2 * number, block_size)
        for start, end in ((0, 40), (40, 46), (46, 47)):
            logits = _forward(loaded, flat_batch([Part(tokens, start, end, blocks)], block_size), storage)
            violated = f"with blocks of {block_size} in any order, which others have used, a token has other logits"
            _equal(logits, expected[start:end], violated)


def computing_again_changes_nothing(loaded: LoadedModel) -> None:
    """Check that a sequence may be computed again over its own keys and values, as after a preemption."""
    tokens = _random_tokens(loaded, 40)
    storage = _used_storage(loaded, 3)
    expected = _alone(loaded, tokens)
    for length in (40, 17, 33, 40):
        logits = _forward(loaded, flat_batch([Part(tokens, 0, length, [0, 1, 2])], _BLOCK), storage)
        _equal(logits, expected[:length], "computed again over its own keys and values, a token has other logits")


def a_row_without_a_slot_writes_nothing(loaded: LoadedModel) -> None:
    """Check that a row whose slot is -1, padding, writes nothing."""
    model = loaded.model
    tokens = _random_tokens(loaded, 12)
    storage = new_storage(model, 2, _BLOCK, loaded.default_kv_dtype)
    model.forward(flat_batch([Part(tokens, 0, 11, [1])], _BLOCK), storage)
    before = [array for layer in range(model.num_layers) for array in storage.gather(layer, [0, 1], 2 * _BLOCK)]
    batch = flat_batch([Part(tokens, 11, 12, [1])], _BLOCK)
    batch.slot_mapping[:] = -1
    model.forward(batch, storage)
    after = [array for layer in range(model.num_layers) for array in storage.gather(layer, [0, 1], 2 * _BLOCK)]
    for left, right in zip(before, after, strict=True):
        _equal(left, right, "a row whose slot is -1 wrote into the storage")


def no_schedule_can_be_seen(loaded: LoadedModel) -> None:
    """Check random chunks, batches and block sizes, all at once."""
    sequences = [_random_tokens(loaded, length, length) for length in _LENGTHS]
    expected = [_alone(loaded, tokens) for tokens in sequences]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        block_size = int(rng.choice([1, 3, 8, 64]))
        storage = _used_storage(loaded, sum(-(-len(tokens) // block_size) for tokens in sequences), block_size)
        for batch in random_batches(sequences, block_size, rng):
            logits = _forward(loaded, flat_batch([part for _, part in batch], block_size), storage)
            alone = np.concatenate([expected[index][part.start : part.end] for index, part in batch])
            _equal(logits, alone, f"in random chunks and batches (seed {seed}) a token has other logits than alone")


def nothing_that_the_engine_does_can_be_seen(loaded: LoadedModel) -> None:
    """Check that tokens and logits are the same to the last bit, whatever the cache, the batch, the budget, which
    sequences are preempted, and with draft tokens."""
    prompts = [_random_tokens(loaded, length, length) for length in (5, 33, 20, 33, 9)]
    prompts.append(prompts[1][:32] + prompts[2])  # begins as another does
    alone = LLM(loaded, kv="off", max_num_seqs=1, max_model_len=96, prefill_only=False)
    runs = [_run(alone, [prompt]) for prompt in prompts]
    tokens = [run.outputs[0] for run in runs]
    for prompt, output, run in zip(prompts, tokens, runs, strict=True):
        whole = alone.logits([*prompt, *output])[len(prompt) - 1 : len(prompt) - 1 + len(output)]
        _equal(run.logits, whole, "through the engine a token has other logits than from one forward over all tokens")
    texts = [[*prompt, *output] for prompt, output in zip(prompts, tokens, strict=True)]
    proposer = ReplayProposer(texts, loaded.model.vocab_size, 0.7)
    for where, options in _engines(proposer):
        run = _run(LLM(loaded, max_model_len=96, prefill_only=False, **options), prompts)
        assert run.outputs == tokens, f"{where} the model says something else: {_first_difference(run.outputs, tokens)}"
        _equal(run.logits, runs[0].logits, f"{where} the tokens are the same and the logits are not")
        few = options.get("num_blocks")
        assert few is None or run.preempted, f"no sequence was preempted: {few} blocks are not too few"


def _engines(proposer: Proposer) -> list[tuple[str, dict]]:
    """Return each technique of the engine: its name in words, and its options."""
    few = {"num_blocks": 14, "block_size": 8}
    drafting = {"kv": "paged", "speculate": proposer, "speculate_fixed": True}
    return [
        ("with the cache off, in a batch,", {"kv": "off"}),
        ("with the basic cache", {"kv": "basic"}),
        ("with the paged cache", {"kv": "paged"}),
        ("with the prefix cache", {"kv": "prefix"}),
        ("with prompts in chunks of 7 tokens", {"kv": "prefix", "max_num_seqs": 6, "max_num_batched_tokens": 7}),
        ("in a pool too small for all, where victims compute again,", {"kv": "paged", **few}),
        ("in a pool too small for all, where victims are swapped,", {"kv": "paged", "preemption": "swap", **few}),
        ("with draft tokens, three in ten of them wrong,", drafting),
    ]


MODEL_CHECKS: tuple[Callable[[LoadedModel], None], ...] = (
    logits_are_a_float32_row_for_each_that_is_wanted,
    the_same_input_gives_the_same_bits,
    a_token_changes_nothing_before_it,
    rows_beside_it_cannot_be_seen,
    how_a_prompt_is_cut_cannot_be_seen,
    where_keys_and_values_lie_cannot_be_seen,
    computing_again_changes_nothing,
    a_row_without_a_slot_writes_nothing,
    no_schedule_can_be_seen,
    nothing_that_the_engine_does_can_be_seen,
)


class _Ran(NamedTuple):
    outputs: list[list[int]]
    """The tokens after each prompt."""
    logits: np.ndarray
    """The logits of each token of the first output: float32 `[tokens, vocab]`."""
    preempted: int


def _run(llm: LLM, prompts: Sequence[list[int]]) -> _Ran:
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    run, preempted = llm.start(list(prompts), params, keep_logits=True), 0
    for record in run:
        preempted += len(record.preempted)
        llm.engine.scheduler.check_invariants()
    return _Ran([list(output.outputs[0].token_ids) for output in run.outputs], np.array(run.logits), preempted)


def _random_tokens(loaded: LoadedModel, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, loaded.model.vocab_size, length).tolist()


def _forward(loaded: LoadedModel, batch: ForwardBatch, storage: KvStorage) -> np.ndarray:
    """Return the logits as an array, wherever the model has them."""
    return np.asarray(loaded.model.forward(batch, storage))


def _alone(loaded: LoadedModel, token_ids: list[int]) -> np.ndarray:
    """Return the logits after each token, from one prefill in a new storage: the oracle."""
    return one_prefill(loaded.model, token_ids, kv_dtype=loaded.default_kv_dtype)


def _used_storage(loaded: LoadedModel, num_blocks: int, block_size: int = _BLOCK) -> KvStorage:
    """Return a storage in which another sequence has been: its tokens must not be read any more."""
    model = loaded.model
    storage = new_storage(model, num_blocks, block_size, loaded.default_kv_dtype)
    length = min(num_blocks * block_size, model.max_position_embeddings)
    part = Part(_random_tokens(loaded, length, seed=99), 0, length, list(range(num_blocks)))
    model.forward(flat_batch([part], block_size, logit_rows=[length - 1]), storage)
    return storage


def _equal(logits: np.ndarray, expected: np.ndarray, violated: str) -> None:
    """Raise an AssertionError unless all bits are equal; it says by how much they differ and where."""
    if logits.shape == expected.shape and np.array_equal(logits, expected):
        return
    assert logits.shape == expected.shape, f"{violated} (shapes {logits.shape} and {expected.shape})"
    rows = np.flatnonzero((logits != expected).reshape(len(logits), -1).any(axis=1))
    most = np.abs(logits.astype(np.float64) - expected).max()
    where = f"{len(rows)} of {len(logits)} rows differ, the first is row {rows[0]}"
    raise AssertionError(f"{violated}: {where}, by up to {most:.3g}")


def _first_difference(outputs: list[list[int]], expected: list[list[int]]) -> str:
    request = next(index for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)) if ours != theirs)
    return f"request {request} says {outputs[request]} and not {expected[request]}"
