"""Server-sent events to one client, and a client's going away.

Each send waits for the client's socket to have room, `stall_timeout` seconds at most; meanwhile what the engine makes
for this client piles up in its `Generation`, merged, and the engine is never held up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from forge.server.errors import error_object, to_api_error
from forge.server.strict_json import to_json

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Write `value` as one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Write `value` as a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(value)


class EventStream(Response):
    """Sends what `events` yields, each piece as soon as it comes. A piece that ends with `DONE` is the last one; the
    answer ends where the events do without it, too.

    `on_gone` is called once, whatever ends the stream: its last event, a client that left, one that takes nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stall_timeout: float, on_gone: Callable[[], None]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stall_timeout, self._on_gone = events, stall_timeout, on_gone
        self._sending_since: float | None = None
        """When the current send began; None if none is under way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with until_gone(disconnected(receive), self._stalled()):
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send)
        except ClientDisconnect:
            pass  # the connection of an answer without an end is closed
        finally:
            self._on_gone()

    async def _send_events(self, send: Send) -> None:
        more = True
        try:
            async for piece in self._events:
                more = not piece.endswith(DONE)
                await self._send(send, {"type": "http.response.body", "body": piece, "more_body": more})
            if more:
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:
            last = event(error_object(to_api_error(error))) + DONE
            await self._send(send, {"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    async def _stalled(self) -> None:
        """Return when the client has taken nothing for too long. Looks now and then: a timer for each event would cost
        as much as sending it."""
        while self._sending_since is None or time.monotonic() - self._sending_since <= self._stall_timeout:
            await asyncio.sleep(self._stall_timeout / 4)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def until_gone(*signs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Raise `ClientDisconnect` in this task if one of the `signs` that the client is gone returns while this context is
    open."""
    waiting = asyncio.current_task()
    assert waiting is not None, "a request is answered within a task"
    watching = [asyncio.create_task(sign) for sign in signs]
    for task in watching:
        task.add_done_callback(lambda task: None if task.cancelled() else waiting.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if not any(task.done() for task in watching):
            raise  # the server is closing
        waiting.uncancel()
        raise ClientDisconnect from None
    finally:
        for task in watching:
            task.cancel()


def leaving_client(request: Request) -> AbstractAsyncContextManager[None]:
    """Raise `ClientDisconnect` in the waiting task if the client leaves while this context is open."""
    return until_gone(disconnected(request.receive))
