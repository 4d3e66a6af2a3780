"""A deployment's router in this process: what it knows, whom it chose, and why.

Ray Serve makes the router of a deployment in each process that calls it. A `Routing` is where the two sides meet:
Serve's router asks it to choose, and the server reads its decisions and feeds it cache events.
"""

from collections import OrderedDict
from collections.abc import Callable

from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.routers import Router, new_router
from forge.trace.records import RouteRecord

MAX_DECISIONS = 4096
"""Decisions that are remembered."""


class Routing:
    """One deployment's router with what it knows and what it has decided."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.router: Router | None = None
        self.decisions: OrderedDict[str, RouteRecord] = OrderedDict()
        """The last of each request, the newest last."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when other replicas run than before."""

    def begin(self, name: str) -> None:
        self.router = new_router(name, self.fleet)

    def route(self, request: RouteRequest, names: list[str]) -> str:
        """The replica that a request goes to."""
        if request.target is not None:
            return request.target if request.target in names else names[0]  # which refuses it
        assert self.router is not None, "Serve begins a router before it asks it"
        names = [name for name in names if name != request.avoid] or names
        for name in names:
            self.fleet.join(name)
        decision = self.router.route(request, names)
        self.decisions[request.request_id] = decision
        if len(self.decisions) > MAX_DECISIONS:
            self.decisions.popitem(last=False)
        return decision.replica

    def set_replicas(self, names: list[str]) -> None:
        before = set(self.fleet.replicas)
        self.fleet.set_to(names)
        if set(names) != before:
            self.on_change()


_ROUTINGS: dict[str, Routing] = {}
"""By deployment. Serve makes the routers of a process, so this is how the process finds them."""


def routing_of(deployment: str) -> Routing:
    """The routing of a deployment in this process, whether Serve has made its router yet or not."""
    return _ROUTINGS.setdefault(deployment, Routing())


def forget_routings() -> None:
    """Serve has been shut down."""
    _ROUTINGS.clear()
