"""The engines of one kind as a front sees them: a circuit breaker for each, and the router that chooses."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.routers import DEFAULT_THRESHOLD, new_router
from forge.trace.records import RouteRecord

FAILURES = 3
"""In a row that open it."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds."""
MAX_DECISIONS = 4096
"""Decisions that are remembered."""


@dataclass
class Breaker:
    """A circuit breaker: closed while a replica works, open after failures in a row. Then it gets no requests for a
    while, and a trial; the pause doubles with each trial that fails (Nygard 2007, *Release It!*). It knows no clock:
    its caller waits."""

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


class Pool:
    """The replicas that can be reached, by name; a router knows no others."""

    def __init__(self, router: str, threshold: int = DEFAULT_THRESHOLD):
        self.fleet = Fleet()
        self.router = new_router(router, self.fleet, threshold, secrets.randbits(32))
        self.breakers: dict[str, Breaker] = {}
        """Of every replica that Ray runs, whether it can be reached or not."""
        self.decisions: OrderedDict[str, RouteRecord] = OrderedDict()
        """The last of each request, the newest last."""

    def route(self, request: RouteRequest) -> RouteRecord:
        """Return the replica that a request goes to, and why. Raises `NoReplica`."""
        decision = self.router.route(request)
        self.decisions[request.request_id] = decision
        self.decisions.move_to_end(request.request_id)
        if len(self.decisions) > MAX_DECISIONS:
            self.decisions.popitem(last=False)
        return decision
