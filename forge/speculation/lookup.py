"""Drafting without a model: what the text or the grammar says already.

`NgramProposer` proposes what followed the last time that the text ended like this. Prompt lookup (Saxena 2023): find
the last few tokens earlier in the prompt or output, the longest match first and of equal ones the latest, and propose
what came after it. Answers that quote, code that repeats a name and lists that go on as they began need no model. A
match may run up to the end of the text, as in "ab ab ab": then what is proposed is read on from the proposal itself, so
a repetition of any period goes on for as many tokens as requested.

`ForcedProposer` proposes the text that a grammar leaves no choice about. After `{"he` a schema may leave only `ro": "`.
That is text, and seldom one token: `ro` and `r` are both legal. So the tokens in which the tokenizer would write it are
proposed, and verified like any other draft's. A model that writes them otherwise is not overruled, and the output stays
what it would have been.

`ReplayProposer` knows the answer: it replays texts that were recorded before. Its draft tokens are always right and
cost nothing, which bounds what speculation can gain. With an agreement below 1 some are wrong on purpose, and with 0
all of them: the worst that a proposer can do.
"""

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from forge.engine.proposer import NO_PROPOSAL, Proposal, ProposalRequest, Proposer
from forge.engine.rng import DrawName, Purpose, uniform
from forge.errors import UsageError

DEFAULT_MIN_NGRAM = 2
DEFAULT_MAX_NGRAM = 4


class NgramProposer(Proposer):
    """Looks up the last `min_ngram` to `max_ngram` tokens of a sequence in what comes before them.

    A lookup compares the whole text with its last token, and a few of the matches with the tokens before it: 10 µs at
    4,096 tokens.
    """

    name = "ngram"

    def __init__(self, min_ngram: int = DEFAULT_MIN_NGRAM, max_ngram: int = DEFAULT_MAX_NGRAM):
        """Raises `UsageError` unless 1 <= min_ngram <= max_ngram."""
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(f"n-grams of {min_ngram} to {max_ngram} tokens make no sense: at least 1, in this order")
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self._texts: dict[int, _Text] = {}

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Propose what followed the longest earlier match, or nothing without a match."""
        return [self._propose(request) if request.max_tokens > 0 else NO_PROPOSAL for request in requests]

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's array."""
        self._texts.pop(seq_id, None)

    def _propose(self, request: ProposalRequest) -> Proposal:
        ids = self._texts.setdefault(request.seq_id, _Text()).updated(request.token_ids)
        match = _index_after_match(ids, self.min_ngram, self.max_ngram)
        if match is None:
            return NO_PROPOSAL
        following = ids[match : match + request.max_tokens].tolist()  # up to the end of the text, then from the start
        return Proposal(tuple(islice(cycle(following), request.max_tokens)))


class _Text:
    """The tokens of a sequence as an array that grows at its end, because converting a long list takes longer."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ids = np.empty(0, np.int32)

    def updated(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return `token_ids` as int32 `[n]`: a view, valid until the next call."""
        known = len(self._tokens)
        if self._tokens != token_ids[:known]:
            self._tokens, known = [], 0
        if len(token_ids) > len(self._ids):
            grown = np.empty(2 * len(token_ids), np.int32)
            grown[:known] = self._ids[:known]
            self._ids = grown
        self._ids[known : len(token_ids)] = token_ids[known:]
        self._tokens += token_ids[known:]
        return self._ids[: len(token_ids)]


def _index_after_match(ids: np.ndarray, min_ngram: int, max_ngram: int) -> int | None:
    """Return the index after the latest earlier match of the longest suffix that has one; None if none has."""
    last = len(ids) - 1
    ends = np.flatnonzero(ids[:last] == ids[last])  # where earlier n-grams end, ascending
    best = ends if min_ngram == 1 else ends[:0]
    for length in range(2, max_ngram + 1):
        ends = ends[ends >= length - 1]
        ends = ends[ids[ends - (length - 1)] == ids[last - (length - 1)]]
        if not len(ends):
            break
        if length >= min_ngram:
            best = ends
    return int(best[-1]) + 1 if len(best) else None


class ForcedProposer(Proposer):
    """Proposes the text that a sequence's grammar forces, and nothing for other sequences."""

    name = "grammar"

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Propose the forced tokens, as many as are requested."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: ProposalRequest) -> Proposal:
        if request.draw.matcher is None or not request.max_tokens:
            return NO_PROPOSAL
        forced = request.draw.matcher.forced(request.draw.output)
        return Proposal(forced[: request.max_tokens])


class ReplayProposer(Proposer):
    """Proposes the recorded continuation of a text."""

    name = "replay"

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, agreement: float = 1.0):
        """texts: token ids, prompt and output, of every sequence that will be requested. A token is proposed as
        recorded with probability `agreement`; its position alone decides."""
        self._texts = [list(text) for text in texts]
        self.vocab_size, self.agreement = vocab_size, agreement

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Propose the recorded tokens after each request's text, nothing for a text that was not recorded."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: ProposalRequest) -> Proposal:
        start = len(request.token_ids)
        text: list[int] = next((text for text in self._texts if text[:start] == list(request.token_ids)), [])
        following = enumerate(text[start : start + request.max_tokens], start)
        return Proposal(tuple(self._token(token_id, position) for position, token_id in following))

    def _token(self, token_id: int, position: int) -> int:
        agrees = uniform(DrawName(0, 0, position, Purpose.PROPOSE)) < self.agreement
        return token_id if agrees else (token_id + 1) % self.vocab_size
