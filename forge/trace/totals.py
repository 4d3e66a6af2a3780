"""The totals of a run: steps by class, throughput, latencies, the cost of preemption, the use of the pool.

Made of records alone, so a recorded run has the same totals as the run itself.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from forge.reasons import ExecutionClass
from forge.trace.records import StepRecord
from forge.trace.timeline import RequestTimeline

STARVED = 8
"""A request that more later ones were admitted before counts as starved."""


@dataclass(frozen=True)
class Percentiles:
    """The distribution of a time that every request has, in milliseconds."""

    p50: float
    p90: float
    p99: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Percentiles | None":
        """Compute the percentiles; None if no value is known."""
        known = sorted([value for value in values if value is not None])
        if not known:
            return None
        return cls(percentile(known, 0.5), percentile(known, 0.9), percentile(known, 0.99), known[-1], len(known))


@dataclass(frozen=True)
class Totals:
    """The sums and times of a run, over all its steps and requests."""

    num_steps: int
    steps_by_class: dict[ExecutionClass, int]
    seconds: float
    """Seconds from the beginning of the first step to the end of the last."""
    output_tokens: int
    tokens_computed: int
    """Rows that went through the model."""
    tokens_recomputed: int
    """Rows that preemption made necessary."""
    tokens_cached: int
    """Prompt tokens that were found in the cache."""
    ended: dict[str, int]
    """The number of sequences with each finish reason."""
    pool_exhausted: int
    """Sequences that ended as `length` because the pool was too small."""
    preemptions: int
    swaps: int
    """Preemptions that swapped the victim's blocks to the host's pool."""
    sequences_preempted: int
    rejected: int
    queue: Percentiles | None
    first_token: Percentiles | None
    per_token: Percentiles | None
    end_to_end: Percentiles | None
    utilization: tuple[float, float]
    """The share of the pool's blocks in use: the mean over the steps, and the most."""
    fragmentation: tuple[float, float]
    """The share of reserved slots that are not filled: mean over the steps, and the most."""
    sharing: tuple[float, float]
    """The share of blocks that sharing saves: mean over the steps, and the most."""
    batch: tuple[float, float]
    """Sequences in a step: mean, and the most."""
    starved: int
    """Requests that more than `STARVED` later ones were admitted before."""
    most_overtaken: int
    """Later requests that were admitted before one, at most."""
    longest_wait: int
    """Steps that a request waited in the queue, at most."""

    @property
    def tokens_per_second(self) -> float | None:
        """The output tokens per second of the whole run."""
        return self.output_tokens / self.seconds if self.seconds > 0 else None

    @property
    def recomputed_share(self) -> float:
        """The share of rows that preemption made necessary."""
        return self.tokens_recomputed / self.tokens_computed if self.tokens_computed else 0.0


def totals_of(steps: Sequence[StepRecord], requests: Sequence[RequestTimeline]) -> Totals:
    """Add up a run of one step or more."""
    preempted = [preemption for step in steps for preemption in step.preempted]
    overtakers = times_overtaken(requests)
    return Totals(
        num_steps=len(steps),
        steps_by_class=dict(Counter(step.execution_class for step in steps)),
        seconds=steps[-1].ended - steps[0].started,
        output_tokens=sum(len(step.tokens) for step in steps),
        tokens_computed=sum(step.tokens_computed for step in steps),
        tokens_recomputed=sum(request.tokens_recomputed for request in requests),
        tokens_cached=sum(request.tokens_cached for request in requests),
        ended=dict(Counter(request.finish_reason for request in requests if request.finish_reason is not None)),
        pool_exhausted=sum(request.finish is not None and request.finish.why is not None for request in requests),
        preemptions=len(preempted),
        swaps=sum(victim.preemption == "swap" for victim in preempted),
        sequences_preempted=len({preemption.seq_id for preemption in preempted}),
        rejected=sum(len(step.rejected) for step in steps),
        queue=Percentiles.of([request.queue_ms for request in requests]),
        first_token=Percentiles.of([request.time_to_first_token_ms for request in requests]),
        per_token=Percentiles.of([request.time_per_output_token_ms for request in requests]),
        end_to_end=Percentiles.of([request.end_to_end_ms for request in requests]),
        utilization=_mean_and_most([step.cache.utilization for step in steps]),
        fragmentation=_mean_and_most([step.cache.internal_fragmentation for step in steps]),
        sharing=_mean_and_most([step.cache.sharing for step in steps]),
        batch=_mean_and_most([len(step.items) for step in steps]),
        starved=sum(number > STARVED for number in overtakers),
        most_overtaken=max(overtakers, default=0),
        longest_wait=max((request.steps_waited for request in requests), default=0),
    )


def times_overtaken(requests: Sequence[RequestTimeline]) -> list[int]:
    """Return for each request, in the order of arrival, how many later ones were admitted before it. Every later
    admission overtakes a request that was never admitted."""
    known = [
        (request.arrived, request.seq_id, request.admitted)
        for request in requests
        if request.arrived is not None and not request.sample
    ]
    waits: list[int] = []
    later: list[float] = []
    for _, _, admitted in sorted(known, reverse=True):
        waits.append(bisect_left(later, inf if admitted is None else admitted))
        if admitted is not None:
            insort(later, admitted)
    return waits[::-1]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of one value or more lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _mean_and_most(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), max(values)
