"""The process of a front that knows Ray: it starts the engines, and tells the front which run and where they listen.

Ray Serve starts, places, checks, restarts and scales the replicas; requests do not pass it. The front goes on while the
keeper or Ray is gone, and starts another keeper. The process ends when the front's end of its socket closes, and takes
with it what it started.
"""

import asyncio
import logging
import os
import re
import secrets
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # of a Ray that is started here: an engine is no background work
os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")  # an engine goes on when Ray has ended
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from forge.cluster import control
from forge.cluster.client import ENGINES, PREFILLS
from forge.cluster.directory import Directory, listen_to
from forge.cluster.ray_address import answers, clear_folder, name_taken, record_address, server_folder
from forge.cluster.replica import DRAIN_SECONDS, EngineReplica, scale_by_sequences
from forge.cluster.wire import starters_socket
from forge.errors import ForgeError, UsageError
from forge.server.messages import Inbox, LoadFailed, frame, received

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_OBJECT_STORE_BYTES = 80 << 20
"""Of a private Ray. No request uses it."""
_SAY_EVERY = 10.0
"""Seconds between two lines about what is waited for."""
_RAY_SILENT = 10.0
"""Seconds without an answer of Ray after which this process ends, for another one to start."""


class Keeper:
    """Starts and watches Ray and its engines for one front."""

    def __init__(self, connection: socket.socket, deployment: control.Deployment):
        self._connection, self._plan = connection, deployment
        self._lock = threading.Lock()
        self._is_private = deployment.address is None
        self._apps: dict[str, str] = {}
        """From a kind of engine to the name of its application."""
        self._known: dict[str, control.Joined] = {}
        """The replicas that the front knows."""
        self._interface: dict[str, Any] | None = None
        """What fronts know of the model."""
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
        if self._is_private:
            self._start_private()
        else:
            self._join()
        self.address = ray.get_runtime_context().gcs_address
        if cluster.attach is None:
            record_address(plan.name, self.address)
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
            raise name_taken(name)
        if cluster.prefill_replicas:
            self._apps[PREFILLS] = f"{name}-prefill"
        self._deploy()

    def _join(self) -> None:
        """Connect to a Ray that runs already."""
        address = self._plan.address
        variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}
        try:  # processes of a Ray that runs already have its environment, and not this one's
            ray.init(address=address, runtime_env={"env_vars": variables} if variables else None, **_QUIET)
        except (ConnectionError, RuntimeError) as error:
            token = "it may need its token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            raise UsageError(f"Ray at {address} cannot be joined ({str(error).splitlines()[0]}); {token}") from None

    def _start_private(self) -> None:
        """Start a Ray for this server alone."""
        plan, cores = self._plan, os.cpu_count() or 1
        needed = plan.cluster.most * plan.options["threads"]
        if needed > cores:
            self.tell(control.Notice(f"{plan.cluster.most} engines with {needed} threads share {cores} CPUs"))
        ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(server_folder(plan.name)),
            **_QUIET,
        )

    def _deploy(self) -> None:
        """Tell Serve what is to run. Engines that run already with the same version of the model stay."""
        cluster, there = self._plan.cluster, ray.cluster_resources()
        needed = (cluster.prefill_replicas or 0) + cluster.answering
        for resource, number in (("CPU", self._num_cpus), ("GPU", self._num_gpus)):
            if needed * number > there.get(resource, 0):
                fewer = "fewer engines or --threads" if resource == "CPU" else "fewer engines"
                lack = f"{needed} engines need {needed * number} {resource}s and Ray has {there.get(resource, 0):g}"
                self.tell(control.Notice(f"{lack}: those without wait until there are more, or give {fewer}"))
        targets = [
            serve.api.RunTarget(self._application(kind), name=app, route_prefix=None)
            for kind, app in self._apps.items()
        ]
        serve.run_many(targets, wait_for_applications_running=False)

    @property
    def _num_cpus(self) -> int:
        """Of an engine, for Ray to set aside. A private Ray has one machine, whose CPUs its engines share."""
        return 0 if self._is_private else self._plan.options["threads"]

    @property
    def _num_gpus(self) -> int:
        return int(self._plan.options.get("device") == "cuda")

    def _application(self, kind: str) -> Any:
        """Build the Ray application of one kind of replica."""
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
                policy=AutoscalingPolicy(policy_function=scale_by_sequences),
            )
        else:
            scaled["num_replicas"] = replicas
        deployment: Any = serve.deployment(
            EngineReplica,
            name=kind,
            ray_actor_options={"num_cpus": self._num_cpus, "num_gpus": self._num_gpus},
            max_ongoing_requests=100,
            max_surge_percent=1,  # one engine more than there should be, while they are replaced
            max_constructor_retry_count=2,  # a model that does not load twice does not load
            graceful_shutdown_timeout_s=DRAIN_SECONDS + 1.0,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1.0,
            health_check_timeout_s=5.0,
            request_router_config=RequestRouterConfig(request_router_class=Directory),  # type: ignore[arg-type]
            **scaled,
        )
        # Serve replaces the replicas of another version. It would take every deployment for another one.
        version = control.version_of(plan.model, options)
        host = "127.0.0.1" if self._is_private else None
        settings = plan.model, options, self._secret, host, version, self._interface
        return deployment.options(version=version, _internal=True).bind(*settings)

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
        front_gone = asyncio.create_task(self._take_changes())
        try:
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
        finally:
            for task in watching:
                task.cancel()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)  # ends the thread that reads

    async def _take(self, kind: str, names: set[str], handle: Any) -> None:
        for name in names - self._known.keys():
            try:
                description = await asyncio.wait_for(handle.describe.remote(name), 10.0)
            except Exception as error:  # it has ended already
                self.tell(control.Notice(f"replica {name} does not say where it listens: {type(error).__name__}"))
                continue
            if not isinstance(description, LoadFailed):
                self._known[name] = control.Joined(name, kind, description.address, description.version)
                self.tell(self._known[name])
        for name in [name for name, known in self._known.items() if known.kind == kind and name not in names]:
            del self._known[name]
            self.tell(control.Left(name))

    # Changes

    async def _take_changes(self) -> None:
        """Carry out what the front asks for, until it has ended."""
        inbox, changes = Inbox(), set[asyncio.Task[None]]()
        while data := await asyncio.to_thread(self._connection.recv, 1 << 16):
            for deployment in inbox.feed(data):
                task = asyncio.create_task(self._change(deployment))
                changes.add(task)
                task.add_done_callback(changes.discard)
        for task in changes:
            task.cancel()

    async def _change(self, plan: control.Deployment) -> None:
        """Let something else run on Ray, or again what ran before, where that cannot be."""
        before, self._plan = self._plan, plan
        try:
            await asyncio.to_thread(self._deploy)
            await self._settle()
        except Exception as error:
            self._plan = before
            await asyncio.to_thread(self._deploy)
            why = str(error) if isinstance(error, ForgeError) else f"Ray has failed at it: {error!r:.300}"
            self.tell(control.Changed(why))
        else:
            self.tell(control.Changed())

    async def _settle(self) -> None:
        """Wait until the plan runs, as long as something happens. Raises the `ForgeError` of what does not
        start."""
        plan, running = self._plan, dict[str, control.Joined]()
        version, least = control.version_of(plan.model, plan.options), plan.cluster.answering
        deadline = time.monotonic() + plan.cluster.start_timeout
        while time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            if self._known != running:
                running, deadline = dict(self._known), time.monotonic() + plan.cluster.start_timeout
            applications = (await asyncio.to_thread(serve.status)).applications
            states = [applications[name] for name in self._apps.values()]
            for state in states:
                if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise ForgeError(_why_failed(state))
            num_engines = sum(replica.kind == ENGINES for replica in running.values())
            is_right = num_engines >= least if plan.cluster.max_replicas is not None else num_engines == least
            versions = {replica.version for replica in running.values()}
            if is_right and versions == {version} and all(state.status == "RUNNING" for state in states):
                return
        raise ForgeError(f"no engine has started for {plan.cluster.start_timeout:g} s: has Ray CPUs or GPUs left?")

    async def _wait_for_first(self, handles: dict[str, Any]) -> None:
        """Tell the front what is served as soon as an engine of each kind runs; and meanwhile what is missing."""
        answers_ = {kind: asyncio.ensure_future(handle.describe.remote(None)) for kind, handle in handles.items()}
        timeout = self._plan.cluster.start_timeout
        deadline = time.monotonic() + timeout
        while True:
            _, waiting = await asyncio.wait(answers_.values(), timeout=min(_SAY_EVERY, timeout))
            if not waiting:
                break
            missing = ", ".join(kind for kind, answer in answers_.items() if not answer.done())
            free = ray.available_resources().get("CPU", 0)
            lack = f"none of the {missing} has loaded its model"
            if time.monotonic() >= deadline:
                needs = f"one needs {self._num_cpus}, and Ray has {free:g} CPUs free"
                message = f"{lack} in {timeout:g} s ({needs}): --start-timeout gives them longer"
                self.tell(LoadFailed(message))
                return
            self.tell(control.Notice(f"{lack} yet; Ray has {free:g} CPUs free"))
        for answer in answers_.values():
            description = answer.result()
            if isinstance(description, LoadFailed):
                self.tell(description)
                return
        first = answers_[ENGINES].result()
        self._interface, self._secret = control.interface_of(first.ready), first.secret
        self.tell(control.Running(first.ready, first.secret, tuple(handles)))

    async def _watch_ray(self) -> None:
        """End this process when Ray does not answer any more."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            if await asyncio.to_thread(self._is_alive):
                since = time.monotonic()
            elif time.monotonic() - since > _RAY_SILENT:
                self.tell(control.Notice(f"Ray at {self.address} does not answer"))
                os._exit(1)

    def _is_alive(self) -> bool:
        """Return whether Ray's control answers, and a node runs where engines can start."""
        return answers(self.address) and any(node["Alive"] for node in ray.nodes())

    def stop(self) -> None:
        """End what was started for a front that has ended."""
        cluster = self._plan.cluster
        if self._is_private or (cluster.attach is None and not cluster.keep_engines):
            for app in self._apps.values():
                serve.delete(app, _blocking=not self._is_private)
        ray.shutdown()
        if self._is_private:
            clear_folder(self._plan.name)


