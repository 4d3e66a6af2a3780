"""The stream of training documents: which kinds there are, in what shares, and which seeds are held out.

A document is a pure function of its number, so the corpus has no files: number n is always the same text. Training counts up from
zero; validation documents have numbers from `HELD_OUT` on, which training never reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .conversations import plain_story, question_chat, story_chat

HELD_OUT = 1_000_000_000
STORIES = {plain_story: 0.50, story_chat: 0.17, question_chat: 0.33}
QUESTIONS = {plain_story: 0.16, story_chat: 0.08, question_chat: 0.76}
"""Shares of the kinds of documents: most of the time, and in the phase that teaches answers."""

Shares = dict[Callable[[Random], str], float]


def document(number: int, shares: Shares = STORIES) -> str:
    """The text of one document, control tokens in it as text."""
    rng = Random(f"tales-{number}")
    write = rng.choices(list(shares), weights=list(shares.values()))[0]
    return write(rng)
