"""What one forward pass can answer, in the words of those who ask: classify, score, embed, rerank.

Each turns its inputs into a `Question`: requests that keep nothing, and a function from their readouts to values. How
they are batched, and what of their prompts is computed once for several, is the engine's business.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from forge.engine.task import Readout, Task
from forge.errors import UsageError
from forge.reasons import Pooling
from forge.tokenizer import Tokenizer

Value = TypeVar("Value")
Values = TypeVar("Values")

RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_RERANK_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANK_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Question(Generic[Values]):
    """What a task asks of an engine, and what it makes of the answers."""

    requests: Sequence[tuple[Sequence[int], Task]]
    """Each a prompt's tokens and what is wanted of it."""
    finish: Callable[[Sequence[Readout]], Values]
    """From the readouts, one per request and in their order, to the task's values."""


@dataclass(frozen=True)
class Classification:
    """One input's label probabilities."""

    probabilities: dict[str, float]
    """Of each label to come next, among the labels; they sum to 1."""
    logprobs: dict[str, float]
    """Natural log probability of each label's tokens to come next, among everything; of a classification head, among
    its labels."""
    score: float | None = None
    """What a head with a single label computed, such as a reward; the label's probability is its sigmoid."""

    @property
    def label(self) -> str:
        """The most probable label."""
        return max(self.probabilities, key=self.probabilities.__getitem__)


@dataclass(frozen=True)
class Score:
    """The probability of a text, token by token."""

    token_ids: tuple[int, ...]
    """The scored tokens."""
    logprobs: tuple[float, ...]
    """Natural log probability of each, given all before it."""
    alternatives: tuple[tuple[tuple[int, float], ...], ...]
    """At each place the likeliest tokens there, as many as were asked for."""

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log probability."""
        return math.exp(-self.total / len(self.logprobs))


def classify(
    prompts: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], names: Sequence[str]
) -> Question[list[Classification]]:
    """Ask for the label probabilities of each prompt.

    Labels of one token are all read off one row of logits. Where any has several, each is scored as a whole behind the
    prompt: their probabilities are those of all their tokens together, and the prompt they share is cached where the
    cache shares prefixes.
    """
    _check_labels(labels, names)
    if all(len(label) == 1 for label in labels):
        return _choose([label[0] for label in labels], prompts, lambda logprobs: _classified(names, logprobs))

    if not all(len(prompt) for prompt in prompts):
        raise UsageError("a prompt must not be empty: nothing would say how likely a label's first token is")
    scored = score([(prompt, label) for prompt in prompts for label in labels], top=0)

    def finish(readouts: Sequence[Readout]) -> list[Classification]:
        totals = [label_score.total for label_score in scored.finish(readouts)]
        return [_classified(names, totals[first : first + len(names)]) for first in range(0, len(totals), len(names))]

    return Question(scored.requests, finish)


def classify_by_head(prompts: Sequence[Sequence[int]], labels: Sequence[str]) -> Question[list[Classification]]:
    """Ask for the label probabilities of each prompt by the model's classification head (`Model.labels`)."""

    def by_score(logprobs: Sequence[float]) -> Classification:
        (name,), (logprob, rest) = labels, logprobs
        return Classification({name: math.exp(logprob)}, {name: logprob}, logprob - rest)

    value = by_score if len(labels) == 1 else lambda logprobs: _classified(labels, logprobs)
    return _choose(range(max(2, len(labels))), prompts, value)


def classify_prompt(tokenizer: Tokenizer, text: str, labels: Sequence[str], question: str | None = None) -> list[int]:
    """Write a user's message that asks for one of the labels: the text, and under it the question."""
    question = question or f"Which is it: {' or '.join(labels)}? Answer with one word."
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    return tokenizer.encode_chat(messages, add_generation_prompt=True)[1]


