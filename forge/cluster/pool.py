"""The engines of one kind as a front sees them: a link to each, their breakers, and the router that chooses."""

import secrets
from collections import OrderedDict

from forge.cluster.breaker import Breaker
from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.routers import DEFAULT_THRESHOLD, new_router
from forge.trace.records import RouteRecord

MAX_DECISIONS = 4096
"""Decisions that are remembered."""


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
