"""Tokens chosen on the device are those that the engine chooses from the same logits."""

import numpy as np
import pytest
import torch

from forge.backends.cuda import sampling
from forge.backends.cuda.launches import TritonLauncher
from forge.backends.cuda.sampling import SamplingRows
from forge.engine.rng import DrawName, gumbel_argmax, token_words
from forge.engine.sampling import choose_token, filtered
from forge.engine.sampling_params import SamplingParams
from forge.model.model import Draw
from tests.backends.cuda.models import sample
from tests.slow import SLOW, mostly_slow

VOCABULARY = 203
"""Not a multiple of 4."""


def rows_of(draws, device, vocabulary=VOCABULARY) -> SamplingRows:
    return SamplingRows.of(draws, vocabulary, torch.device(device))


@pytest.mark.parametrize(
    "name",
    [(2**64 - 1, 3, 40_959), *(pytest.param(name, marks=SLOW) for name in ((0, 0, 0), (1 << 32, 0, 5), (7, 2**31, 0)))],
)
def test_every_token_has_its_noise_of_seed_sample_and_position(name, device):
    """Of each two neighbours the one with more noise is drawn."""
    seed, sample_index, position = name
    draw = Draw(SamplingParams(temperature=1.0), seed, sample_index, range(position), 0)
    logits = torch.full((VOCABULARY - 1, VOCABULARY), -torch.inf, device=device)
    firsts = torch.arange(VOCABULARY - 1, device=device)
    logits[firsts, firsts] = logits[firsts, firsts + 1] = 0.0

    got = sample(logits, rows_of([draw] * len(logits), device))

    words = token_words(np.arange(VOCABULARY), DrawName.of(draw)).astype(np.int64)
    assert got.tolist() == (np.arange(VOCABULARY - 1) + (words[1:] > words[:-1])).tolist()


@pytest.mark.parametrize("seed", mostly_slow(range(24), quick=range(4)))
def test_tokens_are_those_of_the_engine_whatever_is_beside_them(seed, device):
    rng = np.random.default_rng(seed)
    count = 6
    logits = rng.standard_normal((count, VOCABULARY), dtype=np.float32) * 3
    if seed % 3 == 0:
        logits = np.round(logits)  # many are equal, at every edge
    if seed % 4 == 0:
        logits[:, rng.integers(0, VOCABULARY, 50)] = -np.inf
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 1e-300, 1e-3, 0.7, 1.0, 3.0, 1e30])),
            top_k=int(rng.choice([0, 1, 5, 50, 500])),
            top_p=float(rng.choice([1.0, 0.05, 0.5, 0.95])),
            min_p=float(rng.choice([0.0, 0.02, 0.3])),
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, -0.4, 0.7])),
            logit_bias={int(rng.integers(VOCABULARY)): 2.5} if rng.random() < 0.3 else (),
        )
        for _ in range(count)
    ]
    histories = [rng.integers(0, 12, rng.integers(3, 20)).tolist() for _ in range(count)]
    draws = [
        Draw(one, int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(3)), history, 3)
        for one, history in zip(params, histories, strict=True)
    ]
    want = [choose_token(row, draw) for row, draw in zip(logits, draws, strict=True)]
    on_device = torch.from_numpy(logits).to(device)

    got = sample(on_device, rows_of(draws, device))

    assert got.tolist() == want
    assert torch.equal(on_device.cpu(), torch.from_numpy(logits)), "the logits stay as they are"
    alone = [sample(on_device[row : row + 1], rows_of([draws[row]], device)).item() for row in range(count)]
    assert alone == want


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, marks=SLOW),
        {"top_k": 40},
        pytest.param({"top_p": 0.9}, marks=SLOW),
        pytest.param({"min_p": 0.01}, marks=SLOW),
        {"top_k": 300, "top_p": 0.8, "temperature": 2.0},
        pytest.param({"top_p": 0.999, "min_p": 1e-4, "temperature": 1.3}, marks=SLOW),
    ],
)
def test_many_rows_of_a_large_vocabulary_get_the_engines_tokens(params, device, monkeypatch):
    """So many tokens that the engine leaves out those that cannot win, and sorts no whole row."""
    monkeypatch.setattr(sampling, "FILTERED_ROWS", 4)
    count, vocabulary = (64, 151_936) if device == "cuda" else (6, 12_345)
    asked = SamplingParams(**{"temperature": 0.8} | params)
    logits = np.random.default_rng(7).standard_normal((count, vocabulary), dtype=np.float32) * 2
    logits[::3] = np.round(logits[::3], 1)  # many are equal
    draws = [Draw(asked, 11 * row, row % 3, [1] * (100 + row), 1) for row in range(count)]

    got = sample(torch.from_numpy(logits).to(device), rows_of(draws, device, vocabulary))

    assert got.tolist() == [
        gumbel_argmax(*filtered(row, asked), DrawName.of(draw)) for row, draw in zip(logits, draws, strict=True)
    ]


def test_samples_are_left_for_the_next_step(device):
    logits = torch.randn(2, VOCABULARY, device=device)
    best_two = logits[0].topk(2).indices.tolist()
    draws = [
        Draw(SamplingParams(frequency_penalty=100.0), 1, 0, [1, 2, 3, best_two[0]], 3),
        Draw(SamplingParams(temperature=0.5), 2, 1, [4, 5, 6], 3),
    ]
    samples = torch.full((3, 2), -7, dtype=torch.int32, device=device)

    sampling.sample_into(logits, rows_of(draws, device), samples, TritonLauncher(False))

    for row, token in enumerate(samples[:2, 0].tolist()):
        assert samples[row, 1:].view(torch.float32).item() == logits[row, token].item()
    assert samples[0, 0].item() == best_two[1], "what was said once is penalized"
    assert samples[2].tolist() == [-7, -7]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_leaves_a_logit_that_is_not_finite(broken, device):
    logits = torch.zeros(2, VOCABULARY, device=device)
    logits[1, 77] = broken
    draws = [Draw(SamplingParams(temperature=1.0), 1, 0, [1], 1)] * 2
    samples = torch.zeros((2, 2), dtype=torch.int32, device=device)

    sampling.sample_into(logits, rows_of(draws, device), samples, TritonLauncher(False))

    assert samples[:, 1].view(torch.float32).isfinite().tolist() == [True, False]


def test_what_is_not_asked_for_is_not_computed(device, monkeypatch):
    greedy = SamplingParams(temperature=0.0, top_k=5)
    draw = Draw(greedy, 1, 0, [1], 1)

    plain = rows_of([draw, draw._replace(params=SamplingParams(temperature=1.0))], device)
    assert not plain.sorts and not plain.floors and plain.penalties is None
    monkeypatch.setattr(torch, "sort", lambda *_, **__: pytest.fail("no row has a top-k or top-p"))
    assert len(sample(torch.randn(2, VOCABULARY, device=device), plain)) == 2
