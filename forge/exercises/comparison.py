"""The reader's part beside the engine's own: two runs of the engine on the same requests, the source of both, and what
they cost (the same work at three sizes, in turns).
"""

import ast
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from forge.exercises import session
from forge.exercises.catalog import Entry
from forge.exercises.exercise import Exercise
from forge.exercises.loading import load
from forge.trace.records import StepRecord


@dataclass(frozen=True)
class Ran:
    """One run of the engine."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[StepRecord, ...]
    token_text: Callable[[int], str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(record.ended - record.started for record in self.records)
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def fullest(self) -> StepRecord:
        """The step with most blocks in use."""
        return max(self.records, key=lambda record: (record.cache.used_blocks, record.cache.tokens_held))


@dataclass(frozen=True)
class Comparison:
    """The same requests with the reader's part and with the engine's own."""

    exercise: Exercise
    yours: Ran
    reference: Ran
    calls: Mapping[str, int]
    """How often the run called each of the reader's functions."""

    @property
    def identical(self) -> bool:
        return self.yours.token_ids == self.reference.token_ids


_ROUNDS = 9
_ROUND_SECONDS = 0.01
"""Seconds that a round of one side takes at least: short work is repeated."""


@dataclass(frozen=True)
class Measured:
    """One size: the microseconds of each round, for the reader's part and the engine's own."""

    size: str
    yours: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median time of the reader's part over that of the engine's own."""
        return median(self.yours) / median(self.reference)

    @property
    def is_noise(self) -> bool:
        """True if the middle halves of the two sides' rounds overlap, so that their medians cannot be compared."""
        yours, reference = sorted(self.yours), sorted(self.reference)
        quarter = len(yours) // 4
        return yours[quarter] <= reference[-1 - quarter] and reference[quarter] <= yours[-1 - quarter]


def measure(entry: Entry, path: Path) -> list[Measured]:
    """Time all sizes of an exercise's benchmark."""
    measured = []
    for cost in entry.exercise().costs(load(path)):
        sides = [(work, _repeats(work)) for work in (cost.yours, cost.reference)]
        rounds = [[_timed(*side) for side in sides] for _ in range(_ROUNDS)]
        yours, reference = zip(*rounds, strict=True)
        measured.append(Measured(cost.size, yours, reference))
    return measured


def _repeats(work: Callable[[], object]) -> int:
    work()
    return max(1, min(10_000, round(_ROUND_SECONDS * 1e6 / max(1.0, _timed(work, 1)))))


def _timed(work: Callable[[], object], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started) / repeats * 1e6


def compare_costs(entry: Entry, path: Path) -> list[Measured] | None:
    """Run the benchmark in a process of its own. None if the reader's code did not end it."""
    ended = session.in_child("cost", entry, path)
    if ended.result is None:
        return None
    return [
        Measured(str(cost["size"]), tuple(map(float, cost["yours"])), tuple(map(float, cost["reference"])))
        for cost in ended.result["costs"]
    ]


def source_of(path: Path, functions: Sequence[str]) -> str:
    """Return the source of the reader's functions, without docstrings."""
    text = path.read_text(encoding="utf-8")
    lines, shown = text.splitlines(), []
    for node in ast.parse(text).body:
        named = [(node.name, node)] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):
            named = [(f"{node.name}.{item.name}", item) for item in node.body if isinstance(item, ast.FunctionDef)]
        for name, function in named:
            if name in functions:
                first = function.body[0]
                has_words = ast.get_docstring(function) is not None
                words = range(first.lineno - 1, first.end_lineno or first.lineno) if has_words else range(0)
                kept = range(function.lineno - 1, function.end_lineno or function.lineno)
                shown.append("\n".join(lines[index] for index in kept if index not in words))
    return "\n\n".join(shown)
