"""The suites for caches, proposers and policies: sound ones pass, and a broken one is told what it violates."""

import pytest

from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.engine import policies
from forge.engine.proposer import Proposal, Proposer
from forge.speculation.lookup import NgramProposer
from forge.testing import check_cache, check_proposer, check_victim_policy


@pytest.mark.parametrize("kind", [PagedKvCache, PrefixKvCache])
def test_our_caches_pass(kind):
    check_cache(lambda: kind(12, 4), lists=5)


class Leaking(PagedKvCache):
    """Broken on purpose: the last block of a sequence that ends stays taken."""

    def remove(self, seq_id):
        self.pool.incref(self._tables[seq_id].blocks[-1]) if self._tables[seq_id].blocks else None
        super().remove(seq_id)


def test_a_broken_cache_is_shown_the_shortest_way_to_break_it():
    with pytest.raises(AssertionError, match=r"references") as raised:
        check_cache(lambda: Leaking(12, 4), lists=5)
    assert 1 <= str(raised.value).count("('") <= 4, "the list of operations is short"


def test_our_proposer_passes():
    check_proposer(NgramProposer, texts=[[1, 2, 3, 1, 2]])


class Guessing(Proposer):
    """After any text the same tokens, as told."""

    name = "guessing"

    def propose(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        return Proposal((97,) * request.max_tokens)


class Eager(Guessing):
    """Broken on purpose: it does not care how much is wanted."""

    def one(self, request):
        return Proposal((97, 98))


class Remembering(Guessing):
    """Broken on purpose: the guess hangs on how often it was asked."""

    asked = 0

    def one(self, request):
        self.asked += 1
        return Proposal((self.asked % 90,) * request.max_tokens)


class Meddling(Guessing):
    """Broken on purpose: it writes into what it was lent."""

    def one(self, request):
        request.token_ids.append(97)
        return Proposal((97,) * request.max_tokens)


class Lost(Guessing):
    """Broken on purpose: a request without an answer."""

    def propose(self, requests):
        return super().propose(requests)[1:]


def test_a_proposer_that_is_always_wrong_passes():
    check_proposer(Guessing)


@pytest.mark.parametrize(
    ("proposer", "said"),
    [
        (Eager, "asked for 0 tokens at most, it proposed 2"),
        (Remembering, "when new and asked for it alone"),
        (Meddling, "it changed the tokens of the request"),
        (Lost, "one request, and the answer is"),
    ],
)
def test_a_broken_proposer_is_told_what_it_violates(proposer, said):
    with pytest.raises(AssertionError, match=said):
        check_proposer(proposer)


@pytest.mark.parametrize("policy", policies.VICTIM_POLICIES.values(), ids=lambda policy: policy.__name__)
def test_our_policies_pass(policy):
    check_victim_policy(policy)


def refusing(running, requester):
    """Broken on purpose: no sequence ever gives way."""


def test_a_policy_that_lets_requests_end_early_is_found_out():
    with pytest.raises(AssertionError):
        check_victim_policy(refusing)
