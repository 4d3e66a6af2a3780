"""Follows one request from HTTP through both processes to a token, and back. `forge tour` draws it.

A real server answers a real request. What a station says comes from the records of its steps and from what the client
saw; each station names the function that does the work there, found in its source as it is now.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.book.source_code import excerpt
from forge.errors import ForgeError
from forge.server.server_process import ServerProcess, ask, asked
from forge.trace.explain import explain_admission, explain_finish
from forge.trace.records import StepRecord
from forge.views.formatting import count, ms, plural
from forge.views.json_output import as_object
from forge.views.palette import ACCENT, QUIET, TITLE
from forge.views.screen import Fitting, Hanging, Part, Table
from forge.views.text import one_line, quoted, tail

QUESTION = "Where does one request go?"
StepsOf = Callable[[str], Iterator[StepRecord]]
"""The steps of the server at a URL from now on."""
PATIENCE_SECONDS = 30.0
MAX_WARM_UPS = 50
PATH = "/v1/completions"
HTTP, ENGINE = "HTTP process", "engine process"
_BAR = "   │  "
_WIDTH = 96
_STEPS = 16
"""Lines of the picture: the first and the last steps."""
_PICTURE = "The same request, a line for each of its steps (queue and forward in ms)"
_COLUMNS = 40
"""Columns of the picture that its numbers and the space between them take."""


@dataclass(frozen=True)
class Station:
    """A place that the request passes."""

    process: str
    title: str
    dotted: str
    """The function that does the work: `forge.engine.scheduler.Scheduler.schedule`."""
    text: str
    """What the station did with this request."""
    at_ms: float | None = None
    """Milliseconds since the client sent the request; None where nothing measures it."""

    @property
    def where(self) -> str:
        """`forge/engine/scheduler.py:130 Scheduler.schedule`. Raises `SourceError` if there is no such function."""
        source = excerpt(self.dotted)
        return f"{source.path}:{source.first_line} {source.name}"


@dataclass(frozen=True)
class Visit:
    """One request as its client and the engine saw it. Times are seconds on the system's monotonic clock."""

    body: dict[str, Any]
    sent: float
    events: tuple[tuple[float, bytes], ...]
    """Each line of data that came back, and when."""
    pieces: tuple[str, ...]
    """The prompt's tokens."""
    records: tuple[StepRecord, ...]
    """The steps that computed something for it."""
    model: str


@dataclass(frozen=True)
class TourStep:
    """A line of the picture: what one step did with the request."""

    step: int
    queued_ms: float | None
    """How long the request had waited when the step began; None if it did not wait for this step."""
    held: int
    """Tokens in its blocks when the step was over."""
    block_size: int
    rows: int
    forward_ms: float
    token: str
    """The chosen token."""
    text: str
    """The text that the client has received by then."""

    @property
    def slots(self) -> str:
        """The request's last block, slot by slot, after the number of full ones: `2 + ███░░░`."""
        full = max(0, self.held - 1) // self.block_size
        used = self.held - full * self.block_size
        drawn = "█" * used + "░" * (self.block_size - used)
        return f"{full} + {drawn}" if full else drawn


@dataclass(frozen=True)
class Tour:
    """The stations of one request, in order."""

    model: str
    prompt: str
    steps: tuple[TourStep, ...]
    stations: tuple[Station, ...]
    first_text_ms: float
    last_text_ms: float

    def as_json(self) -> dict[str, Any]:
        return as_object(self) | {"stations": [as_object(station, "where") for station in self.stations]}


def take_tour(model: str, prompt: str, max_tokens: int, steps_of: StepsOf) -> Tour:
    """Start a server, send it one request, and follow that. Raises `ForgeError` if the server does not answer."""
    with ServerProcess(["--model", model, "--debug-texts"]) as server:
        server.wait_until_ready()
        visit = _visit(server.url, prompt, max_tokens, model, steps_of)
    return tour_of(visit)


def _visit(url: str, prompt: str, max_tokens: int, model: str, steps_of: StepsOf) -> Visit:
    records: list[StepRecord] = []

    def follow() -> None:
        with suppress(ForgeError):  # the server is gone
            records.extend(steps_of(url))

    threading.Thread(target=follow, daemon=True).start()
    for _ in range(MAX_WARM_UPS):  # until the steps come in, and everything has been compiled and touched
        _stream(url, {"prompt": "Hello", "max_tokens": 2, "stream": True})
        if records:
            break
        time.sleep(0.02)
    token_ids = json.loads(ask(url, "/tokenize", {"prompt": prompt}))["tokens"]
    answers = [ask(url, "/detokenize", {"tokens": [token_id]}) for token_id in token_ids]
    pieces = tuple(json.loads(answer)["prompt"] for answer in answers)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    sent, events = _stream(url, body)
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while not any(record.finished and record.ended > sent for record in list(records)):
        if time.perf_counter() > deadline:
            raise ForgeError("the server did not tell of its steps")
        time.sleep(0.01)
    of_request = tuple(record for record in records if record.started > sent)
    return Visit(body, sent, events, pieces, of_request, model)


