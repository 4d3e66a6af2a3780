"""`forge bench speculation`: K = 1 to 8, a draft and a lookup, for one sequence and for batches.

Every figure is a ratio to plain decoding of the same requests in the same process, turn by turn: repetition i of every
case is measured in one round after one of plain decoding, and the ratio is the median of the rounds' ratios. The number
of guesses is fixed, so that each K shows what it costs. Whether the tokens are the same is checked for every turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forge.errors import UsageError
from forge.speculation.speculator import Speculator
from forge.trace.speculation_summary import SpeculationSummary

if TYPE_CHECKING:
    from forge.engine.sampling_params import SamplingParams
    from forge.llm import LLM
    from forge.trace.records import StepRecord

BEGINNINGS = (
    "Once upon a time",
    "One day",
    "In a small village",
    "The old",
    "When the first snow fell",
    "Every evening",
    "A little fox",
    "By the lake",
    "Long ago",
    "On the hill",
    "The rabbit",
    "There was once",
    "Deep in the forest",
    "Early in the morning",
    "A girl named",
    "The miller",
)
BATCHES = (1, 4, 16)
GUESSES = tuple(range(1, 9))


@dataclass(frozen=True)
class SpeculationCase:
    """What is measured: a proposer, its K, a batch."""

    proposer: str
    k: int
    batch: int


@dataclass(frozen=True)
class SpeculationFigure:
    """What came of a case: medians over the rounds."""

    case: SpeculationCase
    alpha: float | None
    """None where nothing was proposed."""
    tokens_per_cycle: float | None
    speed_up: float
    least: float
    most: float
    predicted: float | None
    """(αK + 1) / (1 + K · t_draft / t_target)."""
    predicted_with_verification: float | None
    """The same with the measured time of the verification."""
    draft_cost: float | None
    verify_cost: float | None
    tokens_per_second: float
    plain_tokens_per_second: float
    identical: bool


@dataclass(frozen=True)
class Effort:
    """How long the benchmark runs: tokens per turn, and repetitions."""

    num_tokens: int = 128
    repetitions: int = 5

    @classmethod
    def quick(cls) -> "Effort":
        return cls(32, 1)


@dataclass(frozen=True)
class Plan:
    """Everything that is measured, and how."""

    proposers: tuple[str, ...] = ("draft", "ngram")
    guesses: tuple[int, ...] = GUESSES
    batches: tuple[int, ...] = BATCHES
    effort: Effort = Effort()

    def __post_init__(self):
        for batch in self.batches:
            if not 1 <= batch <= len(BEGINNINGS):
                raise UsageError(f"--batch takes 1 to {len(BEGINNINGS)} sequences, got {batch}")

    def cases(self, batch: int) -> list[SpeculationCase]:
        return [SpeculationCase(proposer, k, batch) for proposer in self.proposers for k in self.guesses]


@dataclass(frozen=True)
class _Turn:
    """One run of a batch."""

    records: "list[StepRecord]"
    tokens: list[tuple[int, ...]]


def run(
    llm: "LLM", plan: Plan, drafts: Sequence[str] = (), on_progress: Callable[[str], None] = lambda what: None
) -> Iterator[SpeculationFigure]:
    """Measure batch by batch, yielding the figures of a batch when it is done. `llm` must have nothing else to do."""
    from forge.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=plan.effort.num_tokens, ignore_eos=True)
    for batch in plan.batches:
        prompts = list(BEGINNINGS[:batch])
        cases = plan.cases(batch)
        turns: dict[SpeculationCase, list[tuple[_Turn, _Turn]]] = {case: [] for case in cases}
        identical = dict.fromkeys(cases, True)
        plains: list[_Turn] = []
        for round_number in range(plan.effort.repetitions + 1):  # the first warms up
            for proposer in plan.proposers:
                llm.speculate_with("off")
                plain = _turn(llm, prompts, params)
                llm.speculate_with(proposer, drafts)
                for case in (case for case in cases if case.proposer == proposer):
                    on_progress(f"batch {batch}, {proposer}, K = {case.k}, round {round_number}")
                    speculator = llm.engine.speculation
                    assert isinstance(speculator, Speculator)
                    speculator.fix(case.k)
                    turn = _turn(llm, prompts, params)
                    identical[case] &= turn.tokens == plain.tokens
                    if round_number:
                        turns[case].append((plain, turn))
                if round_number:
                    plains.append(plain)
        llm.speculate_with("off")
        for case in cases:
            yield _figure(case, turns[case], identical[case])


def _turn(llm: "LLM", prompts: list[str], params: "SamplingParams") -> _Turn:
    started = llm.start(prompts, params)
    try:
        records = list(started)
    except BaseException:
        started.abort()
        raise
    return _Turn(records, [output.outputs[0].token_ids for output in started.outputs])


def _figure(case: SpeculationCase, turns: list[tuple[_Turn, _Turn]], identical: bool) -> SpeculationFigure:
    from forge.trace.speculation_summary import DecodeTime

    times = [
        (before, after)
        for plain, turn in turns
        if (before := DecodeTime.of(plain.records)) and (after := DecodeTime.of(turn.records))
    ]
    ratios = sorted(before.ms_per_token / after.ms_per_token for before, after in times)
    summaries = [SpeculationSummary.of(plain.records, turn.records) for plain, turn in turns]

    def middle(name: str) -> float | None:
        values = [getattr(summary, name) for summary in summaries if summary is not None]
        return median(values) if values else None

    return SpeculationFigure(
        case=case,
        alpha=middle("alpha"),
        tokens_per_cycle=middle("tokens_per_cycle"),
        speed_up=median(ratios),
        least=ratios[0],
        most=ratios[-1],
        predicted=middle("predicted"),
        predicted_with_verification=middle("predicted_with_verification"),
        draft_cost=middle("draft_cost"),
        verify_cost=middle("verify_cost"),
        tokens_per_second=median(after.tokens_per_second for _, after in times),
        plain_tokens_per_second=median(before.tokens_per_second for before, _ in times),
        identical=identical,
    )


def benchmark_object(figures: Sequence[SpeculationFigure], facts: dict[str, Any]) -> dict[str, Any]:
    """The whole benchmark for `--json`."""
    return facts | {"figures": [asdict(figure.case) | asdict(figure) | {"case": None} for figure in figures]}
