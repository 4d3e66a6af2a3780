"""The clients of a server as it meets them: some read as it comes, one leaves in the middle of an answer, one asks and
then reads nothing for a while, and one asks for more than the queue holds. Meanwhile a client asks how the server is.

They speak HTTP to a server that runs elsewhere. Its steps, as it tells them, are put beside what the clients saw: the
clock of both is the system's own.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from forge.bench.http_client import HttpClient, Timed, read_body, read_head
from forge.trace.records import StepRecord

ANIMALS = (
    "fox", "turtle", "bear", "owl", "mouse", "rabbit", "hedgehog", "bird", "cat", "dog", "frog", "duck", "goose",
    "deer", "squirrel", "badger",
)  # fmt: skip
MOST_FIRST, FIRST_TOKENS = 50, 8
"""Requests that warm the server up, until the reader of its steps is connected."""
MAX_PROMPTS = 128
"""Of one request, as the server has it."""
HEALTH_EVERY, METRICS_EVERY = 0.05, 0.1
"""Seconds."""
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
    "aborted": 'vllm:request_success_total{finished_reason="abort"}',
    "generated": "vllm:generation_tokens_total",
}


@dataclass(frozen=True)
class Crowd:
    """Who comes."""

    readers: int = 8
    max_tokens: int = 256
    every: float = 0.02
    """Seconds between one client and the next."""
    leaves_after: int = 30
    """Events that the leaving client reads."""
    max_queue: int = 64
    """Unfinished prompts that the server takes; one client asks for as many on top of the others'."""

    def prompt(self, index: int) -> str:
        return f"Once upon a time, a little {ANIMALS[index % len(ANIMALS)]}"


