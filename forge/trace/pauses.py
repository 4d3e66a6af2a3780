"""Times without the pauses of a run, in which a person looks at a step while the engine's clock goes on."""

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from forge.trace.records import RequestMetrics, StepRecord


class Pauses:
    """The times at which a run was paused; moves the times of its records to where they would be without the pauses."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._seconds = [0.0]
        """Paused in all, before the first pause and after each."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        started = time.perf_counter()  # the engine's clock
        try:
            yield
        finally:
            self._ends.append(time.perf_counter())
            self._seconds.append(self._seconds[-1] + self._ends[-1] - started)

    def without(self, moment: float) -> float:
        """Convert a moment on the engine's clock, outside of pauses, to a clock that stood still in them."""
        return moment - self._seconds[bisect_right(self._ends, moment)]

    def step(self, record: StepRecord) -> StepRecord:
        arrived = tuple(replace(arrival, arrived=self.without(arrival.arrived)) for arrival in record.arrived)
        return replace(record, started=self.without(record.started), ended=self.without(record.ended), arrived=arrived)

    def metrics(self, metrics: RequestMetrics) -> RequestMetrics:
        moments = {name: getattr(metrics, name) for name in ("arrived", "admitted", "first_token", "last_token")}
        moved: dict[str, Any] = {name: self.without(moment) for name, moment in moments.items() if moment is not None}
        return replace(metrics, **moved)
