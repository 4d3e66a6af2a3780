"""Which Ray a server uses: one that was asked for, one that `ray start` made, or a private one of its own.

Another command joins a private Ray only if it names its server (`--attach`). A server's folder, which has its name and
which only its user may read, holds the address of its Ray and, of a private one, the token without which that answers
nothing; Ray itself listens on all of the machine's addresses. The server's processes hold a lock on the folder, so a
name is taken exactly as long as one of them lives, however busy Ray is.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from forge.cluster.options import ClusterOptions
from forge.errors import UsageError

ANSWER_SECONDS = 2.0
"""How long an address that was not asked for has to answer."""
RESTART_SECONDS = 60.0
"""How long `--attach` waits for a server whose Ray starts."""
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Ray's own question whether a GCS lives; an empty message asks of no node in particular."""
_ADDRESS, _TOKEN = "address", "token"


class RayPlace(NamedTuple):
    """The Ray where the engines run."""

    address: str | None
    """The Ray to join; None for a private one that is to be started."""
    environment: dict[str, str]
    """What a process that talks to it must have in its environment when it imports Ray."""
    lock: int | None = None
    """The file descriptor that holds the server's name, for every process of the server to inherit; None where the
    name is another server's (`--attach`)."""


def choose_ray(name: str, cluster: ClusterOptions, lock: int | None = None) -> RayPlace:
    """The Ray of a server called `name`. lock: the one that the server holds already, if its Ray is started again.
    Raises `UsageError` for a name that is taken, and for what does not answer."""
    if cluster.attach is not None:
        if is_locked(name):
            return RayPlace(_started_address(name), environment_of(name))
        address = shared_address(cluster.ray_address)
        if address is None:
            raise UsageError(f"no server called {name} runs on this machine: without --attach one starts")
        return RayPlace(address, {})
    taken = take_lock(name) if lock is None else lock
    try:
        address = shared_address(cluster.ray_address)
        if address is None and cluster.keep_engines:
            raise UsageError("--keep-engines needs a Ray that outlives this command: ray start --head makes one")
    except UsageError:
        if lock is None:
            release_lock(name, taken)
        raise
    clear_folder(name)
    if address is None:
        _write_token(name)
    return RayPlace(address, environment_of(name), taken)


def name_taken(name: str) -> UsageError:
    return UsageError(f"a server called {name} runs already: --attach {name} shares its engines, --name names another")


def answers(address: str) -> bool:
    """Return whether the control service of a Ray (GCS) answers at `host:port`. A raylet, or any other gRPC server, has
    no such method. A GCS that wants a token refuses the call, which is an answer."""
    import grpc  # type: ignore[import-untyped]  # comes with Ray

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_CHECK_ALIVE)(b"", timeout=ANSWER_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return True


def server_folder(name: str) -> Path:
    """Where a server has its files, and a private Ray its own. Short, because sockets lie in it."""
    return Path(tempfile.gettempdir()) / f"forge-ray-{os.getuid()}" / name


def take_lock(name: str) -> int:
    """Lock a server's folder, which is made if need be, until every process that inherits the returned descriptor has
    ended. Raises `UsageError` where another server has it."""
    folder = server_folder(name)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise name_taken(name) from None
        if _is_at(folder, descriptor):
            return descriptor
        os.close(descriptor)  # its server ended, and removed it, after it was opened


def is_locked(name: str) -> bool:
    """Whether a server called `name` runs on this machine, or starts."""
    if not server_folder(name).exists():
        return False
    try:
        os.close(take_lock(name))
    except UsageError:
        return True
    return False


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _started_address(name: str) -> str:
    """The address of the Ray of a server that runs. Raises `UsageError` where it does not start in time."""
    deadline = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < deadline:
        try:
            address = (server_folder(name) / _ADDRESS).read_text()
        except OSError:
            address = ""
        if address and answers(address):
            return address
        time.sleep(0.1)
    raise UsageError(f"the Ray of the server {name} has not answered for {RESTART_SECONDS:.0f} s: try again later")


def environment_of(name: str) -> dict[str, str]:
    """How to talk to the Ray of a server, if that is a private one."""
    token = server_folder(name) / _TOKEN
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)} if token.exists() else {}


def _write_token(name: str) -> None:
    with open(server_folder(name) / _TOKEN, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))


def record_address(name: str, address: str) -> None:
    """The Ray of a server runs."""
    part = server_folder(name) / f"{_ADDRESS}.part"
    part.write_text(address)
    part.rename(server_folder(name) / _ADDRESS)


def clear_folder(name: str) -> None:
    """The Ray of a server has ended; the server, which has locked the folder, may start another."""
    for path in server_folder(name).iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def release_lock(name: str, lock: int) -> None:
    """A server ends."""
    shutil.rmtree(server_folder(name), ignore_errors=True)
    os.close(lock)


def shared_address(asked: str | None) -> str | None:
    """Return the address of the Ray to join; None for a private one.

    asked: `--ray-address`, or else RAY_ADDRESS is taken, and both must answer: raises `UsageError` otherwise. An
    address that nothing asked for (the record of `ray start`) is passed over where nothing answers at it.
    """
    named = asked or os.environ.get("RAY_ADDRESS")
    if named == "local":
        return None
    if named:
        if named != "auto" and "://" not in named and not answers(named):
            raise UsageError(f"there is no Ray cluster at {named}: it does not answer within {ANSWER_SECONDS:.0f} s")
        if named != "auto":
            return named
    record = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    try:
        address = record.read_text().strip()
    except OSError:
        address = ""
    if address and answers(address):
        return address
    if named:
        raise UsageError("there is no Ray cluster on this machine: ray start --head makes one")
    return None
