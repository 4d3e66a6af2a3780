"""Exercise 10: a proposer. Short texts with a known answer, random ones, the conformance checks of proposers, and then
how many of its draft tokens a held-out text accepts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from forge.engine.proposer import Proposal, ProposalRequest, Proposer
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Exercise, Rule, Trial
from forge.speculation.ngram import NgramProposer
from forge.testing import check_proposer
from forge.workload.judging import HELD_OUT

_GREEDY = SamplingParams()
_K = 4
_STRIDE = 23
"""The held-out text is asked about at every 23rd of its characters."""

RULES = {
    "one-each": Rule(
        "propose returns one Proposal per request, in the order of the requests.",
        "What does it return for a request without a match, and what where there are two requests?",
    ),
    "at-most": Rule("A proposal has at most max_tokens tokens.", "What if max_tokens is 0, or 1?"),
    "untouched": Rule(
        "A request's tokens belong to the caller: they are read and not changed.",
        "Which list does the code append to, and whose is it?",
    ),
    "follows": Rule(
        "What is proposed followed an earlier occurrence of the text's last tokens.",
        "At which index does the occurrence end, and at which does what follows it begin?",
    ),
    "earlier": Rule(
        "Without an earlier occurrence nothing is proposed.", "What is returned after both loops have ended?"
    ),
    "too-short": Rule(
        "Fewer than min_ngram equal tokens are no occurrence.", "How many tokens does the shortest n-gram have?"
    ),
    "longest": Rule(
        "The longest n-gram that has an earlier occurrence decides.", "In which order are the lengths tried?"
    ),
    "latest": Rule("Of several occurrences the latest one decides.", "From which end is the text searched?"),
    "missed": Rule(
        "If there is an earlier occurrence, something is proposed.",
        "Which places are not looked at? Is the end of the text itself one of those that are?",
    ),
    "own-text": Rule(
        "A proposal follows from its own request's tokens alone.", "What does the object remember from earlier calls?"
    ),
    "conforms": Rule("With its draft tokens the engine says what it says without.", "Which call was the first?"),
    "accepted": Rule(
        "A held-out text accepts at least half as many of its draft tokens as of the ones of forge.",
        "How many tokens does it propose where it could propose more?",
    ),
}

_KNOWN: tuple[tuple[str, list[int], int], ...] = (
    ("missed", [1, 2, 3, 9, 1, 2], 3),
    ("earlier", [5, 6, 7, 8], 4),
    ("too-short", [7, 1, 2, 3, 7], 4),
    ("missed", [7, 7, 7], 1),
    ("latest", [1, 2, 3, 1, 2, 4, 1, 2], 1),
    ("longest", [9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1),
    ("missed", [1, 2, 1, 2], 2),
    ("at-most", [1, 2, 3, 9, 1, 2], 0),
    ("at-most", [1, 2, 3, 9, 1, 2], 1),
    ("follows", [4], 3),
)
"""(the rule that a wrong answer breaks, a text, max_tokens)."""
_STORY = (
    "Once upon a time, when the first snow fell, a hungry little fox woke up early in a den under an old oak. The fox "
    "had a friend named Maple, a little turtle. One day Maple lent him her round mirror, and he kept it."
)
"""It is told twice and begun again, so that the model goes on with what it has read."""


def _request(text: Sequence[int], max_tokens: int, seq_id: int = 0) -> ProposalRequest:
    return ProposalRequest(seq_id, text, max_tokens, _GREEDY, 0, 0)


class ProposerTrial(Trial):
    """Asks the reader's proposer about texts whose continuation is known."""

    def __init__(self, piece: ModuleType):
        super().__init__(
            piece,
            "from forge.engine.proposer import ProposalRequest as Request",
            "from forge import SamplingParams",
            "proposer = piece.MyProposer()",
        )
        self.proposer: Proposer = piece.MyProposer()
        self.reference = NgramProposer(2, 4)
        self.setup = len(self.calls)

    def propose(self, texts: Sequence[list[int]], max_tokens: int) -> list[Proposal]:
        del self.calls[self.setup :]
        given = [list(text) for text in texts]
        asked = [_request(text, max_tokens, number) for number, text in enumerate(given)]
        line = ", ".join(f"Request({n}, {text}, {max_tokens}, SamplingParams(), 0, 0)" for n, text in enumerate(texts))
        found = self.call(f"proposer.propose([{line}])", self.proposer.propose, asked)
        self.require(given == list(texts), "untouched", f"{list(texts)} has become {given}")
        is_list = isinstance(found, list) and all(isinstance(one, Proposal) for one in found)
        self.require(is_list and len(found) == len(texts), "one-each", f"{_plural(len(texts))}; it returned {found!r}")
        for proposal in found:
            said = f"asked for {max_tokens} at most, it proposed {proposal.token_ids}"
            self.require(len(proposal) <= max_tokens, "at-most", said)
        return found

    def known(self, rule: str, text: list[int], max_tokens: int) -> None:
        """Where the answer is known: its first tokens must be those of forge's own lookup."""
        (found,) = self.propose([text], max_tokens)
        (expected,) = self.reference.propose([_request(text, max_tokens, 1)])
        ours, theirs = found.token_ids, expected.token_ids
        if not theirs:
            self.require(not ours, rule, f"after {text} it proposed {ours}; there is nothing to propose")
        elif max_tokens:
            self.require(ours, "missed", f"after {text} it proposed nothing; {theirs} would have been right")
            if ours != theirs[: len(ours)]:
                self.require(ours[0] != text[-1] or rule != "missed", "follows", _instead(text, ours, theirs))
                self.require(False, "follows" if rule == "missed" else rule, _instead(text, ours, theirs))

    def alone(self, texts: list[list[int]]) -> None:
        """Each text together with the others, and then alone."""
        together = self.propose(texts, _K)
        for text, beside in zip(texts, together, strict=True):
            (found,) = self.propose([text], _K)
            said = f"after {text} it proposes {found.token_ids}, and beside other requests {beside.token_ids}"
            self.require(found.token_ids == beside.token_ids, "own-text", said)


