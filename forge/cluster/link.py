"""A front's connection to one engine: commands go out, updates come in, and pulses say that it lives."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from forge.cluster.wire import PULSE_TIMEOUT, Address, Pulse, ReplicaUpdate, connect, pulses
from forge.server.messages import Inbox, frame

logger = logging.getLogger("forge.server")

_RECEIVE = 1 << 18
STUCK_SECONDS = 120.0
"""A step that takes longer than this never ends."""


class Link(asyncio.BufferedProtocol):
    """A connection to an engine, from `open_link` until it is lost: the engine closes it, or stops living."""

    def __init__(
        self, name: str, on_update: Callable[["Link", ReplicaUpdate], None], on_lost: Callable[["Link"], None]
    ):
        self.name = name
        self.why_lost = "its connection closed"
        self.is_open = True
        self._on_update, self._on_lost = on_update, on_lost
        self._received = memoryview(bytearray(_RECEIVE))
        self._inbox, self._commands = Inbox(), list[bytes]()
        self._transport: asyncio.Transport | None = None
        self.pulse = PulseReader(lambda: None)

    def send(self, command: Any) -> None:
        """Send a command in one piece with all others of this turn of the loop."""
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._write)
        self._commands.append(frame(command))

    def _write(self) -> None:
        commands, self._commands = self._commands, []
        if self.is_open and self._transport is not None:
            self._transport.write(b"".join(commands))

    def lose(self, why: str) -> None:
        """Give the engine up. What it still sends is ignored."""
        if self.is_open:
            self.is_open, self.why_lost = False, why
            for transport in (self._transport, self.pulse.transport):
                if transport is not None:
                    transport.abort()
            self._on_lost(self)

    def check_pulse(self, now: float) -> None:
        """Give the engine up if it has not given a sign of life for too long."""
        silent = now - self.pulse.last_seen
        if silent > PULSE_TIMEOUT:
            self.lose(f"no sign of life for {silent:.1f} s")
        elif self.pulse.last.step_seconds > STUCK_SECONDS:
            self.lose(f"a step has taken {self.pulse.last.step_seconds:.0f} s")

    # asyncio's

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, num_bytes: int) -> None:
        for update in self._inbox.feed(self._received[:num_bytes]):
            if self.is_open:
                self._on_update(self, update)

    def connection_lost(self, error: Exception | None) -> None:
        self.lose(self.why_lost)


class PulseReader(asyncio.Protocol):
    """Reads an engine's pulses and notes their times."""

    def __init__(self, on_lost: Callable[[], None]):
        self.transport: asyncio.Transport | None = None
        self.last, self.last_seen = Pulse(0, 0.0, 0, 0), time.monotonic()
        self._on_lost, self._bytes = on_lost, b""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.last_seen = transport, time.monotonic()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        whole, self._bytes = pulses(self._bytes + data)
        if whole:
            self.last, self.last_seen = whole[-1], time.monotonic()


async def open_link(
    name: str,
    address: Address,
    secret: bytes,
    on_update: Callable[[Link, ReplicaUpdate], None],
    on_lost: Callable[[Link], None],
) -> Link:
    """Connect to an engine. Raises `Unreachable` within a few seconds."""
    loop, link = asyncio.get_running_loop(), Link(name, on_update, on_lost)
    pulse = await asyncio.to_thread(connect, address, secret, "pulse")
    try:
        front = await asyncio.to_thread(connect, address, secret, "front")
    except BaseException:
        pulse.close()
        raise
    await loop.create_connection(lambda: link.pulse, sock=pulse)
    await loop.create_connection(lambda: link, sock=front)
    return link


async def watch_pulses(links: Callable[[], list[Link]], interval: float = 0.25) -> None:
    """Check all links again and again. After a time in which this loop itself stood still, one round is left out, so
    that what came meanwhile is read first."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(interval)
        now = time.monotonic()
        if now - before < 2 * interval:
            for link in links():
                link.check_pulse(now)
