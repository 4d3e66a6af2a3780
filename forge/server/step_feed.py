"""The engine's steps for clients that watch them: encoded once for all subscribers, of which there are few.

A step costs the loop some 0.1 ms to encode, and each subscriber a write per piece. So a subscriber gets the steps of
50 ms as one piece, and encoding takes at most half of the loop's time; where more happens, subscribers miss steps.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from forge.server.engine_client import EngineClient
from forge.server.errors import ApiError
from forge.server.streaming import DONE, event
from forge.trace.codec import codec_of
from forge.trace.records import StepRecord

MAX_SUBSCRIBERS = 8
_PAUSE = 0.05
"""Seconds between two pieces for one subscriber."""
_MOST_BEHIND = 256
"""Steps that a subscriber may be behind, or that wait to be encoded, before some are missed."""

Subscriber = asyncio.Queue[bytes]
"""Steps, as events, that a subscriber has not been sent yet."""


class StepFeed:
    """Gives the steps of an engine to subscribers, as server-sent events."""

    def __init__(self, client: EngineClient, texts: bool):
        """texts: whether events have token ids and texts."""
        self._client, self._texts = client, texts
        self._subscribers: set[Subscriber] = set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def num_subscribers(self) -> int:
        return len(self._subscribers)

    def join(self) -> Subscriber:
        """Add a subscriber. Raises `ApiError` if there are too many."""
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            message = f"{MAX_SUBSCRIBERS} clients watch the steps already, which is the most: come back later"
            raise ApiError(message, 429, code="too_many_subscribers", retry_after=5)
        subscriber: Subscriber = asyncio.Queue(_MOST_BEHIND)
        self._subscribers.add(subscriber)
        if self._reading is None:
            records: asyncio.Queue[StepRecord | None] = asyncio.Queue(_MOST_BEHIND)
            self._client.watch(partial(_offer, records))
            self._reading = asyncio.get_running_loop().create_task(self._read(records))
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a subscriber. After the last one the engine stops sending records."""
        self._subscribers.discard(subscriber)
        if not self._subscribers and self._reading is not None:
            self._reading.cancel()
            self._end()

    async def pieces(self, subscriber: Subscriber) -> AsyncIterator[bytes]:
        """Yield events of the steps from now on, until the engine ends."""
        piece = b""
        while not piece.endswith(DONE):
            events = [await subscriber.get()]
            while not subscriber.empty():
                events.append(subscriber.get_nowait())
            yield (piece := b"".join(events))
            await asyncio.sleep(_PAUSE)

    async def _read(self, records: asyncio.Queue[StepRecord | None]) -> None:
        encode = codec_of(StepRecord).encode
        while (record := await records.get()) is not None:
            began = time.perf_counter()
            step = event(encode(record if self._texts else without_texts(record)))
            for subscriber in self._subscribers:
                _offer(subscriber, step)
            await asyncio.sleep(time.perf_counter() - began)
        self._end()
        for subscriber in self._subscribers:
            _offer(subscriber, DONE)

    def _end(self) -> None:
        self._reading = None
        self._client.watch(None)


def _offer(queue: asyncio.Queue[Any], item: Any) -> None:
    """Append `item`, dropping the oldest entry if the queue is full."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)


def without_texts(record: StepRecord) -> StepRecord:
    """Return `record` with 0 for every token id and no text: those belong to the client that asked. Counts, times and
    reasons stay."""
    return replace(
        record,
        tokens=tuple([token._replace(token_id=0, text="", probability=None, logprobs=None) for token in record.tokens]),
        finished=tuple([replace(finish, text="", stop=None) for finish in record.finished]),
        cycles=tuple(
            replace(
                cycle,
                proposed=(0,) * len(cycle.proposed),
                emitted=(0,) * len(cycle.emitted),
                verdicts=tuple(replace(verdict, token_id=0, target_argmax=0) for verdict in cycle.verdicts),
            )
            for cycle in record.cycles
        ),
    )
