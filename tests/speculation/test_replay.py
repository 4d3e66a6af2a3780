"""Guesses that are known to be right, or wrong, as often as asked."""

from types import SimpleNamespace

import pytest

from forge.engine.proposer import ProposalRequest
from forge.model.model import Draw
from forge.speculation.lookup import ForcedProposer, ReplayProposer
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
    for start in (1, 100):
        assert guesses[start - 1 :] == proposed(proposer, text[:start], k=4000), "the position alone decides"


def test_what_a_grammar_forces_is_proposed_as_far_as_asked():
    matcher = SimpleNamespace(forced=lambda output: {(3,): (7, 8, 9)}.get(tuple(output), ()))
    draws = [Draw(None, 0, 0, [1, 2, 3], 2, matcher), Draw(None, 0, 0, [1, 3], 2, matcher), Draw(None, 0, 0, [1], 0)]
    for most in (0, 2, 5):
        proposals = ForcedProposer().propose([ProposalRequest(0, draw, most) for draw in draws])
        assert [proposal.token_ids for proposal in proposals] == [(7, 8, 9)[:most], (), ()]
