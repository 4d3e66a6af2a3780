"""`forge serve --replicas`: replicas on Ray Serve, and the HTTP server of `forge serve` in front of them.

The server runs in the process of the command and calls the replicas through Serve's handles, which route. So a request
makes one hop, and all that `forge serve` promises of HTTP (keys, limits, slow clients, SIGTERM) is the same code. Ray
Serve starts the replicas, checks and restarts them, and scales them. On a cluster, `ray start` comes first and the
command joins it; otherwise Ray runs on this machine for as long as the command does.
"""

import os

# Both are read when Ray Serve is imported. A request then stays on one loop in each process.
os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # of a Ray that is started here: an engine is no background work

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from forge.cluster.client import ClusterClient
from forge.cluster.fleet import Fleet
from forge.cluster.options import ClusterOptions
from forge.cluster.replica import EngineReplica
from forge.cluster.routers import new_router
from forge.cluster.routing import forget_routings
from forge.cluster.serve_router import router_options
from forge.errors import UsageError
from forge.server.messages import Ready
from forge.server.serving import listen, serve_client
from forge.server.settings import Settings
from forge.trace.records import StepRecord

ENGINES, PREFILLS = "forge-engines", "forge-prefill"
_OBJECT_STORE_BYTES = 512 << 20
"""Room for hand-overs on a Ray that this command starts."""
_HANDOFF_BLOCKS = 1 << 16
"""Of a decode engine's host pool: what is handed over waits there. It takes memory for as long as it does."""
_MORE_THAN_ANY_QUEUE = 100_000
"""Requests of one replica: its engine queues them, so Serve has nothing to hold back."""


@contextmanager
def cluster(
    model: str, options: dict[str, Any], wanted: ClusterOptions, grace: float = 10.0
) -> Iterator[ClusterClient]:
    """Replicas of a model that run, and a client of them, to be used on one loop. `options`: as for `LLM`.

    At the end the replicas end, and Ray too if it was started here.
    """
    cores = os.cpu_count() or 1
    options = options | {"threads": options.get("threads") or max(1, cores // wanted.most)}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    is_ours = _connect(wanted, max(cores, wanted.most * options["threads"]))
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        engines = _deploy(ENGINES, model, options, wanted.answering, wanted, grace)
        prefills = None
        if wanted.prefill_replicas:
            prefills = _deploy(PREFILLS, model, options, wanted.prefill_replicas, wanted, grace)
        yield ClusterClient(engines, prefills)
    finally:
        forget_routings()
        if not is_ours:
            for name in (ENGINES, PREFILLS):
                serve.delete(name)
        ray.shutdown()


def _connect(wanted: ClusterOptions, num_cpus: int) -> bool:
    """Join a Ray cluster, or start one on this machine; whether it was started."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if wanted.ray_address != "local":
        try:
            ray.init(address=wanted.ray_address or "auto", **quiet)
            return False
        except ConnectionError as error:
            if wanted.ray_address is not None:
                raise UsageError(f"there is no Ray cluster at {wanted.ray_address}: {error}") from None
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        **quiet,
    )
    return True


def _deploy(
    name: str, model: str, options: dict[str, Any], replicas: int, wanted: ClusterOptions, grace: float
) -> DeploymentHandle:
    """Start the replicas of one kind, and wait until they are there."""
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if wanted.max_replicas is not None and name == ENGINES:
        # Each replica always has one request more: the stream by which the server follows it.
        autoscaling = AutoscalingConfig(
            min_replicas=replicas,
            max_replicas=wanted.max_replicas,
            target_ongoing_requests=wanted.target_requests + 1,
        )
        scaling = {"autoscaling_config": autoscaling}
    router = wanted.router
    if wanted.prefill_replicas and name == ENGINES:
        # Prompts go where their prefix is. What decodes elsewhere comes with its blocks, wherever it goes.
        router, options = "least-tokens", options | {"num_host_blocks": _HANDOFF_BLOCKS}
    resources = {"num_cpus": options["threads"], "num_gpus": int(options.get("device") == "cuda")}
    deployment: Any = serve.deployment(
        EngineReplica,
        name=name,
        ray_actor_options=resources,
        max_ongoing_requests=_MORE_THAN_ANY_QUEUE,
        graceful_shutdown_timeout_s=grace,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(**router_options(router)),
        **scaling,
    )
    return serve.run(deployment.bind(_own_name, model, options), name=name, route_prefix=None)


def _own_name() -> str:
    """What Serve calls the replica that this runs in."""
    return serve.get_replica_context().replica_id.unique_id


def serve_cluster(
    model: str,
    options: dict[str, Any],
    settings: Settings,
    wanted: ClusterOptions,
    live: Callable[[Ready], Callable[[StepRecord], None]] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve from replicas until a signal; return the exit status. As `forge.server.serving.serve`."""
    if new_router(wanted.router, Fleet()).needs_events and options.get("kv") != "prefix":
        raise UsageError(f"--router {wanted.router} reads what prefix caches tell: give --kv prefix, or another router")
    listening = listen(settings)
    try:
        with cluster(model, options, wanted, settings.limits.grace) as client:
            return asyncio.run(_serve(client, settings, listening, live, on_ready))
    finally:
        listening.close()


async def _serve(client: ClusterClient, settings: Settings, listening: Any, live: Any, on_ready: Any) -> int:
    try:
        ready = await client.ready()
        client.on_record = live(ready) if live is not None else None
        return await serve_client(client, ready, settings, listening, on_ready)
    finally:
        await client.leave()
