"""The process of a front that knows Ray: it starts the engines, and tells the front which run and where they listen.

Ray Serve starts, places, checks, restarts and scales the replicas; requests do not pass it. The front goes on while the
keeper or Ray is gone, and starts another keeper. The process ends when the front's end of its socket closes, and takes
with it what it started.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # of a Ray that is started here: an engine is no background work
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from forge.cluster import scaling
from forge.cluster.client import ENGINES, PREFILLS
from forge.cluster.directory import Directory, listen_to
from forge.cluster.keeper_messages import Deployment, Joined, Left, Notice, Running
from forge.cluster.ray_address import answers, clear_private, private_folder, record_private
from forge.cluster.replica import EngineReplica
from forge.errors import ForgeError, UsageError
from forge.server.messages import Inbox, LoadFailed, frame

_OBJECT_STORE_BYTES = 80 << 20
"""Of a private Ray. No request uses it."""
_SAY_EVERY = 10.0
"""Seconds between two lines about what is waited for."""
_RAY_SILENT = 10.0
"""Seconds without an answer of Ray after which this process ends, for another one to start."""


class Keeper:
    """Ray for one front."""

    def __init__(self, connection: socket.socket, deployment: Deployment):
        self._connection, self._plan = connection, deployment
        self._lock = threading.Lock()
        self._is_private = deployment.address is None
        self._apps: dict[str, str] = {}
        """From a kind of engine to the name of its application."""
        self._known: dict[str, str] = {}
        """The replicas that the front knows, and their kinds."""
        self._secret = secrets.token_bytes(32)
        """Of the engines that this process starts."""
        self.address = ""

    def tell(self, message: Any) -> None:
        """Send the front a message, from any thread."""
        with self._lock:
            self._connection.sendall(frame(message))

    # Ray

    def start(self) -> None:
        """Connect to Ray, and start the engines unless they run. Raises `UsageError`."""
        plan, cluster = self._plan, self._plan.cluster
        self._connect()
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        running = serve.status().applications
        name = cluster.attach or plan.name
        self._apps = {ENGINES: name}
        if cluster.attach is not None or (plan.again and name in running):
            if name not in running:
                raise UsageError(f"no server called {name} runs on this Ray: {', '.join(running) or 'none'} does")
            if f"{name}-prefill" in running:
                self._apps[PREFILLS] = f"{name}-prefill"
            return
        if name in running:
            raise UsageError(
                f"a server called {name} runs already: --attach {name} shares its engines, --name names another"
            )
        if cluster.prefill_replicas:
            self._apps[PREFILLS] = f"{name}-prefill"
        self._deploy()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._is_private:
            self._start_private(quiet)
            return
        address = self._plan.address
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError) as error:
            token = "it may need its token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            raise UsageError(f"Ray at {address} cannot be joined ({str(error).splitlines()[0]}); {token}") from None
        self.address = ray.get_runtime_context().gcs_address

    def _start_private(self, quiet: dict[str, Any]) -> None:
        """A Ray for this server alone."""
        plan, cores = self._plan, os.cpu_count() or 1
        needed = plan.cluster.most * plan.options["threads"]
        if needed > cores:
            self.tell(Notice(f"{plan.cluster.most} engines with {needed} threads share {cores} CPUs"))
        ray.init(
            address="local",
            num_cpus=max(cores, needed),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(private_folder(plan.name)),
            **quiet,
        )
        self.address = ray.get_runtime_context().gcs_address
        record_private(plan.name, self.address)

    def _deploy(self) -> None:
        plan, cluster = self._plan, self._plan.cluster
        threads = plan.options["threads"]
        gpus = int(plan.options.get("device") == "cuda")
        for resource, per_engine in (("CPU", threads), ("GPU", gpus)):
            there = ray.cluster_resources().get(resource, 0)
            needed = (cluster.prefill_replicas or 0) + cluster.answering
            if needed * per_engine > there:
                fewer = "fewer engines or --threads" if resource == "CPU" else "fewer engines"
                self.tell(
                    Notice(
                        f"{needed} engines need {needed * per_engine} {resource}s and Ray has {there:g}: those without "
                        f"wait until there are more, or give {fewer}"
                    )
                )
        targets = [
            serve.api.RunTarget(self._application(kind), name=app, route_prefix=None)
            for kind, app in self._apps.items()
        ]
        serve.run_many(targets, wait_for_applications_running=False)

    def _application(self, kind: str) -> Any:
        """The replicas of one kind."""
        plan, cluster = self._plan, self._plan.cluster
        options, replicas = plan.options, cluster.answering
        scaled: dict[str, Any] = {}
        if kind == PREFILLS:
            replicas = cluster.prefill_replicas or 1
        if cluster.max_replicas is not None and kind == ENGINES:
            scaled["autoscaling_config"] = AutoscalingConfig(
                min_replicas=replicas,
                max_replicas=cluster.max_replicas,
                target_ongoing_requests=cluster.target_requests,
                upscale_delay_s=cluster.upscale_delay,
                downscale_delay_s=cluster.downscale_delay,
                look_back_period_s=2.0,
                metrics_interval_s=1.0,
                policy=AutoscalingPolicy(policy_function=scaling.by_sequences),
            )
        else:
            scaled["num_replicas"] = replicas
        deployment: Any = serve.deployment(
            EngineReplica,
            name=kind,
            ray_actor_options={
                "num_cpus": options["threads"],
                "num_gpus": int(options.get("device") == "cuda"),
            },
            max_ongoing_requests=100,
            graceful_shutdown_timeout_s=1.0,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1.0,
            health_check_timeout_s=5.0,
            request_router_config=RequestRouterConfig(request_router_class=Directory),  # type: ignore[arg-type]
            **scaled,
        )
        host = "127.0.0.1" if self._is_private else None
        return deployment.bind(plan.model, options, self._secret, host)

    # Replicas

    async def follow(self) -> None:
        """Tell the front of the replicas that run, until its socket closes or Ray is silent."""
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[tuple[str, set[str]]]()
        handles = {}
        for kind, app in self._apps.items():

            def note(names: set[str], kind: str = kind) -> None:
                loop.call_soon_threadsafe(changes.put_nowait, (kind, names))

            listen_to(app, note)
            handles[kind] = serve.get_app_handle(app)
        watching = [asyncio.create_task(self._wait_for_first(handles)), asyncio.create_task(self._watch_ray())]
        front_gone: asyncio.Future[Any] = loop.run_in_executor(None, self._connection.recv, 1)
        while not front_gone.done():
            change = asyncio.ensure_future(changes.get())
            waited: list[asyncio.Future[Any]] = [change, front_gone, *watching]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in watching if task.done()]:
                watching.remove(task)
                task.result()
            if change.done():
                kind, names = change.result()
                await self._take(kind, names, handles[kind])
            else:
                change.cancel()
        for task in watching:
            task.cancel()

    async def _take(self, kind: str, names: set[str], handle: Any) -> None:
        for name in [name for name, known in self._known.items() if known == kind and name not in names]:
            del self._known[name]
            self.tell(Left(name))
        for name in names - self._known.keys():
            try:
                description = await asyncio.wait_for(handle.describe.remote(name), 10.0)
            except Exception as error:  # it has ended already
                self.tell(Notice(f"replica {name} does not say where it listens: {type(error).__name__}"))
                continue
            if not isinstance(description, LoadFailed):
                self._known[name] = kind
                self.tell(Joined(name, kind, description.address))

    async def _wait_for_first(self, handles: dict[str, Any]) -> None:
        """Tell the front what is served as soon as an engine of each kind runs; and meanwhile what is missing."""
        answers_ = {kind: asyncio.ensure_future(_described(handle)) for kind, handle in handles.items()}
        while True:
            _, waiting = await asyncio.wait(answers_.values(), timeout=_SAY_EVERY)
            if not waiting:
                break
            missing = ", ".join(kind for kind, answer in answers_.items() if not answer.done())
            free = ray.available_resources().get("CPU", 0)
            self.tell(Notice(f"none of the {missing} has loaded its model yet; Ray has {free:g} CPUs free"))
        for answer in answers_.values():
            description = answer.result()
            if isinstance(description, LoadFailed):
                self.tell(description)
                return
        first = answers_[ENGINES].result()
        self.tell(Running(first.ready, first.secret, tuple(handles)))

    async def _watch_ray(self) -> None:
        """End this process when Ray does not answer any more."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            if await asyncio.to_thread(self._is_alive):
                since = time.monotonic()
            elif time.monotonic() - since > _RAY_SILENT:
                self.tell(Notice(f"Ray at {self.address} does not answer"))
                os._exit(1)

    def _is_alive(self) -> bool:
        """Whether Ray's control answers, and a node runs where engines can start."""
        return answers(self.address) and any(node["Alive"] for node in ray.nodes())

    def stop(self) -> None:
        """The front has ended: end what was started for it."""
        cluster = self._plan.cluster
        if self._is_private or (cluster.attach is None and not cluster.keep_engines):
            for app in self._apps.values():
                serve.delete(app, _blocking=not self._is_private)
        ray.shutdown()
        if self._is_private:
            clear_private(self._plan.name)


async def _described(handle: Any) -> Any:
    return await handle.describe.remote(None)


def main() -> None:
    """The process's entry point. Its one argument is the file descriptor of the socket to the front."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the front decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    inbox, received = Inbox(), list[Any]()
    while not received:
        data = connection.recv(1 << 16)
        if not data:
            return
        received = inbox.feed(data)
    keeper = Keeper(connection, received[0])
    try:
        keeper.start()
        asyncio.run(keeper.follow())
    except ForgeError as error:
        keeper.tell(LoadFailed(str(error), error.exit_code))
    finally:
        keeper.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