def _stream(url: str, body: dict[str, Any]) -> tuple[float, tuple[tuple[float, bytes], ...]]:
    """Stream one request. Returns when it was sent, and each line of data with its time."""
    with asked(url, PATH, body) as (sent, answer):
        events = [(time.perf_counter(), line.strip()) for line in answer if line.strip()]
    return sent, tuple(events)


def tour_of(visit: Visit) -> Tour:
    """Return the stations, with what this request did at each."""
    texts = [(moment, line) for moment, line in visit.events if line.startswith(b"data: {")]
    first_ms, last_ms = ((texts[place][0] - visit.sent) * 1e3 for place in (0, -1))
    steps, stations = tuple(_steps(visit)), tuple(_stations(visit))
    return Tour(visit.model, str(visit.body["prompt"]), steps, stations, first_ms, last_ms)


def _steps(visit: Visit) -> Iterator[TourStep]:
    text = ""
    for number, record in enumerate(visit.records, start=1):
        (item,) = record.items
        token = "".join(token.text for token in record.tokens)
        text += token
        waited = [(record.started - arrival.arrived) * 1e3 for arrival in record.arrived]
        held, size = item.start + item.num_tokens, record.cache.block_size
        queued = max(0.0, waited[0]) if waited else None
        yield TourStep(number, queued, held, size, item.num_tokens, record.forward_ms, token, text)


def _stations(visit: Visit) -> Iterator[Station]:
    """Yield the stations in the order in which the request passes them."""
    first, last = visit.records[0], visit.records[-1]
    seq_id = first.items[0].seq_id
    later = visit.records[1:]

    def after(moment: float) -> float:
        return (moment - visit.sent) * 1e3

    size = len(json.dumps(visit.body))
    pieces = " ".join(quoted(piece) for piece in visit.pieces)
    prefill, token = first.items[0], first.tokens[0]
    rows, last_row = plural(prefill.num_tokens, "row"), prefill.start + prefill.num_tokens - 1
    yield Station(
        HTTP, "The body is read and checked", "forge.server.app._add_generation.completions",
        f"POST {PATH}, {size} bytes of JSON: {quoted(str(visit.body['prompt']))}, at most "
        f"{plural(visit.body['max_tokens'], 'token')}, streamed.", 0.0,
    )  # fmt: skip
    yield Station(
        HTTP, "The prompt becomes tokens", "forge.tokenizer.tokenizer.Tokenizer.encode",
        f"{plural(prefill.start + prefill.num_tokens + prefill.remaining, 'token')}{f': {pieces}' if pieces else ''}.",
    )  # fmt: skip
    yield Station(
        HTTP, "A message goes to the engine", "forge.server.engine_client.EngineClient.submit",
        "Token ids and sampling parameters, through a socket. The HTTP process computes nothing.",
    )  # fmt: skip
    arrived = [arrival.arrived for arrival in first.arrived]
    yield Station(
        ENGINE, "The request joins the queue", "forge.engine.registry.RequestRegistry.add_request",
        f"It becomes seq {seq_id}. A step that is under way ends first.", after(arrived[0]) if arrived else None,
    )  # fmt: skip
    admitted = [explain_admission(admission) for admission in first.admitted if admission.seq_id == seq_id]
    yield Station(
        ENGINE, "A step is decided", "forge.engine.scheduler.Scheduler.schedule",
        f"seq {seq_id} is admitted with {admitted[0] if admitted else 'its blocks'}, in {ms(first.schedule_ms)} ms.",
        after(first.started),
    )  # fmt: skip
    yield Station(
        ENGINE, "Slots are reserved", "forge.cache.paged.PagedKvCache.reserve",
        f"The pool has {count(first.cache.used_blocks)} of {count(first.cache.num_blocks)} blocks in use.",
    )  # fmt: skip
    yield Station(
        ENGINE, "The batch is laid out", "forge.model.forward_batch.flat_batch",
        f"{rows}, for positions {prefill.start} to {last_row}; logits are wanted for the last one.",
    )  # fmt: skip
    yield Station(
        ENGINE, "The forward pass: prefill", "forge.model.qwen3.Qwen3.run_layers",
        f"Keys and values of {plural(prefill.num_tokens, 'token')} are written into the cache: "
        f"{ms(first.forward_ms)} ms.",
    )  # fmt: skip
    yield Station(
        ENGINE, "A token is chosen", "forge.engine.sampler.Sampler.sample",
        f"Token {count(token.token_id)}, {quoted(token.text)}.",
    )  # fmt: skip
    yield Station(
        ENGINE, "The step is taken in", "forge.engine.scheduler.Scheduler.commit",
        f"The cache now holds {plural(prefill.start + prefill.num_tokens, 'token')} of seq {seq_id}.",
        after(first.ended),
    )  # fmt: skip
    if later:
        continuation = quoted("".join(token.text for record in later for token in record.tokens))
        forward = sum(record.forward_ms for record in later) / len(later)
        yield Station(
            ENGINE, "The same again: decode", "forge.engine.engine.Engine.step",
            f"{plural(len(later), 'step')} of one row each, {ms(forward)} ms per forward pass on average: "
            f"{continuation}.",
            after(last.ended),
        )  # fmt: skip
    ended = [explain_finish(finish) for finish in last.finished if finish.seq_id == seq_id]
    yield Station(
        ENGINE, "What is new goes back", "forge.server.engine_process.EngineServer._send",
        f"After each step, through the socket. With the last one: {ended[0] if ended else 'the end'}.",
    )  # fmt: skip
    yield Station(
        HTTP, "The client's text grows", "forge.server.engine_client.EngineClient._take_in",
        "Tokens that came while the client was not reading are merged into one event.",
    )  # fmt: skip
    events = [(moment, line) for moment, line in visit.events if line.startswith(b"data: {")]
    yield Station(
        HTTP, "Events are written", "forge.server.responses.Shape._chunks",
        f"{plural(len(events), 'event')} of {count(sum(len(line) for _, line in events) // len(events))} bytes each; "
        "the last line is data: [DONE].", after(visit.events[-1][0]),
    )  # fmt: skip


