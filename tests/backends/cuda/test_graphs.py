"""Shapes, buckets and replays: what a graph captured for one step computes for another.

A stand-in for CUDA's graphs keeps the captured computation and calls it again, with whatever Python values it was
captured with. So what differs between two steps and is not in the input words shows as a wrong result.
"""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from forge.backends.cuda import backend as backend_module
from forge.backends.cuda.backend import CudaBackend
from forge.backends.cuda.graphs import Graphs
from forge.backends.cuda.inputs import InputBuffer, shape_of
from forge.backends.cuda.shapes import TOKEN_BUCKETS, Policy, Tuning
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill
from tests.backends.cpu.models import small_model
from tests.backends.cuda.models import relative_error

POLICY = Policy(heads=4, kv_heads=2, multiprocessors=132, invariant=False, buckets=True)


class CalledAgain:
    """What a capture computes, which a real one would only write down, is what the first replay would."""

    def __init__(self, compute):
        self._compute, self.logits = compute, compute()
        self._is_first = True

    def replay(self):
        if not self._is_first:
            self.logits.copy_(self._compute())
        self._is_first = False


class StandIn(Graphs):
    def _capture(self, compute):
        graph = CalledAgain(compute)
        return graph, graph.logits


@pytest.fixture
def backend_with_graphs(device, monkeypatch) -> CudaBackend:
    if device == "cpu":
        monkeypatch.setattr(backend_module, "Graphs", StandIn)
    return CudaBackend(device, dtype="float32", graphs=True)


