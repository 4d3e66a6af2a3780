"""The arithmetic contract: nothing but a row's own sequence can be seen in its logits, to the bit.

What is varied: the rows beside it, the chunks of the prefill, block size and block numbers, the number of threads, what
was in the cache and in the buffers before, and whether the keys were kept or are computed again.
"""

import numpy as np
import pytest

from forge.backends.cpu.attention import ITEMS_PER_THREAD
from forge.backends.cpu.backend import CpuBackend
from forge.backends.cpu.op_layout import ROWS_PER_BLOCK
from forge.backends.cpu.program import allocate
from forge.backends.cpu.tiles import AMX_ROWS
from forge.cache.kv_storage import KV_DTYPES
from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM
from forge.model.manual_batch import Part, flat_batch, new_storage, random_batches
from forge.model.qwen3 import Qwen3
from tests.backends.cpu.models import FLOATS, K_TYPES, QUANTIZED, ThreadedBackend, poison, small_model
from tests.small_models import write_small_qwen3

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 48, 63, 64, 65, 127, 128, 129)
BLOCK_SIZES = (1, 3, 16, 64)
THREADS = (1, 2, 3, 4)

# (tensor type, head_dim, heads, kv heads, dtype of keys and values)
SHAPES = [
    ("Q8_0", 32, 4, 2, "float32"),
    ("Q8_0", 24, 4, 4, "float16"),
    ("Q8_0", 128, 4, 1, "bfloat16"),
    ("Q4_0", 64, 4, 2, "float16"),
    ("Q4_1", 32, 4, 1, "float32"),
    ("Q5_0", 24, 4, 2, "bfloat16"),
    ("Q5_1", 32, 2, 2, "float16"),
    ("Q6_K", 64, 4, 2, "float16"),
    ("Q5_K", 128, 2, 1, "float32"),
    ("Q4_K", 64, 4, 4, "bfloat16"),
    ("Q3_K", 64, 4, 2, "float16"),
    ("Q2_K", 128, 2, 1, "float32"),
    ("IQ4_NL", 32, 4, 2, "float16"),
    ("IQ4_XS", 64, 4, 2, "float32"),
    ("IQ3_S", 64, 4, 4, "bfloat16"),
    ("IQ3_XXS", 64, 2, 2, "float16"),
    ("F32", 24, 4, 1, "float32"),
    ("F16", 32, 4, 2, "float16"),
    ("BF16", 128, 2, 2, "bfloat16"),
    ("Q8_0", 128, 4, 2, "int8"),
    ("F32", 24, 6, 2, "int8"),
]


