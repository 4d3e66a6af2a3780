"""Which Ray a server uses: one that was asked for, one that `ray start` made, or a private one of its own.

Another command joins a private Ray only if it names its server (`--attach`). The folder of a private Ray, which has the
server's name and which only its user may read, holds its address and the token without which Ray answers nothing; Ray
itself listens on all of the machine's addresses.
"""

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from forge.cluster.options import ClusterOptions
from forge.errors import UsageError

ANSWER_SECONDS = 2.0
"""How long an address that was not asked for has to answer."""
_ADDRESS, _TOKEN = "address", "token"


class RayPlace(NamedTuple):
    """Where the engines run."""

    address: str | None
    """The Ray to join; None for a private one that is to be started."""
    environment: dict[str, str]
    """What a process that talks to it must have in its environment when it imports Ray."""


def choose_ray(name: str, cluster: ClusterOptions, again: bool = False) -> RayPlace:
    """The Ray of a server called `name`. again: whether the server itself has run before this. Raises `UsageError` for
    a name that is taken, and for what does not answer."""
    running = private_address(name)
    if cluster.attach is not None and running is not None:
        return RayPlace(running, private_environment(name))
    if running is not None and not again:
        raise name_taken(name)
    address = shared_address(cluster.ray_address)
    if address is not None:
        return RayPlace(address, {})
    if cluster.attach is not None:
        raise UsageError(f"no server called {name} runs on this machine: without --attach one starts")
    if cluster.keep_engines:
        raise UsageError("--keep-engines needs a Ray that outlives this command: ray start --head makes one")
    prepare_private(name)
    return RayPlace(None, private_environment(name))


def name_taken(name: str) -> UsageError:
    return UsageError(f"a server called {name} runs already: --attach {name} shares its engines, --name names another")


def answers(address: str) -> bool:
    """Whether a Ray answers at `host:port`: it opens a channel and not only a connection."""
    import grpc  # type: ignore[import-untyped]  # comes with Ray

    channel = grpc.insecure_channel(address)
    try:
        grpc.channel_ready_future(channel).result(ANSWER_SECONDS)
        return True
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()


def private_folder(name: str) -> Path:
    """Where the private Ray of a server has its files. Short, because sockets lie in it."""
    return Path(tempfile.gettempdir()) / f"forge-ray-{os.getuid()}" / name


def private_address(name: str) -> str | None:
    """The address of the private Ray of a server that runs; None where there is none."""
    try:
        address = (private_folder(name) / _ADDRESS).read_text().strip()
    except OSError:
        return None
    return address if address and answers(address) else None


def private_environment(name: str) -> dict[str, str]:
    """How to talk to the private Ray of a server."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(private_folder(name) / _TOKEN)}


def prepare_private(name: str) -> None:
    """Make the folder of a private Ray, with a token of its own; what an earlier one has left there goes."""
    folder = private_folder(name)
    remove_private(name)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)
    with open(folder / _TOKEN, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))


def record_private(name: str, address: str) -> None:
    """A private Ray runs."""
    (private_folder(name) / _ADDRESS).write_text(address)


def remove_private(name: str) -> None:
    """A private Ray has ended."""
    shutil.rmtree(private_folder(name), ignore_errors=True)


def shared_address(asked: str | None) -> str | None:
    """The address of the Ray to join; None for a private one.

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
