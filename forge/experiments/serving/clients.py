"""The clients of a server as it meets them: some read as it comes, one leaves in the middle of an answer, one asks and
then reads nothing for a while, and one asks for more than the queue holds. Meanwhile a client asks how the server is.

They speak HTTP to a server that runs elsewhere. Its steps, as it tells them, are put beside what the clients saw: the
clock of both is the system's own.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from forge.bench.http_client import HttpClient, Timed, follow, read_head
from forge.server.server_process import metric_sum
from forge.trace.records import StepRecord

PATH = "/v1/completions"
ANIMALS = (
    "fox", "turtle", "bear", "owl", "mouse", "rabbit", "hedgehog", "bird", "cat", "dog", "frog", "duck", "goose",
    "deer", "squirrel", "badger",
)  # fmt: skip
MOST_FIRST, FIRST_TOKENS = 50, 8
"""Requests that warm the server up, until the reader of its steps is connected."""
MAX_PROMPTS = 128
"""Prompts of one request at most, as the server has it."""
HEALTH_EVERY, METRICS_EVERY = 0.05, 0.1
"""Seconds between two requests of each."""
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
    "aborted": 'vllm:request_success_total{finished_reason="abort"}',
    "generated": "vllm:generation_tokens_total",
}


@dataclass(frozen=True)
class Crowd:
    """The clients of one experiment."""

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
class Visit(Timed):
    """One client's request, as the client saw it; it ended when the client had everything, or left."""

    kind: str = "reads"
    """`reads`, `leaves` or `late`."""
    began_to_read: float = 0.0
    engine_ms: float | None = None
    """The engine's own figure: from the request's arrival to its last token."""
    num_steps: int = 0
    """Steps that computed something for it."""

    @property
    def per_token_ms(self) -> float | None:
        """TPOT up to the last text, without the end that follows it."""
        if self.completion_tokens is None or self.completion_tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) * 1e3 / (self.completion_tokens - 1)


@dataclass(frozen=True)
class Ending:
    """How the server ended on SIGTERM while a stream was running."""

    stream: Visit
    refused: str
    """What a client got that came after the signal: a status, or that the port was closed."""
    exit_status: int
    seconds: float
    """Seconds from the signal to the end of the process."""


@dataclass(frozen=True)
class Overload:
    """The answer to a client that requests more than the queue holds."""

    prompts: int
    status: int
    ms: float
    """Milliseconds until the client had the answer."""
    retry_after: str | None
    """The server's advice when to come again, in seconds."""
    status_later: int
    """The same question for one prompt, once the others had gone."""


@dataclass(frozen=True)
class Crowded:
    """The results of `forge serving`."""

    crowd: Crowd
    visits: tuple[Visit, ...]
    health_ms: tuple[float, ...]
    seen: tuple[dict[str, float], ...]
    """The figures of /metrics while the clients were there."""
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
        """Return the engine's id of a visit's sequence; None if no record reported its arrival."""
        arrivals = (arrival for record in self.records for arrival in record.arrived)
        return next((arrival.seq_ids[0] for arrival in arrivals if arrival.request_id == visit.request_id), None)

    def steps_with(self, visit: Visit) -> list[StepRecord]:
        """Return the steps that computed something for this visit."""
        seq_id = self.sequence_of(visit)
        return [record for record in self.records if any(item.seq_id == seq_id for item in record.items)]

    @property
    def crowded_records(self) -> tuple[StepRecord, ...]:
        """Return the steps that began while a client was connected."""
        first, last = self.visits[0].started, max(visit.ended or 0.0 for visit in self.visits)
        return tuple(record for record in self.records if first <= record.started <= last)

    @property
    def steps_after_leaving(self) -> int:
        """Count the steps that began after the client had hung up and still computed something for it."""
        left = self.leaver.ended or 0.0
        return sum(record.started > left for record in self.steps_with(self.leaver))

    @property
    def steps_missed(self) -> int:
        """Steps of the server whose records were dropped because this process read too slowly."""
        numbers = [record.step for record in self.records]
        return numbers[-1] - numbers[0] + 1 - len(numbers) if numbers else 0


