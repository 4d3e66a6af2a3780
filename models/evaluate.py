"""Measurements for the model card, all on documents that training never saw.

Loss in nats per token; accuracy of one-token answers by kind of question (the choice is the most likely token of the whole
vocabulary, no help from the options); agreement of draft and target on text that the target writes greedily, which bounds what
speculative decoding can accept; and the cost of one forward pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from statistics import median

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .corpus.conversations import question_prompt
from .corpus.documents import HELD_OUT
from .corpus.questions import ASKERS
from .data import Rows
from .network import Qwen3
from .sampling import Cache, extend, last_logits


@dataclass(frozen=True)
class Agreement:
    """How often the draft's greedy choice is the target's, and what speculation with K guesses would accept of it.

    `accepted` is the mean number of guesses accepted per round of K, over rounds laid end to end on the target's own text.
    """

    rate: float
    accepted: dict[int, float]


@torch.no_grad()
def held_out_loss(model: Qwen3, tokenizer: Tokenizer, rows: int = 64, length: int = 512) -> float:
    """Mean loss in nats per token over held-out rows."""
    source = Rows(tokenizer, HELD_OUT)
    losses = []
    for _ in range(rows):
        tokens = source.batch(1, length)
        losses.append(F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def answer_accuracy(model: Qwen3, tokenizer: Tokenizer, per_kind: int = 150) -> dict[str, float]:
    """The share of held-out decision questions of each kind whose most likely next token is the right answer."""
    accuracy = {}
    for kind in ASKERS:
        rng = Random(f"held-out {kind}")
        right = 0
        for _ in range(per_kind):
            prompt, question = question_prompt(rng, kind)
            hidden = model.hidden(torch.tensor([tokenizer.encode(prompt).ids]))[0, -1]
            token = int((model.token_embd.weight @ hidden).argmax())
            right += tokenizer.decode([token]) == question.answer
        accuracy[kind] = right / per_kind
    return accuracy


def greedy_texts(target: Qwen3, tokenizer: Tokenizer, start: int, rows: int, length: int) -> Tensor:
    """[rows, length]: the first `start` tokens of held-out documents, continued greedily by the target."""
    prompts = Rows(tokenizer, HELD_OUT + 10_000).batch(rows, start - 1)
    return extend(target, prompts, length, torch.zeros(rows), torch.Generator())


@torch.no_grad()
def agreement(
    target: Qwen3, draft: Qwen3, tokenizer: Tokenizer, start: int = 8, rows: int = 48, length: int = 136
) -> Agreement:
    """Compare the greedy choices of both after `start` tokens, position by position, on the target's greedy text."""
    texts = greedy_texts(target, tokenizer, start, rows, length)
    same = draft(texts[:, :-1])[:, start - 1 :].argmax(-1) == texts[:, start:]
    return Agreement(same.float().mean().item(), {k: mean_accepted(same.tolist(), k) for k in (2, 4, 8)})


def mean_accepted(rows: list[list[bool]], k: int) -> float:
    """Guesses accepted per round: a round stops at its first wrong guess, and the target adds one token of its own."""
    rounds = accepted = 0
    for row in rows:
        position = 0
        while position < len(row):
            guesses = row[position : position + k]
            good = guesses.index(False) if False in guesses else len(guesses)
            rounds += 1
            accepted += good
            position += good + 1
    return accepted / rounds


def seconds_per_token(model: Qwen3, context: int = 128, count: int = 64) -> float:
    """Median time of one decode step of this PyTorch code for one sequence; only ratios of it mean anything."""
    cache = Cache(model, 1, context + count + 1)
    token = torch.zeros(1, 1, dtype=torch.long)
    last_logits(model, token.expand(1, context), cache)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        last_logits(model, token, cache)
        times.append(time.perf_counter() - started)
    return median(times)