@dataclass
class Visit:
    """One client's request, as the client saw it. Times are seconds on the system's monotonic clock."""

    kind: str
    """`reads`, `leaves` or `late`."""
    asked: float = 0.0
    request_id: str = ""
    events: list[float] = field(default_factory=list)
    """When each event with text came."""
    text: str = ""
    tokens: int | None = None
    """As the server counts them at the end."""
    finish_reason: str | None = None
    began_to_read: float = 0.0
    ended: float = 0.0
    """When it had everything, or left."""
    engine_ms: float | None = None
    """From its arrival to its last token, as the engine tells it."""
    num_steps: int = 0
    """That computed something for it."""

    @property
    def first_ms(self) -> float | None:
        """TTFT."""
        return (self.events[0] - self.asked) * 1e3 if self.events else None

    @property
    def per_token_ms(self) -> float | None:
        """TPOT: the time from the first event to the last, by the tokens after the first. An event may have several."""
        if self.tokens is None or self.tokens < 2 or len(self.events) < 2:
            return None
        return (self.events[-1] - self.events[0]) * 1e3 / (self.tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """ITL: between one event and the next."""
        return [(after - before) * 1e3 for before, after in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True)
class Ending:
    """What SIGTERM did while a stream was under way."""

    stream: Visit
    refused: str
    """What a client got that came after it: a status, or that the port was closed."""
    exit_status: int
    seconds: float
    """From the signal to the end of the process."""


@dataclass(frozen=True)
class Overload:
    """What a client got that asked for more than the queue holds."""

    prompts: int
    status: int
    ms: float
    """Until it had the answer."""
    retry_after: str | None
    """When to come again, as the server says: seconds."""
    status_later: int
    """The same question for one prompt, once the others had gone."""


@dataclass(frozen=True)
class Crowded:
    """What came of it."""

    crowd: Crowd
    visits: tuple[Visit, ...]
    health_ms: tuple[float, ...]
    seen: tuple[dict[str, float], ...]
    """What /metrics said while they were there."""
    afterwards: dict[str, float]
    overload: Overload
    alone: Visit
    """The first reader's request once more, with no other client."""
    ending: Ending
    records: tuple[StepRecord, ...]
    """The server's steps, as it told them."""
    ready_seconds: float

    def of(self, kind: str) -> list[Visit]:
        return [visit for visit in self.visits if visit.kind == kind]

    @property
    def leaver(self) -> Visit:
        return self.of("leaves")[0]

    @property
    def late(self) -> Visit:
        return self.of("late")[0]

    def sequence_of(self, visit: Visit) -> int | None:
        """The engine's number for a visit's sequence; None if its arrival was not told."""
        arrivals = (one for record in self.records for one in record.arrived)
        return next((one.seq_ids[0] for one in arrivals if one.request_id == visit.request_id), None)

    def steps_with(self, visit: Visit) -> list[StepRecord]:
        """The steps that computed something for it."""
        seq_id = self.sequence_of(visit)
        return [record for record in self.records if any(item.seq_id == seq_id for item in record.items)]

    @property
    def crowded_records(self) -> tuple[StepRecord, ...]:
        """The steps that began while one of them was there."""
        first, last = self.visits[0].asked, max(visit.ended for visit in self.visits)
        return tuple(record for record in self.records if first <= record.started <= last)

    @property
    def steps_after_leaving(self) -> int:
        """Steps that began after the client had hung up and still computed something for it."""
        left = self.leaver.ended
        return sum(record.started > left for record in self.steps_with(self.leaver))

    @property
    def steps_missed(self) -> int:
        """That the server made and we were not told about, because we were slow."""
        numbers = [record.step for record in self.records]
        return numbers[-1] - numbers[0] + 1 - len(numbers) if numbers else 0


async def visit_all(
    url: str, crowd: Crowd, terminate: Callable[[], None], is_watched: Callable[[], bool]
) -> tuple[dict[str, Any], float]:
    """Run all clients, and end the server with SIGTERM. `is_watched`: whether a step of it has been told.

    Returns the fields of `Crowded` that clients can know, with an `ending` whose server has not been waited for yet,
    and when the signal was sent. Raises `OSError` where the server goes away before it should.
    """
    clients = _Clients(url, crowd)
    try:
        await clients.learn_model()
        for _ in range(MOST_FIRST):  # the first ones are not timed
            await clients.read("reads", crowd.prompt(0), FIRST_TOKENS)
            if is_watched():
                break
        watching = [asyncio.create_task(clients.ask_health()), asyncio.create_task(clients.read_metrics())]
        visits, overload = await clients.come()
        for task in watching:
            task.cancel()
        afterwards = await clients.metrics()
        await clients.ask_lives(visits)
        overload = replace(overload, status_later=(await clients.ask_much(1)).status)
        alone = await clients.read("reads", crowd.prompt(0))
        stream, refused, signalled = await clients.end(terminate)
    finally:
        clients.close()
    found = {
        "visits": visits,
        "health_ms": tuple(clients.health_ms),
        "seen": tuple(clients.seen),
        "afterwards": afterwards,
        "overload": overload,
        "alone": alone,
        "ending": Ending(stream, refused, 0, 0.0),
    }
    return found, signalled


class _Clients:
    def __init__(self, url: str, crowd: Crowd):
        parts = urlsplit(url)
        self._http, self._model, self._crowd = HttpClient(url), "", crowd
        self._host, self._port = parts.hostname, parts.port
        self._all_read = asyncio.Event()
        self.health_ms: list[float] = []
        self.seen: list[dict[str, float]] = []

    def close(self) -> None:
        self._http.close()

    async def learn_model(self) -> None:
        """What the server calls its model."""
        _, body = await self._http.get("/v1/models")
        self._model = json.loads(body)["data"][0]["id"]

    async def come(self) -> tuple[tuple[Visit, ...], Overload]:
        """One after another; the one who leaves and the one who reads late come second and third. When all are there,
        one more asks for as many answers as the whole queue holds."""
        crowd = self._crowd
        kinds = ["reads"] * crowd.readers
        kinds[1:1] = ["leaves", "late"]
        tasks = []
        for index, kind in enumerate(kinds):
            tasks.append(asyncio.create_task(self.read(kind, crowd.prompt(index))))
            await asyncio.sleep(crowd.every)
        overload = await self.ask_much(min(crowd.max_queue, MAX_PROMPTS))
        await asyncio.wait([task for task, kind in zip(tasks, kinds, strict=True) if kind != "late"])
        self._all_read.set()
        return tuple(await asyncio.gather(*tasks)), overload

    async def ask_much(self, number: int) -> Overload:
        """Ask for one token after each of `number` prompts, in one request."""
        asked = time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            body = self._body("", 1) | {"prompt": [self._crowd.prompt(0)] * number, "stream": False}
            del body["stream_options"]
            writer.write(self._post(body))
            status, headers = await read_head(reader)
        finally:
            writer.close()
        return Overload(
            number, status, (time.perf_counter() - asked) * 1e3, headers.get(b"retry-after", b"").decode() or None, 0
        )

    async def read(
        self, kind: str, prompt: str, max_tokens: int | None = None, on_text: Callable[[], None] = lambda: None
    ) -> Visit:
        """Ask, and read as this kind of client does, over a connection of its own."""
        visit = Visit(kind, time.perf_counter())
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._request(prompt, max_tokens or self._crowd.max_tokens))
            if kind == "late":
                await self._all_read.wait()
            visit.began_to_read = time.perf_counter()
            await self._follow(reader, visit, on_text)
        finally:
            visit.ended = time.perf_counter()
            writer.close()
        return visit

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _request(self, prompt: str, max_tokens: int) -> bytes:
        return self._post(self._body(prompt, max_tokens))

    def _post(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nconnection: close\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data

    async def _follow(self, reader: asyncio.StreamReader, visit: Visit, on_text: Callable[[], None]) -> None:
        """Take in a stream to its end, or as far as this client does."""
        status, headers = await read_head(reader)
        if status != 200:
            visit.finish_reason = str(status)
            return
        rest = b""
        async for piece in read_body(reader, headers):
            now = time.perf_counter()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    _take(json.loads(event[6:]), now, visit)
            if visit.events:
                on_text()
            if visit.kind == "leaves" and len(visit.events) >= self._crowd.leaves_after:
                visit.finish_reason = "left"
                return

    async def ask_health(self) -> None:
        while True:
            began = time.perf_counter()
            await self._http.get("/health")
            self.health_ms.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(HEALTH_EVERY)

    async def read_metrics(self) -> None:
        while True:
            self.seen.append(await self.metrics())
            await asyncio.sleep(METRICS_EVERY)

    async def metrics(self) -> dict[str, float]:
        """A few of the figures on /metrics."""
        _, body = await self._http.get("/metrics")
        return parse_metrics(body.decode())

    async def ask_lives(self, visits: tuple[Visit, ...]) -> None:
        """Enter what the engine knows of each of them."""
        for visit in visits:
            status, body = await self._http.get(f"/debug/requests/{visit.request_id}")
            if status == 200:
                sample = json.loads(body)["samples"][0]
                visit.engine_ms, visit.num_steps = sample["end_to_end_ms"], len(sample["forwards"])

    async def end(self, terminate: Callable[[], None]) -> tuple[Visit, str, float]:
        """Have the server told to end while a stream is under way: what became of that, of a client that comes now, and
        when it was told."""
        begun, crowd = asyncio.Event(), self._crowd
        reading = asyncio.create_task(self.read("reads", crowd.prompt(1), 2 * crowd.max_tokens, begun.set))
        await asyncio.wait([reading, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        signalled = time.perf_counter()
        terminate()
        refused = await self._come_late()
        return await reading, refused, signalled

    async def _come_late(self) -> str:
        """What a client gets that asks now."""
        while True:
            found: Timed = await self._http.stream("/v1/completions", self._body(self._crowd.prompt(2), 1))
            if found.error is not None:
                return found.error[:3] if found.error[:3].isdigit() else "port closed"
            await asyncio.sleep(0.001)  # the signal has not come through yet


def _take(event: dict[str, Any], now: float, visit: Visit) -> None:
    visit.request_id = event.get("id", visit.request_id)
    if "error" in event:
        visit.finish_reason = str(event["error"].get("code") or "error")
    if event.get("usage"):
        visit.tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices") or ():
        if choice.get("text"):
            visit.events.append(now)
            visit.text += choice["text"]
        visit.finish_reason = choice.get("finish_reason") or visit.finish_reason


def parse_metrics(text: str) -> dict[str, float]:
    """The figures of `_GAUGES` in Prometheus' text, each the sum over its labels."""
    found = dict.fromkeys(_GAUGES, 0.0)
    for line in text.splitlines():
        for name, metric in _GAUGES.items():
            title, _, label = metric.partition("{")
            if line.startswith(title + "{") and label.rstrip("}") in line:
                found[name] += float(line.rsplit(" ", 1)[1])
    return found
