"""Times each fused step, by waiting for the device after every launch."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge.model.backend import OperationTime


class StepClock:
    """Seconds and calls per layer and step, in the order in which they first ran."""

    def __init__(self, synchronize: Callable[[], None]):
        self._synchronize = synchronize
        self._seconds: dict[tuple[int, str], float] = defaultdict(float)
        self._calls: dict[tuple[int, str], int] = defaultdict(int)

    @contextmanager
    def step(self, name: str, layer: int) -> Iterator[None]:
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[layer, name] += time.perf_counter() - started
        self._calls[layer, name] += 1

    def times(self) -> tuple[OperationTime, ...]:
        return tuple(
            OperationTime(layer, name, seconds * 1e3, self._calls[layer, name])
            for (layer, name), seconds in self._seconds.items()
        )
