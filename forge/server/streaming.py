"""Server-sent events to one client, and a client's going away.

Each send waits for the client's socket to have room, `stall_timeout` seconds at most; meanwhile what the engine makes
for this client piles up in its `Generation`, merged, and the engine is never held up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
        self._stalled = False
        self._watching: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "an answer is sent within a task"
        leaving = asyncio.create_task(_disconnected(receive))
        leaving.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
        watching = loop.call_later(self._stall_timeout, self._watch, task)
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
        except asyncio.CancelledError:
            if not leaving.done() and not self._stalled:
                raise  # the server is closing: not this stream's cancellation
            task.uncancel()  # the connection of an answer without an end is closed
        finally:
            self._on_gone()
            leaving.cancel()
            (self._watching or watching).cancel()

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

    def _watch(self, task: asyncio.Task[Any]) -> None:
        """Look now and then whether the client takes anything: a timer for each event would cost as much as sending
        it."""
        since = self._sending_since
        if since is not None and time.monotonic() - since > self._stall_timeout:
            self._stalled = True
            task.cancel()
        else:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(self._stall_timeout / 4, self._watch, task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def leaving_client(request: Request) -> AsyncIterator[None]:
    """Raise `ClientDisconnect` in the waiting task if the client leaves while this context is open."""
    waiting = asyncio.current_task()
    assert waiting is not None, "a request is answered within a task"
    leaving = asyncio.create_task(_disconnected(request.receive))
    leaving.add_done_callback(lambda task: None if task.cancelled() else waiting.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if leaving.done():
            waiting.uncancel()
            raise ClientDisconnect from None
        raise
    finally:
        leaving.cancel()