def score(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], top: int) -> Question[list[Score]]:
    """Ask for a score of each continuation's tokens given its prompt. The prompt may be empty: then the first token,
    which nothing precedes, has no score."""
    if top < 0:
        raise UsageError(f"top is a number of tokens, and not {top}")
    requests = []
    for prompt, continuation in pairs:
        if len(prompt) + len(continuation) < 2 or not continuation:
            raise UsageError("there is nothing to score: it takes a token, and one before it")
        requests.append(([*prompt, *continuation], Task(score_from=max(1, len(prompt)), top=top)))

    def finish(readouts: Sequence[Readout]) -> list[Score]:
        scores = []
        for (token_ids, task), readout in zip(requests, readouts, strict=True):
            scored = tuple(token_ids[task.score_from :])
            logprobs = tuple(dict(row)[token_id] for row, token_id in zip(readout.scores, scored, strict=True))
            scores.append(Score(scored, logprobs, tuple(row[:top] for row in readout.scores)))
        return scores

    return Question(requests, finish)


def embed(prompts: Sequence[Sequence[int]], pooling: Pooling) -> Question[np.ndarray]:
    """Embed the prompts: unit vectors, float32 `[prompts, hidden]`."""
    task = Task(pooling=pooling)
    return Question(
        [(prompt, task) for prompt in prompts],
        lambda readouts: np.stack([readout.embedding for readout in readouts if readout.embedding is not None]),
    )


def rerank_prompt(tokenizer: Tokenizer, query: str, document: str, instruction: str = RERANK_INSTRUCTION) -> list[int]:
    """Write the prompt that Qwen3-Reranker was trained with, ready for "yes" or "no": as its card encodes it, in three
    parts. Only the outer two may hold control tokens."""
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    before, after = (tokenizer.encode(part, allow_special=True) for part in (_RERANK_BEFORE, _RERANK_AFTER))
    return [*before, *tokenizer.encode(text, add_special_tokens=False), *after]


def rerank_candidates(tokenizer: Tokenizer, labels: Sequence[str]) -> tuple[int, int]:
    """Return where the logits of "yes" and "no" are: at these words' tokens or, of a classification head with `labels`,
    in its rows. A head of one label scores "yes". Raises `UsageError` for a head or a vocabulary that has no such
    answers."""
    if not labels:
        return single_token(tokenizer, "yes"), single_token(tokenizer, "no")
    if len(labels) == 1:
        return 0, 1
    if {"yes", "no"} <= set(labels):
        return labels.index("yes"), labels.index("no")
    raise UsageError(f"this model classifies into {', '.join(labels)}; a reranker has one label, or yes and no")


def rerank(prompts: Sequence[Sequence[int]], yes: int, no: int) -> Question[list[float]]:
    """Ask for each prompt for the probability of "yes" against "no"."""
    return _choose((yes, no), prompts, lambda logprobs: 1 / (1 + math.exp(min(700.0, logprobs[1] - logprobs[0]))))


def single_token(tokenizer: Tokenizer, text: str) -> int:
    """Return the one token that `text` is. Raises `UsageError` if it is several."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1:
        raise UsageError(f"{text!r} is {len(token_ids)} tokens in this model's vocabulary, and one is needed")
    return token_ids[0]


def _check_labels(labels: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    if len(labels) < 2:
        raise UsageError(f"a classification needs two labels or more, got {len(labels)}")
    for index, label in enumerate(labels):
        if not label:
            raise UsageError("a label must not be empty")
        for earlier in range(index):
            if list(labels[earlier]) == list(label):
                raise UsageError(f"labels {names[earlier]!r} and {names[index]!r} are the same tokens")


def _choose(
    candidates: Iterable[int], prompts: Sequence[Sequence[int]], value: Callable[[Sequence[float]], Value]
) -> Question[list[Value]]:
    """Ask for a value of each prompt, computed from the log probabilities of the candidates to come next."""
    task = Task(candidates=tuple(candidates))
    return Question(
        [(prompt, task) for prompt in prompts], lambda readouts: [value(readout.candidates) for readout in readouts]
    )


def _classified(names: Sequence[str], logprobs: Sequence[float]) -> Classification:
    """Make probabilities among the labels of their log probabilities among everything, by softmax."""
    greatest = max(logprobs)
    weights = [math.exp(logprob - greatest) for logprob in logprobs]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    return Classification(dict(zip(names, probabilities, strict=True)), dict(zip(names, logprobs, strict=True)))
