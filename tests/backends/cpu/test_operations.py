"""Each operation against float64.

A forward pass here is not a model's: it is the operation in question between an embedding lookup, which brings the
input, and a product with the identity, which lets the output through unchanged (one product by 1.0 and sums of zeros).
Both ends are float32 matrices, so that the only error is the operation's own.
"""

from collections.abc import Callable
from itertools import pairwise

import numba
import numpy as np
import pytest

from forge.backends.cpu.compilation import instruction_set, tile_set
from forge.backends.cpu.kernels import PAIRS_FROM
from forge.backends.cpu.op_layout import ROWS_NEAR
from forge.backends.cpu.packing import LAYOUT_OF_TYPE
from forge.backends.cpu.tiles import PAIR
from forge.backends.cpu.vectors import exp16, load_f32, store_f32
from forge.cache.kv_storage import rounded
from forge.gguf import GGMLType
from forge.model.forward_batch import ForwardBatch
from forge.model.manual_batch import Part, flat_batch
from forge.model.rope import Rope
from tests.backends.cpu.models import FLOATS, QUANTIZED, ThreadedBackend, memory_tensor, poison
from tests.small_models import random_weights

EPS = 1e-6
ROUNDING = 2.0**-24
"""The relative error of one float32 operation."""


class Bench:
    """A backend, and forward passes of one operation on rows of numbers."""

    def __init__(self, rows: np.ndarray, threads: int = 2, head_dim: int = 32, kv_heads: int = 1, layers: int = 1):
        self.rows = np.ascontiguousarray(rows, np.float32)
        self.backend = ThreadedBackend(threads=threads)
        self.table = self.matrix("F32", self.rows)
        self.head_dim, self.kv_heads, self.layers = head_dim, kv_heads, layers

    def matrix(self, tensor_type: str, data: np.ndarray):
        return self.backend.load_matrix(memory_tensor("blk.0.some.weight", tensor_type, data))

    def vector(self, values: np.ndarray):
        return self.backend.load_vector(memory_tensor("norm.weight", "F32", np.asarray(values, np.float32)))

    def identity(self, width: int):
        return self.matrix("F32", np.eye(width, dtype=np.float32))

    def storage(self, num_blocks: int = 1, block_size: int = 16, kv_dtype: str = "float32"):
        from forge.cache.kv_storage import KvLayout

        layout = KvLayout(self.layers, num_blocks, block_size, self.kv_heads, self.head_dim, kv_dtype)
        return self.backend.new_storage(layout)

    def run(self, operation: Callable, batch: ForwardBatch | None = None, storage=None) -> np.ndarray:
        """`operation(ops, x, batch, storage)` gives what `result` takes; x is the batch's rows.

        Run three times: what is left in the buffers, and in the result's, cannot be seen in it.
        """
        if batch is None:
            count = len(self.rows)
            batch = flat_batch([Part(list(range(count)), 0, count, [0])], block_size=max(16, count))
        storage = storage if storage is not None else self.storage(block_size=max(16, len(self.rows)))

        def forward_pass(ops, batch, storage):
            ops.begin_layer(-1)
            return ops.result(operation(ops, ops.embed(self.table, batch), batch, storage))

        first = self.backend.run(forward_pass, batch, storage)
        for _ in range(2):
            self.backend._programs[forward_pass].logits[: len(first), : first.shape[1]] = (
                np.nan
            )  # what is padding must stay zero
            again = self.backend.run(forward_pass, batch, storage)
            np.testing.assert_array_equal(again, first)
        self.backend._pool.close()
        return first


def random_rows(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of very different size, single large values among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, width)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    values[rng.random(values.shape) < 0.02] *= 50
    return values.astype(np.float32)


def relative_error(got: np.ndarray, want: np.ndarray, scale: np.ndarray | float | None = None) -> float:
    """The largest error relative to `scale`, by default to the largest magnitude of the row."""
    scale = np.abs(want).max(axis=-1, keepdims=True) if scale is None else scale
    error = np.abs(got.astype(np.float64) - want)
    return float((error / np.maximum(scale, 1e-300)).max())


