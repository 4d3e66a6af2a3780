"""What a run came to: steps by class, throughput, latencies, what preemption cost, how full the pool was.

Made of records alone, so a recorded run has the same totals as the run itself.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from forge.trace.lives import Life, percentile
from forge.trace.records import StepRecord


@dataclass(frozen=True)
class Percentiles:
    """Of a time that every request has, in milliseconds."""

    p50: float
    p90: float
    p99: float
    maximum: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Percentiles | None":
        """None where no value is one."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(percentile(known, 0.5), percentile(known, 0.9), percentile(known, 0.99), max(known), len(known))


@dataclass(frozen=True)
class Totals:
    num_steps: int
    steps_by_class: dict[str, int]
    seconds: float
    """From the beginning of the first step to the end of the last."""
    output_tokens: int
    tokens_computed: int
    """Rows that went through the model."""
    tokens_recomputed: int
    """Of those, the ones that preemption made necessary."""
    tokens_cached: int
    """Prompt tokens that were found in the cache."""
    ended: dict[str, int]
    """Sequences by why they ended."""
    preemptions: int
    swaps: int
    """Preemptions that kept what the victim had in the host's pool."""
    sequences_preempted: int
    rejected: int
    queue: Percentiles | None
    first_token: Percentiles | None
    per_token: Percentiles | None
    end_to_end: Percentiles | None
    utilization: tuple[float, float]
    """Of the pool's blocks: mean over the steps, and the most."""
    fragmentation: tuple[float, float]
    """The share of reserved slots with nothing in them: mean over the steps, and the most."""
    batch: tuple[float, int]
    """Sequences in a step: mean, and the most."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.output_tokens / self.seconds if self.seconds > 0 else None

    @property
    def recomputed_share(self) -> float:
        """Of all rows, those that preemption made necessary."""
        return self.tokens_recomputed / self.tokens_computed if self.tokens_computed else 0.0


def totals_of(steps: Sequence[StepRecord], lives: Sequence[Life]) -> Totals:
    """Raises ValueError where there is no step."""
    if not steps:
        raise ValueError("no step, no totals")
    preempted = [one for step in steps for one in step.preempted]
    return Totals(
        num_steps=len(steps),
        steps_by_class=dict(Counter(step.execution_class for step in steps)),
        seconds=steps[-1].ended - steps[0].started,
        output_tokens=sum(len(step.tokens) for step in steps),
        tokens_computed=sum(step.tokens_computed for step in steps),
        tokens_recomputed=sum(life.tokens_recomputed for life in lives),
        tokens_cached=sum(life.tokens_cached for life in lives),
        ended=dict(Counter(life.reason for life in lives if life.reason is not None)),
        preemptions=len(preempted),
        swaps=sum(one.mode == "swap" for one in preempted),
        sequences_preempted=len({one.seq_id for one in preempted}),
        rejected=sum(len(step.rejected) for step in steps),
        queue=Percentiles.of([life.queue_ms for life in lives]),
        first_token=Percentiles.of([life.time_to_first_token_ms for life in lives]),
        per_token=Percentiles.of([life.time_per_output_token_ms for life in lives]),
        end_to_end=Percentiles.of([life.end_to_end_ms for life in lives]),
        utilization=_mean_and_most([step.cache.utilization for step in steps]),
        fragmentation=_mean_and_most([step.cache.internal_fragmentation for step in steps]),
        batch=_mean_and_most([len(step.items) for step in steps]),
    )


def _mean_and_most(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), max(values)
