"""Exercise 10: a proposer. Short texts with a known answer, random ones, the conformance checks of proposers, and then
how many of its draft tokens a held-out text accepts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from forge.engine.proposer import Proposal, ProposalRequest, Proposer
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Costs, Exercise, Part, Trial, are_ids, words_of
from forge.model.model import Draw
from forge.pieces import standing_in
from forge.speculation.lookup import NgramProposer
from forge.testing import check_proposer
from forge.views.formatting import plural
from forge.workload.judging import HELD_OUT

_GREEDY = SamplingParams()
_K = 4
_STRIDE = 23
"""The held-out text is asked about at every 23rd of its characters."""


_KNOWN: tuple[tuple[str, list[int], int], ...] = (
    ("missed", [1, 2, 3, 9, 1, 2], 3),
    ("earlier", [5, 6, 7, 8], 4),
    ("too-short", [7, 1, 2, 3, 7], 4),
    ("missed", [7, 7, 7], 1),
    ("latest", [1, 2, 3, 1, 2, 4, 1, 2], 1),
    ("longest", [9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1),
    ("longest", [9, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4], 1),
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
"""The text is told twice and begun again, so that the model goes on with what it has read."""


def _request(text: Sequence[int], max_tokens: int, seq_id: int = 0) -> ProposalRequest:
    return ProposalRequest(seq_id, Draw(_GREEDY, 0, 0, text), max_tokens)


class ProposerTrial(Trial):
    """Asks the reader's proposer about texts whose continuation is known."""

    setup_lines = (
        "from forge.engine.proposer import ProposalRequest as Request",
        "from forge import SamplingParams; from forge.model.model import Draw",
        "proposer = piece.MyProposer()",
    )

    def __init__(self, piece: ModuleType):
        super().__init__(piece)
        self.proposer: Any = piece.MyProposer()
        self.reference = NgramProposer(2, 4)
        self.next_id = 0

    def bound(self, least: int, most: int) -> None:
        self.proposer.min_ngram, self.proposer.max_ngram = least, most
        self.reference = NgramProposer(least, most)
        self.calls[self.setup :] = [f"proposer.min_ngram, proposer.max_ngram = {least}, {most}"]
        self.setup = len(self.calls)

    def propose(self, texts: Sequence[list[int]], max_tokens: int, seq_id: int | None = None) -> list[tuple[int, ...]]:
        """Propose for these texts. seq_id: set if the text has grown since the last call under this id; None for new
        texts."""
        first = self.next_id if seq_id is None else seq_id
        self.next_id += len(texts)
        asked = [_request(list(text), max_tokens, first + number) for number, text in enumerate(texts)]
        shown = ", ".join(
            f"Request({first + n}, Draw(SamplingParams(), 0, 0, {text}), {max_tokens})" for n, text in enumerate(texts)
        )
        proposals = self.call_anew(f"proposer.propose([{shown}])", self.proposer.propose, asked)
        is_list = isinstance(proposals, list | tuple) and all(isinstance(proposal, Proposal) for proposal in proposals)
        finding = f"{plural(len(texts), 'request')}; it returned {proposals!r}"
        self.require(is_list and len(proposals) == len(texts), "one-each", finding)
        return [self._checked(proposal.token_ids, max_tokens) for proposal in proposals]

    def _checked(self, token_ids: Any, max_tokens: int) -> tuple[int, ...]:
        self.require(are_ids(token_ids), "result", f"the token ids are {token_ids!r}")
        finding = f"asked for {max_tokens} at most, it proposed {tuple(token_ids)}"
        self.require(len(token_ids) <= max_tokens, "at-most", finding)
        return tuple(map(int, token_ids))

    def known(self, rule: str, text: list[int], max_tokens: int, seq_id: int | None = None) -> None:
        """Check that the first proposed tokens are those of forge's own lookup."""
        (proposed,) = self.propose([text], max_tokens, seq_id)
        self._compare(rule, text, max_tokens, proposed)

    def looked_up(self, rule: str, text: list[int], max_tokens: int) -> None:
        line = f"proposer.lookup({text}, {max_tokens})"
        proposed = self.call_anew(line, self.proposer.lookup, list(text), max_tokens)
        self._compare(rule, text, max_tokens, self._checked(proposed, max_tokens))

    def _compare(self, rule: str, text: list[int], max_tokens: int, ours: tuple[int, ...]) -> None:
        (expected,) = self.reference.propose([_request(text, max_tokens, 1)])
        theirs = expected.token_ids
        if not theirs:
            self.require(not ours, rule, f"after {text} it proposed {ours}; there is nothing to propose")
        elif max_tokens:
            self.require(ours, "missed", f"after {text} it proposed nothing; {theirs} would have been right")
            if ours != theirs[: len(ours)]:
                self.require(ours[0] != text[-1] or rule != "missed", "follows", _instead(text, ours, theirs))
                self.require(False, "follows" if rule == "missed" else rule, _instead(text, ours, theirs))

    def alone(self, texts: list[list[int]]) -> None:
        """Check that a text gets the same proposal alone as in a batch."""
        together = self.propose(texts, _K)
        for text, beside in zip(texts, together, strict=True):
            (proposed,) = self.propose([text], _K)
            finding = f"after {text} it proposes {proposed}, and beside other requests {beside}"
            self.require(proposed == beside, "own-text", finding)