def quantized(x: np.ndarray) -> np.ndarray:
    """What int8 activations stand for, as float64: groups of 32 that share max|x| / 127, rounded to nearest even.

    In float32 where the kernels are, so that ties fall alike.
    """
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    there = largest > 1e-30
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(there, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    quants = np.rint(groups * inverse)
    assert np.abs(quants).max() <= 127
    scales = np.where(there, largest / np.float32(127), np.float32(0))
    return (quants.astype(np.float64) * scales).reshape(len(x), -1)[:, : x.shape[1]]


# Lookup


@pytest.mark.parametrize("tensor_type", [*FLOATS, *QUANTIZED])
def test_a_looked_up_row_is_the_dequantized_row_to_the_bit(tensor_type):
    columns = max(64, GGMLType[tensor_type].block.elements) if tensor_type in QUANTIZED else 40
    bench = Bench(np.zeros((1, 8)))
    rng = np.random.default_rng(1)
    raw = random_weights(GGMLType[tensor_type], (37, columns), 1.0, rng)
    tensor = memory_tensor("token_embd.weight", tensor_type, raw)
    bench.table = bench.backend.load_matrix(tensor)
    identity = bench.identity(columns)
    tokens = [36, 0, 16, 15, 36, 31]

    batch = flat_batch([Part(tokens, 0, len(tokens), [0])], 16)
    got = bench.run(lambda ops, x, batch, storage: ops.linear(x, identity), batch)

    np.testing.assert_array_equal(got, tensor.dequantize()[tokens])


# Norms


@pytest.mark.parametrize("width", [1, 20, 32, 48, 64, 100, 1024])
@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm(width, rows):
    x = random_rows(rows, width, seed=width)
    weight = 1 + 0.3 * np.random.default_rng(2).standard_normal(width).astype(np.float32)
    bench = Bench(x)
    norm_weight, identity = bench.vector(weight), bench.identity(width)

    got = bench.run(lambda ops, x, batch, storage: ops.linear(ops.rms_norm(x, norm_weight, EPS), identity))

    exact = x.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + np.float32(EPS)) * weight
    assert relative_error(got, want, np.abs(want)) < 10 * ROUNDING + width / 16 * ROUNDING


def test_rms_norm_of_zeros_and_of_tiny_and_large_numbers():
    x = np.array([[0.0] * 32, [1e-20] * 32, [1e15] * 32], np.float32)
    bench = Bench(x)
    weight, identity = bench.vector(np.ones(32)), bench.identity(32)

    got = bench.run(lambda ops, x, batch, storage: ops.linear(ops.rms_norm(x, weight, EPS), identity))

    np.testing.assert_allclose(got[:, 0], [0.0, 1e-17, 1.0], rtol=1e-6)


@pytest.mark.parametrize("rows", [[2, 8], [-1, 0]], ids=["", "one before the first"])
def test_only_the_rows_that_need_logits_are_normed(rows):
    x = random_rows(9, 64)
    bench = Bench(x)
    weight, identity = bench.vector(np.ones(64)), bench.identity(64)
    batch = flat_batch([Part(list(range(9)), 0, 9, [0])], 16, logit_rows=rows)

    def last_norm(ops, x, batch, storage):
        return ops.linear(ops.rms_norm(ops.logit_rows(x, batch), weight, EPS), identity)

    got = bench.run(last_norm, batch)

    exact = x[np.maximum(rows, 0)].astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + EPS)
    assert got.shape == (2, 64)
    assert relative_error(got, want) < 20 * ROUNDING


# Matrix products


@pytest.mark.parametrize("tensor_type", FLOATS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (50, 33), (7, 300), (130, 64)])
def test_a_product_with_float_weights(tensor_type, rows, columns):
    x = random_rows(5, columns, seed=rows)
    bench = Bench(x)
    tensor = memory_tensor(
        "w", tensor_type, random_weights(GGMLType[tensor_type], (rows, columns), 1.0, np.random.default_rng(3))
    )
    matrix = bench.backend.load_matrix(tensor)

    got = bench.run(lambda ops, x, batch, storage: ops.linear(x, matrix))

    exact, weights = x.astype(np.float64), tensor.dequantize().astype(np.float64)
    bound = (columns / 4 + 4) * ROUNDING  # of the sum of magnitudes: a quarter of the columns in each running sum
    assert relative_error(got, exact @ weights.T, np.abs(exact) @ np.abs(weights).T) < bound


