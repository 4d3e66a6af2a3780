"""Ray Serve's request router as a directory: which replicas run, and calls to the one that is named.

Serve tells the router of a deployment in each process that calls it which replicas run. Requests do not come this way;
the keeper asks each replica once for its engine's address.
"""

from collections.abc import Callable

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

_LISTENERS: dict[str, Callable[[set[str]], None]] = {}
"""By deployment. Serve makes the routers of a process, so this is how they find who wants to know."""


def listen_to(deployment: str, on_change: Callable[[set[str]], None]) -> None:
    """Call `on_change`, from any thread, with the names of the running replicas whenever they change."""
    _LISTENERS[deployment] = on_change


class Directory(RequestRouter):
    """Sends a call to the replica that its first argument names, or to any."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named if name is not None else candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        from forge.cluster import directory  # Serve copies this module's code into another

        listener = directory._LISTENERS.get(self._deployment_id.app_name)
        if listener is not None:
            listener({replica_id.unique_id for replica_id in self.curr_replicas})
