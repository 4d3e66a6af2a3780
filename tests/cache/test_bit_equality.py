"""No kind of cache, size of block or mixture of hits can be seen in the logits: `==`, on every bit.

The same prompts come at the same times to engines that differ in their cache. They share beginnings of every length,
with one another while they run and with those that are gone, so that blocks are hit whole and in part, cached and
running, split and evicted.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM
from forge.model.forward_batch import ForwardBatch
from tests.small_models import write_small_qwen3

BLOCK_SIZES = (1, 2, 8, 16, 64)
SHARING = ("paged", "prefix")
WAVES, LONGEST = 9, 150


@dataclass
class Said:
    logits: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """For each sequence, counted from 0: float32 `[vocab]` of each of its tokens."""
    prefix_hits: int = 0
    splits: int = 0
    evictions: int = 0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_qwen3(tmp_path_factory.mktemp("model") / "m.gguf", tensor_type="Q8_0", seed=7)


def prompts(rng: np.random.Generator, wave: int, longest: int) -> list[list[int]]:
    """Three that begin as one of two long texts do, to random lengths, and go on alone. The texts change in time."""
    trunks = [[(7 * position + text) % 288 for position in range(longest)] for text in (wave // 3, wave // 3 + 1)]
    return [
        trunks[int(rng.integers(2))][: int(rng.integers(longest // 3, longest))]
        + rng.integers(0, 288, int(rng.integers(0, 4))).tolist()
        for _ in range(3)
    ]


def said(llm: LLM, seed: int, waves: int, longest: int) -> Said:
    """Let waves of prompts come while others are under way; all bits of all that was computed for a choice."""
    rng, result = np.random.default_rng(seed), Said()
    llm.engine.on_logits[:] = [lambda seq_id, logits: result.logits.setdefault(seq_id, []).append(logits)]
    for wave in range(waves):
        params = SamplingParams(max_tokens=int(rng.integers(3, 12)), temperature=0.9, seed=wave, ignore_eos=True)
        run = iter(llm.start(prompts(rng, wave, longest), params))
        for _ in range(int(rng.integers(1, 12))):
            record = next(run, None)
            if record is not None:
                cache = record.cache
                result.prefix_hits, result.splits, result.evictions = cache.prefix_hits, cache.splits, cache.evictions
        llm.engine.scheduler.check_invariants()
    while llm.engine.has_unfinished():
        llm.engine.step()
    first = min(result.logits)
    result.logits = {seq_id - first: logits for seq_id, logits in result.logits.items()}
    return result


def assert_same(one: Said, other: Said, what: str) -> None:
    assert one.logits.keys() == other.logits.keys()
    for seq_id, expected in one.logits.items():
        got = other.logits[seq_id]
        assert len(got) == len(expected), f"{what}: sequence {seq_id}"
        for index, pair in enumerate(zip(expected, got, strict=True)):
            assert np.array_equal(*pair), f"{what}: token {index} of sequence {seq_id}"


@pytest.fixture(scope="module")
def expected(path) -> list[Said]:
    llm = LLM(path, kv="off", device="cpu", threads=2, max_model_len=256)
    return [said(llm, seed, WAVES, LONGEST) for seed in range(2)]


def options(kv: str, block_size: int) -> dict:
    """Four sequences at once, and in a pool no more room than that."""
    pool = {} if kv == "basic" else {"num_blocks": 4 * (-(-(LONGEST + 16) // block_size) + 1)}
    return {"kv": kv, "block_size": block_size, "max_model_len": 256, "max_num_seqs": 4} | pool


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kv", ["basic", *SHARING])
def test_every_kind_of_cache_gives_the_logits_of_none_to_the_bit(path, expected, kv, block_size):
    llm = LLM(path, device="cpu", threads=1 + block_size % 3, **options(kv, block_size))
    for seed, want in enumerate(expected):
        got = said(llm, seed, WAVES, LONGEST)
        assert_same(want, got, f"{kv}, blocks of {block_size}, seed {seed}")
    if kv == "prefix":
        assert got.prefix_hits > 300, "little was shared"
        assert got.splits > 0 or block_size == 1, "no block was split"
        assert got.evictions > 0, "no block was evicted"


@pytest.mark.parametrize("kv", SHARING)
def test_the_reference_backend_agrees_with_itself(path, kv):
    off = LLM(path, kv="off", device="reference", max_model_len=64)
    want = said(off, 3, waves=3, longest=24)
    for block_size in (2, 16):
        llm = LLM(path, kv=kv, device="reference", block_size=block_size, max_model_len=64)
        assert_same(want, said(llm, 3, waves=3, longest=24), f"{kv}, blocks of {block_size}")


@pytest.mark.parametrize(("device", "longest"), [("cpu", LONGEST), ("reference", 24)])
def test_int8_keys_and_values_are_shared_split_and_computed_again_with_the_same_bits(path, device, longest):
    """The scale of a key is its own, so it does not matter what else was in its block when it was written."""
    off = LLM(path, kv="off", device=device, kv_dtype="int8", max_model_len=256)
    want = said(off, 5, waves=3, longest=longest)
    for kv in ("basic", *SHARING):
        llm = LLM(path, device=device, kv_dtype="int8", **options(kv, block_size=8))
        assert_same(want, said(llm, 5, waves=3, longest=longest), kv)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
@pytest.mark.parametrize("kv", ["basic", *SHARING])
def test_a_restored_snapshot_goes_on_with_the_same_bits(path, kv, kv_dtype):
    """A conversation goes on, is taken back to where it was, and goes on in another way, and again in the first."""
    llm = LLM(path, kv=kv, device="cpu", max_model_len=128, kv_dtype=kv_dtype)
    cache, storage, model = llm.engine.cache, llm.engine.storage, llm.model
    story = [(5 * position) % 288 for position in range(41)]

    def compute(seq_id: int, tokens: list[int]) -> np.ndarray:
        start = cache.computed_length(seq_id)
        storage.copy_blocks(cache.reserve(seq_id, len(tokens)))
        table = np.array([cache.block_table(seq_id)], np.int32)
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        size = storage.layout.block_size
        batch = ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=positions,
            cu_seqlens=np.array([0, len(tokens)], np.int32),
            slot_mapping=(table[0, positions // size] * size + positions % size).astype(np.int32),
            block_tables=table,
            context_lens=np.array([start + len(tokens)], np.int32),
            logit_rows=np.arange(len(tokens), dtype=np.int32),
        )
        logits = model.forward(batch, storage)
        cache.commit(seq_id, tokens)
        return logits

    def restored(seq_id: int) -> int:
        storage.copy_blocks(cache.restore(snapshot, seq_id))
        return seq_id

    cache.add(0, story, max_cached=len(story) - 1)
    compute(0, story)
    snapshot, copies = cache.snapshot(0)
    storage.copy_blocks(copies)
    first = compute(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = compute(restored(1), [11, 12, 13])
    again = compute(restored(2), [1, 2, 3, 4, 5, 6, 7, 8, 9])

    assert np.array_equal(first, again)
    assert np.array_equal(first, llm.logits([*story, 1, 2, 3, 4, 5, 6, 7, 8, 9])[len(story) :])
    assert np.array_equal(other, llm.logits([*story, 11, 12, 13])[len(story) :])
    cache.check_invariants()
