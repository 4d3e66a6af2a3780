"""The routers of `routers` as Ray Serve's request routers.

Serve makes a request router for each deployment handle, in the process that has the handle, tells it which replicas run,
and asks it for one per request; what the router answers and the numbers behind it go to the `Routing` of that
deployment, which the server in the same process reads.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forge.cluster.fleet import Fleet, RouteDecision, RouteRequest
from forge.cluster.routers import Router, new_router

MAX_DECISIONS = 4096
"""Decisions that are remembered."""


class Routing:
    """One deployment's router with what it knows and what it has decided."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.router: Router | None = None
        self.decisions: OrderedDict[str, RouteDecision] = OrderedDict()
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


class ForgeRequestRouter(RequestRouter):
    """Ray Serve's request router around one of ours."""

    def initialize_state(self, router: str) -> None:
        self._routing = routing_of(self._deployment_id.name)
        self._routing.begin(router)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        if pending_request is None or not by_name:
            return [candidate_replicas]
        return [[by_name[self._routing.route(pending_request.args[0], list(by_name))]]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._routing.set_replicas([one.replica_id.unique_id for one in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._routing.set_replicas([one.unique_id for one in self.curr_replicas])


def router_options(router: str) -> dict[str, Any]:
    """For `RequestRouterConfig`."""
    return {"request_router_class": ForgeRequestRouter, "request_router_kwargs": {"router": router}}
