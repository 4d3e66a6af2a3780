"""Batches of tokens from the document stream.

A row starts at the first token of a document (so that the model meets documents at position zero, as it will when it is served), goes
on with further documents after an end-of-text token each, and is cut at its length. No document is used twice.
"""

from __future__ import annotations

from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus.documents import STORIES, Shares, document
from .corpus.questions import LABELS


class Rows:
    """Deals rows of packed documents, counting document numbers up from `next_document`."""

    def __init__(self, tokenizer: Tokenizer, next_document: int = 0) -> None:
        self.tokenizer = tokenizer
        self.next_document = next_document
        self.shares: Shares = STORIES
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")

    def row(self, length: int) -> list[int]:
        """`length` tokens."""
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.tokenizer.encode(document(self.next_document, self.shares)).ids
            tokens.append(self.end_of_text)
            self.next_document += 1
        return tokens[:length]

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length + 1]: inputs are all columns but the last, targets all but the first."""
        return torch.tensor([self.row(length + 1) for _ in range(count)])


class Rehearsal:
    """Rows that teach copying, and nothing else: words of the corpus in patterns that only a look at the row itself can predict.

    In a story few tokens can be copied from before, so a network that sees only stories learns all their templates first and to copy a
    name last. Here nearly every token is a copy. Patterns: a loop of words; a few words drawn again and again; pairs in any order, of
    which the first word tells the second.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        words = dict.fromkeys(word for labels in LABELS.values() for word in labels)
        self.words = [ids[0] for word in words if len(ids := tokenizer.encode(" " + word).ids) == 1]
        self.period = tokenizer.encode(".").ids[0]
        self.rng = Random(seed)

    def row(self, length: int) -> list[int]:
        """`length` tokens: patterns of about 100 tokens, one after another."""
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.rng.choice((self._loop, self._few, self._pairs))()
        return tokens[:length]

    def _loop(self) -> list[int]:
        words = self.rng.sample(self.words, self.rng.randint(4, 40))
        return words * (100 // len(words) + 2)

    def _few(self) -> list[int]:
        words = self.rng.sample(self.words, self.rng.randint(2, 5))
        return [token for _ in range(40) for token in (self.rng.choice(words), self.period)]

    def _pairs(self) -> list[int]:
        words = self.rng.sample(self.words, 2 * self.rng.randint(3, 8))
        pairs = list(zip(words[::2], words[1::2], strict=True))
        return [token for _ in range(36) for token in (*self.rng.choice(pairs), self.period)]

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length + 1]."""
        return torch.tensor([self.row(length + 1) for _ in range(count)])


class Weigher:
    """Says how much each target weighs in the loss: one-token answers more than the rest, and, early in training, words to copy.

    Answers are few among many story tokens. Words to copy are names, kinds, objects and places: the story decides them, and the rest of
    the text is mostly templates, whose choice nobody can predict.
    """

    def __init__(self, tokenizer: Tokenizer, answer_weight: float, copy_weight: float) -> None:
        self.assistant, self.newline = tokenizer.encode("assistant\n").ids
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.answer_weight, self.copy_weight = answer_weight, copy_weight
        words = dict.fromkeys(word for labels in LABELS.values() for word in labels)
        forms = [tokenizer.encode(form).ids for word in words for form in (word, " " + word)]
        self.copied = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool)
        self.copied[[ids[0] for ids in forms if len(ids) == 1]] = True

    def weights(self, tokens: Tensor, copying: bool) -> Tensor:
        """tokens [batch, length + 1] -> the weight of every target, [batch, length]."""
        targets = tokens[:, 1:]
        weights = torch.ones(targets.shape)
        if copying:
            weights[self.copied[targets]] = self.copy_weight
        answered = (tokens[:, :-3] == self.assistant) & (tokens[:, 1:-2] == self.newline) & (tokens[:, 3:] == self.end)
        weights[:, 1:-1][answered] = self.answer_weight
        return weights
