"""Batches of tokens from the document stream, and how much each token weighs in the loss.

A row starts at the first token of a document (so that the model meets documents at position zero, as it will when it is served), goes
on with further documents that fit, an end-of-text token after each, and ends in padding. Only a document that is longer than a row is
cut. No document is used twice.
"""

from __future__ import annotations

from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus.documents import STORIES, Shares, document
from .corpus.lexicon import KINDS, PLACES, THINGS
from .corpus.questions import LABELS

WAITING = 64  # documents to choose from when a row is filled: leaves 5 % of a row of 512 tokens to padding


class Rows:
    """Deals rows of packed documents, counting document numbers up from `next_document`.

    `next_document` and `waiting`, the numbers of documents drawn and not yet dealt, are all that a checkpoint needs.
    """

    def __init__(
        self, tokenizer: Tokenizer, next_document: int = 0, waiting: list[int] | None = None, shares: Shares = STORIES
    ) -> None:
        self.tokenizer = tokenizer
        self.shares = shares
        self.next_document = next_document
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")
        self._drawn = {number: self._encode(number) for number in waiting or []}

    @property
    def waiting(self) -> list[int]:
        return list(self._drawn)

    def _encode(self, number: int) -> list[int]:
        return [*self.tokenizer.encode(document(number, self.shares)).ids, self.end_of_text]

    def row(self, length: int) -> list[int]:
        """`length` tokens: the document that has waited longest, then always the longest that still fits."""
        while len(self._drawn) < WAITING:
            self._drawn[self.next_document] = self._encode(self.next_document)
            self.next_document += 1
        tokens = self._drawn.pop(next(iter(self._drawn)))[:length]
        while fitting := [number for number, ids in self._drawn.items() if len(ids) <= length - len(tokens)]:
            tokens += self._drawn.pop(max(fitting, key=lambda number: len(self._drawn[number])))
        return tokens + [self.end_of_text] * (length - len(tokens))

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length + 1]: inputs are all columns but the last, targets all but the first."""
        return torch.tensor([self.row(length + 1) for _ in range(count)])


class Rehearsal:
    """Rows that teach copying, and nothing else: words of the corpus in patterns that only a look at the row itself can predict.

    In a story few tokens can be copied from before, so a network that sees only stories learns all their templates first and to copy a
    name last. Here nearly every token is a copy. Patterns: a loop of words; a few words drawn again and again; pairs in any order, of
    which the first word tells the second. Loops of few words matter most: with loops of 4 to 40 words, a network of 1.3 M parameters had
    a loss of 4.4 nats in them after 1.6 M tokens, with these of 1.2 after 1.1 M.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = dict.fromkeys(word for labels in LABELS.values() for word in labels)
        self.words = [ids[0] for word in words if len(ids := tokenizer.encode(" " + word).ids) == 1]
        self.period = tokenizer.encode(".").ids[0]

    def row(self, length: int, rng: Random) -> list[int]:
        """`length` tokens: patterns of about 100 tokens, one after another."""
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += rng.choice((self._loop, self._few, self._pairs))(rng)
        return tokens[:length]

    def _loop(self, rng: Random) -> list[int]:
        words = rng.sample(self.words, rng.choice((2, 3, 4, 6, 8, 12, 16, 24, 32)))
        return words * (80 // len(words) + 2)

    def _few(self, rng: Random) -> list[int]:
        words = rng.sample(self.words, rng.randint(2, 5))
        return [token for _ in range(40) for token in (rng.choice(words), self.period)]

    def _pairs(self, rng: Random) -> list[int]:
        words = rng.sample(self.words, 2 * rng.randint(2, 6))
        pairs = list(zip(words[::2], words[1::2], strict=True))
        return [token for _ in range(36) for token in (*rng.choice(pairs), self.period)]

    def batch(self, count: int, length: int, seed: int) -> Tensor:
        """[count, length + 1]; the same rows for the same seed."""
        rng = Random(f"rehearsal-{seed}")
        return torch.tensor([self.row(length + 1, rng) for _ in range(count)])


class Weigher:
    """Says how much each target weighs in the loss: one-token answers more than the rest, words that can be copied more, padding nothing.

    Answers are few among many story tokens. Words to copy are names, kinds, objects and places that the row has had before: the story
    decides them, and the rest of the text is mostly templates, whose choice nothing can predict.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.assistant, self.newline = tokenizer.encode("assistant\n").ids
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.padding = tokenizer.token_to_id("<|endoftext|>")
        words = dict.fromkeys(word for labels in LABELS.values() for word in labels)
        forms = [tokenizer.encode(form).ids for word in words for form in (word, " " + word)]
        self.copied = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool)
        self.copied[[ids[0] for ids in forms if len(ids) == 1]] = True

    def answers(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length + 1] -> whether each target is a one-token answer, [batch, length]."""
        answered = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
        before = (tokens[:, :-3] == self.assistant) & (tokens[:, 1:-2] == self.newline)
        answered[:, 1:-1] = before & (tokens[:, 3:] == self.end) & (tokens[:, 2:-1] != self.end)
        return answered

    def weights(self, tokens: Tensor, text: float, copy: float, answer: float) -> Tensor:
        """tokens [batch, length + 1] -> the weight of every target, [batch, length]: an answer's, a copy's or any other's."""
        targets = tokens[:, 1:]
        weights = torch.full(targets.shape, text)
        weights[self.copied[targets] & repeated(tokens)[:, 1:]] = copy
        weights[(targets == self.padding) & (tokens[:, :-1] == self.padding)] = 0.0
        weights[self.answers(tokens)] = answer
        return weights


def repeated(tokens: Tensor) -> Tensor:
    """Whether the row has the same token further left, [batch, length]."""
    order = tokens.argsort(dim=1, stable=True)
    ordered = tokens.gather(1, order)
    same = torch.zeros_like(tokens, dtype=torch.bool)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(same).scatter(1, order, same)


class AnswerKinds:
    """Sorts one-token answers by what they are, so that accuracy can be told by kind while a model trains."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        names = set(LABELS["hero"]) - set(KINDS)
        kinds = {
            "yes_no": LABELS["yes_no"],
            "ending": LABELS["ending"],
            "name": names,
            "kind": KINDS,
            "object": THINGS,
            "place": PLACES,
        }
        self.kinds = {word: kind for kind, words in kinds.items() for word in words}

    def count(self, answers: Tensor, right: Tensor, counts: dict[str, list[int]]) -> None:
        """Add the answers, token ids [n], and whether each was predicted, [n], to `counts`: right ones and all, by kind."""
        for token, hit in zip(answers.tolist(), right.tolist(), strict=True):
            if kind := self.kinds.get(self.tokenizer.decode([token])):
                entry = counts.setdefault(kind, [0, 0])
                entry[0] += hit
                entry[1] += 1
