"""The stream of training documents: which kinds there are, in what shares, and which seeds are held out.

A document is a pure function of its number, so the corpus has no files: number n is always the same text. Training counts up from
zero; validation documents have numbers from `HELD_OUT` on, which training never reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .conversations import fact_chat, plain_story, question_chat, story_chat, subject_chat
from .records import record_chat
from .tools import tool_chat

HELD_OUT = 1_000_000_000
FACTS = {fact_chat: 1.0}
STORIES = {
    plain_story: 0.40,
    story_chat: 0.10,
    question_chat: 0.27,
    subject_chat: 0.07,
    record_chat: 0.06,
    tool_chat: 0.04,
    fact_chat: 0.06,
}
"""Shares of the kinds of documents: in the first phase, which teaches to look up and to compare, and in the rest of the training."""

Shares = dict[Callable[[Random], str], float]


def document(number: int, shares: Shares = STORIES) -> str:
    """The text of one document, control tokens in it as text."""
    rng = Random(f"tales-{number}")
    write = rng.choices(list(shares), weights=list(shares.values()))[0]
    return write(rng)