def tour_screen(tour: Tour) -> Iterator[Part]:
    """Draw the stations, process by process, and the request's steps."""
    yield from (Text.assemble((QUESTION, TITLE), (f"  {tour.model}", QUIET)), None)
    process = ""
    for number, station in enumerate(tour.stations, start=1):
        if station.process != process:
            process = station.process
            bar = _BAR if number > 1 else ""
            yield Text.assemble((bar, QUIET), ("── ", QUIET), (process, f"{TITLE} {ACCENT}"))
        yield partial(_station_lines, number, station)
    yield None
    yield lambda width: _picture(tour.steps, width)
    first, last = ms(tour.first_text_ms), ms(tour.last_text_ms)
    yield from (None, Hanging(Text(f"The first text came after {first} ms, the last after {last} ms."), 0))


def _station_lines(number: int, station: Station, width: int) -> Iterator[Text]:
    head = Text.assemble((f"{number:>3} ", ACCENT), (station.title, TITLE))
    if station.at_ms is not None:
        moment = f"{ms(station.at_ms)} ms"
        head.append(" " * max(2, min(width, _WIDTH) - head.cell_len - len(moment))).append(moment, QUIET)
    yield head
    for text in (Text(station.where, ACCENT), Text(station.text)):
        for line in text.wrap(Console(), max(20, min(width, _WIDTH) - len(_BAR))):
            line.rstrip()
            yield Text.assemble((_BAR, QUIET), line)


def _picture(steps: Sequence[TourStep], width: int) -> Iterator[Part]:
    """Draw the request's steps as a picture that grows by a line and a token with each."""
    shown = steps if len(steps) <= _STEPS else (*steps[: _STEPS // 2], *steps[-_STEPS // 2 :])
    room = max(8, width - max(len(step.slots) + len(quoted(step.token)) for step in shown) - _COLUMNS)
    formats = {"quoted": quoted, "end": lambda text: tail(one_line(text), room)}
    columns = ["step: {step}", "queue: {queued_ms:ms}", "blocks: {slots}", "rows: {rows}", "forward: {forward_ms:ms}"]
    stream = ["sampler: {token:quoted}", "stream: {text:end}"]
    styles = {2: ACCENT}
    tables = [
        Table.of(shown, *columns, *last, formats=formats, styles=styles, lefts=(2, 5, 6))
        for last in (stream, stream[1:])
    ]
    yield Hanging(Text(_PICTURE, TITLE), 0)
    yield Fitting([[table] for table in tables])
