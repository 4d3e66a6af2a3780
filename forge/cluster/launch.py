"""`forge serve --replicas`: the HTTP server of `forge serve` in front of engines that Ray Serve runs.

The server runs in the process of the command and talks to the engines directly. Only a process beside it knows Ray, the
keeper, which is started again when it ends. So an engine or Ray may die, and the streams go on.
"""

import asyncio
import logging
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.cluster import control
from forge.cluster.client import ClusterClient
from forge.cluster.options import ClusterOptions
from forge.cluster.ray_address import choose_ray, release_lock
from forge.cluster.wire import start_process
from forge.errors import ForgeError, UsageError
from forge.server.engine_client import Connection
from forge.server.messages import LoadFailed, Ready
from forge.server.serving import OnReady, listen, serve_client
from forge.server.settings import Settings
from forge.trace.records import StepRecord

logger = logging.getLogger("forge.server")

_KEEPER_ENDS = 30.0
"""Seconds that the keeper has to end the engines."""
_KEEPER_ENDED = "the process that keeps Ray has ended: try again in a minute"
_RESTART_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)


class KeeperProcess:
    """The process of a keeper, as its front sees it."""

    def __init__(self, deployment: control.Deployment, environment: dict[str, str], lock: int | None = None):
        """environment: what it needs beside this process's. lock: a file descriptor that it inherits."""
        # In a group of its own: Ctrl-C is for the front, which then ends the keeper.
        inherited = [] if lock is None else [lock]
        self.process, self._socket = start_process("forge.cluster.keeper", deployment, environment, inherited)

    async def messages(self) -> "asyncio.Queue[Any]":
        """Return a queue of its messages from now on; None follows the last."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._connection = Connection(queue.put_nowait, lambda: queue.put_nowait(None))
        await self._connection.open(self._socket)
        return queue

    def send(self, message: Any) -> None:
        """Raises `ForgeError` if the keeper has ended."""
        if not self._connection.is_open:
            raise ForgeError(_KEEPER_ENDED)
        self._connection.send(message)

    def close(self) -> None:
        """Let the keeper end what it started, and wait for that."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(_KEEPER_ENDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ClusterFront:
    """A client of the engines, with the keeper that reports them."""

    def __init__(self, name: str, model: str, options: dict[str, Any], cluster: ClusterOptions):
        """Raises `UsageError` where the engines cannot be run as asked."""
        self._plan = control.Deployment(name, model, options, cluster)
        self._lock: int | None = None
        """Holds the server's name, if that is its own."""
        self._is_private = False
        """Whether Ray ends with its keeper."""
        self._keeper = self._start_keeper()
        self.client: ClusterClient | None = None
        self._following: asyncio.Task[None] | None = None
        self._changing: asyncio.Future[control.Changed] | None = None
        self._control: asyncio.Server | None = None

    def _start_keeper(self, again: bool = False) -> KeeperProcess:
        place = choose_ray(self._plan.name, self._plan.cluster, self._lock)
        self._lock, self._is_private = place.lock, place.lock is not None and place.address is None
        plan = self._plan._replace(address=place.address, again=again)
        return KeeperProcess(plan, place.environment, place.lock)

    async def start(self) -> tuple[ClusterClient, Ready]:
        """Wait until the first engines run. Raises the `ForgeError` of what does not load."""
        queue, replicas = await self._keeper.messages(), list[control.Joined]()
        while True:
            match await queue.get():
                case control.Running(ready, secret, kinds):
                    break
                case control.Joined() as joined:
                    replicas.append(joined)
                case control.Notice(text):
                    logger.warning(text)
                case LoadFailed() as failed:
                    raise failed.error()
                case None:
                    raise ForgeError("Ray ended before the engines ran: its logs are in /tmp/ray and /tmp/forge-ray-*")
        cluster = self._plan.cluster
        self.client = client = ClusterClient(secret, ready, cluster.router, cluster.prefix_threshold, len(kinds) > 1)
        await client.connect()
        for joined in replicas:
            client.join(*joined)
        self._following = asyncio.create_task(self._follow(queue))
        while not client.is_ready:  # an engine of each kind is connected to
            await asyncio.sleep(0.02)
        if self._lock is not None:
            self._control = await control.listen_for_changes(self._plan.name, self._change)
        return client, ready

    async def _change(self, change: control.Change) -> None:
        """Let the keeper change the engines. Raises the `ForgeError` that says why they are as before."""
        plan = control.changed(self._plan, change)
        self._changing = asyncio.get_running_loop().create_future()
        self._keeper.send(plan)
        failure = (await self._changing).failure
        if failure is not None:
            raise ForgeError(failure)
        self._plan = plan

    async def _follow(self, queue: "asyncio.Queue[Any]") -> None:
        """Process the keeper's messages; when it ends, start another."""
        assert self.client is not None, "the first engines run"
        failures, before = 0, dict[str, set[str]]()
        while True:
            match await queue.get():
                case control.Joined(name, kind, address, version):
                    failures = 0
                    self.client.join(name, kind, address, version)
                    for old in before.pop(kind, set()) - {name}:  # of a Ray that has ended: they finish what they have
                        self.client.leave(old)
                case control.Left(name):
                    self.client.leave(name)
                case control.Notice(text):
                    logger.warning(text)
                case control.Running(_, secret, _):
                    self.client.secret = secret
                case control.Changed() as result:
                    self._end_change(result)
                case LoadFailed(message, _):
                    logger.error("the engines cannot be started again: %s", message)
                case None:
                    self._end_change(control.Changed(_KEEPER_ENDED))
                    if self._is_private:
                        before = {kind: self.client.replicas(kind) for kind in self.client.pools}
                    pause = _RESTART_PAUSES[min(failures, len(_RESTART_PAUSES) - 1)]
                    failures += 1
                    logger.error("the process that keeps Ray has ended: another one starts in %.0f s", pause)
                    await asyncio.sleep(pause)
                    await asyncio.to_thread(self._keeper.close)
                    try:
                        self._keeper = await asyncio.to_thread(self._start_keeper, True)
                        queue = await self._keeper.messages()
                    except UsageError as error:
                        logger.error("the engines cannot be started again: %s", error)
                        queue.put_nowait(None)

    def _end_change(self, result: control.Changed) -> None:
        if self._changing is not None and not self._changing.done():
            self._changing.set_result(result)

    async def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._following is not None:
            self._following.cancel()
        if self.client is not None:
            self.client.disconnect()
        await asyncio.to_thread(self._keeper.close)
        if self._lock is not None:
            release_lock(self._plan.name, self._lock)


