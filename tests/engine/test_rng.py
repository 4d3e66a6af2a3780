"""Draws are a pure function of their name, and uniform."""

import numpy as np
import pytest

from forge.engine.draws import MAX_BRANCHES, Purpose, uniform


def test_a_draw_depends_on_its_name_and_on_nothing_else():
    first = uniform(5, 0, 17, Purpose.SAMPLE)
    for position in range(100):
        uniform(5, 0, position, Purpose.SAMPLE)

    assert uniform(5, 0, 17, Purpose.SAMPLE) == first


def test_every_part_of_the_name_matters():
    names = [(5, 0, 17, Purpose.SAMPLE), (6, 0, 17, Purpose.SAMPLE), (5, 1, 17, Purpose.SAMPLE)]
    names += [(5, 0, 18, Purpose.SAMPLE), *((5, 0, 17, purpose) for purpose in Purpose if purpose != Purpose.SAMPLE)]
    names += [(5, 0, 17, purpose, branch) for purpose in Purpose for branch in range(1, MAX_BRANCHES)]

    assert len({uniform(*name) for name in names}) == len(names)


def test_draws_stay_what_they_are():
    """A recording made today must replay tomorrow."""
    assert uniform(0, 0, 0, Purpose.SAMPLE) == 0.1715401303266132
    assert uniform(2**64 - 1, 3, 4095, Purpose.ACCEPT) == 0.95725338198363


@pytest.mark.parametrize("vary", ["seed", "sample_index", "position"])
def test_draws_are_uniform_and_neighbours_are_unrelated(vary):
    def name(i):
        return {"seed": 1, "sample_index": 0, "position": 0, "purpose": Purpose.SAMPLE} | {vary: i}

    draws = np.array([uniform(**name(i)) for i in range(20_000)])

    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 150  # chi-squared of 99 degrees: 99.9 % lie below 149
    pairs = np.histogram2d(draws[:-1], draws[1:], bins=10, range=[(0, 1), (0, 1)])[0]
    expected = (len(draws) - 1) / 100
    assert ((pairs - expected) ** 2 / expected).sum() < 150