def decode_batch(lengths, block_size=4):
    blocks = iter(range(1000))
    parts = []
    for length in lengths:
        own = [next(blocks) for _ in range(-(-length // block_size))]
        parts.append(Part(list(range(length)), length - 1, length, own))
    return flat_batch(parts, block_size)


@pytest.mark.slow
def test_a_shape_is_run_eagerly_once_then_captured_then_replayed(backend_with_graphs, device):
    backend = backend_with_graphs
    model = small_model(backend, "F32", seed=1, num_layers=1)
    tokens = np.random.default_rng(5).integers(0, 288, 12).tolist()
    want = one_prefill(
        small_model(CudaBackend(device, kernels="torch", dtype="float32"), "F32", seed=1, num_layers=1), tokens
    )
    storage = new_storage(model, 5, 4)
    blocks = [4, 0, 2]
    model.forward(flat_batch([Part(tokens, 0, 7, blocks)], 4), storage)

    modes = []
    for position in range(7, 12):
        logits = model.forward(flat_batch([Part(tokens, position, position + 1, blocks)], 4), storage)
        assert relative_error(logits, want[position : position + 1]) < 1e-4, f"position {position}"
        modes.append(backend.execution.mode)

    assert modes == ["eager", "graph", "graph", "graph", "graph"]


def test_a_replay_for_fewer_rows_and_other_blocks_leaves_the_padding_out(backend_with_graphs, device):
    """Four sequences, then three others in the same bucket: the fourth row is padding and writes nowhere."""
    backend = backend_with_graphs
    model = small_model(backend, "F32", seed=1, num_layers=1)
    plain = small_model(CudaBackend(device, kernels="torch", dtype="float32"), "F32", seed=1, num_layers=1)
    storage, expected = (new_storage(each, 16, 4) for each in (model, plain))
    tokens = np.random.default_rng(6).integers(0, 288, 40).tolist()
    batches = [
        flat_batch([Part(tokens, 3 * i, 3 * i + 1, [4 * i + j for j in range(4)]) for i in range(4)], 4),
        flat_batch([Part(tokens, i, i + 1, [15 - i, i]) for i in range(4)], 4),
        flat_batch([Part(tokens, 2 * i, 2 * i + 1, [5 + i, 11 - i, 0]) for i in (2, 0, 1)], 4),
    ]

    for batch in batches:
        got, want = model.forward(batch, storage), plain.forward(batch, expected)
        assert relative_error(got, want) < 1e-4
        for ours, theirs in ((storage.keys, expected.keys), (storage.values, expected.values)):
            assert torch.allclose(ours, theirs, atol=1e-5)

    assert backend.execution.mode == "graph" and backend.execution.rows == 4


@pytest.mark.slow
def test_prefills_of_other_lengths_share_a_token_bucket(backend_with_graphs, device):
    backend = backend_with_graphs
    model = small_model(backend, "F32", seed=1, num_layers=1)
    plain = small_model(CudaBackend(device, kernels="torch", dtype="float32"), "F32", seed=1, num_layers=1)
    tokens = np.random.default_rng(7).integers(0, 288, 32).tolist()

    for length, mode in ((17, "eager"), (20, "graph"), (31, "graph")):
        batch = flat_batch([Part(tokens, 0, length, list(range(8)))], 4, logit_rows=[length - 1])
        got, want = (each.forward(batch, new_storage(each, 8, 4)) for each in (model, plain))
        assert relative_error(got, want) < 1e-4
        assert backend.execution.rows == 32
        if length == 17:
            assert backend.execution.mode == mode


@pytest.mark.slow
def test_captures_are_dropped_when_something_they_read_moves(backend_with_graphs):
    backend = backend_with_graphs
    model = small_model(backend, "F32", seed=1, num_layers=1)
    storage = new_storage(model, 4, 4)
    batch = decode_batch([6])
    for _ in range(2):
        want = model.forward(batch, storage)
    captured = list(backend._steps[storage].graphs._captured.values())

    backend._buffer._words = 0  # as if it had been too small
    got = model.forward(batch, storage)

    assert backend.execution.mode == "graph", "its kernels are compiled, so it is captured at once"
    assert captured and captured != list(backend._steps[storage].graphs._captured.values())
    assert np.array_equal(got, want)


@pytest.mark.slow
def test_each_storage_has_its_own_captures_and_takes_them_with_it(backend_with_graphs):
    backend = backend_with_graphs
    model = small_model(backend, "F32", seed=1, num_layers=1)
    kept, passing = (new_storage(model, 4, 4) for _ in range(2))
    batch = decode_batch([6])
    modes = []
    for storage in (kept, kept):
        model.forward(batch, storage)
        modes.append(backend.execution.mode)
    captured = list(backend._steps[kept].graphs._captured.values())
    for storage in (passing, kept):
        model.forward(batch, storage)
        modes.append(backend.execution.mode)

    assert modes == ["eager", "graph", "eager", "graph"]
    assert list(backend._steps[kept].graphs._captured.values()) == captured, (
        "another storage's first step moves nothing"
    )
    assert passing.keys[0, 1, 1].any()
    del storage, passing
    gc.collect()
    assert len(backend._steps) == 1


def test_a_shape_that_cannot_be_captured_runs_eagerly_and_says_why(backend_with_graphs, monkeypatch):
    def refuse(self, compute):
        raise RuntimeError("CUDA error: out of memory\nand more")

    backend = backend_with_graphs
    model = small_model(backend, "F32", seed=1, num_layers=1)
    storage = new_storage(model, 4, 4)
    monkeypatch.setattr(backend_module.Graphs, "_capture", refuse)

    outs = [model.forward(decode_batch([6]), storage) for _ in range(3)]

    assert backend.execution.mode == "eager" and "out of memory" in backend.execution.reason
    assert np.array_equal(outs[0], outs[2])


def test_rows_that_need_each_others_keys_are_no_decode(device):
    """The second sequence goes on from the first one's token, whose key is stored in the same step."""
    tokens = [5, 6, 7, 8, 9, 10]
    parts = [Part(tokens, 4, 5, [0, 1]), Part(tokens, 5, 6, [0, 1])]
    batch = flat_batch(parts, 4)
    model, plain = (
        small_model(CudaBackend(device, kernels=kernels, dtype="float32"), "F32", seed=1, num_layers=1)
        for kernels in ("triton", "torch")
    )
    storages = [new_storage(each, 2, 4) for each in (model, plain)]
    for each, storage in zip((model, plain), storages, strict=True):
        each.forward(flat_batch([Part(tokens, 0, 4, [0])], 4), storage)

    got, want = (each.forward(batch, storage) for each, storage in zip((model, plain), storages, strict=True))

    assert not shape_of(batch, POLICY, 4, in_float32=False).is_decode
    assert shape_of(decode_batch([5, 6, 9]), POLICY, 4, in_float32=False).is_decode
    assert relative_error(got, want) < 1e-4


def test_more_rows_than_any_bucket_are_not_padded():
    tokens = list(range(TOKEN_BUCKETS[-1] + 3))
    batch = flat_batch([Part(tokens, 0, len(tokens), list(range(300)))], 4, logit_rows=[5])

    shape = shape_of(batch, POLICY, 4, in_float32=False)

    assert not shape.is_bucket and shape.num_rows == len(tokens)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_one_tile_and_padding_in_none(seed):
    rng = np.random.default_rng(seed)
    spans = [(int(start), int(start + length)) for start, length in rng.integers(1, 90, (rng.integers(1, 9), 2))]
    parts = [Part(list(range(end)), start, end, list(range(-(-end // 4)))) for start, end in spans]
    rows = sum(end - start for start, end in spans)
    batch = flat_batch(parts, 4, logit_rows=sorted(rng.choice(rows, rng.integers(0, min(rows, 5)), False).tolist()))
    policy = replace(POLICY, buckets=bool(seed % 2), invariant=seed % 3 == 0)
    shape = shape_of(batch, policy, 4, in_float32=False)
    buffer = InputBuffer(torch.device("cpu"))
    buffer.reach(shape, batch.block_tables.size)
    buffer.fill(shape, batch)
    inputs = buffer.inputs(shape)

    covered = []
    for sequence, first, length in zip(
        inputs.tile_sequences.tolist(), inputs.tile_firsts.tolist(), inputs.tile_lengths.tolist(), strict=True
    ):
        assert 0 <= length <= shape.tile_rows
        own = range(batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1])
        assert all(row in own for row in range(first, first + length))
        covered += range(first, first + length)
    assert sorted(covered) == list(range(rows))
    assert inputs.slots[:rows].tolist() == batch.slot_mapping.tolist() and inputs.slots[rows:].eq(-1).all()
    stride = int(inputs.table_stride[0])
    tables = inputs.tables[: batch.num_sequences * stride].view(-1, stride)
    assert torch.equal(tables, torch.from_numpy(batch.block_tables))
    assert shape.is_decode or inputs.logit_lengths.sum() == len(batch.logit_rows)


def test_real_graphs_replay_what_was_captured(gpu):
    backend = CudaBackend(gpu, dtype="float32")
    model = small_model(backend, "F32", seed=1)
    storage = new_storage(model, 4, 4)
    outs = [model.forward(decode_batch([6]), storage) for _ in range(3)]
    assert backend.execution.mode == "graph"
    assert np.array_equal(outs[1], outs[0]) and np.array_equal(outs[2], outs[0])


def test_fine_buckets_pad_a_hundred_and_forty_rows_to_a_hundred_and_sixty():
    batch = decode_batch([3] * 140)
    fine = replace(POLICY, tuning=Tuning(fine_buckets=True))

    assert (
        shape_of(batch, POLICY, 4, in_float32=False).num_rows == 256
        and shape_of(batch, fine, 4, in_float32=False).num_rows == 160
    )


@pytest.mark.parametrize("pause", [False, True])
def test_no_garbage_is_collected_during_a_capture_if_it_is_paused(pause, monkeypatch):
    during = []

    class Capture:
        def __init__(self, *_, **__): ...

        def __enter__(self):
            during.append(gc.isenabled())

        def __exit__(self, *_): ...

        def pool(self): ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    Graphs(pause_gc=pause)._capture(lambda: torch.zeros(1))

    assert during == [not pause] and gc.isenabled()


@pytest.mark.slow
def test_the_last_graph_is_that_of_the_step_before(backend_with_graphs):
    model = small_model(backend_with_graphs, "F32", seed=1, num_layers=1)
    storage = new_storage(model, 4, 4)

    graphs = []
    for _ in range(3):
        model.forward(decode_batch([6]), storage)
        graphs.append(backend_with_graphs.last_graph(storage))

    assert graphs[0] is None and graphs[1] is graphs[2] is not None
    assert backend_with_graphs.last_graph(new_storage(model, 4, 4)) is None


def test_layers_that_are_launched_alike_are_listed_once(device):
    for kind, layers in (("F32", 2), ("Q4_0", 2)):
        model = small_model(backend := CudaBackend(device), kind, num_layers=4)
        model.prepare(model.kv_layout(1, 4, "bfloat16"))
        network = backend._launches.network
        assert len(network.distinct().layers) == layers and network.distinct().layers[-1] is network.layers[-1]
