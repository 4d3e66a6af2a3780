"""The engine's steps for clients that watch them: encoded once for all watchers, of which there are few.

A step costs the loop some 0.1 ms to encode, and each watcher a write per piece. So a watcher gets the steps of 50 ms as
one piece, and encoding takes at most half of the loop's time; where more happens than that, watchers miss steps.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from forge.server.engine_client import EngineClient, offer
from forge.server.errors import ApiError
from forge.server.redaction import without_texts
from forge.server.streaming import DONE, event
from forge.trace.codec import codec_of
from forge.trace.records import StepRecord

MAX_WATCHERS = 8
_PAUSE = 0.05
"""Seconds between two pieces for one watcher."""
_MOST_BEHIND = 256
"""Steps that a watcher may be behind before it misses some."""

Watcher = asyncio.Queue[bytes]
"""Steps, as events, that a watcher has not been sent yet."""


class StepFeed:
    """Gives the steps of an engine to watchers, as server-sent events."""

    def __init__(self, client: EngineClient, texts: bool):
        """texts: whether events have token ids and texts."""
        self._client, self._texts = client, texts
        self._watchers: set[Watcher] = set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def join(self) -> Watcher:
        """Begin to watch. Raises `ApiError` where there are too many watchers."""
        if len(self._watchers) >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} clients watch the steps already, which is the most: come back later"
            raise ApiError(message, 429, code="too_many_watchers", retry_after=5)
        watcher: Watcher = asyncio.Queue(_MOST_BEHIND)
        self._watchers.add(watcher)
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """End watching. With the last watcher the engine stops to send records."""
        self._watchers.discard(watcher)
        if not self._watchers and self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def pieces(self, watcher: Watcher) -> AsyncIterator[bytes]:
        """Events of the steps from now on, until the engine ends."""
        piece = b""
        while not piece.endswith(DONE):
            events = [await watcher.get()]
            while not watcher.empty():
                events.append(watcher.get_nowait())
            yield (piece := b"".join(events))
            await asyncio.sleep(_PAUSE)

    async def _read(self) -> None:
        encode = codec_of(StepRecord).encode
        async for record in self._client.records():
            began = time.perf_counter()
            step = event(encode(record if self._texts else without_texts(record)))
            for watcher in self._watchers:
                offer(watcher, step)
            await asyncio.sleep(time.perf_counter() - began)
        self._reading = None
        for watcher in self._watchers:
            offer(watcher, DONE)
