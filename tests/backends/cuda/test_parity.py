"""Whole models on `cuda` against `reference`: the same logits, to the accuracy of the dtype, whatever the batch."""

from itertools import pairwise

import numpy as np
import pytest

from forge.backends.cuda.backend import CudaBackend
from forge.backends.reference import ReferenceBackend
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill
from forge.model.qwen3 import Qwen3
from tests.backends.cpu.models import FLOATS, QUANTIZED, small_model
from tests.backends.cuda.models import relative_error
from tests.slow import mostly_slow

MODEL_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
"""Of the logits of two random layers: roundings add up, so bfloat16's is more than one operation's."""
ODD_SIZES = {"hidden_size": 20, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3} | {
    "intermediate_size": 37
}


def tokens_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 288, length).tolist()


def in_several_steps(model: Qwen3, tokens: list[int], kv_dtype: str = "float32") -> np.ndarray:
    """The logits of every position but the first chunk's, from a chunk, six rows at once, then decodes."""
    storage = new_storage(model, 4, 8, kv_dtype)
    cuts = [0, len(tokens) - 8, *range(len(tokens) - 2, len(tokens) + 1)]
    steps = [Part(tokens, start, end, [2, 0, 3, 1]) for start, end in pairwise(cuts)]
    first = model.forward(flat_batch(steps[:1], 8, logit_rows=[]), storage)
    assert first.shape == (0, model.vocab_size)
    return np.concatenate([model.forward(flat_batch([part], 8), storage) for part in steps[1:]])


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], quick=["float32"]))
@pytest.mark.parametrize("tensor_type", mostly_slow([*FLOATS, *QUANTIZED], quick=["F32", "BF16", "Q8_0", "Q4_K"]))
def test_plain_operations_give_the_references_logits(tensor_type, dtype, device):
    tokens = tokens_of(30)
    want = one_prefill(small_model(ReferenceBackend(), tensor_type, seed=2, tie=False), tokens)
    model = small_model(CudaBackend(device, kernels="torch", dtype=dtype), tensor_type, seed=2, tie=False)

    error = relative_error(one_prefill(model, tokens), want)

    print(f"{tensor_type}, {dtype}: relative error of the logits {error:.1e}")
    assert error < MODEL_TOLERANCE[dtype]
    assert relative_error(in_several_steps(model, tokens), want[-8:]) < MODEL_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("tensor_type", "dtype", "sizes"),
    [
        pytest.param("F32", "float32", {}, id="F32 in float32", marks=pytest.mark.slow),
        pytest.param("F32", "float32", ODD_SIZES, id="odd sizes"),
        pytest.param("BF16", "bfloat16", {}, id="BF16 in bfloat16", marks=pytest.mark.slow),
        pytest.param("Q4_0", "bfloat16", {"num_layers": 1}, id="Q4_0 in bfloat16", marks=pytest.mark.slow),
    ],
)
def test_fused_kernels_give_the_references_logits(tensor_type, dtype, sizes, device):
    tokens = tokens_of(21)
    want = one_prefill(small_model(ReferenceBackend(), tensor_type, seed=2, **sizes), tokens)
    model = small_model(CudaBackend(device, dtype=dtype), tensor_type, seed=2, **sizes)

    error = relative_error(in_several_steps(model, tokens), want[-8:])

    print(f"{tensor_type}, {dtype}: relative error of the logits {error:.1e}")
    assert error < MODEL_TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("copies", [True, False], ids=["dense copies", "multiplied out each time"])
def test_many_rows_of_a_packed_model_go_through_dense_products(copies, device):
    tokens = tokens_of(66)
    sizes = {"num_layers": 1}
    want = one_prefill(small_model(ReferenceBackend(), "Q8_0", seed=3, **sizes), tokens)
    model = small_model(CudaBackend(device, dtype="float32", dense_copies=copies), "Q8_0", seed=3, **sizes)

    batch = flat_batch([Part(tokens, 0, 66, list(range(5)))], 16, logit_rows=[40, 65])
    got = model.forward(batch, new_storage(model, 5, 16))

    assert relative_error(got, want[[40, 65]]) < MODEL_TOLERANCE["float32"]


@pytest.mark.parametrize("kv_dtype", mostly_slow(["float16", "bfloat16"], quick=["float16"]))
def test_keys_and_values_are_rounded_to_the_storages_dtype(kv_dtype, device):
    tokens = tokens_of(21)
    reference = small_model(ReferenceBackend(), "F32", seed=2, num_layers=1)
    model = small_model(CudaBackend(device, dtype="float32"), "F32", seed=2, num_layers=1)

    got, want = (in_several_steps(each, tokens, kv_dtype) for each in (model, reference))

    assert relative_error(got, want) < 2e-3  # a number near a tie may be rounded to the other side


def test_prefills_chunks_and_decodes_of_several_sequences_share_a_batch(device):
    sequences = [tokens_of(length, seed) for seed, length in enumerate((9, 14, 6))]
    reference = small_model(ReferenceBackend(), "F32", seed=4)
    model = small_model(CudaBackend(device, dtype="float32"), "F32", seed=4)
    want = [one_prefill(reference, tokens) for tokens in sequences]
    storage = new_storage(model, 8, 4)
    blocks = [[7, 0, 3], [5, 1, 6, 4], [2, 0]]
    blocks[2][1] = 0  # never reached: a table may go on past its sequence
    steps = [[(0, 4), None, None], [(4, 8), (0, 13), None], [(8, 9), (13, 14), (0, 4)]]

    for spans in steps:
        chosen = [(i, span) for i, span in enumerate(spans) if span is not None]
        parts = [Part(sequences[i], *span, blocks[i]) for i, span in chosen]
        ends = np.cumsum([end - start for _, (start, end) in chosen]) - 1
        logits = model.forward(flat_batch(parts, 4, logit_rows=ends.tolist()), storage)
        expected = np.stack([want[i][end - 1] for i, (_, end) in chosen])
        assert relative_error(logits, expected) < MODEL_TOLERANCE["float32"]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_every_step_of_a_forward_has_its_time(kernels, device):
    backend = CudaBackend(device, kernels=kernels, dtype="float32")
    backend.time_operations()
    model = small_model(backend, "F32", num_layers=1)

    one_prefill(model, [1])

    names = [time.operation for time in backend.operation_times()]
    if kernels == "triton":
        assert names == [
            "embed",
            "rms_norm, attn_q, attn_k, attn_v",
            "head norm, rope, write_kv, attention",
            "attn_output, add",
            "rms_norm, ffn_gate, ffn_up, swiglu",
            "ffn_down, add",
            "rms_norm, output head",
            "argmax",
        ]
    else:
        assert {"attention", "ffn_gate", "output head"} <= set(names)
    assert all(time.calls >= 1 for time in backend.operation_times())
    assert sum(time.ms for time in backend.operation_times()) > 0


def test_quantizing_on_load_reads_a_byte_per_weight(device):
    plain = small_model(CudaBackend(device), "F32", num_layers=1)
    quantized = small_model(CudaBackend(device, quantize="q8_0"), "F32", num_layers=1)

    bytes_of = [model.weights.layers[0].ffn_down.read_bytes for model in (plain, quantized)]

    assert bytes_of[1] / bytes_of[0] == pytest.approx(34 / 64)
