"""The routers of `routers` as Ray Serve's request routers.

Serve tells a request router which replicas run, and asks it for one per request. It copies this module's code, so what
a process shares with its routers is in another module, `routing`.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forge.cluster.routing import routing_of


class ForgeRequestRouter(RequestRouter):
    """Ray Serve's request router around one of ours."""

    def initialize_state(self, router: str = "prefix", **options: Any) -> None:
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