def _instead(text: list[int], ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    return f"after {text} it proposed {ours}, and not {theirs}"


def _texts() -> Iterator[list[int]]:
    rng = np.random.default_rng(0)
    for length in (2, 3, 5, 8, 13, 30, 60):
        for _ in range(20):
            yield rng.integers(0, 3, length).tolist()


def _check_lookup(piece: ModuleType) -> None:
    trial = ProposerTrial(piece)
    for rule, text, max_tokens in _KNOWN:
        trial.looked_up(rule, text, max_tokens)
    for number, text in enumerate(_texts()):
        trial.looked_up("follows", text, 1 + number % 6)
    for least, most in ((1, 3), (3, 3), (2, 6)):
        trial = ProposerTrial(piece)
        trial.bound(least, most)
        for text in _texts():
            trial.looked_up("bounds", text, _K)

    def work(length: int) -> Any:
        text = np.random.default_rng(0).permutation(length).tolist()
        return partial(trial.proposer.lookup, text, _K)

    trial.require_growth("proposer.lookup(list(range(16_000)), 4)", work, 500, 16_000, 160)


def _check_proposer(piece: ModuleType) -> None:
    trial = ProposerTrial(piece)
    for rule, text, max_tokens in _KNOWN:
        trial.known(rule, text, max_tokens)
    trial.alone([[1, 2, 3, 9, 1, 2], [5, 6, 7], [3, 9, 4, 3, 9]])
    trial.require(list(trial.propose([], _K)) == [], "one-each", "there was no request")
    for text in _texts():
        trial.known("follows", text, _K)
    for number in range(6):
        text = np.random.default_rng(number).integers(0, 3, 40).tolist()
        trial.next_id += 1
        for length in range(1, len(text)):
            trial.known("follows", text[:length], _K, 10_000 + number)
    check_proposer(piece.MyProposer, [[1, 2, 3, 9, 1, 2], [1, 2, 1, 2]], reuses_ids=False)
    text = list(HELD_OUT.read_bytes())[:6000]
    ours, theirs = _accepted(piece.MyProposer(), text), _accepted(NgramProposer(2, 4), text)
    finding = f"of a text of {len(text)} bytes it got {ours} draft tokens accepted, and forge's own {theirs}"
    trial.calls.clear()
    trial.require(2 * ours >= theirs, "accepted", finding)


def _accepted(proposer: Proposer, text: list[int]) -> int:
    """Count the draft tokens that agree with the text, over proposals at many of its positions."""
    total = 0
    for place in range(200, len(text) - _K, _STRIDE):
        (proposal,) = proposer.propose([_request(text[:place], _K)])
        for index, token_id in enumerate(proposal.token_ids):
            if token_id != text[place + index]:
                break
            total += 1
    return total


def engine(piece: ModuleType) -> AbstractContextManager[None]:
    return standing_in(ngram=lambda: PlainIds(piece.MyProposer()))


class PlainIds(Proposer):
    """Wraps the reader's proposer and converts its ids to `int`, which records and JSON need."""

    def __init__(self, proposer: Proposer):
        self._proposer, self.name = proposer, proposer.name

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        proposals = self._proposer.propose(requests)
        return [Proposal(tuple(map(int, proposal.token_ids))) for proposal in proposals]

    def forget(self, seq_id: int) -> None:
        self._proposer.forget(seq_id)


def _cost(piece: ModuleType | None, length: int) -> Callable[[], object]:
    text = np.random.default_rng(0).integers(0, 3 * length, length).tolist()
    proposer = piece.MyProposer() if piece else NgramProposer(2, 4)
    return partial(proposer.propose, [_request(text, _K)])


EXERCISE = Exercise(
    **words_of("ngram_proposer"),
    parts=(
        Part(("MyProposer.lookup",), _check_lookup),
        Part(("MyProposer.lookup", "MyProposer.propose"), _check_proposer),
    ),
    costs=Costs("a text of {:,} tokens", (64, 512, 4096), _cost),
    engine=engine,
    options={"kv": "paged", "speculate": "ngram", "speculate_fixed": True},
    prompts=(" ".join([_STORY, _STORY, _STORY[:60]]),),
    params=({"max_tokens": 96, "ignore_eos": True},),
    view="speculation",
)
