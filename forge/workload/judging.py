"""Requests that want one token, through either life: as a generation, or as a request that keeps nothing.

A fixed number of callers ask, each again as soon as it has its answer (a closed loop). Engines have the same weights
and are warm; what differs between two runs is the configuration.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import UsageError
from forge.reasons import Deferred
from forge.trace.records import FinishRecord, StepRecord
from forge.trace.totals import percentile

if TYPE_CHECKING:
    from forge.engine.engine import Engine
    from forge.tokenizer import Tokenizer

RUBRIC = (
    "You are given a story and one question about it. Read the whole story before you answer, and answer from what "
    "it says alone. Take the last events for the ending, and what somebody has at the end for what they found. Where "
    "two answers seem possible, take the one that the story speaks of last. Say nothing else, and do not explain."
)
QUESTIONS = ("Is the ending happy or sad?", "Which place is in the story?", "Who is the hero of the story?")
VISITOR_TOKENS = 160
"""Tokens of a prompt that comes once."""
HELD_OUT = Path(__file__).with_name("held_out.txt")
"""Text that the bundled models were not trained on: documents of `models/corpus` with numbers from `HELD_OUT` on, which
training never reaches."""


@dataclass(frozen=True)
class JudgeRun:
    """What some requests came to in one configuration."""

    seconds: float
    """From the first request to the last answer."""
    latencies_ms: tuple[float, ...]
    """Of each request, from when it was asked to when its answer was there."""
    num_steps: int
    tokens_computed: int
    tokens_cached: int
    """Prompt tokens that were found in the cache."""
    most_blocks: int
    """Most blocks of the pool in use after a step."""
    most_table_entries: int
    """Block-table entries of running sequences in a step, at most."""
    most_temporary_bytes: int
    deferred: int
    """Times that a request waited a step for another one to compute what both begin with."""
    answers: tuple[tuple[int, ...], ...]
    """Each request's tokens."""

    @property
    def requests_per_second(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def p50_ms(self) -> float:
        return latency_ms(self.latencies_ms, 0.5)

    @property
    def p95_ms(self) -> float:
        return latency_ms(self.latencies_ms, 0.95)


def latency_ms(latencies: Sequence[float], share: float) -> float:
    """A percentile of at least one latency."""
    latency = percentile(latencies, share)
    assert latency is not None
    return latency


def judge_prompts(tokenizer: "Tokenizer", number: int) -> list[list[int]]:
    """Chat prompts that begin with one rubric: held-out stories in turn, with a question each. UsageError for none."""
    if number < 1:
        raise UsageError(f"--requests must be at least 1, got {number}")
    stories = held_out_stories()
    prompts = []
    for index in range(number):
        story, question = stories[index % len(stories)], QUESTIONS[index // len(stories) % len(QUESTIONS)]
        message = f"{RUBRIC}\n\n{story}\n\n{question} Answer with one word."
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True)
        prompts.append(tokenizer.encode(rendered, allow_special=True))
    return prompts


def returning_prompts(tokenizer: "Tokenizer", number: int) -> list[list[int]]:
    """Judge prompts whose rubric is asked for now and then: after each two of them come six stories without it, each
    from another place on, so that no two of those begin alike. UsageError for none."""
    judged, passage = judge_prompts(tokenizer, number), tokenizer.encode("\n\n".join(held_out_stories()))
    length = min(VISITOR_TOKENS, len(passage))
    starts = [97 * index % (len(passage) - length + 1) for index in range(number)]
    return [
        judged[index] if index % 8 < 2 else list(passage[start : start + length]) for index, start in enumerate(starts)
    ]


@cache
def held_out_stories() -> tuple[str, ...]:
    """Stories that no training saw, without the conversations around some of them."""
    documents = HELD_OUT.read_text(encoding="utf-8").split("<|endoftext|>")
    return tuple(document.strip() for document in documents if "<|im_start|>" not in document and document.strip())


def run_requests(
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 1,
    concurrency: int | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> JudgeRun:
    """Answer every prompt, with so many of them asked at once; None asks all."""
    return _Callers(engine, prompts, max_tokens, concurrency or len(prompts)).run(on_step)


class _Callers:
    """Those who ask, and what they saw."""

    def __init__(self, engine: "Engine", prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int):
        from forge.engine.sampling_params import SamplingParams

        self._engine, self._concurrency = engine, concurrency
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._to_come: Iterator[tuple[int, Sequence[int]]] = iter(enumerate(prompts))
        self._asked: dict[int, tuple[str, int, float]] = {}
        self._latencies: dict[int, float] = {}
        self._answers: dict[int, tuple[int, ...]] = {}
        self._cached = 0

    def run(self, on_step: Callable[[StepRecord], None]) -> JudgeRun:
        engine = self._engine
        most: Counter[str] = Counter()
        steps = computed = deferred = 0
        began = time.perf_counter()
        try:
            while self._ask():
                record = engine.step()
                self._collect(record.finished)
                steps += 1
                computed += record.tokens_computed
                deferred += sum(isinstance(wait.reason, Deferred) for wait in record.waiting)
                most |= Counter(
                    blocks=record.cache.used_blocks,
                    entries=record.block_table_entries,
                    temporary=record.temporary_bytes,
                )
                on_step(record)
            seconds = time.perf_counter() - began
        finally:
            for request_id, *_ in self._asked.values():
                engine.abort(request_id)
                engine.forget(request_id)
        numbers = sorted(self._answers)
        return JudgeRun(
            seconds,
            tuple(self._latencies[number] for number in numbers),
            steps,
            computed,
            self._cached,
            most["blocks"],
            most["entries"],
            most["temporary"],
            deferred,
            tuple(self._answers[number] for number in numbers),
        )

    def _ask(self) -> bool:
        """Fill up to the number of callers; true if a caller waits for an answer."""
        while len(self._asked) < self._concurrency:
            number, prompt = next(self._to_come, (-1, ()))
            if number < 0:
                break
            request_id = f"judge-{number}"
            asked = time.perf_counter()
            (seq_id,) = self._engine.add_request(request_id, prompt, self._params)
            self._asked[seq_id] = request_id, number, asked
        return bool(self._asked)

    def _collect(self, finished: Sequence[FinishRecord]) -> None:
        now = time.perf_counter()
        for finish in finished:
            request_id, number, asked = self._asked.pop(finish.seq_id)
            output = self._engine.output(request_id)
            self._engine.forget(request_id)
            self._latencies[number] = (now - asked) * 1e3
            self._answers[number] = output.outputs[0].token_ids
            self._cached += output.metrics.tokens_cached
