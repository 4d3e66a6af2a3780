"""Requests against an engine in the same process: as many at a time as asked for, each one's moments kept.

A closed loop: when a request ends, the next begins. Every prompt is different from its first token on, so that no cache
can help. It drives any engine that has `add`, which queues a prompt, and `step`, which advances everything and says
whose tokens came and who ended.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class LoadedEngine(Protocol):
    """What is measured."""

    def add(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a request that ends after exactly `output_tokens`; return its number."""
        ...

    def step(self) -> tuple[Sequence[int], Sequence[int]]:
        """Advance. The requests that a token came for, and those that ended, by number."""
        ...


@dataclass(frozen=True)
class Moments:
    """When things happened to one request, in seconds from its beginning."""

    first_token: float
    end: float


def unique_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts; no two of them begin with the same token, as long as there are enough tokens."""
    rng = random.Random(f"{seed}-{count}-{length}")
    firsts = rng.sample(range(vocab_size), min(count, vocab_size))
    return [
        [firsts[number % vocab_size], *(rng.randrange(vocab_size) for _ in range(length - 1))]
        for number in range(count)
    ]


def drive(
    engine: LoadedEngine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Moments], float]:
    """Every request's moments, in the order in which they ended, and the seconds of the whole."""
    waiting = iter(prompts)
    begun: dict[int, float] = {}
    first: dict[int, float] = {}
    done: list[Moments] = []
    started = clock()

    def admit() -> None:
        prompt = next(waiting, None)
        if prompt is not None:
            now = clock()  # queueing is part of what a request waits for
            begun[engine.add(prompt, output_tokens)] = now

    for _ in range(concurrency):
        admit()
    while begun:
        with_token, ended = engine.step()
        now = clock()
        for number in with_token:
            first.setdefault(number, now)
        for number in ended:
            begin = begun.pop(number)
            done.append(Moments(first.pop(number) - begin, now - begin))
            admit()
    return done, clock() - started