@pytest.mark.parametrize("tensor_type", QUANTIZED)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20])
def test_a_product_with_quantized_weights_is_that_of_what_both_sides_stand_for(tensor_type, rows):
    """So tight that one quant of one activation off by one would show: it is 1/127 of its group's largest."""
    columns = 2 * max(32, GGMLType[tensor_type].block.elements)
    x = random_rows(rows, columns, seed=rows)
    x[0, :32] = 0
    bench = Bench(x)
    tensor = memory_tensor(
        "w", tensor_type, random_weights(GGMLType[tensor_type], (53, columns), 1.0, np.random.default_rng(4))
    )
    matrix = bench.backend.load_matrix(tensor)

    got = bench.run(lambda ops, x, batch, storage: ops.linear(x, matrix))

    exact, weights = quantized(x), tensor.dequantize().astype(np.float64)
    magnitudes = np.abs(exact) @ np.abs(weights).T
    # A weight with a minimum is the small difference of two larger numbers, both of which the kernel rounds.
    slack = 8 if tensor_type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    assert relative_error(got, exact @ weights.T, magnitudes) < slack * (columns / 32 + 4) * ROUNDING


@pytest.mark.parametrize("groups", [15, 16, 17, 33])
def test_rows_are_quantized_sixteen_groups_at_once_and_one_by_one(groups):
    x = random_rows(3, 32 * groups)
    x[0, 32:64], x[1, :64], x[2, 5] = 0, 1e-31, 1e30
    bench = Bench(x)
    tensor = memory_tensor("w", "Q8_0", random_weights(GGMLType.Q8_0, (16, 32 * groups), 1.0, np.random.default_rng(6)))
    matrix = bench.backend.load_matrix(tensor)

    got = bench.run(lambda ops, x, batch, storage: ops.linear(x, matrix))

    exact, weights = quantized(x), tensor.dequantize().astype(np.float64)
    assert relative_error(got, exact @ weights.T, np.abs(exact) @ np.abs(weights).T) < (groups + 4) * ROUNDING


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0"])
def test_a_product_that_a_residual_is_added_to(tensor_type):
    x = random_rows(11, 64)
    bench = Bench(x)
    tensor = memory_tensor(
        "w", tensor_type, random_weights(GGMLType[tensor_type], (64, 64), 1.0, np.random.default_rng(5))
    )
    matrix, identity, weight = bench.backend.load_matrix(tensor), bench.identity(64), bench.vector(np.ones(64))

    def residual(ops, x, batch, storage):
        return ops.linear(ops.add(x, ops.linear(ops.rms_norm(x, weight, EPS), matrix)), identity)

    got = bench.run(residual)

    normed = (x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPS)).astype(np.float32)
    exact = quantized(normed) if tensor_type == "Q8_0" else normed.astype(np.float64)
    want = x + exact @ tensor.dequantize().T.astype(np.float64)
    # The norm's last bit may tip a quant over: a step of 1/127 in one of 64 inputs.
    assert relative_error(got, want) < (2e-3 if tensor_type == "Q8_0" else 40 * ROUNDING)


@pytest.mark.parametrize("tensor_type", QUANTIZED)
def test_activations_of_zero_give_zero(tensor_type):
    columns = max(32, GGMLType[tensor_type].block.elements)
    bench = Bench(np.zeros((3, columns)))
    raw = random_weights(GGMLType[tensor_type], (16, columns), 1.0, np.random.default_rng(6))
    matrix = bench.matrix(tensor_type, raw)

    got = bench.run(lambda ops, x, batch, storage: ops.linear(x, matrix))

    np.testing.assert_array_equal(got, 0)


# SwiGLU


def silu(gate: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate))


@pytest.mark.parametrize("width", [32, 37, 300, 512])
def test_swiglu(width):
    x = np.concatenate([np.linspace(-100, 100, width), np.random.default_rng(7).standard_normal(width)])
    x = np.stack([x, x[::-1]]).astype(np.float32)
    bench = Bench(x)
    both = np.eye(2 * width, dtype=np.float32)
    gate, up, identity = bench.matrix("F32", both[:width]), bench.matrix("F32", both[width:]), bench.identity(width)

    def feed_forward(ops, x, batch, storage):
        return ops.linear(ops.swiglu(ops.linear(x, gate), ops.linear(x, up)), identity)

    got = bench.run(feed_forward)

    exact = x.astype(np.float64)
    want = silu(exact[:, :width]) * exact[:, width:]
    # Below -87 exp is clamped, and what should be 1e-39 is 1e-36: nothing, either way.
    np.testing.assert_allclose(got, want, rtol=30 * ROUNDING, atol=1e-34)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 19])
