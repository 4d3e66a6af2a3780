"""A compiled draw is NumPy's draw: the same token for every row of scores and every name."""

import sys

import numpy as np
import pytest

from forge.backends.cpu.draw import CompiledDraw
from forge.engine import rng
from forge.engine.rng import MAX_BRANCHES, DrawName, Purpose, gumbel, numpy_argmax, token_words
from forge.engine.sampling import filtered
from forge.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def draw():
    return CompiledDraw()


OPTIONS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.05),
    SamplingParams(temperature=30.0),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.3, min_p=0.02),
    SamplingParams(temperature=0.8, top_k=300, top_p=0.9, min_p=0.01),
)


@pytest.mark.parametrize("size", [1, 2, 17, 1023, 1025, 4096, 50_001])
def test_a_compiled_draw_chooses_the_token_that_numpy_chooses(draw, size):
    generator = np.random.default_rng(size)
    for number in range(70 if size < 10_000 else 14):
        logits = (generator.choice([0.0, 0.3, 3.0, 12.0]) * generator.standard_normal(size)).astype(np.float32)
        if number % 3 == 0:
            logits[generator.random(size) < 0.3] = -np.inf
            logits[generator.integers(size)] = 1.0
        token_ids, scores = filtered(logits, OPTIONS[number % len(OPTIONS)])
        if number % 5 == 0:  # as under a grammar
            token_ids = token_ids * 3 + 2
        seed, position, sample = (int(generator.integers(0, high, dtype=np.uint64)) for high in (2**64 - 1, 2**31, 99))
        purpose, branch = list(Purpose)[number % 4], int(generator.integers(MAX_BRANCHES))
        expected = numpy_argmax(token_ids, scores, DrawName(seed, sample, position, purpose, branch))
        assert draw(token_ids, scores, seed, position, sample, purpose | branch << 2) == expected


def test_the_greatest_seed_and_a_strided_row_are_drawn_too(draw):
    scores = np.zeros((500, 2))[:, 0]
    assert draw(np.arange(500), scores, 2**64 - 1, 3, 0, 0) == numpy_argmax(
        np.arange(500), scores, DrawName(2**64 - 1, 0, 3)
    )


@pytest.mark.parametrize(("difference", "decides"), [(0.0, False), (1e-12, False), (-1e-12, False), (1e-3, True)])
def test_a_close_race_is_left_to_numpy(draw, difference, decides):
    """The scores of two tokens are such that their sums with the noise differ by so much."""
    size, pair = 4096, np.array([70, 3000])
    noise = gumbel(token_words(np.arange(size), DrawName(5, 0, 8)))
    scores = -100.0 - noise
    scores[pair] = [10 - noise[70], 10 - noise[3000] + difference]
    expected = numpy_argmax(np.arange(size), scores, DrawName(5, 0, 8))
    assert expected in pair
    assert draw(np.arange(size), scores, 5, 8, 0, 0) == (expected if decides else None)


def test_a_draw_is_compiled_where_numba_is_and_numpys_elsewhere(monkeypatch):
    rng._compiled_draw.cache_clear()
    monkeypatch.setattr(rng, "numpy_argmax", lambda *name: -7)
    assert rng.gumbel_argmax(np.arange(9), np.zeros(9), DrawName(1, 2, 3)) >= 0

    rng._compiled_draw.cache_clear()
    monkeypatch.setitem(sys.modules, "forge.backends.cpu.draw", None)
    assert rng.gumbel_argmax(np.arange(9), np.zeros(9), DrawName(1, 2, 3)) == -7
    rng._compiled_draw.cache_clear()
