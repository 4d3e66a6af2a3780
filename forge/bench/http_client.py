"""A small HTTP/1.1 client for measuring: streams of server-sent events over connections that are kept.

It exists because a client that shares its machine with the server it measures must cost as little as can be, and say
what it costs. It knows what such servers send (`content-length`, chunked, events) and nothing else.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from forge.errors import ForgeError, UsageError


class ServerProblem(ForgeError):
    """A server answered with an error, or not at all."""


@dataclass
class Timed:
    """One streamed request as its client saw it. Times are seconds on the monotonic clock."""

    started: float
    chunks: list[float] = field(default_factory=list)
    """The time at which each chunk with text came."""
    ended: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """The server's own count, sent at the end."""
    text: str = ""
    error: str | None = None
    request_id: str = ""
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """The server's own count, or else the chunks with text."""
        return self.completion_tokens if self.completion_tokens is not None else len(self.chunks)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: from sending to the first text."""
        return 1e3 * (self.chunks[0] - self.started) if self.chunks else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token: from the first text to the end, over the tokens after the first (a chunk may have
        several)."""
        if self.num_tokens < 2 or not self.chunks or self.ended is None:
            return None
        return 1e3 * (self.ended - self.chunks[0]) / (self.num_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        """Inter-token latencies: the time between each chunk and the next."""
        return [1e3 * (after - before) for before, after in pairwise(self.chunks)]

    @property
    def e2el_ms(self) -> float | None:
        return None if self.ended is None else 1e3 * (self.ended - self.started)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpClient:
    """Connections to one server."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url}: give a server's address, such as http://127.0.0.1:8080")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"host: {parts.netloc}\r\n{key}"
        self._idle: list[Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request; return status and body."""
        asked = f"GET {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n"
        connection, status, headers = await self._ask(asked.encode())
        body = b"".join([piece async for piece in read_body(connection[0], headers)])
        self._idle.append(connection)
        return status, body

    def post(self, path: str, body: Any) -> bytes:
        """Send a request with JSON; return its answer."""
        data = json.dumps(body).encode()
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}content-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def stream(self, path: str, body: dict[str, Any]) -> Timed:
        """Send a request that streams; follow it to its end."""
        timed = Timed(time.perf_counter())
        try:
            connection, status, headers = await self._ask(self.post(path, body))
            if status != 200:
                text = b"".join([piece async for piece in read_body(connection[0], headers)])
                timed.error = f"{status}: {text[:300].decode(errors='replace')}"
            else:
                await follow(connection[0], headers, timed)
            self._idle.append(connection)
        except (OSError, EOFError, ValueError) as error:
            timed.error = f"{type(error).__name__}: {error}"
        timed.ended = time.perf_counter()
        return timed

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def connect(self) -> Connection:
        """Return a new connection, which no other code uses."""
        return await asyncio.open_connection(self._host, self._port, ssl=self._secure or None, limit=1 << 20)

    async def _ask(self, data: bytes) -> tuple[Connection, int, dict[bytes, bytes]]:
        """Send over a kept connection or a new one; the connection, the status and the headers of the answer. A kept
        one that the server closes without a word is left for another."""
        while self._idle:
            reader, writer = self._idle.pop()
            if reader.at_eof() or writer.is_closing():
                continue
            writer.write(data)
            try:
                return (reader, writer), *await read_head(reader)
            except (EOFError, ConnectionError):
                writer.close()
        reader, writer = await self.connect()
        writer.write(data)
        return (reader, writer), *await read_head(reader)


async def follow(
    reader: asyncio.StreamReader,
    headers: dict[bytes, bytes],
    timed: Timed,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Take in the events of a stream, as long as it `goes_on`: asked after each piece."""
    rest = b""
    async for piece in read_body(reader, headers):
        now = time.perf_counter()
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.partition(b"\n")[0]  # an id may follow
            if data.startswith(b"data: ") and data != b"data: [DONE]":
                _take_event(json.loads(data[6:]), now, timed)
        if not goes_on():
            return


def _take_event(event: dict[str, Any], now: float, timed: Timed) -> None:
    timed.request_id = event.get("id", timed.request_id)
    if "error" in event:
        timed.error = str(event["error"])[:300]
        timed.finish_reason = str(event["error"].get("code") or "error")
    if usage := event.get("usage"):
        timed.prompt_tokens, timed.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices") or ():
        if text := choice.get("text") or (choice.get("delta") or {}).get("content"):
            timed.chunks.append(now)
            timed.text += text
        timed.finish_reason = choice.get("finish_reason") or timed.finish_reason


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    pairs = (line.split(b":", 1) for line in lines[1:] if b":" in line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield the body's pieces as they come."""
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif length := int(headers.get(b"content-length", b"0")):
        yield await reader.readexactly(length)
