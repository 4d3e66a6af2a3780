"""The processor time that other programs took while an experiment ran.

Linux counts the time of all programs in `/proc/stat`; what this process and its children took is subtracted. Where
there is no such file the load average of the minute before counts.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.25
"""Of all processors. From here on a run is disturbed."""
SHORTEST_SECONDS = 0.2
"""A shorter run is not judged: the system counts hundredths of a second."""


@dataclass(frozen=True)
class OtherLoad:
    """Processor time of other programs, in processors."""

    processors: float
    of: int

    @property
    def is_busy(self) -> bool:
        return self.processors > BUSY_SHARE * self.of

    @property
    def sentence(self) -> str:
        return (
            f"Other programs kept {min(self.processors, self.of):.1f} of {self.of} processors busy during this run, so "
            "its times are longer and less regular than on an idle machine."
        )


class LoadMeter:
    """Measures other programs' processor time from its creation on."""

    def __init__(self, statistics: Path = Path("/proc/stat")):
        self._statistics = statistics
        self._load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self._began, self._busy, self._own = time.monotonic(), self._busy_seconds(), _own_seconds()

    def read(self) -> OtherLoad:
        seconds, busy = time.monotonic() - self._began, self._busy_seconds()
        of = os.cpu_count() or 1
        if seconds < SHORTEST_SECONDS:
            return OtherLoad(0.0, of)
        if busy is None or self._busy is None:
            return OtherLoad(self._load_average, of)
        other_seconds = (busy - self._busy) - (_own_seconds() - self._own)
        return OtherLoad(max(0.0, other_seconds / seconds), of)

    def _busy_seconds(self) -> float | None:
        """Return the busy seconds of all processors since the system started."""
        try:
            name, user, nice, system, _idle, _iowait, interrupts, soft, stolen, *_ = (
                self._statistics.read_text().splitlines()[0].split()
            )
            ticks = sum(map(int, (user, nice, system, interrupts, soft, stolen)))
        except (OSError, ValueError, IndexError):
            return None
        return ticks / os.sysconf("SC_CLK_TCK") if name == "cpu" else None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
