"""Connections between fronts, engines and the actors beside them, and what is said on them.

An engine listens on one TCP port. A peer that connects names its purpose and proves that it knows the server's secret,
and so does the engine (HMAC-SHA256 of a nonce, both ways) before a byte is unpickled. A *front* connection carries the
messages of `forge.server.messages`. A *pulse* connection carries a `Pulse` a few times a second, from a thread of its
own: it goes on while a step takes long, and stops where the process is stopped.

Prefill apart from decode: one engine computes a prompt, and the other takes its blocks from it over one connection. The
front sends the prompt to the first engine, and with its end the request to the second, saying where its beginning lies
(`Source`). The bytes go from engine to engine and never through a front.

An actor and a front start the processes beside them by `start_process`, which end with them.
"""

import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from forge.cluster.events import NO_EVENTS, CacheEvents, Load
from forge.engine.handoff import Emitted, KvHandoff
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.server.messages import Ask, Submit, Update, frame, received

Purpose = Literal["front", "pulse"]
Address = tuple[str, int]

HANDSHAKE_SECONDS = 2.0
PULSE_INTERVAL = 0.2
"""Seconds between two pulses."""
PULSE_TIMEOUT = 2.0
"""Seconds without a pulse after which an engine is taken for dead."""
MIN_PROMPT = 2
"""Tokens of the shortest prompt of which anything can be handed over: the last one is computed where it is sampled."""
_NONCE = 32
_PURPOSES: dict[bytes, Purpose] = {b"F": "front", b"P": "pulse"}
_PULSE = Struct("<QdQQ")


class Unreachable(ForgeError):
    """An engine does not answer at its address, or does not know the secret."""


class Source(NamedTuple):
    """Where an engine finds the computed beginning of a request: another engine, and the request's key there."""

    address: Address
    key: int


class Place(NamedTuple):
    """Queue a request at the engine that a router chose."""

    submit: Submit
    cached_tokens: int = 0
    """Of its prompt, as the router believes."""
    emitted: tuple[Emitted, ...] = ()
    """Of each sample what another engine had sent of it; empty for a request that begins."""
    hands_over: bool = False
    """Keep its cache for another engine to take (`Source`)."""
    source: Source | None = None
    """Take its beginning from there."""
    num_streams: int = 0
    """Of the front, at all engines: how often a stream has an event follows from it."""
    trace: str = ""
    """The id of the HTTP request, for the engine's log; empty where the front writes no log of requests."""


@dataclass
class ReplicaUpdate(Update):
    """What has happened in one engine since its last update to the same front."""

    clock: float = 0.0
    """The engine's monotonic clock, in seconds, when this was sent."""
    events: CacheEvents = NO_EVENTS
    failed_in_a_row: int = 0
    """Steps that raised, since the last one that did not."""
    load: Load | None = None
    """With every request counted that is accepted in this update or before."""


class Pulse(NamedTuple):
    """A sign of life."""

    num_steps: int
    """Steps so far."""
    step_seconds: float
    """How long the step under way has taken; 0 between steps."""
    failed_in_a_row: int
    """Steps that raised, since the last one that did not."""
    num_sequences: int
    """That run or wait."""

    def packed(self) -> bytes:
        return _PULSE.pack(*self)


def pulses(data: bytes) -> tuple[list[Pulse], bytes]:
    """The whole pulses in `data`, and the bytes behind the last."""
    whole = len(data) // _PULSE.size * _PULSE.size
    return [Pulse(*fields) for fields in _PULSE.iter_unpack(data[:whole])], data[whole:]


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of `host`."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.bind((host, 0))
    listening.listen(128)
    return listening


def connect(address: Address, secret: bytes, purpose: Purpose) -> socket.socket:
    """A connection to an engine. Blocks for `HANDSHAKE_SECONDS` at most per exchange; raises `Unreachable`."""
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection(address, HANDSHAKE_SECONDS)
        nonce = os.urandom(_NONCE)
        theirs = _receive(connection, _NONCE)
        letter = next(letter for letter, name in _PURPOSES.items() if name == purpose)
        connection.sendall(letter + _proof(secret, b"client", theirs) + nonce)
        if not hmac.compare_digest(_receive(connection, sha256().digest_size), _proof(secret, b"engine", nonce)):
            raise OSError("it does not know the secret")
    except OSError as error:
        if connection is not None:
            connection.close()
        raise Unreachable(f"the engine at {address[0]}:{address[1]} cannot be reached: {error}") from None
    _prepare(connection)
    return connection


def admit(connection: socket.socket, secret: bytes) -> Purpose | None:
    """The engine's end of `connect`: what the connection is for, or None for one that is refused."""
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        nonce = os.urandom(_NONCE)
        connection.sendall(nonce)
        answer = _receive(connection, 1 + sha256().digest_size + _NONCE)
        letter, proof, theirs = answer[:1], answer[1:-_NONCE], answer[-_NONCE:]
        if letter not in _PURPOSES or not hmac.compare_digest(proof, _proof(secret, b"client", nonce)):
            return None
        connection.sendall(_proof(secret, b"engine", theirs))
    except OSError:
        return None
    _prepare(connection)
    return _PURPOSES[letter]


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    connection.setblocking(False)


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, "sha256")


def _receive(connection: socket.socket, number: int) -> bytes:
    data = b""
    while len(data) < number:
        piece = connection.recv(number - len(data))
        if not piece:
            raise OSError("it closed the connection")
        data += piece
    return data


# Hand-overs


def prefill_params() -> SamplingParams:
    """Return the parameters of a request that is computed for another engine. Its one token is not used."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prefill_of(submit: Submit) -> Submit:
    """Return the request that computes what another engine needs of this one: all of its prompt but the last token."""
    return submit._replace(token_ids=submit.token_ids[:-1], params=prefill_params(), prompt=None, stream=False)


def fetch(address: Address, key: int, secret: bytes) -> KvHandoff | None:
    """Fetch what the engine at `address` has computed of a request; None if it is gone. Blocks. Raises
    `Unreachable`."""
    with connect(address, secret, "front") as connection:
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            connection.sendall(frame(Ask(secrets.randbits(62), "handoff", (key,))))
            for update in received(connection):
                for answer in update.answers:
                    computed: KvHandoff | None = answer.value
                    return computed
        except OSError as error:
            raise Unreachable(f"the engine at {address[0]}:{address[1]} does not answer: {error}") from None
    return None


# Processes


def start_process(
    module: str, message: Any, environment: Mapping[str, str] = MappingProxyType({}), inherited: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module as a process in a group of its own; return it, and a socket to it on which `message` is sent.
    environment: beside this process's. inherited: file descriptors."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno())],
        pass_fds=[theirs.fileno(), *inherited],
        start_new_session=True,
        env={**os.environ, **environment},
    )
    theirs.close()
    ours.sendall(frame(message))
    return process, ours


def starters_socket() -> socket.socket:
    """Return the socket to the process that has started this one by `start_process`, and that decides when it ends:
    signals do not end it from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return socket.socket(fileno=int(sys.argv[1]))
