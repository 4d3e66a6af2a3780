"""Draws are a pure function of their name, and uniform; noise has the Gumbel distribution."""

import numpy as np
import pytest

from forge.engine.rng import (
    MAX_BRANCHES,
    DrawName,
    Purpose,
    gumbel,
    gumbel_argmax,
    numpy_argmax,
    philox,
    token_words,
    uniform,
)
from forge.model.model import Draw

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ([ONES] * 4, [ONES] * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox(*counter, *key) == expected
    arrays = [np.full(5, word, np.uint64) for word in counter]
    assert [lane.tolist() for lane in philox(*arrays, *key)] == [[word] * 5 for word in expected]


def test_the_word_of_a_token_is_that_of_the_definition():
    seed, sample, position = 0x1234567890ABCDEF, 3, 70_000
    for ids in ([0], [5], [2, 3, 4, 5], [1, 9, 400, 151_935], list(range(3, 4100)), list(range(0, 9000, 2))):
        expected = [philox(i // 4, position, sample, 0, seed & ONES, seed >> 32)[i % 4] for i in ids]
        assert token_words(np.array(ids), DrawName(seed, sample, position)).tolist() == expected


@pytest.mark.parametrize("draw_argmax", [gumbel_argmax, numpy_argmax])
def test_purpose_and_branch_are_the_last_word_of_the_counter(draw_argmax):
    ids, draw = np.arange(50), Draw(None, 9, 3, [1] * 7)
    for purpose, branch in ((Purpose.SAMPLE, 0), (Purpose.RESAMPLE, 5), (Purpose.PROPOSE, MAX_BRANCHES - 1)):
        name = DrawName.of(draw, purpose, branch)
        words = [philox(i // 4, 7, 3, purpose + 4 * branch, 9, 0)[i % 4] for i in range(50)]
        assert token_words(ids, name).tolist() == words
        assert draw_argmax(ids, np.zeros(50), name) == np.argmax(words)
    assert DrawName.of(draw) == (9, 3, 7, Purpose.SAMPLE, 0)
    assert draw_argmax(ids, np.where(ids == 0, 100.0, 0.0), name) == 0


def test_noise_is_minus_log_minus_log_of_the_middle_of_its_word():
    words = np.array([0, 1, 2**31, 2**32 - 1], np.uint64)
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    assert gumbel(words).tolist() == (-np.log(-np.log(u))).tolist()
    assert np.isfinite(gumbel(words)).all()


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0, 30.0])
def test_leaving_out_what_cannot_win_changes_no_token(spread, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr("forge.engine.rng._compiled_draw", lambda: None)
    ids = np.arange(70_000)
    for seed in range(12):
        scores = spread * np.random.default_rng(seed).standard_normal(len(ids))
        scores[::7] = -np.inf
        kept = ids if seed % 2 else ids[seed::3]
        whole = scores[kept] + gumbel(token_words(kept, DrawName(seed, 0, 9)))
        assert gumbel_argmax(kept, scores[kept], DrawName(seed, 0, 9)) == kept[whole.argmax()]


def test_of_equal_sums_the_lower_token_id_wins(monkeypatch):
    monkeypatch.setattr("forge.engine.rng.token_words", lambda ids, name: np.full(len(ids), 77, np.uint64))
    for size in (10, 100_000):
        scores = np.zeros(size)
        scores[[3, size - 1]] = 1.0
        assert numpy_argmax(np.arange(size), scores, DrawName(0, 0, 0)) == 3


def test_a_draw_depends_on_its_name_and_on_nothing_else():
    first = uniform(DrawName(5, 0, 17))
    for position in range(100):
        uniform(DrawName(5, 0, position))

    assert uniform(DrawName(5, 0, 17)) == first


def test_every_part_of_the_name_matters():
    names = [(5, 0, 17, Purpose.SAMPLE), (6, 0, 17, Purpose.SAMPLE), (5, 1, 17, Purpose.SAMPLE)]
    names += [(5, 0, 18, Purpose.SAMPLE), *((5, 0, 17, purpose) for purpose in Purpose if purpose != Purpose.SAMPLE)]
    names += [(5, 0, 17, purpose, branch) for purpose in Purpose for branch in range(1, MAX_BRANCHES)]

    assert len({uniform(DrawName(*name)) for name in names}) == len(names)


def test_draws_stay_what_they_are():
    """A recording made today must replay tomorrow."""
    assert [int(purpose) for purpose in Purpose] == [0, 1, 2, 3]
    assert uniform(DrawName(0, 0, 0)) == (0x6627E8D5 + 0.5) * 2.0**-32
    assert uniform(DrawName(2**64 - 1, 3, 4095, Purpose.ACCEPT)) == 0.13145331374835223
    drawn = [gumbel_argmax(np.arange(1000), np.zeros(1000), DrawName(7, 0, position)) for position in range(4)]
    assert drawn == [
        709,
        207,
        596,
        143,
    ]


@pytest.mark.parametrize("vary", ["seed", "sample_index", "position"])
def test_draws_are_uniform_and_neighbours_are_unrelated(vary):
    def name(i):
        return {"seed": 1, "sample_index": 0, "position": 0, "purpose": Purpose.SAMPLE} | {vary: i}

    draws = np.array([uniform(DrawName(**name(i))) for i in range(20_000)])

    assert draws.min() > 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 150  # chi-squared of 99 degrees: 99.9 % lie below 149
    pairs = np.histogram2d(draws[:-1], draws[1:], bins=10, range=[(0, 1), (0, 1)])[0]
    expected = (len(draws) - 1) / 100
    assert ((pairs - expected) ** 2 / expected).sum() < 150
