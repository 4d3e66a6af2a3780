"""Keeping time changes nothing else, and leaves no operation without a name."""

import inspect
from collections import Counter

import numpy as np
import pytest

from forge.backends.reference import ReferenceBackend
from forge.backends.timed import TimedOperations, short_name
from forge.gguf import GGUFFile
from forge.model.backend import Operations
from forge.model.loader import load_qwen3
from forge.model.manual_batch import one_prefill
from forge.model.weight_source import GGUFWeights
from tests.small_models import write_small_qwen3

OPERATIONS = {"rms_norm", "head_norm", "rope", "write_kv", "attention", "swiglu", "add"}
MATRICES = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}


def load(path, backend):
    with GGUFFile.open(path) as file:
        return load_qwen3(GGUFWeights(file), backend)


def timed_backend() -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.time_operations()
    return backend


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_results_are_unchanged_and_every_operation_has_its_name(tmp_path, tie):
    path = write_small_qwen3(tmp_path / "m.gguf", tie=tie, num_layers=3)
    timed = timed_backend()
    tokens = list(range(20))

    plain, clocked = one_prefill(load(path, ReferenceBackend()), tokens), one_prefill(load(path, timed), tokens)

    assert np.array_equal(plain, clocked)
    calls = Counter((time.layer, time.operation) for time in timed.operation_times() for _ in range(time.calls))
    outside = {(-1, name) for name in ("embed", "logit_rows", "rms_norm", "output head", "result")}
    inside = {(layer, name) for layer in range(3) for name in OPERATIONS | MATRICES}
    assert set(calls) == outside | inside
    assert calls[1, "rms_norm"] == calls[1, "add"] == calls[1, "rope"] == calls[1, "head_norm"] == 2
    assert calls[1, "attention"] == calls[1, "attn_q"] == calls[-1, "output head"] == 1
    assert sum(time.ms for time in timed.operation_times()) > 0


def test_times_add_up_over_forwards(tmp_path):
    timed = timed_backend()
    model = load(write_small_qwen3(tmp_path / "m.gguf"), timed)

    one_prefill(model, [1, 2])
    one_prefill(model, [3])

    calls = [(time.operation, time.calls) for time in timed.operation_times()]
    assert {count for name, count in calls if name == "attention"} == {2}
    assert ("embed", 2) in calls


def test_what_follows_an_interrupted_forward_is_not_charged_to_the_layer_where_it_stopped(tmp_path, monkeypatch):
    timed = timed_backend()
    model = load(write_small_qwen3(tmp_path / "m.gguf"), timed)
    with monkeypatch.context() as patch, pytest.raises(IndexError):
        patch.setattr(timed._operations.inner, "swiglu", lambda *arguments: [][0])
        one_prefill(model, [1])

    one_prefill(model, [1])

    assert {time.layer for time in timed.operation_times() if time.operation == "embed"} == {-1}


def test_without_being_asked_nobody_keeps_time(tmp_path):
    backend = ReferenceBackend()
    one_prefill(load(write_small_qwen3(tmp_path / "m.gguf"), backend), [1, 2])

    assert backend.operation_times() == ()


def test_every_operation_of_the_seam_is_passed_on():
    operations = {name for name, _ in inspect.getmembers(Operations, inspect.isfunction) if not name.startswith("_")}

    assert operations <= set(vars(TimedOperations))


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("blk.3.ffn_gate.weight", "ffn_gate"),
        ("blk.0.attn_output.weight", "attn_output"),
        ("output.weight", "output head"),
        ("token_embd.weight", "output head"),
    ],
)
def test_a_matrix_goes_by_its_short_name(tensor, name):
    assert short_name(tensor) == name
