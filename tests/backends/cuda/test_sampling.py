"""Tokens chosen on the device are those of the definition, written out in Python and NumPy here."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from forge.backends.cuda.sampling import Draw, Penalties, SamplingRows, philox_words, sample, sample_into
from forge.engine.sampling_params import SamplingParams

VOCABULARY = 203
"""Not a multiple of 4."""


def philox(counter, key) -> list[int]:
    """Philox4x32-10 as Salmon et al. give it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def words_of(draw: Draw, vocabulary: int) -> list[int]:
    key = draw.seed & 0xFFFFFFFF, draw.seed >> 32
    blocks = (philox((block, draw.position, draw.sample_index, 0), key) for block in range(-(-vocabulary // 4)))
    return [word for block in blocks for word in block][:vocabulary]


def penalized(logits: np.ndarray, params: SamplingParams, history: list[int], num_prompt: int) -> np.ndarray:
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in set(history):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(history[num_prompt:]):
        values[token] -= params.frequency_penalty * history[num_prompt:].count(token) + params.presence_penalty
    return values.astype(np.float32)


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64, -infinity where a token may not be drawn."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[: params.top_k] if params.top_k else order
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    if params.top_p < 1:
        total, reached, kept = weights[order].sum(), 0.0, []
        for token in order:
            if reached >= params.top_p * total:
                break
            kept.append(token)
            reached += weights[token]
        order = np.array(kept)
    order = order[weights[order] >= params.min_p]
    out = np.full(len(logits), -np.inf)
    out[order] = logits[order]
    return out


def chosen(logits: np.ndarray, params: SamplingParams, draw: Draw, history: list[int], num_prompt: int) -> int:
    logits = penalized(logits, params, history, num_prompt)
    if params.temperature == 0:
        return int(logits.argmax())
    noise = [-math.log(-math.log((word + 0.5) * 2.0**-32)) for word in words_of(draw, len(logits))]
    return int((filtered(logits, params) / params.temperature + np.array(noise)).argmax())


def rows_of(params, draws, device, histories=None, num_prompt=3) -> SamplingRows:
    where, penalties = torch.device(device), None
    if histories is not None:
        penalties = Penalties.of(params, histories, [num_prompt] * len(params), VOCABULARY, where)
    return SamplingRows.of(params, draws, VOCABULARY, where, penalties)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_test_vectors(counter, key, want):
    from forge.backends.cuda.sampling import _philox

    got = _philox(tuple(torch.tensor([[word]]) for word in counter), tuple(torch.tensor([[word]]) for word in key))

    assert tuple(int(word) for word in got) == want == tuple(philox(counter, key))


def test_every_token_has_its_word_of_seed_sample_and_position(device):
    draws = [Draw(0, 0, 0), Draw(2**64 - 1, 3, 40_959), Draw(1 << 32, 0, 5), Draw(7, 2**31, 0)]

    got = philox_words(rows_of([SamplingParams(temperature=1.0)] * 4, draws, device), VOCABULARY)

    assert got.tolist() == [words_of(draw, VOCABULARY) for draw in draws]


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_of_the_definition_whatever_is_beside_them(seed, device):
    rng = np.random.default_rng(seed)
    count = 6
    logits = rng.standard_normal((count, VOCABULARY), dtype=np.float32) * 3
    if seed % 3 == 0:
        logits = np.round(logits)  # many are equal, at every edge
    if seed % 4 == 0:
        logits[:, rng.integers(0, VOCABULARY, 50)] = -np.inf
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 1e-3, 0.7, 1.0, 3.0])),
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
    draws = [Draw(int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(3)), len(each)) for each in histories]
    want = [chosen(*each, 3) for each in zip(logits, params, draws, histories, strict=True)]
    on_device = torch.from_numpy(logits).to(device)

    got = sample(on_device, rows_of(params, draws, device, histories))

    assert got.tolist() == want
    assert torch.equal(on_device.cpu(), torch.from_numpy(logits)), "the logits stay as they are"
    alone = [
        sample(on_device[row : row + 1], rows_of([params[row]], [draws[row]], device, [histories[row]])).item()
        for row in range(count)
    ]
    assert alone == want


def test_draws_follow_the_probabilities(device):
    """Over 4,000 positions, to five standard deviations."""
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).to(device).repeat(4000, 1)
    params = [SamplingParams(temperature=1.0)] * 4000
    rows = SamplingRows.of(params, [Draw(3, 0, position) for position in range(4000)], 4, torch.device(device))

    shares = torch.bincount(sample(logits, rows), minlength=4).double().cpu() / 4000

    assert torch.allclose(shares, torch.tensor([0.5, 0.25, 0.15, 0.1]).double(), atol=5 * 0.5 / 4000**0.5)


def test_samples_are_left_for_the_next_step_and_counted(device):
    logits = torch.randn(2, VOCABULARY, device=device)
    params = [SamplingParams(temperature=0.0, frequency_penalty=100.0), SamplingParams(temperature=0.5)]
    rows = rows_of(params, [Draw(1, 0, 9), Draw(2, 1, 4)], device, [[1, 2, 3], [4, 5, 6]])
    samples = torch.full((3, 2), -7, dtype=torch.int32, device=device)

    seen = []
    for _ in range(2):
        sample_into(logits, rows, samples)
        seen.append(samples[:2, 0].tolist())
        for row, token in enumerate(seen[-1]):
            assert samples[row, 1:].view(torch.float32).item() == logits[row, token].item()

    best_two = logits[0].topk(2).indices.tolist()
    assert [first for first, _ in seen] == best_two, "what was said once is penalized at once"
    assert samples[2].tolist() == [-7, -7] and rows.penalties.counts[0, best_two].tolist() == [1, 1]


def test_what_is_not_asked_for_is_not_computed(device, monkeypatch):
    greedy = SamplingParams(temperature=0.0, top_k=5)
    draw = Draw(1, 0, 1)

    assert not rows_of([greedy], [draw], device).draws
    plain = rows_of([greedy, replace(greedy, temperature=1.0, top_k=0)], [draw, draw], device)
    assert plain.draws and not plain.sorts and not plain.floors
    monkeypatch.setattr(torch, "sort", lambda *_, **__: pytest.fail("no row has a top-k or top-p"))
    assert len(sample(torch.randn(2, VOCABULARY, device=device), plain)) == 2