@pytest.mark.parametrize(("gate_type", "up_type"), [("Q8_0", "Q8_0"), ("Q4_0", "Q6_K")])
def test_gate_up_and_swiglu_with_quantized_weights(rows, gate_type, up_type):
    x = random_rows(rows, 256, seed=rows) / 100
    bench = Bench(x)
    rng = np.random.default_rng(8)
    tensors = [
        memory_tensor("w", kind, random_weights(GGMLType[kind], shape, 1 / 16, rng))
        for kind, shape in ((gate_type, (96, 256)), (up_type, (96, 256)), ("Q8_0", (40, 96)))
    ]
    gate, up, down = (bench.backend.load_matrix(tensor) for tensor in tensors)

    def feed_forward(ops, x, batch, storage):
        return ops.linear(ops.swiglu(ops.linear(x, gate), ops.linear(x, up)), down)

    got = bench.run(feed_forward)

    weights = [tensor.dequantize().astype(np.float64) for tensor in tensors]
    inner = silu(quantized(x) @ weights[0].T) * (quantized(x) @ weights[1].T)
    want = quantized(inner.astype(np.float32)) @ weights[2].T
    # A product's last bit may tip one of 96 quants over.
    assert relative_error(got, want) < 5e-3
    assert np.median(np.abs(got - want) / np.abs(want).max(axis=-1, keepdims=True)) < 1e-4


def test_a_row_of_a_batch_larger_than_passes_over_weights_together_is_the_row_alone():
    x = random_rows(2 * ROWS_NEAR + 19, 256) / 100
    rng = np.random.default_rng(8)
    tensors = [
        memory_tensor("w", kind, random_weights(GGMLType[kind], shape, 1 / 16, rng))
        for kind, shape in (("Q8_0", (544, 256)), ("Q4_K", (544, 256)), ("Q8_0", (256, 544)))
    ]

    def run(rows):
        bench = Bench(rows)
        gate, up, down = (bench.backend.load_matrix(tensor) for tensor in tensors)
        return bench.run(
            lambda ops, x, *_: ops.add(x, ops.linear(ops.swiglu(ops.linear(x, gate), ops.linear(x, up)), down))
        )

    got = run(x)

    for row in (0, 15, ROWS_NEAR - 1, ROWS_NEAR, 2 * ROWS_NEAR + 15, 2 * ROWS_NEAR + 18):
        np.testing.assert_array_equal(got[row], run(x[row : row + 1])[0])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "IQ4_XS", "Q4_K"])
@pytest.mark.parametrize("rows", [PAIRS_FROM - 1, PAIRS_FROM, PAIRS_FROM + 7, ROWS_NEAR + PAIRS_FROM + 1])
def test_a_row_among_so_many_that_tiles_are_taken_in_pairs_is_the_row_alone(kind, rows):
    x, tiles = random_rows(rows, 256) / 100, 33  # the last one has no other beside it
    rng = np.random.default_rng(8)
    tensor = memory_tensor("w", kind, random_weights(GGMLType[kind], (16 * tiles, 256), 1 / 16, rng))

    def run(rows):
        bench = Bench(rows)
        matrix = bench.backend.load_matrix(tensor)
        return bench.run(lambda ops, x, *_: ops.linear(x, matrix))

    got = run(x)

    pair = tile_set(LAYOUT_OF_TYPE[GGMLType[kind]]).addresses[PAIR]
    assert (pair != 0) == (instruction_set().pairs_tiles and kind != "Q4_K")
    for row in {0, 3, 4, PAIRS_FROM - 2, rows - 4, rows - 1}:
        np.testing.assert_array_equal(got[row], run(x[row : row + 1])[0])


# Rotation, storing and attention


