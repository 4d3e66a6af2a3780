"""One HTTP request and its answer: its id, and what the access log and the metrics say of it.

`Exchanges` is the outermost ASGI application. It gives each request an id (the client's own `X-Request-Id`, or a new
one), sends it back in the same header, and puts it before each line of the log that is written for that request.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, assert_never

from forge.server.engine_client import Generation
from forge.server.errors import CLIENT_LEFT, ShuttingDown, error_response
from forge.server.settings import AccessLog
from forge.server.strict_json import to_json
from forge.views.json_output import picked

access = logging.getLogger("forge.access")

HEADER = b"x-request-id"
_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)
"""The ids that a client may give: an id stands in a header and in lines of the log."""
OTHER_ROUTE = "other"
"""The route of what is no endpoint. Its path is any client's choice, and no label of a metric."""


@dataclass(slots=True)
class Exchange:
    """A request and its answer so far. Times are seconds of `time.perf_counter`."""

    id: str
    method: str
    client: str
    began: float = field(default_factory=time.perf_counter)
    route: str = OTHER_ROUTE
    key: str | None = None
    """The name of the API key, where keys have names."""
    status: int = CLIENT_LEFT
    first_byte: float | None = None
    ended: float | None = None
    generations: list[Generation] = field(default_factory=list)
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that generate nothing."""

    @property
    def seconds(self) -> float:
        return (self.ended or time.perf_counter()) - self.began

    def facts(self) -> dict[str, Any]:
        """Return what the log says, by name, without what is not known."""
        ended = [output for generation in self.generations for output in generation.outputs if output is not None]
        prompts = [prompt for generation in self.generations for prompt in generation.prompts]
        reasons = dict.fromkeys(str(sample.finish_reason) for output in ended for sample in output.outputs)
        facts = picked(self, "id", "method", "route", "status", "client", "key")
        if self.generations or self.num_prompt_tokens:
            facts["prompt_tokens"] = self.num_prompt_tokens + sum(len(prompt.token_ids) for prompt in prompts)
        if self.generations:
            facts["cached_tokens"] = sum(output.metrics.tokens_cached for output in ended)
            facts["output_tokens"] = sum(generation.num_tokens for generation in self.generations)
            facts["finish"] = ",".join(reasons) or None
            facts["answer"] = self.generations[0].request_id
        if self.first_byte is not None:
            facts["first_byte_ms"] = round((self.first_byte - self.began) * 1e3, 1)
        facts["total_ms"] = round(self.seconds * 1e3, 1)
        return {name: value for name, value in facts.items() if value is not None}


_CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current_exchange() -> Exchange | None:
    """Return the request that this task answers; None outside of one."""
    return _CURRENT.get()


class WithRequestId(logging.Filter):
    """Gives a log record `request`: the id of its request in brackets, or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        exchange = _CURRENT.get()
        record.request = "" if exchange is None else f"[{exchange.id}] "
        return True


class Exchanges:
    """Follows every request to its end, and ends those that are left when the server does."""

    def __init__(self, app: Any, log: AccessLog, routes: Sequence[str], on_end: Callable[[Exchange], None]):
        """routes: the paths of endpoints, for requests that are refused before they reach one. on_end: called with
        each exchange that has ended."""
        self._app, self._log, self._routes, self._on_end = app, log, frozenset(routes), on_end
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def end_all(self) -> None:
        """End all requests that still run, with status 503 if nothing was sent yet."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _new_exchange(scope)
        _CURRENT.set(exchange)
        task = asyncio.current_task()
        assert task is not None, "a request is answered within a task"
        self._tasks.add(task)

        async def send_and_note(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.first_byte = message["status"], time.perf_counter()
                message = message | {"headers": [*message["headers"], (HEADER, exchange.id.encode())]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.ended = time.perf_counter()

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            if exchange.first_byte is None:
                await error_response(ShuttingDown())(scope, receive, send_and_note)
        finally:
            self._tasks.discard(task)
            route = getattr(scope.get("route"), "path", None) or scope["path"]
            exchange.route = route if route in self._routes else OTHER_ROUTE
            self._on_end(exchange)
            self._write(exchange)

    def _write(self, exchange: Exchange) -> None:
        match self._log:
            case "off":
                pass
            case "text":
                facts = exchange.facts()
                words = [str(facts.pop(name)) for name in ("method", "route", "status")]
                access.info(" ".join([*words, *(f"{name}={value}" for name, value in facts.items())]))
            case "json":
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                access.info(to_json({"time": now, **exchange.facts()}).decode())
            case _:
                assert_never(self._log)


def _new_exchange(scope: Any) -> Exchange:
    request_id = dict(scope["headers"]).get(HEADER, b"").decode("latin-1")
    client = scope.get("client")
    return Exchange(
        request_id if _ID.fullmatch(request_id) else secrets.token_hex(12),
        scope["method"],
        client[0] if client else "?",
    )
