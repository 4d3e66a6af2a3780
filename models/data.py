"""Batches of tokens from the document stream.

A row starts at the first token of a document (so that the model meets documents at position zero, as it will when it is served), goes
on with further documents after an end-of-text token each, and is cut at its length. No document is used twice.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus.documents import document


class Rows:
    """Deals rows of packed documents, counting document numbers up from `next_document`."""

    def __init__(self, tokenizer: Tokenizer, next_document: int = 0) -> None:
        self.tokenizer = tokenizer
        self.next_document = next_document
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")

    def row(self, length: int) -> list[int]:
        """`length` tokens."""
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.tokenizer.encode(document(self.next_document)).ids
            tokens.append(self.end_of_text)
            self.next_document += 1
        return tokens[:length]

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length + 1]: inputs are all columns but the last, targets all but the first."""
        return torch.tensor([self.row(length + 1) for _ in range(count)])


class AnswerFinder:
    """Finds one-token answers: what stands alone between the assistant's header and the end of its message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.assistant, self.newline = tokenizer.encode("assistant\n").ids
        self.end = tokenizer.token_to_id("<|im_end|>")

    def targets(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length + 1] -> bool [batch, length]: whether the target at a position is a one-token answer."""
        found = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
        answered = (tokens[:, :-3] == self.assistant) & (tokens[:, 1:-2] == self.newline) & (tokens[:, 3:] == self.end)
        found[:, 1:-1] = answered
        return found
