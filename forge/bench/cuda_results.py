"""What a run of `forge bench cuda` found, as plain data, and the statistics made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from forge.bench.cases import Case
from forge.bench.results import FORGE, Skipped

SCHEMA = 1
"""Counts up when a name in the JSON changes its meaning."""


@dataclass(frozen=True)
class CudaLimits:
    """What the GPU can do at most, as measured."""

    device: str
    versions: str
    memory_bytes: int
    copy_bytes_per_second: float
    """Read and written together."""
    read_bytes_per_second: float
    products_per_second: float
    """bfloat16 multiplications, each with its addition."""


@dataclass(frozen=True)
class Load:
    """Requests that come as fast as others end."""

    name: str
    """What `--only` calls it."""
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    @property
    def title(self) -> str:
        return f"{self.prompt_tokens} in, {self.output_tokens} out, {self.concurrency} at a time"

    @property
    def question(self) -> dict[str, int]:
        """What a worker is asked."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


@dataclass(frozen=True)
class Percentiles:
    """Of some durations, in seconds."""

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """The nearest rank: a value that was measured."""
        ordered = sorted(seconds)
        return cls(mean(ordered), ordered[_rank(0.50, len(ordered))], ordered[_rank(0.95, len(ordered))])


def _rank(share: float, count: int) -> int:
    return max(0, -(-round(share * 100) * count // 100) - 1)


@dataclass(frozen=True)
class LoadResult:
    """One contender's requests under one load."""

    load: Load
    contender: str
    setting: str
    requests_per_second: float
    first_token: Percentiles
    per_token: Percentiles | None
    """From the first token to the last, by token; None where there is only one."""
    end: Percentiles

    @classmethod
    def of(cls, load: Load, contender: str, answer: Mapping[str, Any]) -> "LoadResult":
        first, end = answer["first_token"], answer["end"]
        per_token = None
        if load.output_tokens > 1:
            steps = load.output_tokens - 1
            per_token = Percentiles.of([(e - f) / steps for f, e in zip(first, end, strict=True)])
        rate = len(end) / answer["seconds"]
        return cls(load, contender, answer["setting"], rate, Percentiles.of(first), per_token, Percentiles.of(end))


@dataclass(frozen=True)
class Speed:
    """Seconds of a step: the median of the repetitions, the least and the most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Speed":
        return cls(median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class StepResult:
    """One contender's steps of one case."""

    case: Case
    contender: str
    seconds: Speed
    setting: str
    top_tokens: tuple[int, ...]


@dataclass(frozen=True)
class CudaBenchmark:
    """One run."""

    model: str
    limits: CudaLimits | None
    contenders: Mapping[str, Mapping[str, Any]]
    """What each said of itself when it had loaded the model: `description`, `seconds`, …"""
    steps: tuple[StepResult, ...]
    loads: tuple[LoadResult, ...]
    skipped: tuple[Skipped, ...]
    interrupted: bool = False

    def step(self, case: Case, contender: str) -> StepResult | None:
        return next((s for s in self.steps if (s.case, s.contender) == (case, contender)), None)

    def bytes_needed(self, case: Case) -> int | None:
        """What a decode step of forge must read: weights once, and the keys and values before it."""
        about = self.contenders.get(FORGE)
        if about is None or case.kind != "decode":
            return None
        return about["read_bytes"] + case.sequences * case.context * about["kv_bytes"]

    def bandwidth_share(self, result: StepResult) -> float | None:
        """Of the GPU's measured reading bandwidth, what a decode step of forge reaches."""
        needed = self.bytes_needed(result.case)
        if needed is None or self.limits is None or result.contender != FORGE:
            return None
        return needed / result.seconds.median / self.limits.read_bytes_per_second


def cuda_benchmark_object(result: CudaBenchmark) -> dict[str, Any]:
    """The run for programs; seconds and bytes, nothing rounded."""
    return {
        "schema": SCHEMA,
        "model": result.model,
        "limits": asdict(result.limits) if result.limits else None,
        "contenders": {name: dict(about) for name, about in result.contenders.items()},
        "steps": [
            {
                "name": step.case.name,
                "contender": step.contender,
                "setting": step.setting,
                "seconds": asdict(step.seconds),
                "bandwidth_share": result.bandwidth_share(step),
                "top_tokens": list(step.top_tokens),
            }
            for step in result.steps
        ],
        "loads": [asdict(load) for load in result.loads],
        "skipped": [asdict(skipped) for skipped in result.skipped],
        "interrupted": result.interrupted,
    }
