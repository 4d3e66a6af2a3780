"""Kernels compiled ahead are those that are launched, to the key of Triton's cache."""

import json
from itertools import product

import pytest
import torch

from forge.backends.cuda import warm_up
from forge.backends.cuda.backend import CudaBackend
from forge.backends.cuda.inputs import expected_shapes, shape_of
from forge.backends.cuda.launches import ListingLauncher
from forge.backends.cuda.shapes import Policy
from forge.engine.sampling_params import SamplingParams
from forge.model.manual_batch import Part, flat_batch, new_storage
from forge.model.model import Draw
from tests.backends.cpu.models import ROOT, run_python, small_model
from tests.slow import mostly_slow


@pytest.mark.slow
def test_what_processes_compile_is_what_a_launch_finds(tmp_path):
    found = run_python(
        ["tests/backends/cuda/compile_in_parallel.py"],
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
        PYTHONPATH=str(ROOT),
    )
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)

    assert facts["listed"] == 3 == facts["compiled"] == facts["afterwards"], "nothing was compiled a second time"
    assert len(facts["failed"]) == 1 and "no_such_kernel" in facts["failed"][0]
    assert facts["progress"][0] == [0, 4] and facts["progress"][4] == [4, 4]
    assert facts["first"] == facts["again"] == [] and "compiled again" in facts["progress"]
    assert "and again" not in facts["progress"], "what was compiled once is known"


def decode(rows: int, context: int):
    blocks = -(-context // 16)
    return [Part([1] * context, context - 1, context, list(range(n * blocks, (n + 1) * blocks))) for n in range(rows)]


@pytest.mark.parametrize("kind", mostly_slow(["F32", "Q8_0"], quick=["Q8_0"]))
def test_no_step_launches_what_was_not_expected(kind, device):
    """Decodes of any number of rows and contexts, prefills, chunks."""
    backend = CudaBackend(device, graphs=True)
    model = small_model(backend, kind, num_layers=3)
    layout = model.kv_layout(1, 16, "bfloat16")
    listing = ListingLauncher(dependent=False)
    backend._launcher = listing
    model.prepare(layout)
    backend.uses_graphs = False

    expected = set(backend.expected_launches(model.forward_pass, layout, dependent=False))
    listing.found.clear()
    storage = new_storage(model, 600, 16, "bfloat16")
    batches = [decode(rows, context) for rows in (1, 2, 3, 9, 16, 17, 40) for context in (1, 17, 65, 200)]
    batches += [decode(1, 4000), [Part([1] * 90, 60, 90, list(range(6)))], [Part([1] * 700, 0, 700, list(range(44)))]]
    for parts in batches:
        last = parts[-1].end - parts[-1].start - 1 + len(parts) - 1
        rows = None if len(parts) > 1 or parts[0].end - parts[0].start == 1 else [last]
        backend.launch(model.forward_pass, flat_batch(parts, 16, logit_rows=rows), storage)

    assert set(listing.found) - expected == set()
    assert len(expected) < 60


def test_shapes_expected_are_shapes_that_batches_have():
    policy = Policy(16, 8, 132, invariant=False, buckets=True)
    expected = expected_shapes(policy, False, 4096)

    assert shape_of(flat_batch(decode(3, 160), 16), policy, 16, in_float32=False) in expected


def test_numbers_that_triton_treats_alike_are_described_alike():
    described = [warm_up._described(value) for value in (1, 3, 17, 16, 1 << 40, -5)]

    assert described == [("int", 1), ("int", 3), ("int", 3), ("int", 16), ("int", (1 << 40) + 16), ("int", 3)]
    whole = torch.zeros(32, dtype=torch.bfloat16)
    assert warm_up._described(whole)[0] == "bfloat16"
    assert (warm_up._described(whole[4:])[1] - warm_up._described(whole)[1]) % 16 == 8
    assert warm_up._described(torch.zeros(32, dtype=torch.int8, device="meta")[8:]) == ("int8", 8)


def test_no_draw_launches_what_was_not_expected(device):
    backend = CudaBackend(device, graphs=True, runs_ahead=True)
    model = small_model(backend, "F32", num_layers=1)
    listing = ListingLauncher(dependent=False)
    backend._launcher = listing
    layout = model.kv_layout(1, 16, "bfloat16")
    model.prepare(layout)
    backend.uses_graphs = False
    expected = set(backend.expected_launches(model.forward_pass, layout, dependent=False))

    asked = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"frequency_penalty": 1.0}]
    for rows, options in product((1, 3), asked):
        storage = new_storage(model, 8, 16, "bfloat16")
        logits = model.forward(flat_batch(decode(rows, 17), 16), storage)
        listing.found.clear()
        logits.sample([Draw(SamplingParams(**options), 1, 0, [1] * 17, 3) for _ in range(rows)])
        (launched,) = listing.found
        assert launched.kernel == "argmax.gumbel_argmax" and launched in expected
