"""What a run of `forge bench cpu` found, as plain data, and the statistics made of it.

Repetition i of every contender was measured in the same round, one right after the other. So a comparison is made pair
by pair, the i-th with the i-th, and what is shown is the median of those ratios: a machine that slows down for a while
slows both down.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from forge.bench.cases import Case, ModelSize, Needs

FORGE = "forge"

SCHEMA = 1
"""Counts up when a name in the JSON changes its meaning."""


@dataclass(frozen=True)
class Middle:
    """The median of some repetitions, and how far they lie apart."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Middle":
        """Raises ValueError for none."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Measured:
    """One contender's repetitions of one case."""

    contender: str
    seconds: tuple[float, ...]
    """Of one step, by repetition: the median of the steps of that turn."""
    setting: str
    """The options that the contender ran with, where it has a choice."""
    top_tokens: tuple[int, ...]
    """The likeliest next token of each sequence, from the last step: whether all programs computed the same thing."""


@dataclass(frozen=True)
class Limits:
    """What the machine can do at most."""

    bytes_per_second: float
    products_per_second: float


@dataclass(frozen=True)
class Roofline:
    """One contender's median step against the machine's limits (Williams, Waterman and Patterson 2009)."""

    bytes_per_second: float
    """Of what the step must read at least."""
    products_per_second: float
    bound: Literal["memory", "arithmetic"]
    """The limit that the step would meet first."""
    share: float
    """How much of that limit was reached: the least time that the step could take, over the time it took."""
    limit_seconds: float


@dataclass(frozen=True)
class Figure:
    """One case, measured for every program."""

    case: Case
    needs: Needs
    measured: tuple[Measured, ...]
    """forge first."""

    def of(self, contender: str) -> Measured | None:
        return next((one for one in self.measured if one.contender == contender), None)

    def rate(self, contender: str) -> Middle | None:
        """Tokens per second."""
        one = self.of(contender)
        return None if one is None else Middle.of([self.case.tokens_per_step / seconds for seconds in one.seconds])

    def ratio(self, peer: str) -> Middle | None:
        """How many times as fast as `peer` forge is, pair by pair."""
        ours, theirs = self.of(FORGE), self.of(peer)
        return None if ours is None or theirs is None else pairwise(ours.seconds, theirs.seconds)

    def disagreements(self, peer: str) -> int | None:
        """Sequences whose likeliest next token `peer` sees otherwise."""
        ours, theirs = self.of(FORGE), self.of(peer)
        if ours is None or theirs is None:
            return None
        return sum(one != other for one, other in zip(ours.top_tokens, theirs.top_tokens, strict=True))

    def roofline(self, contender: str, limits: Limits) -> Roofline | None:
        one = self.of(contender)
        if one is None:
            return None
        return roofline(self.needs, median(one.seconds), limits)


@dataclass(frozen=True)
class Standing:
    """A contender as a whole."""

    name: str
    description: str
    load_seconds: tuple[float, ...]
    """From opening the file to being able to compute, in a process that has its libraries loaded."""
    loaded_bytes: int
    """The most memory that its process had had when the model was loaded."""
    peak_bytes: int
    """The most that it had in all, with every case's cache and batch."""
    weight_bytes: int | None = None
    """Of the weights as it laid them out, where it says."""

    @property
    def load(self) -> Middle:
        return Middle.of(self.load_seconds)


@dataclass(frozen=True)
class Skipped:
    """Something that was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class CpuBenchmark:
    """One run."""

    model: str
    size: ModelSize
    threads: int
    repetitions: int
    machine: str
    load_average: float | None
    """Of the last minute before the run: how busy the machine was with other things."""
    before: Limits | None
    after: Limits | None
    standings: tuple[Standing, ...]
    figures: tuple[Figure, ...]
    skipped: tuple[Skipped, ...]
    interrupted: bool = False

    @property
    def limits(self) -> Limits | None:
        """The better of the two measurements: a limit that was reached once is one that can be reached."""
        known = [limits for limits in (self.before, self.after) if limits is not None]
        if not known:
            return None
        return Limits(
            max(limits.bytes_per_second for limits in known), max(limits.products_per_second for limits in known)
        )

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(standing.name for standing in self.standings if standing.name != FORGE)


def pairwise(ours: Sequence[float], theirs: Sequence[float]) -> Middle | None:
    """theirs / ours for each repetition that both have; of times, that is how many times as fast ours is."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=False)]
    return Middle.of(ratios) if ratios else None


def roofline(needs: Needs, seconds: float, limits: Limits) -> Roofline:
    """Which limit a step meets first, and how near it came."""
    memory, arithmetic = needs.bytes_read / limits.bytes_per_second, needs.products / limits.products_per_second
    least = max(memory, arithmetic)
    return Roofline(
        bytes_per_second=needs.bytes_read / seconds,
        products_per_second=needs.products / seconds,
        bound="memory" if memory >= arithmetic else "arithmetic",
        share=least / seconds,
        limit_seconds=least,
    )


def benchmark_object(result: CpuBenchmark) -> dict[str, Any]:
    """A run for `--json`: every repetition, and what is shown of them. Seconds, bytes, tokens per second."""
    return {
        "schema": SCHEMA,
        "benchmark": "cpu",
        "model": result.model,
        "model_size": asdict(result.size),
        "threads": result.threads,
        "repetitions": result.repetitions,
        "machine": result.machine,
        "load_average": result.load_average,
        "interrupted": result.interrupted,
        "limits": {
            name: None if limits is None else asdict(limits)
            for name, limits in (("before", result.before), ("after", result.after), ("used", result.limits))
        },
        "contenders": [asdict(standing) | {"load": asdict(standing.load)} for standing in result.standings],
        "skipped": [asdict(skipped) for skipped in result.skipped],
        "figures": [_figure_object(figure, result) for figure in result.figures],
    }


def _figure_object(figure: Figure, result: CpuBenchmark) -> dict[str, Any]:
    limits = result.limits
    measured = []
    for one in figure.measured:
        rate = figure.rate(one.contender)
        assert rate is not None, "it was measured"
        line = None if limits is None else figure.roofline(one.contender, limits)
        ratio = None if one.contender == FORGE else figure.ratio(one.contender)
        measured.append(
            {
                "contender": one.contender,
                "setting": one.setting,
                "seconds": list(one.seconds),
                "tokens_per_second": asdict(rate),
                "forge_is_times_as_fast": None if ratio is None else asdict(ratio),
                "top_token_disagreements": None if one.contender == FORGE else figure.disagreements(one.contender),
                "roofline": None if line is None else asdict(line),
            }
        )
    return {"case": asdict(figure.case), "needs": asdict(figure.needs), "measured": measured}
