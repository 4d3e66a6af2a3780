"""What batching buys: the same requests one at a time, in batches that wait for their slowest, and continuously.

Continuous batching is iteration-level scheduling (Yu et al. 2022, Orca): a request that ends makes room in the next
step. Static batching is the same engine with one rule more: no request begins before the whole batch before it has
ended. `speculative` is continuous batching with the model's proposers. Every way must give the same tokens;
`identical` says whether it did.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from forge.llm import LLM
from forge.trace.records import StepRecord
from forge.trace.speculation_summary import draft_totals
from forge.trace.timeline import RequestTimeline, timeline_of
from forge.trace.totals import Totals, totals_of
from forge.workload.requests import Workload, WorkloadRun

How = Literal["sequential", "static", "continuous", "speculative"]
Tokens = tuple[tuple[int, ...], ...]
"""Each request's output, in the order of the workload."""


@dataclass(frozen=True)
class Measured:
    """The figures of one way of running a workload, from the round with the median time."""

    how: How
    batch: int
    """Sequences at once at most."""
    seconds: float
    """Seconds from the first arrival to the last token, engines made on the way included."""
    all_seconds: tuple[float, ...]
    """The seconds of every turn."""
    totals: Totals
    tokens: Tokens
    acceptance: float | None = None
    """`speculative`: draft tokens accepted over those proposed."""

    @property
    def tokens_per_second(self) -> float:
        return self.totals.output_tokens / self.seconds

    @property
    def ms_per_request(self) -> float:
        """The whole time by the number of requests: the cost of one, not its duration."""
        return self.seconds * 1e3 / len(self.tokens)


def measure(llm: LLM, workload: Workload, how: How, batch: int, turns: int = 1) -> Measured:
    """Run a workload `turns` times, each on a fresh engine with an empty cache (`sequential`: one for each request)."""
    rounds = sorted((_turn(llm, workload, how, batch) for _ in range(turns)), key=lambda measured: measured.seconds)
    middle = rounds[(len(rounds) - 1) // 2]
    return replace(middle, all_seconds=tuple(measured.seconds for measured in rounds))


def measure_all(
    llm: LLM,
    workload: Workload,
    ways: Sequence[tuple[How, int]],
    turns: int = 1,
    on_progress: Callable[[str], None] = lambda message: None,
) -> tuple[Measured, ...]:
    """Measure every way in turn, after a round that is not timed."""
    on_progress("warming up")
    _turn(llm, Workload(workload.requests[:2]), "continuous", 2)
    measured = []
    for how, batch in ways:
        on_progress(f"{how}, {batch} at once")
        measured.append(measure(llm, workload, how, batch, turns))
    return tuple(measured)


def identical(measured: Sequence[Measured], requests: int | None = None) -> bool:
    """Return whether all ways gave the same tokens to every request, or to the first `requests` of each."""
    return len({way.tokens[:requests] for way in measured}) <= 1


def requests_in_common(workload: Workload, rival: Workload) -> int:
    """Return how many requests, counted from the first, ask for the same tokens after the same prompt in both
    workloads."""
    pairs = zip(workload.requests, rival.requests, strict=False)
    same = (
        left.prompt_token_ids == right.prompt_token_ids and left.max_tokens == right.max_tokens for left, right in pairs
    )
    return sum(takewhile(bool, same))


def speed_up(way: Measured, of: Measured) -> float:
    """Return how many times as many tokens per second it makes as another."""
    return way.tokens_per_second / of.tokens_per_second


def _turn(llm: LLM, workload: Workload, how: How, batch: int) -> Measured:
    parts = (
        [replace(workload, requests=(request,)) for request in workload.requests] if how == "sequential" else [workload]
    )
    steps: list[StepRecord] = []
    tokens: list[tuple[int, ...]] = []
    requests: list[RequestTimeline] = []
    began = time.perf_counter()
    for part in parts:
        engine = llm.new_engine(max_num_seqs=batch)
        if how == "speculative":
            engine.speculation = llm.new_speculation()
        run = WorkloadRun(engine, part, together=batch if how == "static" else None)
        at_once = not any(request.arrival for request in part.requests)
        part_steps = [_arrived_at(began, step) if at_once else step for step in run]
        steps += part_steps
        requests += timeline_of(part_steps).requests()
        tokens += [output.outputs[0].token_ids for output in run.outputs]
    seconds = time.perf_counter() - began
    totals = totals_of(steps, requests)
    drafts = draft_totals(step.cycles for step in steps)
    proposed = sum(draft.proposed for draft in drafts)
    acceptance = sum(draft.accepted for draft in drafts) / proposed if proposed else None
    return Measured(how, batch, seconds, (seconds,), totals, tuple(tokens), acceptance)


def _arrived_at(began: float, step: StepRecord) -> StepRecord:
    """Return the step as if its requests had come when the run began: one kept from the engine waits all the same."""
    if not step.arrived:
        return step
    return replace(step, arrived=tuple(replace(arrival, arrived=began) for arrival in step.arrived))
