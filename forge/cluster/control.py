"""What runs on Ray, and how that is changed: what a front, its keeper and `forge engines` tell each other.

The keeper is the one process of a front that knows Ray. To change how many engines there are, or which model they load,
`forge engines NAME` asks the server's front over a socket in the server's folder. The front passes the change on to its
keeper, which tells Ray Serve: one new engine at a time, before an old one goes, and one that goes finishes what it has.
The new model must look like the old one to a front, which has told its clients of the tokenizer and the context.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from forge.cluster.options import ClusterOptions
from forge.cluster.ray_address import server_folder
from forge.cluster.wire import Address
from forge.errors import ForgeError, UsageError
from forge.server.messages import LoadFailed, Ready

_SOCKET = "control"


class Deployment(NamedTuple):
    """To the keeper: what is to run on Ray, from now on."""

    name: str
    model: str
    options: dict[str, Any]
    """As for `LLM`."""
    cluster: ClusterOptions
    address: str | None = None
    """Of Ray; None for one that is to be started in the server's private folder."""
    again: bool = False
    """Whether a keeper before this one has started it: what still runs is taken over."""


class Running(NamedTuple):
    """From the keeper: the first engines run."""

    ready: Ready
    secret: bytes
    kinds: tuple[str, ...]


class Joined(NamedTuple):
    """From the keeper: a replica runs, and its engine listens."""

    name: str
    kind: str
    address: Address
    version: str
    """Of its model."""


class Left(NamedTuple):
    """From the keeper: a replica has ended, or begins to."""

    name: str


class Changed(NamedTuple):
    """From the keeper: what runs on Ray is what was asked for last."""

    failure: str | None = None
    """Why it is still what it was before."""


class Notice(NamedTuple):
    """From the keeper: a line for the log."""

    text: str


class Change(NamedTuple):
    """What is to be different."""

    replicas: int | None = None
    """Engines that answer; with autoscaling, at least."""
    model: str | None = None


def changed(deployment: Deployment, change: Change) -> Deployment:
    """The deployment with a change. Raises `UsageError` for one that has no meaning."""
    cluster = deployment.cluster
    if change.replicas is not None:
        which: dict[str, Any] = {"replicas" if cluster.decode_replicas is None else "decode_replicas": change.replicas}
        cluster = replace(cluster, **which)
    return deployment._replace(cluster=cluster, model=change.model or deployment.model)


def version_of(model: str, options: dict[str, Any]) -> str:
    """The same for the same model with the same options, and another one for a file that has changed."""
    path = Path(model)
    state = [(file.stat().st_size, file.stat().st_mtime_ns) for file in (path,) if file.exists()]
    return sha256(repr((model, sorted(options.items()), state)).encode()).hexdigest()[:16]


def interface_of(ready: Ready) -> dict[str, Any]:
    """What a front relies on, by what a person calls it."""
    spec = {field.name: getattr(ready.tokenizer_spec, field.name) for field in fields(ready.tokenizer_spec)}
    del spec["key_prefix"]  # where it was read
    spec |= {"token_types": spec["token_types"].tolist(), "special_ids": sorted((spec["special_ids"] or {}).items())}
    return {
        "tokenizer": sha256(repr((ready.tokenizer_type, spec)).encode()).hexdigest(),
        "context": ready.max_model_len,
        "KV cache": (ready.kv, ready.block_size),
        "kind of embeddings": ready.pooling,
        "labels": ready.labels,
    }


def check_interface(known: dict[str, Any], ready: Ready) -> None:
    """Raises `UsageError` for a model that fronts do not expect."""
    differing = [name for name, value in interface_of(ready).items() if value != known[name]]
    if differing:
        differences = " and ".join(f"another {name}" for name in differing)
        raise UsageError(f"the new model has {differences}: start a server of its own for it")


# The socket


async def listen_for_changes(name: str, make: Callable[[Change], Awaitable[None]]) -> asyncio.Server:
    """Take changes of the server called `name`, one at a time. make: makes one, or raises the `ForgeError` that says
    why not."""
    lock = asyncio.Lock()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {}
        try:
            change = Change(**json.loads(await reader.readline()))
            async with lock:
                await make(change)
        except ForgeError as error:
            answer = LoadFailed(str(error), error.exit_code)._asdict()
        except (ValueError, TypeError) as error:
            answer = LoadFailed(f"no change: {error}", UsageError.exit_code)._asdict()
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(take, server_folder(name) / _SOCKET)


def ask_for_change(name: str, change: Change) -> None:
    """Let the server called `name` make a change, and wait until that is done. Raises the `ForgeError` that says why it
    is not, after which the engines are those of before."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(server_folder(name) / _SOCKET))
    except OSError:
        raise UsageError(f"no server called {name} runs on this machine: ask where it was started") from None
    with connection, connection.makefile("rw") as stream:
        stream.write(json.dumps(change._asdict()) + "\n")
        stream.flush()
        line = stream.readline()
    if not line:
        raise ForgeError(f"the server {name} has ended before its engines were changed")
    answer = json.loads(line)
    if answer:
        raise LoadFailed(**answer).error()
