"""Requests with prefixes in common, as a service sees them: conversations, shared system prompts, agents' trees.

Tokens are drawn from a seed, so a trace is the same in every run. A request's prompt begins with a system prompt that
many share; a later turn's with the whole conversation, answers included; an agent's branches with its task.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

_VOCABULARY = 32_000


@dataclass(frozen=True)
class TraceShape:
    """How many requests of which kind. Lengths are tokens; each is drawn from half to one and a half of its mean."""

    num_requests: int = 100_000
    num_systems: int = 12
    """System prompts; one conversation in three has the first, one in six the second, and so on."""
    system_tokens: int = 256
    user_tokens: int = 64
    answer_tokens: int = 16
    turns: int = 6
    """Turns per conversation, on average."""
    agents: float = 0.2
    """The share of conversations that are agents: a task, and `branches` that run at once from it."""
    branches: int = 4
    task_tokens: int = 512
    think_seconds: float = 4.0
    """Seconds between an answer and the next turn, on average."""
    seed: int = 0


@dataclass
class Turn:
    """One request of a conversation, when it is sent."""

    at: float
    """The earliest time at which it may be sent, in seconds."""
    conversation: "Conversation | Client"
    prompt: list[int]
    answer: list[int]
    """The model's answer: the trace knows it before the simulated engine does."""


@dataclass
class Conversation:
    """One conversation: what has been said so far, and how many turns are left."""

    number: int
    history: list[int]
    turns_left: int
    random: random.Random
    shape: TraceShape = field(repr=False)

    def next_turn(self, now: float) -> Turn | None:
        """Return the next request, some seconds after `now`; None if nothing is left to say."""
        if not self.turns_left:
            return None
        self.turns_left -= 1
        shape = self.shape
        self.history += tokens(self.random, shape.user_tokens)
        prompt, answer = list(self.history), tokens(self.random, shape.answer_tokens)
        self.history += answer
        return Turn(now + self.random.expovariate(1 / shape.think_seconds), self, prompt, answer)


@dataclass(frozen=True)
class KnownRequest:
    """A request whose answer has a known length, as one that was measured."""

    prompt: list[int]
    answer_tokens: int


@dataclass
class Client:
    """A client that sends the next of the requests that several share as soon as its last one is answered."""

    requests: Iterator[KnownRequest]

    def next_turn(self, now: float) -> Turn | None:
        """Return the next request, at once; None if none is left."""
        request = next(self.requests, None)
        return None if request is None else Turn(now, self, list(request.prompt), [0] * request.answer_tokens)


def tokens(random_: random.Random, mean: int) -> list[int]:
    """Draw random tokens: as many as a text of this mean length has."""
    length = random_.randint(max(1, mean // 2), mean + mean // 2)
    return random_.choices(range(_VOCABULARY), k=length)


def conversations(shape: TraceShape) -> Iterator[list[Conversation]]:
    """Yield, without end, lists of conversations that begin together: one conversation, or an agent's branches."""
    random_ = random.Random(shape.seed)
    systems = [tokens(random_, shape.system_tokens) for _ in range(shape.num_systems)]
    weights = [1 / (rank + 1) for rank in range(shape.num_systems)]
    number = 0
    while True:
        beginning = list(random_.choices(systems, weights)[0])
        is_agent = random_.random() < shape.agents
        if is_agent:
            beginning += tokens(random_, shape.task_tokens)
        begun = []
        for _ in range(shape.branches if is_agent else 1):
            turns = random_.randint(1, 2 * shape.turns - 1)
            begun.append(Conversation(number, list(beginning), turns, random.Random(f"{shape.seed}-{number}"), shape))
            number += 1
        yield begun
