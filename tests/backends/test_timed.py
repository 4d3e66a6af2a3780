"""`TimedBackend` keeps time and changes nothing else."""

import inspect

import numpy as np
import pytest

from forge.backends.backend import Backend
from forge.backends.reference import ReferenceBackend
from forge.backends.timed import TimedBackend
from forge.gguf import GGUFFile
from forge.model.loader import load_qwen3
from tests.model.forwards import one_prefill
from tests.small_models import write_small_qwen3

OPERATIONS = {"rms_norm", "head_norm", "rope", "write_kv", "attention", "swiglu", "add"}
MATRICES = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}


def load(path, backend):
    with GGUFFile.open(path) as file:
        return load_qwen3(file, backend)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_results_are_unchanged_and_every_operation_has_its_name(tmp_path, tie):
    path = write_small_qwen3(tmp_path / "m.gguf", tie=tie, num_layers=3)
    timed = TimedBackend(ReferenceBackend())
    tokens = list(range(20))

    plain, clocked = one_prefill(load(path, ReferenceBackend()), tokens), one_prefill(load(path, timed), tokens)

    assert np.array_equal(plain, clocked)
    calls = {(time.layer, time.operation): time.calls for time in timed.times()}
    outside = {(-1, name) for name in ("embed", "take_rows", "rms_norm", "output head", "to_numpy")}
    inside = {(layer, name) for layer in range(3) for name in OPERATIONS | MATRICES}
    assert set(calls) == outside | inside
    assert calls[1, "rms_norm"] == calls[1, "add"] == calls[1, "rope"] == calls[1, "head_norm"] == 2
    assert calls[1, "attention"] == calls[1, "attn_q"] == calls[-1, "output head"] == 1
    assert all(time.ms >= 0 for time in timed.times())


def test_times_add_up_over_forwards(tmp_path):
    timed = TimedBackend(ReferenceBackend())
    model = load(write_small_qwen3(tmp_path / "m.gguf"), timed)

    one_prefill(model, [1, 2])
    one_prefill(model, [3])

    assert {time.calls for time in timed.times() if time.operation == "attention"} == {2}
    assert [time.calls for time in timed.times() if time.operation == "embed"] == [2]


def test_every_method_of_the_seam_is_passed_on():
    methods = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}

    assert methods <= set(vars(TimedBackend))


def test_it_answers_to_the_name_of_the_backend_inside():
    inner = ReferenceBackend()
    timed = TimedBackend(inner)

    assert (timed.name, timed.description) == (inner.name, inner.description)
