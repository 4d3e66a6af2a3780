"""`forge kernels --layer` shows every operation of a layer, and counts what each reads and writes."""

import io

import pytest
from rich.console import Console

from forge.backends.cpu.program import Matrix
from forge.backends.reference import ReferenceOperations
from forge.experiments import one_layer
from forge.experiments.one_layer import layer_object, layer_report, run
from forge.llm import LLM
from tests.small_models import write_small_qwen3

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
KEYS = one_layer.CONTEXT + 1


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    path = tmp_path_factory.mktemp("layer") / "small.gguf"
    return write_small_qwen3(path, tensor_type="Q8_0", num_layers=2, num_key_value_heads=KV_HEADS, **sizes)


@pytest.fixture(scope="module")
def layers(path):
    return {layer.device: layer for layer in run(path, threads=1).layers}


def operations_called(path, monkeypatch) -> list[str]:
    """The names of the operations that `Qwen3.forward_pass` calls in layer 1, whatever keeps time of them."""
    llm, calls, layer, depth = LLM(path, device="reference"), [], [-1], [0]
    for name in {name for name in vars(ReferenceOperations) if not name.startswith("_")}:
        method = getattr(ReferenceOperations, name)

        def called(self, *arguments, name=name, method=method):
            if layer[0] == 1 and not depth[0]:
                calls.append(name)
            depth[0] += 1  # an operation may call another
            result = method(self, *arguments)
            depth[0] -= 1
            return result

        monkeypatch.setattr(ReferenceOperations, name, called)
    monkeypatch.setattr(ReferenceOperations, "begin_layer", lambda self, index: layer.__setitem__(0, index))
    llm.logits([1])
    return calls


def test_the_references_table_has_every_operation_that_the_forward_pass_calls(path, layers, monkeypatch):
    calls = operations_called(path, monkeypatch)
    matrices = iter(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
    assert calls.count("linear") == 7
    expected = [next(matrices) if name == "linear" else name for name in calls]
    assert [operation.operation for operation in layers["reference"].operations] == expected


def test_the_compiled_table_has_every_operation_of_the_program_that_runs(path, layers):
    llm = LLM(path, device="cpu", threads=1)
    llm.logits([1])
    program = llm.model.backend._programs[llm.model.forward_pass]
    per_layer = [operation.name for operation in program.recording.operations if operation.layer == 1]
    outside = [operation.name for operation in program.recording.operations if operation.layer == -1]
    assert len(program.table) == 2 * len(per_layer) + len(outside)
    assert [operation.operation for operation in layers["cpu"].operations] == per_layer
    llm.model.backend._pool.close()


def bytes_of(layer, name) -> tuple[int, int]:
    [operation] = [operation for operation in layer.operations if operation.operation == name]
    return operation.bytes_read, operation.bytes_written


def test_bytes_are_those_of_the_arrays(layers):
    reference, kv = layers["reference"], KV_HEADS * HEAD_DIM
    width = HEADS * HEAD_DIM
    assert bytes_of(reference, "attn_q") == (4 * (HIDDEN + width * HIDDEN), 4 * width)
    assert bytes_of(reference, "attention") == (4 * (width + 2 * KEYS * kv), 4 * width)
    assert bytes_of(reference, "write_kv") == (4 * 2 * kv, 4 * 2 * kv)
    assert bytes_of(reference, "swiglu") == (4 * 2 * FFN, 4 * FFN)
    matrices = 2 * width * HIDDEN + 2 * kv * HIDDEN + 3 * FFN * HIDDEN
    activations = 13 * HIDDEN + 4 * width + 4 * kv + 2 * HEAD_DIM + 3 * FFN
    assert reference.bytes_read == 4 * (matrices + activations + 2 * KEYS * kv)


def test_compiled_bytes_are_those_of_packed_weights_and_a_byte_for_each_number_of_a_key(path, layers):
    compiled, kv, width = layers["cpu"], KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    row = KV_HEADS * (HEAD_DIM + 4)  # a token's keys, or values, in int8 with their scales
    llm = LLM(path, device="cpu", threads=1)
    weights = llm.model.weights.layers[1]
    packed = {matrix.name: matrix.packed.nbytes for matrix in vars(weights).values() if isinstance(matrix, Matrix)}
    assert len(packed) == 7
    quantized = HIDDEN * 3 // 2  # of an element 1.5 bytes: itself, and its part of a scale and of a sum
    assert bytes_of(compiled, "attn_q") == (quantized + packed["attn_q"], 4 * width)
    assert bytes_of(compiled, "attn_output") == (quantized + packed["attn_output"] + 4 * HIDDEN, 4 * HIDDEN)
    glu = bytes_of(compiled, "ffn_gate, ffn_up, swiglu")
    assert glu == (quantized + packed["ffn_gate"] + packed["ffn_up"], FFN * 3 // 2)
    assert bytes_of(compiled, "attention") == (4 * width + 2 * KEYS * row, 4 * width)
    assert bytes_of(compiled, "head norm, rope, store")[1] == 4 * (width + kv) + 2 * row
    assert compiled.bytes_read > sum(packed.values())


def test_every_operation_of_a_layer_has_bytes_and_a_time(layers):
    for layer in layers.values():
        for operation in layer.operations:
            assert operation.bytes_read > 0 and operation.bytes_written > 0 and operation.ms > 0, operation


def test_the_screen_fits_80_columns_and_shows_what_the_facts_say(path):
    report = layer_report(path, threads=1)
    out = io.StringIO()
    report.draw(Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for layer in report.facts["layers"]:
        names = [operation["operation"] for operation in layer["operations"]]
        assert [line.split("  ")[0] for line in lines if line.split("  ")[0] in names].count("attention") == 2
        assert f"{layer['device']}: {len(names)} operations read" in out.getvalue()
    assert set(report.facts) == set(layer_object(run(path, 1)))
