"""Requests that want one token, through either life: as a generation, or as a request that keeps nothing.

A fixed number of callers ask, each again as soon as it has its answer (a closed loop). Engines have the same weights
and are warm; what differs between two runs is the configuration.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import UsageError
from forge.reasons import Deferred
from forge.trace.records import StepRecord
from forge.trace.totals import percentile

if TYPE_CHECKING:
    from forge.engine.engine import Engine
    from forge.engine.outputs import CompletionOutput
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
    """The figures of some requests in one configuration."""

    seconds: float
    """Seconds from the first request to the last answer."""
    latencies_ms: tuple[float, ...]
    """Each request's milliseconds from its arrival to its last token."""
    first_token_ms: tuple[float, ...]
    """Each request's milliseconds from its arrival to its first token."""
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

    @classmethod
    def of(cls, seconds: float, records: Sequence[StepRecord], answers: "Sequence[CompletionOutput]") -> "JudgeRun":
        """Add up the steps and the answers of at least one request."""
        waits = [wait.reason for record in records for wait in record.waiting]
        return cls(
            seconds,
            tuple(answer.metrics.end_to_end_ms or 0.0 for answer in answers),
            tuple(answer.metrics.time_to_first_token_ms or 0.0 for answer in answers),
            len(records),
            sum(record.tokens_computed for record in records),
            sum(answer.metrics.tokens_cached for answer in answers),
            max(record.cache.used_blocks for record in records),
            max(record.block_table_entries for record in records),
            max(record.temporary_bytes for record in records),
            sum(isinstance(reason, Deferred) for reason in waits),
            tuple(answer.token_ids for answer in answers),
        )

    @property
    def requests_per_second(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def p50_ms(self) -> float:
        return percentile(self.latencies_ms, 0.5)

    @property
    def p95_ms(self) -> float:
        return percentile(self.latencies_ms, 0.95)


def judge_prompts(tokenizer: "Tokenizer", number: int) -> list[list[int]]:
    """Build chat prompts that begin with one rubric: held-out stories in turn, with a question each. UsageError for
    none."""
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
    """Build judge prompts whose rubric is asked for now and then: after each two of them come six stories without it,
    each from another place on, so that no two of those begin alike. UsageError for none."""
    judged, passage = judge_prompts(tokenizer, number), tokenizer.encode("\n\n".join(held_out_stories()))
    length = min(VISITOR_TOKENS, len(passage))
    starts = [97 * index % (len(passage) - length + 1) for index in range(number)]
    return [
        judged[index] if index % 8 < 2 else list(passage[start : start + length]) for index, start in enumerate(starts)
    ]


@cache
def held_out_stories() -> tuple[str, ...]:
    """Read the stories that no training saw, without the conversations around some of them."""
    documents = HELD_OUT.read_text(encoding="utf-8").split("<|endoftext|>")
    return tuple(document.strip() for document in documents if "<|im_start|>" not in document and document.strip())


def run_requests(
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 1,
    concurrency: int | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> JudgeRun:
    """Answer every prompt, with so many of them asked at once; None asks all. Raises `UsageError` for one that can
    never run."""
    from forge.workload.requests import Request, Workload, WorkloadRun

    workload = Workload(tuple(Request(tuple(prompt), max_tokens) for prompt in prompts))
    run, records = WorkloadRun(engine, workload, callers=concurrency), []
    began = time.perf_counter()
    try:
        for record in run:
            records.append(record)
            on_step(record)
        seconds = time.perf_counter() - began
    finally:
        run.abort()
    if run.refused:
        raise UsageError(run.refused[0][1])
    return JudgeRun.of(seconds, records, [output.outputs[0] for output in run.outputs])
