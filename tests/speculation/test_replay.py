"""Guesses that are known to be right, or wrong, as often as asked."""

import pytest

from forge.speculation.lookup import ReplayProposer
from tests.speculation.requests import proposed

TEXTS = [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9]]


def test_what_was_recorded_follows():
    proposer = ReplayProposer(TEXTS, vocab_size=10)

    assert proposed(proposer, [1, 2, 3]) == [4, 5, 6]
    assert proposed(proposer, [1, 2, 9], k=1) == [9]
    assert proposed(proposer, [1, 2, 3, 4, 5, 6]) == []
    assert proposed(proposer, [7]) == []
    assert proposed(proposer, [1], k=2) == [2, 3]


def test_a_hostile_one_is_always_wrong_and_never_outside_the_vocabulary():
    proposer = ReplayProposer([[0] * 5 + [9] * 5], vocab_size=10, agreement=0.0)

    assert proposed(proposer, [0] * 3) == [1, 1, 0, 0]


def test_agreement_is_the_share_of_right_guesses():
    text = [index % 10 for index in range(4001)]
    proposer = ReplayProposer([text], vocab_size=10, agreement=0.7)

    guesses = proposed(proposer, text[:1], k=4000)

    assert sum(map(int.__eq__, guesses, text[1:])) / 4000 == pytest.approx(0.7, abs=0.03)
    assert guesses == proposed(proposer, text[:1], k=4000)
