"""What a keeper tells Ray Serve and its front. Ray is imported, and not started."""

import asyncio
import socket
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from forge.cluster.control import Deployment
from forge.cluster.options import ClusterOptions
from forge.server.messages import Inbox, LoadFailed
from tests.waiting import PATIENCE

with warnings.catch_warnings(action="ignore"):  # Ray's, of its own use of a library
    pytest.importorskip("ray", reason="Ray Serve is not installed: pip install 'ray[serve]'")
    from forge.cluster import keeper as module
    from forge.cluster.keeper import Keeper

OPTIONS = {"threads": 2, "kv": "prefix", "device": "cuda"}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    front, back = socket.socketpair()
    with front, back:
        yield front, back


def deployed(back: socket.socket, address: str | None, **wanted: Any) -> Any:
    """The deployment of the engines that answer."""
    settings: dict[str, Any] = {"model": "hash", "options": OPTIONS, "cluster": ClusterOptions(replicas=2)} | wanted
    application = Keeper(back, Deployment("one", address=address, **settings))._application("engines")
    return application._bound_deployment


def test_an_engine_is_a_ray_resource_of_its_threads_and_its_gpu(ends):
    shared, private = deployed(ends[1], "10.0.0.1:1"), deployed(ends[1], None)
    assert (shared.ray_actor_options["num_cpus"], shared.ray_actor_options["num_gpus"]) == (2, 1)
    assert (private.ray_actor_options["num_cpus"], private.ray_actor_options["num_gpus"]) == (0, 1)
    on_cpus = deployed(ends[1], "10.0.0.1:1", options=OPTIONS | {"device": "cpu"})
    assert on_cpus.ray_actor_options["num_gpus"] == 0


@pytest.mark.parametrize("front_ends", [True, False])
def test_a_keeper_that_ray_does_not_answer_ends_with_its_front(ends, front_ends: bool, monkeypatch):
    front, back = ends
    has_started, statuses = threading.Event(), []

    def end(status: int) -> None:
        statuses.append(status)
        has_started.set()

    monkeypatch.setattr(module.os, "_exit", end)
    watching = threading.Thread(target=module.end_with_front, args=(back, has_started))
    watching.start()
    if front_ends:
        front.close()
    else:
        front.send(b"a change")  # which is read later
        has_started.set()
    watching.join(PATIENCE)
    assert not watching.is_alive() and statuses == [1] * front_ends


def test_serve_replaces_engines_for_another_model_and_not_for_another_number(ends):
    two, three = deployed(ends[1], None), deployed(ends[1], None, cluster=ClusterOptions(replicas=3))
    assert (two.num_replicas, three.num_replicas) == (2, 3) and two.version == three.version
    assert deployed(ends[1], None, model="tales").version != two.version
    assert two._deployment_config.max_surge_percent == 1, "a new engine runs before an old one goes"


def test_delays_of_scaling_are_those_of_the_options(ends):
    cluster = ClusterOptions(replicas=1, max_replicas=4, target_requests=3.0, upscale_delay=2.0, downscale_delay=9.0)
    scaling = deployed(ends[1], None, cluster=cluster)._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 3.0)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (2.0, 9.0)


def test_engines_that_do_not_start_in_time_are_one_line_with_what_ray_has_left(ends, monkeypatch):
    front, back = ends
    monkeypatch.setattr(module.ray, "available_resources", lambda: {"CPU": 1.0})
    cluster = ClusterOptions(replicas=2, start_timeout=0.05)
    keeper = Keeper(back, Deployment("one", "hash", OPTIONS, cluster, "10.0.0.1:1"))

    async def run() -> None:
        never = SimpleNamespace(remote=lambda name: asyncio.Future())
        await asyncio.wait_for(keeper._wait_for_first({"engines": SimpleNamespace(describe=never)}), 30)

    asyncio.run(run())
    (message,) = Inbox().feed(front.recv(1 << 16))
    assert isinstance(message, LoadFailed) and message.message == (
        "none of the engines has loaded its model in 0.05 s (one needs 2, and Ray has 1 CPUs free): "
        "--start-timeout gives them longer"
    )


def test_why_an_update_failed_is_the_line_of_the_engine():
    message = "The deployment failed to start 3 times.\nray.exceptions.RayTaskError\n  File x\n"
    message += "forge.cluster.replica.ReplicaFailed: the new model has another context\n"
    state = SimpleNamespace(message="", deployments={"engines": SimpleNamespace(message=message)})
    assert module._why_failed(state) == "the new model has another context"
    state.deployments = {"engines": SimpleNamespace(message="no node\nhas room")}
    assert module._why_failed(state) == "the engines do not start: no node has room"
