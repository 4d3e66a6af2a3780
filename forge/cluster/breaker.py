"""A circuit breaker for each replica: after failures in a row it gets no requests for a while, then a trial.

(Nygard 2007, *Release It!*) The pause doubles with each trial that fails. It knows no clock: its caller waits.
"""

from dataclasses import dataclass

FAILURES = 3
"""In a row that open it."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds."""


@dataclass
class Breaker:
    """A circuit breaker: closed while a replica works, open after it has failed."""

    failures: int = 0
    """In a row."""
    pause: float = 0.0
    """Seconds of the current pause; 0 while it is closed."""

    def succeeded(self) -> None:
        """Note that the replica did its work."""
        self.failures, self.pause = 0, 0.0

    def failed(self, is_gone: bool = False) -> float | None:
        """Note a failure; return the seconds for which the replica gets no requests, or None if it goes on. is_gone: it
        cannot be reached, which opens the breaker at once."""
        self.failures += 1
        if self.failures < FAILURES and not is_gone and not self.pause:
            return None
        self.pause = min(LONGEST_PAUSE, 2 * self.pause or FIRST_PAUSE)
        return self.pause
