"""A closed loop of requests against an engine in the same process: when a request ends, the next begins.

It drives any engine that has `add`, which queues a prompt, and `step`, which advances all of them and says which got a
token and which ended. Each request's moments are kept.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

from forge.bench.cases import Load


class LoadedEngine(Protocol):
    """What is measured."""

    def add(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a request that ends after exactly `output_tokens`; return its number."""
        ...

    def step(self) -> tuple[Sequence[int], Sequence[int]]:
        """Run one step; return the numbers of the requests that a token came for, and of those that ended."""
        ...


@dataclass(frozen=True)
class Moments:
    """When things happened to one request, in seconds from its beginning."""

    first_token: float
    end: float


def answered(setting: str, moments: Sequence[Moments], seconds: float) -> dict[str, Any]:
    """Return what a worker answers of `requests`."""
    first, end = [moment.first_token for moment in moments], [moment.end for moment in moments]
    return {"setting": setting, "seconds": seconds, "first_token": first, "end": end}


def load_figures(load: Load, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return one program's requests under one load, in seconds. per_token: from the first token to the last."""
    first, end, steps = answer["first_token"], answer["end"], load.output_tokens - 1
    return {
        "setting": answer["setting"],
        "requests_per_second": len(end) / answer["seconds"],
        "first_token": percentiles(first),
        "per_token": percentiles([(e - f) / steps for f, e in zip(first, end, strict=True)]) if steps else None,
        "end": percentiles(end),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles by the nearest rank: a value that was measured."""
    ordered = sorted(seconds)
    ranks = {f"p{share}": ordered[max(0, -(-share * len(ordered) // 100) - 1)] for share in (50, 95)}
    return {"mean": mean(ordered), **ranks}


def unique_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts; no two of them begin with the same token, if there are enough tokens, so no cache can help."""
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
