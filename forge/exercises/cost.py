"""The cost of the reader's part and of the engine's own: the same work at three sizes, in turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from forge.exercises.catalog import Entry
from forge.exercises.loading import load

_ROUNDS = 9
_ROUND_SECONDS = 0.01
"""How long a round of one side is at least: short work is repeated."""


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
