"""A front's connection to one engine: commands go out, updates come in, and pulses say that it lives."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from forge.cluster.wire import PULSE_TIMEOUT, Address, Pulse, ReplicaUpdate, connect, pulses
from forge.server.engine_client import Connection

logger = logging.getLogger("forge.server")

STUCK_SECONDS = 120.0
"""A step that takes longer than this never ends."""


class Link(Connection):
    """A connection to an engine, from `open_link` until it is lost: the engine closes it, or stops living."""

    def __init__(
        self, name: str, on_update: Callable[["Link", ReplicaUpdate], None], on_lost: Callable[["Link"], None]
    ):
        super().__init__(partial(on_update, self), lambda: self.lose("its connection closed"))
        self.name = name
        self.why_lost = ""
        self._on_link_lost = on_lost
        self.pulse = PulseReader(lambda: None)

    def lose(self, why: str) -> None:
        """Give the engine up. What it still sends is ignored."""
        if self.is_open:
            self.why_lost = why
            self.abort()
            if self.pulse.transport is not None:
                self.pulse.transport.abort()
            self._on_link_lost(self)

    def check_pulse(self, now: float) -> None:
        """Give the engine up if it has not given a sign of life for too long."""
        silent = now - self.pulse.last_seen
        if silent > PULSE_TIMEOUT:
            self.lose(f"no sign of life for {silent:.1f} s")
        elif self.pulse.last.step_seconds > STUCK_SECONDS:
            self.lose(f"a step has taken {self.pulse.last.step_seconds:.0f} s")


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
    await link.open(front)
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