def test_every_layout_and_kind_is_among_the_shapes():
    assert {shape[0] for shape in SHAPES} == {*QUANTIZED, *FLOATS}
    assert {shape[1] for shape in SHAPES} == {24, 32, 64, 128}
    assert {shape[2] // shape[3] for shape in SHAPES} == {1, 2, 3, 4}
    assert {shape[4] for shape in SHAPES} == set(KV_DTYPES)


def model_of(shape: tuple, threads: int) -> Qwen3:
    tensor_type, head_dim, heads, kv_heads, _ = shape
    sizes = {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if tensor_type not in K_TYPES:
        one_group_or_two = 32 if head_dim == 24 else 64
        sizes |= {"hidden_size": one_group_or_two, "intermediate_size": 96}
    return small_model(ThreadedBackend(threads), tensor_type, seed=3, num_layers=2, **sizes)


@pytest.fixture(params=SHAPES, ids=lambda shape: "-".join(map(str, shape)), scope="module")
def models(request):
    """The same model for each number of threads, and the dtype of keys and values."""
    loaded = {threads: model_of(request.param, threads) for threads in THREADS}
    yield loaded, request.param[-1]
    for model in loaded.values():
        if model.backend._pool is not None:
            model.backend._pool.close()


def alone(model: Qwen3, tokens: list[int], kv_dtype: str, block_size: int = 256) -> np.ndarray:
    """All logits of one sequence, from one prefill by itself."""
    num_blocks = -(-len(tokens) // block_size)
    batch = flat_batch([Part(tokens, 0, len(tokens), list(range(num_blocks)))], block_size)
    return model.forward(batch, new_storage(model, num_blocks, block_size, kv_dtype))


def poisoned_storage(model: Qwen3, num_blocks: int, block_size: int, kv_dtype: str):
    """An unwritten slot is not a number, and must not be read. Padding inside a head is zero, by the storage's word."""
    storage = new_storage(model, num_blocks, block_size, kv_dtype)
    poison(storage)
    return storage


def test_neighbours_chunks_blocks_and_threads_cannot_be_seen(models):
    """24 random schedules of a shape, some 200 forwards."""
    loaded, kv_dtype = models
    rng = np.random.default_rng(17)
    sequences = [rng.integers(0, 288, length).tolist() for length in LENGTHS]
    expected = [alone(loaded[1], tokens, kv_dtype) for tokens in sequences]
    assert all(np.isfinite(logits).all() for logits in expected)
    forwards = 0
    for case in range(24):
        model = loaded[THREADS[case % len(THREADS)]]
        block_size = BLOCK_SIZES[case // 2 % len(BLOCK_SIZES)]
        chosen = rng.choice(len(LENGTHS), size=rng.integers(1, 6), replace=False).tolist()
        total = sum(-(-LENGTHS[index] // block_size) for index in chosen)
        storage = poisoned_storage(model, total, block_size, kv_dtype)
        for batch in random_batches([sequences[index] for index in chosen], block_size, rng):
            forwards += 1
            logits = model.forward(flat_batch([part for _, part in batch], block_size), storage)
            row = 0
            for number, part in batch:
                got = logits[row : row + part.end - part.start]
                row += part.end - part.start
                where = f"case {case}, {part.start}:{part.end} of {len(part.token_ids)}, blocks of {block_size}"
                assert np.array_equal(got, expected[chosen[number]][part.start : part.end]), where
    assert forwards > 50


def test_how_many_rows_pass_over_keys_together_cannot_be_seen(models):
    """64 in a long prefill, 16 in its chunks."""
    loaded, kv_dtype = models
    model = loaded[1]
    length = ITEMS_PER_THREAD * 4 * ROWS_PER_BLOCK // model.config.num_key_value_heads + 5
    tokens = np.random.default_rng(8).integers(0, 288, length).tolist()
    expected = alone(model, tokens, kv_dtype, block_size=16)
    table = list(range(-(-length // 16)))
    storage = poisoned_storage(model, len(table), 16, kv_dtype)
    for start in range(0, length, 250):
        end = min(start + 250, length)
        got = model.forward(flat_batch([Part(tokens, start, end, table)], 16), storage)
        assert np.array_equal(got, expected[start:end]), start


def test_the_items_of_a_thread_that_does_not_come_are_done_by_others(models):
    loaded, kv_dtype = models
    model = loaded[2]
    tokens = np.random.default_rng(5).integers(0, 288, 37).tolist()
    expected = alone(model, tokens, kv_dtype)
    backend, pool = model.backend, model.backend._pool
    there, programs = pool._memory.num_threads, backend._programs
    backend._programs = {
        forward_pass: allocate(program.recording, 5, program.max_rows, program.max_logit_rows)
        for forward_pass, program in programs.items()
    }
    pool._memory.num_threads = 5  # and so each thread's own items are others than before
    try:
        assert np.array_equal(alone(model, tokens, kv_dtype), expected)
    finally:
        pool._memory.num_threads, backend._programs = there, programs


@pytest.mark.parametrize("count", [*range(1, 21), 25, 33, 42, 64, 80])
def test_a_row_is_the_same_among_any_number_of_rows(models, count):
    """Every size of tile, and every split of rows over tiles."""
    loaded, kv_dtype = models
    model = loaded[2]
    sequences = [[(7 * index + 3) % 288] for index in range(count)]
    parts = [Part(tokens, 0, 1, [index]) for index, tokens in enumerate(sequences)]

    together = model.forward(flat_batch(parts, 1), poisoned_storage(model, count, 1, kv_dtype))

    for index in {0, count // 2, count - 1}:
        assert np.array_equal(together[index], alone(model, sequences[index], kv_dtype)[0])


def test_one_token_at_a_time_is_one_prefill_is_every_prefix_again(models):
    """With a cache, without one (the whole sequence again for every token), and after recomputing."""
    loaded, kv_dtype = models
    tokens = np.random.default_rng(4).integers(0, 288, 131).tolist()
    whole = alone(loaded[1], tokens, kv_dtype)

    storage = poisoned_storage(loaded[2], 9, 16, kv_dtype)
    for position in range(len(tokens)):
        batch = flat_batch([Part(tokens, position, position + 1, list(range(9)))], 16)
        assert np.array_equal(loaded[2].forward(batch, storage)[0], whole[position]), f"position {position}"

    kept = storage.keys.copy(), storage.values.copy()
    for length in (1, 2, 62, 63, 64, 65, 127, 128, 129, 131):
        batch = flat_batch([Part(tokens, 0, length, list(range(9)))], 16, logit_rows=[length - 1])
        assert np.array_equal(loaded[3].forward(batch, storage)[0], whole[length - 1]), f"prefix {length}"
    assert np.array_equal(kept[0].view(np.uint8), storage.keys.view(np.uint8))
    assert np.array_equal(kept[1].view(np.uint8), storage.values.view(np.uint8))


def test_which_rows_ask_for_logits_cannot_be_seen(models):
    loaded, kv_dtype = models
    tokens = list(range(40))
    every = alone(loaded[1], tokens, kv_dtype)
    for logit_rows in ([], [39], [0, 17, 39], list(range(3, 30))):
        batch = flat_batch([Part(tokens, 0, 40, [0])], 40, logit_rows=logit_rows)
        got = loaded[4].forward(batch, new_storage(loaded[4], 1, 40, kv_dtype))
        assert np.array_equal(got, every[logit_rows])


def test_what_lies_behind_a_batchs_rows_is_never_read():
    """Rows that are multiplied because sixteen are multiplied together."""
    model = model_of(SHAPES[0], 2)
    parts = [Part([token], 0, 1, [token]) for token in range(13)]
    expected = model.forward(flat_batch(parts, 1), new_storage(model, 13, 1))
    for program in model.backend._programs.values():
        for array in program.keep:
            if array.dtype == np.float32 and len(array) in (16, 17):  # the scales of buffers, and the values
                array[13:] = np.nan
    assert np.array_equal(model.forward(flat_batch(parts, 1), new_storage(model, 13, 1)), expected)
    model.backend._pool.close()


@pytest.mark.parametrize("most", [(1, 1), (9, 2), (40, 17)])
def test_buffers_have_rows_for_sixteen_at_a_time(most):
    """Of a batch that fills them, and of its logits."""
    model = model_of(SHAPES[0], 1)
    alone(model, [1], "float32")
    (program,) = model.backend._programs.values()
    arrays = [array for array in allocate(program.recording, 1, *most).keep if array.dtype == np.int8]
    assert arrays and all(len(array) % AMX_ROWS == 0 for array in arrays)
    assert len(allocate(program.recording, 1, *most).logits) >= -(-most[1] // AMX_ROWS) * AMX_ROWS
    model.backend._pool.close()


def test_a_result_is_the_callers_to_keep():
    model = model_of(SHAPES[0], 2)
    first = alone(model, [1, 2, 3], "float32")
    copy = first.copy()
    alone(model, [9, 8, 7], "float32")
    assert np.array_equal(first, copy)
    model.backend._pool.close()


def test_a_row_with_slot_minus_one_writes_nothing_and_changes_no_other_row():
    model = model_of(SHAPES[0], 2)
    storage = new_storage(model, 2, 4)
    batch = flat_batch([Part([5, 6, 7], 0, 3, [1])], 4)
    batch.slot_mapping[2] = -1

    got = model.forward(batch, storage)

    keys, _ = storage.gather(0, [1], 4)
    assert keys[:2].any(axis=(-1, -2)).all()
    assert not keys[2:].any()
    assert not storage.gather(0, [0], 4)[0].any()
    assert np.array_equal(got[:2], alone(model, [5, 6, 7], "float32")[:2])
    model.backend._pool.close()


def test_a_small_model_runs_on_one_thread_of_a_pool_with_the_same_bits():
    tokens = list(range(70))
    many = model_of(SHAPES[0], 3)
    one = small_model(CpuBackend(3), "Q8_0", seed=3, num_layers=2, head_dim=32, num_attention_heads=4)
    assert np.array_equal(alone(one, tokens, "float32"), alone(many, tokens, "float32"))
    for model in (one, many):
        model.backend._pool.close()


def test_timing_every_operation_changes_no_bit():
    model = model_of(SHAPES[0], 2)
    tokens = list(range(20))
    plain = alone(model, tokens, "float32")
    model.backend.time_operations()
    assert np.array_equal(alone(model, tokens, "float32"), plain)
    assert {time.layer for time in model.backend.operation_times()} == {-1, 0, 1}
    model.backend._pool.close()


def test_a_storage_of_another_shape_in_between_changes_nothing():
    """One backend serves storages with different block sizes and dtypes in turn."""
    model = model_of(SHAPES[0], 2)
    tokens = list(range(30))
    expected = {kv_dtype: alone(model, tokens, kv_dtype) for kv_dtype in KV_DTYPES}
    assert not np.array_equal(expected["float32"], expected["bfloat16"])
    for block_size in (1, 7, 32):
        for kv_dtype, want in expected.items():
            assert np.array_equal(alone(model, tokens, kv_dtype, block_size), want)
    model.backend._pool.close()


def test_a_neighbour_that_is_not_a_number_stays_alone():
    """A token whose embedding is infinite spoils its own row and no other."""
    model = model_of(("F32", 24, 4, 4, "float32"), 1)
    expected = alone(model, [1], "float32")
    table = model.weights.embedding.packed.values
    table[5 // 16, :, 5 % 16] = np.inf
    parts = [Part([1], 0, 1, [0]), Part([5], 0, 1, [1])]

    together = model.forward(flat_batch(parts, 1), new_storage(model, 2, 1))

    model.backend._pool.close()
    assert np.isnan(together[1]).any()
    others = np.arange(len(expected[0])) != 5  # the embedding is the head too, and so token 5's logit is not a number
    assert np.array_equal(together[0][others], expected[0][others])


@pytest.mark.parametrize("tensor_type", ["Q8_0", "F32"])
def test_through_the_engine_no_kind_of_cache_changes_a_bit(tensor_type, tmp_path):
    """Three prompts at once, greedy, with the cache off and basic, and on other numbers of threads."""
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type=tensor_type, seed=5)
    prompts = [[1, 2, 3], list(range(20, 90)), [7] * 17]
    said = {}
    for kv, threads in [("off", 1), ("basic", 2), ("basic", 3)]:
        llm = LLM(path, kv=kv, device="cpu", threads=threads)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0))
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        logits = [llm.logits(prompt + new) for prompt, new in zip(prompts, tokens, strict=True)]
        said[kv, threads] = tokens, logits
        for prompt, new, rows in zip(prompts, tokens, logits, strict=True):
            assert rows[len(prompt) - 1 : -1].argmax(axis=1).tolist() == new, "greedy tokens follow from the logits"
    first_tokens, first_logits = said["off", 1]
    for tokens, logits in said.values():
        assert tokens == first_tokens
        assert all(np.array_equal(a, b) for a, b in zip(logits, first_logits, strict=True))


def test_a_thread_has_room_for_the_widest_row_of_which_the_quants_alone_are_kept():
    """Its floats wait there to be quantized."""
    width = 48 * 1024
    sizes = {"head_dim": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = small_model(
        ThreadedBackend(1), "Q8_0", seed=1, num_layers=1, hidden_size=width, intermediate_size=32, **sizes
    )
    alone(model, [1, 2, 3], "int8")
    assert model.backend._context.scratch_bytes >= 4 * width
