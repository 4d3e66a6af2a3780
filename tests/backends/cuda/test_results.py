"""What a step leaves: the greatest logit of each row, tokens for the next step, logits that outlive later steps."""

import numpy as np
import pytest
import torch

from forge.backends.cuda import backend as backend_module
from forge.backends.cuda.backend import CudaBackend
from forge.backends.cuda.sampling import SamplingRows
from forge.engine.sampler import argmax_rows
from forge.engine.sampling_params import SamplingParams
from forge.model.manual_batch import Part, flat_batch, new_storage
from forge.model.model import DeviceLogits, Draw
from tests.backends.cpu.models import small_model
from tests.backends.cuda.models import launches, relative_error, sample
from tests.backends.cuda.test_graphs import StandIn


def found_by_the_kernel(logits: np.ndarray, device: str) -> tuple[list[int], list[float]]:
    samples = torch.full((len(logits) + 1, 2), -7, dtype=torch.int32, device=device)
    run = launches(device, "float32")
    for _ in range(2):  # a second time: the counters are 0 again
        run.argmax(torch.from_numpy(logits).to(device), samples)
    assert not run._counters.any() and samples[-1].tolist() == [-7, -7]
    numbers = samples[:-1].cpu().numpy()
    return numbers[:, 0].tolist(), numbers[:, 1].copy().view(np.float32).tolist()


@pytest.mark.parametrize("vocabulary", [1, 37, 2048, 2049, 9000])
def test_the_greatest_logit_is_numpys_in_every_part_of_the_row(vocabulary, device):
    rng = np.random.default_rng()
    logits = rng.standard_normal((3, vocabulary), dtype=np.float32)
    logits[1] = np.round(logits[1])  # many are equal: the lowest token wins
    logits[2, -1] = 100

    assert found_by_the_kernel(logits, device) == argmax_rows(logits)


def test_nans_infinities_and_both_zeros_are_ordered_as_numpy_orders_them(device):
    nan, inf = np.nan, np.inf
    rows = [
        [1, inf, nan, -nan, inf],
        [-0.0, 0.0, -1, -inf, -0.0],
        [-inf] * 5,
        [-3, -2, -2.5, -2, -inf],
        [-inf, -nan, 5, inf, nan],
    ]
    logits = np.array(rows, np.float32)
    logits[0, 3:4].view(np.uint32)[:] |= 1 << 31  # a NaN with its sign set

    tokens, values = found_by_the_kernel(logits, device)

    assert tokens == argmax_rows(logits)[0] == [2, 0, 0, 1, 1]
    assert np.array_equal(values, argmax_rows(logits)[1], equal_nan=True)