def _why_failed(state: Any) -> str:
    """What an application's status says of a replica that did not start, in one line."""
    messages = [state.message, *[deployment.message for deployment in state.deployments.values()]]
    failures = re.findall(r"ReplicaFailed: (.*)", "\n".join(messages))
    return failures[-1] if failures else f"the engines do not start: {' '.join(' '.join(messages).split())[-300:]}"


def end_with_front(connection: socket.socket, has_started: threading.Event) -> None:
    """End this process when the front ends before Ray has answered, which `ray.init` may wait for in vain. Blocks."""
    hung_up = select.poll()
    hung_up.register(connection, select.POLLRDHUP)
    while not has_started.is_set():
        if hung_up.poll(200):
            os._exit(1)


def main() -> None:
    """Run a keeper, whose one argument is the file descriptor of the socket to the front. The process's entry point."""
    connection = starters_socket()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    deployment: control.Deployment | None = next(received(connection), None)
    if deployment is None:
        return
    keeper, has_started = Keeper(connection, deployment), threading.Event()
    threading.Thread(target=end_with_front, args=(connection, has_started), daemon=True).start()
    try:
        keeper.start()
        has_started.set()
        asyncio.run(keeper.follow())
    except ForgeError as error:
        keeper.tell(LoadFailed(str(error), error.exit_code))
    finally:
        keeper.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