def _plural(number: int) -> str:
    return "one request" if number == 1 else f"{number} requests"


def _instead(text: list[int], ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    return f"after {text} it proposed {ours}, and not {theirs}"


def check(piece: ModuleType) -> None:
    trial = ProposerTrial(piece)
    for rule, text, max_tokens in _KNOWN:
        trial.known(rule, text, max_tokens)
    trial.alone([[1, 2, 3, 9, 1, 2], [5, 6, 7], [3, 9, 4, 3, 9]])
    rng = np.random.default_rng(0)
    for length in (2, 3, 5, 8, 13, 30, 60):
        for _ in range(20):
            trial.known("follows", rng.integers(0, 3, length).tolist(), _K)
    check_proposer(piece.MyProposer, [[1, 2, 3, 9, 1, 2], [1, 2, 1, 2]])
    text = list(HELD_OUT.read_bytes())[:6000]
    ours, theirs = _accepted(piece.MyProposer(), text), _accepted(NgramProposer(2, 4), text)
    said = f"of a text of {len(text)} bytes it got {ours} draft tokens accepted, and forge's own {theirs}"
    trial.calls.clear()
    trial.require(2 * ours >= theirs, "accepted", said)


def _accepted(proposer: Proposer, text: list[int]) -> int:
    """How many draft tokens the text itself agrees with, asked at many of its places."""
    total = 0
    for place in range(200, len(text) - _K, _STRIDE):
        (proposal,) = proposer.propose([_request(text[:place], _K)])
        for index, token_id in enumerate(proposal.token_ids):
            if token_id != text[place + index]:
                break
            total += 1
    return total


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    yield {"kv": "paged", "speculate": piece.MyProposer()}


EXERCISE = Exercise(
    names=("MyProposer",),
    rules=RULES,
    hints=(
        "Start with propose: one line, if lookup is there. What is Proposal(()) worth?",
        "lookup is two loops: over the length n, from the longest down, and over the places at which an earlier n-gram "
        "may begin, from the latest back. Slices of a list can be compared: token_ids[i : i + n] == token_ids[-n:].",
        "The latest place at which an earlier n-gram may begin is len(token_ids) - n - 1: one more would be the end of "
        "the text itself.",
        "What follows an occurrence at i begins at i + n. It may be short where the occurrence is near the end; in "
        "'ab ab ab' it is worth reading on from the proposal itself: token p of it is token p modulo its length.",
    ),
    solution=("forge.speculation.ngram.NgramProposer", "forge.speculation.ngram._index_after_match"),
    check=check,
    engine=engine,
    own={"kv": "paged", "speculate": "ngram"},
    prompts=(" ".join([_STORY, _STORY, _STORY[:60]]),),
    params={"max_tokens": 96, "ignore_eos": True},
    view="speculation",
)
