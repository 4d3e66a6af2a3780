"""Which Ray a server uses: names are its own, private stays private, and what does not answer is passed over."""

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from forge.cluster import ray_address
from forge.cluster.options import ClusterOptions
from forge.cluster.ray_address import (
    choose_ray,
    clear_folder,
    record_address,
    release_lock,
    server_folder,
    take_lock,
)
from forge.errors import UsageError

OPTIONS = ClusterOptions(replicas=1)
ANSWERS = ray_address.answers


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine of its own, on which the addresses of the set answer that is returned."""
    running: set[str] = set()
    monkeypatch.setattr(ray_address.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_address, "answers", running.__contains__)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return running


@pytest.fixture
def record(tmp_path):
    """The file in which `ray start` notes its address."""
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def start_private(name: str, running: set[str]) -> int:
    """The descriptor that locks its name."""
    place = choose_ray(name, OPTIONS)
    assert place.address is None and place.lock is not None
    record_address(name, "10.0.0.1:1")
    running.add("10.0.0.1:1")
    return place.lock


def test_a_ray_that_has_died_and_was_not_asked_for_is_passed_over(machine, record):
    record.write_text("10.0.0.1:6379")
    assert choose_ray("one", OPTIONS).address is None
    machine.add("10.0.0.1:6379")
    assert choose_ray("two", OPTIONS).address == "10.0.0.1:6379"


def test_a_ray_that_was_asked_for_must_answer(machine, monkeypatch):
    for options in (ClusterOptions(ray_address="10.0.0.1:6379"), OPTIONS):
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        with pytest.raises(UsageError, match=r"no Ray cluster at 10\.0\.0\.1:6379: it does not answer within 2 s"):
            choose_ray("one", options)
    machine.add("10.0.0.1:6379")
    assert choose_ray("one", OPTIONS).address == "10.0.0.1:6379"
    assert choose_ray("two", ClusterOptions(ray_address="local")).address is None
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(UsageError, match="ray start --head makes one"):
        choose_ray("three", OPTIONS)


def test_another_server_never_joins_a_private_ray(machine):
    start_private("one", machine)
    assert choose_ray("two", OPTIONS).address is None


def test_a_name_is_taken_until_its_server_has_ended_whether_or_not_its_ray_answers(machine):
    lock = start_private("one", machine)
    for _ in range(2):
        with pytest.raises(UsageError, match="one runs already: --attach one shares its engines, --name names another"):
            choose_ray("one", OPTIONS)
        machine.clear()  # it is too busy to answer
    again = choose_ray("one", OPTIONS, lock)
    assert (again.address, again.lock) == (None, lock), "its own server may start another Ray"
    os.close(lock)  # it was killed
    assert choose_ray("one", OPTIONS).address is None


def test_the_keeper_of_a_killed_front_still_holds_its_name(machine):
    lock = start_private("one", machine)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock]) as keeper:
        os.close(lock)
        with pytest.raises(UsageError, match="one runs already"):
            choose_ray("one", OPTIONS)
        keeper.stdin.close()
        keeper.wait(30)
    assert choose_ray("one", OPTIONS).address is None


def test_a_folder_that_is_removed_while_it_is_being_locked_is_made_again(machine, monkeypatch):
    taken, flock = [], fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(descriptor)
            shutil.rmtree(server_folder("one"))
        flock(descriptor, operation)

    monkeypatch.setattr(ray_address.fcntl, "flock", remove_first)
    lock = take_lock("one")
    assert os.path.samestat(os.fstat(lock), os.stat(server_folder("one")))


def test_attach_joins_the_private_ray_of_that_name_with_its_token(machine):
    start_private("one", machine)
    place = choose_ray("one", ClusterOptions(attach="one"))
    assert place.address == "10.0.0.1:1" and place.environment["RAY_AUTH_MODE"] == "token"
    with pytest.raises(UsageError, match="no server called two runs on this machine"):
        choose_ray("two", ClusterOptions(attach="two"))


def test_attach_waits_for_a_ray_that_starts_again(machine, monkeypatch):
    start_private("one", machine)
    clear_folder("one")
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: record_address("one", "10.0.0.1:1"))
    monkeypatch.setattr(ray_address, "time", clock)  # other threads sleep too
    assert choose_ray("one", ClusterOptions(attach="one")).address == "10.0.0.1:1"
    machine.clear()
    monkeypatch.setattr(ray_address, "RESTART_SECONDS", 0.0)
    with pytest.raises(UsageError, match="the Ray of the server one has not answered for 0 s"):
        choose_ray("one", ClusterOptions(attach="one"))


def test_each_private_ray_has_a_token_that_only_its_user_reads(machine):
    tokens = set()
    for name in ("one", "two"):
        lock = choose_ray(name, OPTIONS).lock
        token = server_folder(name) / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(server_folder(name).stat().st_mode) == 0o700
        tokens.add(token.read_text())
    assert len(tokens) == 2 and min(map(len, tokens)) == 64
    release_lock("two", lock)
    assert not server_folder("two").exists()


def test_attach_finds_a_server_on_a_shared_ray_by_its_name_too(machine, record):
    record.write_text("10.0.0.1:6379")
    machine.add("10.0.0.1:6379")
    place = choose_ray("one", OPTIONS)
    assert place.address == "10.0.0.1:6379" and place.lock is not None and not place.environment
    record_address("one", place.address)
    record.unlink()
    assert choose_ray("one", ClusterOptions(attach="one")) == ("10.0.0.1:6379", {}, None)
    with pytest.raises(UsageError, match="one runs already"):
        choose_ray("one", OPTIONS)


def test_engines_that_outlive_the_command_need_a_ray_that_does(machine):
    with pytest.raises(UsageError, match="--keep-engines needs a Ray that outlives this command"):
        choose_ray("one", ClusterOptions(keep_engines=True))


@pytest.fixture
def serve_grpc(machine, monkeypatch):
    """A function that starts a gRPC server and returns its address. handle: of the question whether a GCS lives."""
    grpc = pytest.importorskip("grpc", reason="comes with Ray")
    monkeypatch.setattr(ray_address, "answers", ANSWERS)
    monkeypatch.setattr(ray_address, "ANSWER_SECONDS", 0.5)
    servers = []

    def serve(handle=None) -> str:
        server = grpc.server(ThreadPoolExecutor(1))
        servers.append(server)
        if handle is not None:
            handlers = {"CheckAlive": grpc.unary_unary_rpc_method_handler(handle)}
            service = grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)
            server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield serve
    for server in servers:
        server.stop(None)


def test_a_port_that_takes_connections_and_says_nothing_is_no_ray(serve_grpc):
    """As a GCS that stands still."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not ray_address.answers(f"127.0.0.1:{silent.getsockname()[1]}")


def test_a_grpc_server_that_is_no_gcs_is_no_ray(serve_grpc):
    """As a raylet: `ray.init` would wait for minutes there."""
    address = serve_grpc()
    assert not ray_address.answers(address)
    with pytest.raises(UsageError, match=f"no Ray cluster at {address}"):
        choose_ray("one", ClusterOptions(ray_address=address))


def test_a_gcs_answers_also_by_asking_for_its_token(serve_grpc):
    import grpc

    assert ray_address.answers(serve_grpc(lambda request, context: b""))
    assert ray_address.answers(serve_grpc(lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "token")))
    assert not ray_address.answers(serve_grpc(lambda _, context: context.abort(grpc.StatusCode.UNAVAILABLE, "starts")))
