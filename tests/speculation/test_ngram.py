"""What followed the last time: held against a search written to be read."""

import numpy as np
import pytest

from forge.errors import UsageError
from forge.speculation.lookup import NgramProposer
from tests.speculation.requests import proposed, request


def looked_up(tokens: list[int], k: int, min_ngram: int, max_ngram: int) -> list[int]:
    """The oracle: every length from the longest, every place from the latest, token by token."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                out = list(tokens)
                for index in range(k):
                    out.append(out[end + index])
                return out[len(tokens) :]
    return []


def test_what_followed_the_longest_match_is_proposed():
    tokens = [1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3]

    assert proposed(NgramProposer(2, 4), tokens) == [9, 9, 2, 3], "three tokens match, though two match later"
    assert proposed(NgramProposer(2, 2), tokens) == [8, 8, 1, 2]


def test_of_equal_matches_the_latest_counts():
    assert proposed(NgramProposer(), [1, 2, 7, 1, 2, 8, 1, 2]) == [8, 1, 2, 8]


def test_a_repetition_goes_on_for_as_long_as_it_is_asked_to():
    assert proposed(NgramProposer(), [5, 6, 7, 6, 7], k=7) == [6, 7, 6, 7, 6, 7, 6]
    assert proposed(NgramProposer(), [4, 4, 4], k=5) == [4, 4, 4, 4, 4]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4], [1, 2, 1, 3, 1], [3, 1, 2, 4, 2]])
def test_where_nothing_matches_nothing_is_proposed(tokens):
    assert proposed(NgramProposer(), tokens) == []


def test_nothing_is_proposed_where_nothing_is_asked_for():
    assert proposed(NgramProposer(), [1, 2, 1, 2], k=0) == []


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 2), (2, 4), (3, 5)])
def test_growing_texts_are_looked_up_as_a_plain_search_would(sizes):
    rng = np.random.default_rng(sum(sizes))
    proposer = NgramProposer(*sizes)
    for seq_id in range(60):
        tokens = rng.integers(0, 3, size=rng.integers(1, 12)).tolist()
        for _ in range(12):
            k = int(rng.integers(1, 6))
            assert proposed(proposer, tokens, k, seq_id=seq_id % 5) == looked_up(tokens, k, *sizes), tokens
            tokens += rng.integers(0, 3, size=rng.integers(1, 4)).tolist()


def test_sequences_are_kept_apart_and_one_that_begins_anew_is_read_anew():
    proposer = NgramProposer()
    ours, theirs = proposer.propose([request([1, 2, 3, 1, 2]), request([1, 2, 4, 1, 2], seq_id=1)])

    assert (ours.token_ids[0], theirs.token_ids[0]) == (3, 4)
    assert proposed(proposer, [1, 2, 5, 1, 2, 5, 6, 1, 2]) == [5, 6, 1, 2], "the id was given to another text"
    assert proposed(proposer, [1, 2, 5, 1, 2]) == [5, 1, 2, 5], "a text that became shorter"


def test_what_is_forgotten_takes_no_room():
    proposer = NgramProposer()
    proposed(proposer, [1, 2, 3, 1, 2])
    proposer.forget(0)
    proposer.forget(0)

    assert proposer._texts == {}
    assert proposed(proposer, [1, 2, 3, 1, 2]) == [3, 1, 2, 3]


def test_the_odds_are_none():
    (proposal,) = NgramProposer().propose([request([1, 1, 1])])

    assert proposal.distributions is None


@pytest.mark.parametrize("sizes", [(0, 3), (3, 2), (-1, -1)])
def test_lengths_that_make_no_sense_are_refused(sizes):
    with pytest.raises(UsageError, match="make no sense"):
        NgramProposer(*sizes)