def default_name(model: str) -> str:
    """Return the name on Ray of a server without one: its model's, and a number that no other has."""
    stem = re.sub("[^a-z0-9]+", "-", Path(model).stem.lower()).strip("-")
    return f"{stem[:24] or 'forge'}-{secrets.token_hex(2)}"


def serve_cluster(
    model: str,
    options: dict[str, Any],
    settings: Settings,
    live: Callable[[Ready], Callable[[StepRecord], None]] | None,
    on_ready: OnReady,
    *,
    cluster: ClusterOptions,
) -> int:
    """Serve from replicas until a signal, as `forge.server.serving.serve` does; return the exit status."""
    if cluster.attach is None:
        cluster.check_cache(options["kv"])
    cores = os.cpu_count() or 1
    options = options | {"threads": options.get("threads") or max(1, cores // cluster.most)}
    name = cluster.attach or cluster.name or default_name(model)

    async def run(front: ClusterFront) -> int:
        try:
            client, ready = await front.start()
            client.on_record = live(ready) if live is not None else None
            client.is_traced = settings.access_log != "off"
            logger.info("the engines are called %s: --attach %s is another front of them", name, name)
            return await serve_client(client, ready, settings, listening, on_ready)
        finally:
            await front.stop()

    with listen(settings, share=cluster.reuse_port) as listening:
        return asyncio.run(run(ClusterFront(name, model, options, cluster)))