async def visit_all(
    url: str, crowd: Crowd, terminate: Callable[[], None], is_watched: Callable[[], bool]
) -> tuple[dict[str, Any], tuple[Visit, str, float]]:
    """Run all clients, and end the server with SIGTERM. `is_watched`: whether a step of it has been told.

    Returns the fields of `Crowded` that clients can know, and what `_Clients.end` does. Raises `OSError` where the
    server goes away before it should.
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
        ended = await clients.end(terminate)
    finally:
        clients.close()
    fields = {
        "visits": visits,
        "health_ms": tuple(clients.health_ms),
        "seen": tuple(clients.seen),
        "afterwards": afterwards,
        "overload": overload,
        "alone": alone,
    }
    return fields, ended


class _Clients:
    def __init__(self, url: str, crowd: Crowd):
        self._http, self._model, self._crowd = HttpClient(url), "", crowd
        self._all_read = asyncio.Event()
        self.health_ms: list[float] = []
        self.seen: list[dict[str, float]] = []

    def close(self) -> None:
        self._http.close()

    async def learn_model(self) -> None:
        """Ask the server for its model's name."""
        _, body = await self._http.get("/v1/models")
        self._model = json.loads(body)["data"][0]["id"]

    async def come(self) -> tuple[tuple[Visit, ...], Overload]:
        """Start the clients one after another; the second leaves early and the third reads late. Then one more requests
        as many answers as the whole queue holds."""
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
        """Request one token after each of `number` prompts, in one request."""
        asked = time.perf_counter()
        reader, writer = await self._http.connect()
        try:
            body = self._body("", 1) | {"prompt": [self._crowd.prompt(0)] * number, "stream": False}
            del body["stream_options"]
            writer.write(self._http.post(PATH, body))
            status, headers = await read_head(reader)
        finally:
            writer.close()
        again = headers.get(b"retry-after", b"").decode() or None
        return Overload(number, status, (time.perf_counter() - asked) * 1e3, again, 0)

    async def read(
        self, kind: str, prompt: str, max_tokens: int | None = None, on_text: Callable[[], None] = lambda: None
    ) -> Visit:
        """Send a request on a connection of its own, and read as this kind of client does."""
        visit = Visit(time.perf_counter(), kind=kind)

        def goes_on() -> bool:
            if visit.chunks:
                on_text()
            if kind != "leaves" or len(visit.chunks) < self._crowd.leaves_after:
                return True
            visit.finish_reason = "left"
            return False

        reader, writer = await self._http.connect()
        try:
            writer.write(self._http.post(PATH, self._body(prompt, max_tokens or self._crowd.max_tokens)))
            if kind == "late":
                await self._all_read.wait()
            visit.began_to_read = time.perf_counter()
            status, headers = await read_head(reader)
            if status == 200:
                await follow(reader, headers, visit, goes_on)
            else:
                visit.finish_reason = str(status)
        finally:
            visit.ended = time.perf_counter()
            writer.close()
        return visit

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        asked = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return asked | {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}

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
        """Read a few of the figures on /metrics."""
        _, body = await self._http.get("/metrics")
        return parse_metrics(body.decode())

    async def ask_lives(self, visits: tuple[Visit, ...]) -> None:
        """Add the engine's record of each visit."""
        for visit in visits:
            status, body = await self._http.get(f"/debug/requests/{visit.request_id}")
            if status == 200:
                sample = json.loads(body)["samples"][0]
                visit.engine_ms, visit.num_steps = sample["end_to_end_ms"], len(sample["forwards"])

    async def end(self, terminate: Callable[[], None]) -> tuple[Visit, str, float]:
        """Terminate the server while a stream is running. Returns how the stream ended, what a late client got, and
        when the signal was sent."""
        begun, crowd = asyncio.Event(), self._crowd
        reading = asyncio.create_task(self.read("reads", crowd.prompt(1), 2 * crowd.max_tokens, begun.set))
        await asyncio.wait([reading, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        signalled = time.perf_counter()
        terminate()
        refused = await self._come_late()
        return await reading, refused, signalled

    async def _come_late(self) -> str:
        """Return the answer to a client that connects now."""
        while True:
            answer: Timed = await self._http.stream(PATH, self._body(self._crowd.prompt(2), 1))
            if answer.error is not None:
                return answer.error[:3] if answer.error[:3].isdigit() else "port closed"
            await asyncio.sleep(0.001)  # the signal has not come through yet


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the figures of `_GAUGES` from Prometheus' text, each summed over its labels."""
    return {name: metric_sum(text, metric) for name, metric in _GAUGES.items()}