@pytest.fixture
def model(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(backend_module, "Graphs", StandIn)
    return small_model(CudaBackend(device, dtype="float32", graphs=True, runs_ahead=True), "F32", seed=1, num_layers=1)


def decode(tokens: list[list[int]], position: int, order=(0, 1)):
    """One row of each sequence, at the same position; the sequences in that order."""
    parts = [Part(tokens[i], position, position + 1, [4 * i + j for j in range(4)]) for i in order]
    return flat_batch(parts, 4)


@pytest.mark.slow
def test_a_step_takes_its_tokens_from_the_step_before_unseen(model):
    """Once told its tokens, once only whose they are: the sequences change places, and graphs are replayed."""
    known, ahead = (new_storage(model, 8, 4) for _ in range(2))
    tokens, order = [[7], [9]], (0, 1)
    expected = model.forward(decode(tokens, 0, order), known)
    before = model.forward(decode(tokens, 0, order), ahead)
    for position in range(1, 8):
        said, _ = expected.argmax_rows()
        tokens = [[*own, said[order.index(i)]] for i, own in enumerate(tokens)]
        unseen = [[*own[:-1], -1 - order.index(i)] for i, own in enumerate(tokens)]
        order = order[::-1]
        expected = model.forward(decode(tokens, position, order), known)
        found = model.forward(decode(unseen, position, order), ahead)
        assert before.argmax_rows()[0] == said, "the step before is read after the next one was launched"
        assert np.array_equal(found[:], expected[:]), position
        before = found
    assert model.backend.execution.mode == "graph"


@pytest.mark.slow
def test_results_can_be_read_after_any_number_of_later_steps(model):
    storage = new_storage(model, 8, 4)
    tokens = np.random.default_rng(2).integers(0, 288, (2, 8)).tolist()
    wanted = [model.forward(decode(tokens, position), storage)[:] for position in range(8)]

    held = [model.forward(decode(tokens, position), storage) for position in range(8)]

    assert all(isinstance(each, DeviceLogits) for each in held)
    assert {each.execution.mode for each in held} == {"graph"}
    for each, want in zip(held, wanted, strict=True):
        assert each.argmax_rows() == argmax_rows(want)
        assert np.array_equal(np.asarray(each), want) and np.array_equal(each[-1], want[-1])
        assert np.array_equal(np.stack(list(each)), want) and np.array_equal(each[1:], want[1:])
    with pytest.raises(IndexError):
        held[0][2]


def test_released_logits_keep_their_argmax_and_are_not_copied(model, monkeypatch):
    storage = new_storage(model, 8, 4)
    tokens = np.random.default_rng(4).integers(0, 288, (2, 8)).tolist()
    wanted = [argmax_rows(model.forward(decode(tokens, position), storage)[:]) for position in range(4)]
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: pytest.fail("no caller asked for the rows"))

    held = []
    for position in range(4):
        held.append(model.forward(decode(tokens, position), storage))
        held[-1].release()

    assert [each.argmax_rows() for each in held] == wanted and len(held[0]) == 2


@pytest.mark.slow
def test_a_pass_that_ends_in_hidden_states_gives_those(model, device):
    plain = small_model(CudaBackend(device, kernels="torch", dtype="float32"), "F32", seed=1, num_layers=1)
    tokens = np.random.default_rng(3).integers(0, 288, 9).tolist()
    batch = flat_batch([Part(tokens, 0, 9, [0, 1, 2])], 4, logit_rows=[3, 8])

    for first in ("hidden", "forward"):
        for name in (first, "hidden", "forward", "hidden"):
            got, want = (getattr(each, name)(batch, new_storage(each, 3, 4)) for each in (model, plain))
            assert got.shape == want.shape and relative_error(got, want) < 1e-4


def test_plain_operations_do_not_run_ahead(device):
    assert not CudaBackend(device, kernels="torch", runs_ahead=True).runs_ahead
    assert CudaBackend(device).runs_ahead == (device == "cuda")


@pytest.mark.slow
def test_a_step_takes_tokens_that_were_drawn_on_the_device_unseen(model):
    """The same seeds draw the same tokens, whether the host reads them before the next step or after it."""
    known, ahead = (new_storage(model, 8, 4) for _ in range(2))
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=5), SamplingParams(temperature=1.5, seed=6)]
    device = model.backend._device

    def draws(position: int) -> list[Draw]:
        return [Draw(one, one.seed, 0, range(position + 1), 1) for one in params]

    tokens, unread = [[7], [9]], None
    for position in range(6):
        expected = model.forward(decode(tokens, position), known)
        rows = SamplingRows.of(draws(position), model.vocab_size, device)
        drawn = sample(torch.from_numpy(expected[:]).to(device), rows).tolist()
        unseen = [[*own[:-1], -1 - row] for row, own in enumerate(tokens)] if position else tokens
        found = model.forward(decode(unseen, position), ahead)
        found.sample(draws(position))
        if unread is not None:
            assert unread.argmax_rows()[0] == [own[-1] for own in tokens], "read after the next step was launched"
        assert np.array_equal(found[:], expected[:]), position
        tokens, unread = [[*own, token] for own, token in zip(tokens, drawn, strict=True)], found
    chosen, logits = unread.argmax_rows()
    assert chosen == [own[-1] for own in tokens]
    assert logits == [unread[row][token] for row, token in enumerate(chosen)]
    assert len({token for own in tokens for token in own}) > 4