def normed_heads(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """float64 `[rows, heads, head_dim]`."""
    heads = x.astype(np.float64).reshape(len(x), -1, len(weight))
    return heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + np.float32(EPS)) * weight


def rotated(heads: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    half = heads.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


def attended(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """softmax(q · Kᵀ / sqrt(head_dim)) · V in float64: `[rows, heads, d]`, `[n, kv_heads, d]` twice → as queries."""
    group = queries.shape[1] // keys.shape[1]
    out = np.empty_like(queries)
    for row, position in enumerate(positions):
        for head in range(queries.shape[1]):
            visible = slice(0, position + 1)
            scores = keys[visible, head // group] @ queries[row, head] / np.sqrt(queries.shape[-1])
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[visible, head // group] / weights.sum()
    return out


class AttentionBench(Bench):
    """q, k and v are the three parts of each row of the table, so that keys and queries are what a test says."""

    def __init__(self, rows: np.ndarray, heads: int, kv_heads: int, head_dim: int, theta: float = 1e4):
        super().__init__(rows, head_dim=head_dim, kv_heads=kv_heads)
        self.heads, self.theta = heads, theta
        picks = np.eye(rows.shape[1], dtype=np.float32)
        ends = np.cumsum([0, heads, kv_heads, kv_heads]) * head_dim
        self.parts = [slice(start, end) for start, end in pairwise(ends)]
        self.q, self.k, self.v = (self.matrix("F32", picks[part]) for part in self.parts)
        rng = np.random.default_rng(9)
        self.q_weight, self.k_weight = (1 + 0.2 * rng.standard_normal((2, head_dim))).astype(np.float32)
        self.q_norm, self.k_norm = self.vector(self.q_weight), self.vector(self.k_weight)
        # The interface says that products read a norm; this one leaves ones and zeros of a row as they are.
        self.out = self.identity(heads * head_dim)

    def operation(self, ops, x, batch, storage):
        q = ops.rope(ops.head_norm(ops.linear(x, self.q), self.q_norm, EPS), batch, Rope(self.head_dim, self.theta))
        k = ops.rope(ops.head_norm(ops.linear(x, self.k), self.k_norm, EPS), batch, Rope(self.head_dim, self.theta))
        ops.write_kv(storage, 0, batch, k, ops.linear(x, self.v))
        return ops.linear(ops.attention(q, storage, 0, batch), self.out)

    def expected(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        query_dtype: str = "float32",
    ) -> np.ndarray:
        queries = rotated(normed_heads(rows[:, self.parts[0]], self.q_weight), positions, self.theta)
        queries = queries if query_dtype == "float32" else rounded(queries.astype(np.float32), query_dtype)
        return attended(queries, keys.astype(np.float64), values.astype(np.float64), positions).reshape(len(rows), -1)


def attention_rows(count: int, heads: int, kv_heads: int, head_dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, (heads + 2 * kv_heads) * head_dim)).astype(np.float32)


@pytest.mark.parametrize("head_dim", [2, 16, 24, 32, 64, 80, 128])
@pytest.mark.parametrize("start", [0, 40_000])
def test_stored_keys_are_normed_and_rotated_and_values_are_as_they_were(head_dim, start):
    """At position 40,000 an angle in float32 would be wrong in the third digit."""
    x = attention_rows(9, 2, 2, head_dim, seed=head_dim)
    bench = AttentionBench(x, 2, 2, head_dim, theta=1e6)
    block = 64
    positions = start + np.arange(9)
    table = [0] * (positions[-1] // block) + [1]  # block 1 holds the rows; earlier positions read zeros of block 0
    storage = bench.storage(2, block)
    tokens = [0] * start + list(range(9))

    bench.run(bench.operation, flat_batch([Part(tokens, start, start + 9, table)], block), storage)

    offset = start % block
    keys, values = (array[offset : offset + 9] for array in storage.gather(0, [1], block))
    want = rotated(normed_heads(x[:, bench.parts[1]], bench.k_weight), positions, 1e6)
    assert relative_error(keys, want, np.abs(want).max()) < 20 * ROUNDING
    np.testing.assert_array_equal(values.reshape(9, -1), x[:, bench.parts[2]])


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8"])
def test_keys_and_values_are_rounded_to_the_nearest_number_of_the_storages_type(kv_dtype):
    """Ties to even, subnormals and overflow included, exactly as `reference` rounds."""
    x = attention_rows(8, 1, 1, 32, seed=3)
    special = [0.0, -0.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.9, 65520.0, -65504.0, 2.0**-24, 2.0**-25]
    special += [1.5 * 2.0**-24, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-30, -1e-30, 6e-8, 3e38]
    x[0, 64 : 64 + len(special)] = special
    bench = AttentionBench(x, 1, 1, 32)
    storage = bench.storage(1, 16, kv_dtype)

    bench.run(bench.operation, flat_batch([Part(list(range(8)), 0, 8, [0])], 16), storage)

    _, values = storage.gather(0, [0], 8)
    # The way to a value is a sum that starts at +0, so the sign of a zero is not to be seen here.
    np.testing.assert_array_equal(values.reshape(8, -1), rounded(np.ascontiguousarray(x[:, 64:]), kv_dtype))


@pytest.mark.parametrize("shape", [(2, 2, 24), (4, 2, 32), (4, 1, 64), (2, 1, 128), (3, 1, 6)], ids=str)
@pytest.mark.parametrize("context", [1, 16, 63, 64, 65, 127, 128, 129, 200])
def test_attention_through_a_shuffled_block_table(shape, context):
    heads, kv_heads, head_dim = shape
    x = attention_rows(context, heads, kv_heads, head_dim, seed=context)
    bench = AttentionBench(x, heads, kv_heads, head_dim)
    block_size = 7
    num_blocks = -(-context // block_size)
    blocks = np.random.default_rng(context).permutation(num_blocks + 3)[:num_blocks].tolist()
    storage = bench.storage(num_blocks + 3, block_size)
    poison(storage)

    got = bench.run(bench.operation, flat_batch([Part(list(range(context)), 0, context, blocks)], block_size), storage)

    want = bench.expected(x, np.arange(context), *storage.gather(0, blocks, context))
    assert relative_error(got, want, np.abs(want).max()) < 60 * ROUNDING


@pytest.mark.parametrize(("kv_dtype", "bound"), [("float16", 60 * ROUNDING), ("bfloat16", 2.0**-9)])
def test_attention_reads_what_was_rounded(kv_dtype, bound):
    """In bfloat16 queries and weights are rounded too."""
    x = attention_rows(90, 4, 2, 24, seed=5)
    bench = AttentionBench(x, 4, 2, 24)
    storage = bench.storage(6, 16, kv_dtype)
    poison(storage)

    got = bench.run(bench.operation, flat_batch([Part(list(range(90)), 0, 90, [5, 1, 0, 2, 4, 3])], 16), storage)

    want = bench.expected(x, np.arange(90), *storage.gather(0, [5, 1, 0, 2, 4, 3], 90))
    assert relative_error(got, want, np.abs(want).max()) < bound


@pytest.mark.parametrize(
    "shape", [(2, 2, 24), (4, 2, 32), (4, 1, 64), (2, 1, 128), (3, 1, 6), (2, 1, 80), (1, 1, 192)], ids=str
)
def test_queries_are_rounded_as_int8_keys_are(shape):
    """A number that lies between two of int8 may be rounded to either here and there, hence the tolerance."""
    heads, kv_heads, head_dim = shape
    x = attention_rows(90, heads, kv_heads, head_dim, seed=5)
    bench = AttentionBench(x, heads, kv_heads, head_dim)
    storage = bench.storage(6, 16, "int8")
    poison(storage)

    got = bench.run(bench.operation, flat_batch([Part(list(range(90)), 0, 90, [5, 1, 0, 2, 4, 3])], 16), storage)

    keys, values = storage.gather(0, [5, 1, 0, 2, 4, 3], 90)
    want = bench.expected(x, np.arange(90), keys, values, query_dtype="int8")
    exact = bench.expected(x, np.arange(90), keys, values)
    scale = np.abs(want).max()
    assert relative_error(got, want, scale) < 1e-3 < relative_error(exact, want, scale)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8"])
def test_rows_are_what_they_are_though_later_rows_hold_the_largest_numbers(kv_dtype):
    x = attention_rows(20, 4, 2, 32, seed=7)
    bench = AttentionBench(x, 4, 2, 32)
    batch = flat_batch([Part(list(range(20)), 0, 20, [0, 1])], 16)
    expected = bench.run(bench.operation, batch, bench.storage(2, 16, kv_dtype))
    x[9:] = 3e38
    broken = AttentionBench(x, 4, 2, 32)
    got = broken.run(broken.operation, batch, broken.storage(2, 16, kv_dtype))
    np.testing.assert_array_equal(got[:9], expected[:9])
    assert not np.array_equal(got[9:], expected[9:])


def test_attention_with_one_key_far_above_the_others_and_with_equal_keys():
    """A softmax whose scores differ by hundreds, first where a later chunk holds the largest, then all the same."""
    x = attention_rows(150, 1, 1, 32, seed=6)
    x[:, :32] = 1.0  # the queries; keys are the opposite, all but one
    x[:, 32:64] = np.where(np.arange(150)[:, None] == 100, 1.0, -1.0)
    # With theta 1 every pair turns alike, and q · k depends on the distance only.
    bench = AttentionBench(x, 1, 1, 32, theta=1.0)
    bench.q_norm = bench.vector(np.full(32, 12.0))
    bench.q_weight = np.full(32, 12.0, np.float32)
    bench.k_norm = bench.vector(np.full(32, 12.0))
    storage = bench.storage(1, 160)

    got = bench.run(bench.operation, flat_batch([Part(list(range(150)), 0, 150, [0])], 160), storage)

    want = bench.expected(x, np.arange(150), *storage.gather(0, [0], 150))
    # Scores of ±800 have an absolute error of 1e-4 before the exponential.
    assert np.isfinite(got).all()
    assert relative_error(got, want, np.abs(want).max()) < 2e-3


@pytest.mark.parametrize(("gap", "counts"), [(30.0, True), (42.0, False)])
def test_a_bfloat16_weight_below_2_to_the_minus_50_counts_as_none(gap, counts):
    """So no subnormal number is multiplied, which some instructions take for zero and others do not."""
    x = np.ones((2, 96), np.float32)
    x[0, 32:64] = -1.0  # the first key is the opposite of the second, and its value is large
    x[0, 64:] = 2.0**100
    bench = AttentionBench(x, 1, 1, 32, theta=1.0)
    weight = np.sqrt(gap / ((1 + np.cos(1.0)) * np.sqrt(32)))  # of q · k, which one position turns by one radian
    bench.q_norm = bench.k_norm = bench.vector(np.full(32, weight))

    got = bench.run(bench.operation, flat_batch([Part([0, 1], 0, 2, [0])], 16), bench.storage(1, 16, "bfloat16"))

    assert ((got[1] > 2.0**50) if counts else (got[1] == 1.0)).all()


# The exponential


@numba.njit
def _exponentials(x, out, count):
    for offset in range(0, 4 * count, 64):
        store_f32(out + offset, exp16(load_f32(x + offset)))


def test_exp_is_within_two_units_in_the_last_place_over_the_whole_range():
    rng = np.random.default_rng(10)
    x = [np.linspace(-87.3, 88.0, 400_000), rng.standard_normal(100_000), rng.uniform(-1e-3, 1e-3, 100_000)]
    x = np.clip(np.concatenate(x).astype(np.float32), np.float32(-87.3), np.float32(88.0))
    out = np.full_like(x, np.nan)

    _exponentials(x.ctypes.data, out.ctypes.data, len(x))

    want = np.exp(x.astype(np.float64))
    error = np.abs(out - want) / want
    print(f"exp: largest relative error {error.max():.2e}, {error.max() / 2**-23:.2f} units in the last place")
    assert error.max() < 2 * 2.0**-23


def test_exp_of_what_lies_outside_is_the_nearest_end_and_of_zero_is_one():
    x = np.array([-np.inf, -1e30, -88, -87.3, 0.0, -0.0, 88, 89, 1e30, np.inf] + [0.0] * 6, np.float32)
    out = np.empty_like(x)

    _exponentials(x.ctypes.data, out.ctypes.data, len(x))

    assert (out[:4] == out[3]).all()
    assert 0 < out[3] < 1.3e-38
    assert (out[4:6] == 1).all()
    assert (out[6:10] == out[6]).all()
    assert np.isfinite(out[6])
