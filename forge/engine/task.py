"""What is wanted of a request: generated tokens, or what one forward pass over its prompt can answer.

A judge, a router, a classifier, a reranker or an embedder reads a prompt and returns something of fixed size. Such a
request is *prefill-only* (Prelude calls it OneShot): it keeps nothing, so its keys and values lie in blocks that live
for one step. A generation of at most one token is prefill-only too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.reasons import Pooling

if TYPE_CHECKING:
    import numpy as np

Logprobs = tuple[tuple[int, float], ...]
"""(token id, natural log probability), most probable first."""


@dataclass(frozen=True)
class Task:
    """What a request asks for. Fields that are not set cost nothing."""

    sample: bool = False
    """Output tokens, chosen as the request's sampling parameters say; alone it is an ordinary generation."""
    candidates: tuple[int, ...] = ()
    """Log probabilities of these tokens to come next."""
    score_from: int | None = None
    """Log probabilities of the prompt's own tokens from this position on (at least 1), each given those before it."""
    top: int = 0
    """With each scored token, this many of the most probable alternatives."""
    pooling: Pooling | None = None
    """An embedding: the last hidden state, or the mean of all. Such a task has a forward pass of its own, which ends in
    hidden states, and no other field."""

    def logit_rows(self, start: int, length: int) -> range:
        """Return the rows, counted from position `start`, whose logits (or hidden states) the task needs."""
        if self.pooling == "mean":
            return range(length - start)
        last = length if self.sample or self.candidates or self.pooling else length - 1
        first = length - 1 if self.score_from is None else min(length - 1, self.score_from - 1)
        return range(first - start, max(first, last) - start)

    def chunk_rows(self, start: int, num_tokens: int, length: int) -> range:
        """Return those of its rows that lie in a chunk of `num_tokens` rows from position `start` on, counted from
        there."""
        rows = self.logit_rows(start, length)
        return range(num_tokens)[max(0, rows.start) : max(0, rows.stop)]


GENERATE = Task(sample=True)


@dataclass(frozen=True)
class Readout:
    """The answer to a task, beside sampled tokens. Fields that were not requested are empty."""

    candidates: tuple[float, ...] = ()
    """Natural log probabilities of the candidates."""
    scores: tuple[Logprobs, ...] = ()
    """For each scored prompt token the most probable tokens there; the token itself is always among them."""
    embedding: "np.ndarray | None" = None
    """float32 `[hidden]`, of length 1."""


NO_READOUT = Readout()
