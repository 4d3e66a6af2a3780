"""What Ray Serve starts, checks and restarts: an actor that keeps an engine's process.

No request comes through it. It starts the engine beside it, tells fronts where it listens, and ends when it ends. Serve
asks it for the engine's health, which the engine's pulses tell; an engine that stands still is killed, so that another
takes its place.
"""

import asyncio
import os
import time
from math import ceil
from typing import Any, NamedTuple

from forge.cluster.control import check_interface
from forge.cluster.link import STUCK_SECONDS, PulseReader
from forge.cluster.wire import Address, connect, start_process
from forge.errors import UsageError
from forge.server.messages import LoadFailed, Ready, received

DEAD_AFTER = 5.0
"""Seconds without a pulse after which an engine is killed. A front gives it up before."""
FAILED_STEPS = 10
"""Steps in a row that raise, after which an engine is started anew."""
DRAIN_SECONDS = 300.0
"""How long an engine that is taken away has for the requests that it has."""
_DRAINED_AFTER = 1.0
"""Seconds without a sequence after which it has none: meanwhile every front knows that it leaves."""


class ReplicaFailed(RuntimeError):
    """The engine of this replica does not work."""


class Description(NamedTuple):
    """What a front must know of a replica."""

    address: Address
    ready: Ready
    secret: bytes
    version: str


class EngineReplica:
    """One engine of the cluster. Its methods take the name of the replica that they are for."""

    async def __init__(  # type: ignore[misc]
        self,
        model: str,
        options: dict[str, Any],
        secret: bytes,
        host: str | None,
        version: str,
        interface: dict[str, Any] | None,
    ):
        """Serve awaits it. model, options: as for `LLM`. host: where it listens; None for this node's address.
        interface: what fronts know of the model already; a model that does not load, or that looks otherwise, is then
        not started, and Serve keeps the engines that run."""
        self._description: Description | LoadFailed
        """Or why there is no engine to describe."""
        self._pulses = PulseReader(self._end)
        # In a group of its own: Ray's reaper kills its whole group when the process that has started Ray ends.
        load = host or _node_address(), secret, os.getppid(), model, options
        self._process, self._control = start_process("forge.cluster.replica_engine", load)
        message = await asyncio.to_thread(next, received(self._control), None)
        if message is None:
            raise ReplicaFailed("the engine's process has ended before its model was loaded")
        if isinstance(message, LoadFailed):  # started again it would fail again: `describe` says why
            if interface is not None:
                raise ReplicaFailed(message.message)
            self._description = message
            return
        address, ready = message
        self._description = Description(address, ready, secret, version)
        if interface is not None:
            try:
                check_interface(interface, ready)
            except UsageError as error:
                self._process.kill()
                raise ReplicaFailed(str(error)) from None
        connection = await asyncio.to_thread(connect, address, secret, "pulse")
        await asyncio.get_running_loop().create_connection(lambda: self._pulses, sock=connection)

    def _end(self) -> None:
        """Without its engine this actor is worth nothing: Serve starts another one."""
        self._process.kill()
        os._exit(1)

    # What Ray Serve calls

    async def check_health(self) -> None:
        """Raises where the engine's steps raise; ends the actor where the engine does not live."""
        if isinstance(self._description, LoadFailed):
            return
        silent, pulse = time.monotonic() - self._pulses.last_seen, self._pulses.last
        if self._process.poll() is not None or silent > DEAD_AFTER or pulse.step_seconds > STUCK_SECONDS:
            self._end()
        if pulse.failed_in_a_row >= FAILED_STEPS:
            raise ReplicaFailed(f"{pulse.failed_in_a_row} steps in a row have failed")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What scaling goes by: sequences that run or wait in the engine."""
        return {"sequences": float(self._pulses.last.num_sequences)}

    async def describe(self, name: str | None) -> Description | LoadFailed:
        """Where the engine listens and what it serves, or why it does not."""
        return self._description

    async def __del__(self) -> None:
        """Serve takes this replica away, and fronts send nothing more: wait until the engine has done what it has."""
        began = idle_since = time.monotonic()
        while (now := time.monotonic()) - began < DRAIN_SECONDS and now - idle_since < _DRAINED_AFTER:
            await asyncio.sleep(0.1)
            if self._pulses.last.num_sequences:
                idle_since = time.monotonic()
        self._process.kill()


def scale_by_sequences(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: its `AutoscalingContext` to the number of replicas that there should be, from
    what `record_autoscaling_stats` tells.

    Between `min_replicas` and `max_replicas`, and its delays, Serve keeps to itself.
    """
    told = (context.aggregated_metrics or {}).get("sequences", {})
    return wanted_replicas(sum(told.values()), context.config.get_target_ongoing_requests()), {}


def wanted_replicas(sequences: float, target: float) -> int:
    """Return the replicas for so many sequences, `target` of them each; one at least."""
    return max(1, ceil(sequences / target - 1e-9))


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
