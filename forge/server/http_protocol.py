"""uvicorn's HTTP protocol with habits of ours: hanging up on who does not ask, one write per turn, no other protocol.

A connection whose request does not come in time, or has no end to its head, is closed: uvicorn itself waits for ever
for the first one, and with httptools it takes a head of any size. What an answer's head, its events and its end write
within one turn of the loop goes to the system as one piece: a write costs more than all that leads to it. An offer to
go on in another protocol (Java's client begins so) is not taken up, and the request is answered like any other. A
client that closes its sending half gets its answer, where the system tells it from one that has left.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger("forge.server")

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a request's line and headers, at most."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_OF_PROBES = tuple(f"GET {path}".encode() for path in ("/health", "/ping", "/ready", "/metrics"))
"""Beginnings of requests that are answered on a connection beyond the most: what watches a full server must get
through."""
_PROBE_TIMEOUT = 1.0
"""Seconds in which such a request must come."""
_PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
_EMPTY_EVENT = b"3\r\n:\n\n\r\n"
"""A comment in a stream of events, as a chunk."""
_TCP_CLOSE = 7
_FIRST_PROBE, _LAST_PROBE = 0.001, 1.0
"""Seconds between looks at a half-closed connection: each twice the one before."""
_UPGRADE = re.compile(rb"^upgrade(?=:)", re.IGNORECASE | re.MULTILINE)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class CorkedTransport:
    """A transport that gathers what is written until the loop turns. All else is the wrapped transport's."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, linger: float):
        self._transport, self._loop, self._linger = transport, loop, linger
        self._pieces: list[bytes] = []
        self._giving_up: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        """Close once all has been taken, or after `linger` seconds."""
        if self._is_closed:
            return
        self._flush()
        self._transport.close()
        if self._giving_up is None and self._transport.get_write_buffer_size():
            self._giving_up = self._loop.call_later(self._linger, self._transport.abort)

    def closed(self) -> None:
        """Note that the connection is closed: everything was sent, or it is lost."""
        self._is_closed = True
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(b"".join(pieces))


class HttpProtocol(HttpToolsProtocol):
    """An HTTP connection, with bounds on heads and bodies, and on the time that they take."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_refused = _is_surplus = False

    def __init__(
        self,
        *,
        header_timeout: float,
        max_connections: int,
        num_surplus: int,
        on_refused: Callable[[], None],
        **uvicorns: Any,
    ):
        """num_surplus: connections beyond the most on which probes are answered. on_refused: called with each
        connection that is refused."""
        super().__init__(**uvicorns)
        self._on_refused = on_refused
        self._header_timeout, self._max_connections, self._num_surplus = header_timeout, max_connections, num_surplus

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        num_beyond = len(self.connections) - self._max_connections
        if num_beyond >= self._num_surplus:
            self._is_refused = True
            self._refuse(transport)
            return
        if num_beyond >= 0:
            self._is_surplus, self._header_timeout = True, _PROBE_TIMEOUT
        corked = CorkedTransport(transport, self.loop, self._header_timeout)
        super().connection_made(corked)  # type: ignore[arg-type]  # it has all that uvicorn uses of one
        self._expect_head()

    def _refuse(self, transport: asyncio.Transport) -> None:
        logger.warning("%d connections are open: more are refused", self._max_connections)
        self._on_refused()
        transport.write(_FULL)
        transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_surplus and not self._is_answering and not data.startswith(_OF_PROBES):
            self._refuse(self.transport)
            return
        if b"pgrade" in data:
            data = _without_upgrade(data)
        if not self._is_answering:
            end = data.find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else end
            if self._head_bytes > MAX_HEAD_BYTES:
                if not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                    self._too_late()
                return
        super().data_received(data)
        if self._is_answering:
            self._stop_expecting()
        elif self._deadline is None:
            self._expect_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio has it
        """Find out whether the client has left or has only closed its sending half: send it something harmless, which a
        client that has left answers with a reset."""
        cycle = self.cycle
        is_encrypted = self.transport.get_extra_info("sslcontext") is not None  # which cannot be half closed
        if not self._is_answering or cycle.more_body or is_encrypted or not hasattr(socket, "TCP_INFO"):
            return None  # closes the connection
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.1":
                return None
            self.transport.write(_PROCESSING)
        elif cycle.chunked_encoding:
            self.transport.write(_EMPTY_EVENT)
        last = self.pipeline[0][0] if self.pipeline else cycle
        last.keep_alive = False
        self._probe(_FIRST_PROBE)
        return True

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _probe(self, wait: float) -> None:
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(wait, self._probe, min(2 * wait, _LAST_PROBE))

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_expecting()
        if not self._is_refused:
            self.transport.closed()  # type: ignore[attr-defined]  # a `CorkedTransport`
            super().connection_lost(error)

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self._header_timeout, self._too_late)

    def _stop_expecting(self) -> None:
        self._head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._stop_expecting()
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Return a request's head without a working `upgrade`: httptools does not read what follows such a header."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"x-upgrade", head) + end + rest
