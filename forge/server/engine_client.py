"""The HTTP process's end of the engine: submit requests, follow what becomes of them.

An `EngineClient` lives on one asyncio loop and nothing in it blocks. What the engine sends is taken in at once and
merged per request; a reader of a `Generation` gets all that has come since it last looked. A first token, an end and a
failure wake their reader at once. Everything else wakes all readers together, at most so often that the events of
several streams stay below `EVENTS_PER_SECOND`: alone, every token is an event; with many, a few tokens share one.
"""

import asyncio
import logging
import multiprocessing
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Thread
from typing import Any

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Logprobs
from forge.errors import ForgeError, UsageError
from forge.server import messages
from forge.server.errors import ClientStalled, EngineDead, RequestFailed
from forge.server.metrics import Metrics
from forge.server.resumption import SeenStream, StreamPosition
from forge.trace.records import StepRecord

logger = logging.getLogger("forge.server")

_RECEIVE = 1 << 18
MAX_PENDING_CHARS = 1 << 20
"""Characters that a client may leave unread before its request is aborted."""


MAX_DELTAS = 256
"""Tokens of a lone stream that wait to be taken apart from each other."""


@dataclass(slots=True)
class Delta:
    """The new tokens of one choice: several if its reader was slow."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    """One for each token, or none at all."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @classmethod
    def of(cls, sample: CompletionOutput) -> "Delta":
        """Return a whole choice that has ended as one delta."""
        logprobs = [entry for entry in sample.logprobs or () if entry is not None]
        ids = list(sample.token_ids)
        return cls(sample.index, sample.text, ids, logprobs, sample.finish_reason, sample.stop_reason)


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the engine."""

    token_ids: list[int]
    text: str | None = None


class Connection(asyncio.BufferedProtocol):
    """The loop's end of a socket that carries messages. Those of one turn of the loop go out in one piece."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]):
        self.is_open = True
        self._on_message, self._on_lost = on_message, on_lost
        self._received = memoryview(bytearray(_RECEIVE))
        self._inbox, self._unsent = messages.Inbox(), list[bytes]()
        self._transport: asyncio.Transport | None = None

    async def open(self, connection: socket.socket) -> None:
        """Let the running loop receive messages from now on."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    def send(self, message: Any) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(messages.frame(message))

    def _write(self) -> None:
        if self._transport is not None:
            unsent, self._unsent = self._unsent, []
            self._transport.write(b"".join(unsent))

    def abort(self) -> None:
        """Close the connection. What has come and was not read is ignored."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # Called by the loop

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._write()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, num_bytes: int) -> None:
        for message in self._inbox.feed(self._received[:num_bytes]):
            if self.is_open:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost()
        self.is_open = False


@dataclass(eq=False)
class Generation:
    """An HTTP request that the engine generates for: one or several prompts, each with `params.n` choices.

    Choice i is sample `i % n` of prompt `i // n`.
    """

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    stream: bool = False
    priority: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        self.keys: list[int] = []
        self.arrived = time.perf_counter()
        self.outputs: list[RequestOutput | None] = [None] * len(self.prompts)
        self.error: ForgeError | None = None
        self.position: StreamPosition | None = None
        """Marks its events so that its stream can be resumed; None if it cannot."""
        self._num_tokens: dict[int, int] = {}
        """The streamed tokens of each choice."""
        self._num_accepted = 0
        self._deltas: list[Delta] = []
        self._last: dict[int, Delta] = {}
        """The last delta of each choice, into which more can be merged."""
        self._pending_chars = 0
        self._wake = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.error is not None or all(output is not None for output in self.outputs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far, as far as it is known here: of a request that is not streamed, those
        of its ended prompts."""
        ended = sum(len(sample.token_ids) for output in self.outputs if output is not None for sample in output.outputs)
        return max(sum(self._num_tokens.values()), ended)

    @property
    def has_nothing_more(self) -> bool:
        """True if it has ended well and its reader has all of it."""
        return not self._deltas and self.error is None and self.ended

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts. Raises `UsageError` for one that cannot run."""
        while self._num_accepted < len(self.prompts) and not self.ended:
            await self._woken()
        self._raise_error()

    async def finished(self) -> list[RequestOutput]:
        """Wait for the end. Raises what went wrong."""
        while not self.ended:
            await self._woken()
        self._raise_error()
        return [output for output in self.outputs if output is not None]

    async def updates(self) -> AsyncIterator[list[Delta]]:
        """Yield what is new, until the end. Raises what went wrong, after what came before it."""
        while True:
            if self._deltas:
                deltas, self._deltas, self._last, self._pending_chars = self._deltas, [], {}, 0
                yield deltas
            elif self.ended:
                self._raise_error()
                return
            else:
                await self._woken()

    async def _woken(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    # Called by the client, as the engine's updates come in

    def wake(self) -> None:
        self._wake.set()

    def accept(self) -> None:
        self._num_accepted += 1
        if self._num_accepted == len(self.prompts):
            self.wake()

    def fail(self, error: ForgeError) -> None:
        if not self.ended:
            self.error = error
            self.wake()

    def delta(self, choice: int) -> Delta:
        """Return the delta that the next tokens of a choice belong to."""
        delta = self._last.get(choice)
        if delta is None:
            delta = self._last[choice] = Delta(choice)
            self._deltas.append(delta)
        return delta

    def add_token(self, choice: int, token_id: int, text: str, logprobs: Logprobs | None, apart: bool = False) -> bool:
        """Add a token; return whether it is the first of its choice. `apart`: in a delta of its own, unless very many
        wait to be read."""
        if apart and len(self._deltas) < MAX_DELTAS:
            self._last.pop(choice, None)
        delta = self.delta(choice)
        delta.text += text
        delta.token_ids.append(token_id)
        self._pending_chars += len(text)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
            self._pending_chars += 32 * len(logprobs)
        number = self._num_tokens[choice] = self._num_tokens.get(choice, 0) + 1
        if self.position is not None and self.position.splits_before(choice, number):
            self._last.pop(choice, None)
        return number == 1

    @property
    def is_stalled(self) -> bool:
        return self._pending_chars > MAX_PENDING_CHARS


class EngineClient(ABC):
    """Submits requests to what computes them, and follows them to their ends.

    `ProcessClient` has one engine, in a process beside it. A cluster's client has many.
    """

    metrics: Metrics
    """The counters of the engine's work. They are there before `connect`."""

    def __init__(self) -> None:
        self._device = ""
        """The device that the engine computes on."""
        self.on_record: Callable[[StepRecord], None] | None = None
        """Called with every step's whole record, for `--live`."""
        self._generations: dict[int, tuple[Generation, int]] = {}
        """A request's key → its generation, and which of its prompts it is."""
        self._keys, self._numbers = count(), count()
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._feed: Callable[[StepRecord | None], None] | None = None
        self._dirty: set[Generation] = set()
        self._streams: set[Generation] = set()
        self._last_flush = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None
        self.pid: int | None = None
        """The id of the engine's process, if it is this server's own."""
        self.dead = False
        """True while no request would ever be answered."""
        self._is_leaving = False

    @abstractmethod
    async def connect(self) -> None:
        """Let the running loop receive updates from now on."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the loop."""

    def check_ready(self) -> None:
        """Raise `EngineDead` if no engine would answer a request."""
        if self.dead:
            raise EngineDead

    @abstractmethod
    def probe(self, patience: float) -> bool:
        """Return whether requests are still worked on, asking where that takes a question: False if none was answered
        for `patience` seconds."""

    @abstractmethod
    def _send(self, command: Any) -> None:
        """Send a command to the engine that it concerns."""

    @property
    def num_unfinished(self) -> int:
        """The number of prompts that have not ended, and of requests whose answers are not here."""
        return len(self._generations) + self._num_asked

    # Requests

    def is_running(self, request_id: str) -> bool:
        """Return whether a request of this id has not ended, or one of several prompts whose prompts have such ids."""
        names = [generation.request_id for generation, _ in self._generations.values()]
        return any(request_id == name or request_id.startswith(f"{name}-") for name in names)

    def submit(self, generation: Generation) -> None:
        """Send a generation's prompts to the engine, and follow it to its end. Raises `EngineDead`."""
        if self.dead:
            raise EngineDead
        for command in self._follow(generation):
            self._send(command)

    def _follow(self, generation: Generation) -> list[messages.Submit]:
        """Follow a generation from now on; return the commands that queue its prompts."""
        commands, rest = [], (generation.priority, generation.salt, generation.stream)
        for index, prompt in enumerate(generation.prompts):
            key, own_id = next(self._keys), generation.request_id
            if len(generation.prompts) > 1:
                own_id = messages.prompt_id(own_id, index)
            generation.keys.append(key)
            self._generations[key] = generation, index
            commands.append(messages.Submit(key, own_id, prompt.token_ids, generation.params, prompt.text, *rest))
        if generation.stream:
            self._streams.add(generation)
        return commands

    def abort(self, generation: Generation, error: ForgeError | None = None) -> None:
        """Abort a generation. What it holds is free before the next step."""
        for key in generation.keys:
            if self._generations.pop(key, None) is not None and not self.dead:
                self._send(messages.Abort(key))
        self._streams.discard(generation)
        generation.fail(error or RequestFailed("the request was aborted"))

    def abort_all(self, error: ForgeError) -> None:
        for generation in {generation for generation, _ in self._generations.values()}:
            self.abort(generation, error)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)

    async def ask(self, subject: str, *arguments: Any) -> Any:
        """Return the engine's answer, which it gives between two steps. Raises `UsageError` if the question is wrong,
        `RequestFailed` if the engine fails at it, and `EngineDead`."""
        return await self._answer_to(messages.Ask(next(self._numbers), subject, arguments), 1)

    async def answer(self, requests: list[tuple[list[int], Any]]) -> list[Any]:
        """Return the results of prefill-only requests, each a prompt's tokens and a task. Raises as `ask` does. If the
        caller is cancelled, the requests end before the next step."""
        question = messages.AskTasks(next(self._numbers), requests)
        try:
            results: list[Any] = await self._answer_to(question, len(requests))
            return results
        except BaseException:
            if not self.dead:
                self._send(messages.Withdraw(question.number))
            raise

    async def _answer_to(self, question: messages.Ask | messages.AskTasks, num_requests: int) -> Any:
        if self.dead:
            raise EngineDead
        number = question.number
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._num_asked += num_requests
        self._send(question)
        try:
            return await future
        finally:
            self._num_asked -= num_requests
            del self._questions[number]

    def watch(self, feed: Callable[[StepRecord | None], None] | None) -> None:
        """Give whole records of the steps from now on to `feed`, and None after the last; None ends that."""
        self._feed = feed
        if not self.dead and (feed is not None or self.on_record is None):
            self._send(messages.Watch(feed is not None))

    def end_records(self) -> None:
        """Say that there are no more records."""
        if self._feed is not None:
            self._feed(None)

    # Updates

    def _take_in(self, update: messages.Update) -> None:
        find, dirty = self._generations.get, self._dirty
        for key in update.accepted:
            if key in self._generations:
                self._generations[key][0].accept()
        for refusal in update.refused:
            if (place := find(refusal.key)) is not None:
                self.abort(place[0], _error_of(refusal.fault))
        is_alone = len(self._streams) <= 1
        for key, sample, token_id, text, logprobs in update.tokens:
            place = find(key)
            if place is None:
                continue
            generation, index = place
            if generation.add_token(index * generation.params.n + sample, token_id, text, logprobs, is_alone):
                generation.wake()
            else:
                dirty.add(generation)
                if generation.is_stalled:
                    self.abort(generation, ClientStalled("the client does not take what is generated"))
        for key, sample, reason, text, stop in update.sample_ends:
            if (place := find(key)) is not None:
                generation, index = place
                delta = generation.delta(index * generation.params.n + sample)
                delta.text += text
                delta.finish_reason, delta.stop_reason = reason, stop
                generation.wake()
        for key, output, fault in update.ends:
            self._take_end(key, output, fault)
        for answer in update.answers:
            self._take_answer(answer)
        for step in update.steps:
            self.metrics.take_step(step)
        if update.gauges is not None:
            self.metrics.gauges = update.gauges
        for record in update.records:
            for take in (self._feed, self.on_record):
                if take is not None:
                    take(record)
        self._flush_when_due()

    def _take_end(self, key: int, output: RequestOutput, fault: messages.Fault | None) -> None:
        place = self._generations.pop(key, None)
        if place is None:
            return
        generation, index = place
        if fault is None and any(sample.finish_reason == "error" for sample in output.outputs):
            fault = messages.Fault("the engine could not finish this request", internal=True)
        self.metrics.take_output(output, generation.params, generation.arrived)
        if fault is not None:
            self.abort(generation, _error_of(fault))
            return
        generation.outputs[index] = output
        if generation.ended:
            self._streams.discard(generation)
            generation.wake()

    def _take_answer(self, answer: messages.Answer) -> None:
        future = self._questions.get(answer.number)
        if future is None or future.done():
            return
        if answer.fault is None:
            future.set_result(answer.value)
        else:
            future.set_exception(_error_of(answer.fault))

    def _flush_when_due(self) -> None:
        """Wake the streams' readers, now or when the next events are due."""
        if not self._dirty or self._flush_timer is not None:
            return
        due = self._last_flush + messages.pause_between_events(len(self._streams), self._device)
        wait = due - time.perf_counter()
        if wait <= 0:
            self._flush()
        else:
            self._flush_timer = asyncio.get_running_loop().call_later(wait, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        self._last_flush = time.perf_counter()
        for generation in self._dirty:
            generation.wake()
        self._dirty.clear()


class ResumableClient(EngineClient):
    """An `EngineClient` whose streams have ids, by which a client resumes them."""

    @abstractmethod
    async def resume(self, seen: SeenStream, generation: Generation) -> None:
        """Submit a stream that another connection began, under an id of its own, without what its client has seen.
        Raises `UsageError` if that belongs to another request."""


class ProcessClient(EngineClient):
    """Starts the engine's process and talks with it.

    It is made before the loop runs, so that a bad model is a plain error.
    """

    def __init__(self, model: str, options: dict[str, Any]):
        super().__init__()
        self._model, self._options = model, options
        self._question: tuple[int, float] | None = None
        """The question of `probe` that has no answer yet, and when it was sent."""
        self.died = asyncio.Event()
        """Set when the engine's process is gone without `disconnect`."""
        self._start()

    def _start(self) -> None:
        """Start a process and load the model in it."""
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        context = multiprocessing.get_context("spawn")
        from forge.server import engine_process

        self.process = context.Process(
            target=engine_process.main, args=(theirs, self._model, self._options), name="forge-engine", daemon=True
        )
        self.process.start()
        self.pid = self.process.pid
        theirs.close()
        self._connection = Connection(self._take_in, self._lost)

    def wait_until_ready(self) -> messages.Ready:
        """Block until the model is loaded. Raises the `ForgeError` that the engine's process found."""
        message: messages.Ready | messages.LoadFailed | None = next(messages.received(self._socket), None)
        if message is None:
            raise EngineDead
        if isinstance(message, messages.LoadFailed):
            raise message.error()
        self._device = message.device
        return message

    async def connect(self) -> None:
        """Let the running loop receive updates from now on."""
        await self._connection.open(self._socket)
        if self.on_record is not None:
            self._connection.send(messages.Watch(True))

    async def restart(self) -> None:
        """Start the engine's process again after it died. Raises the `ForgeError` of one that does not load."""
        await asyncio.to_thread(self.close)
        self._start()
        await asyncio.to_thread(self.wait_until_ready)
        await self.connect()
        self.dead = False
        self.died.clear()

    def disconnect(self) -> None:
        """Leave the loop; the engine's process ends when its socket closes."""
        self._is_leaving = True
        self._connection.abort()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a restart may wait on it in another thread

    def close(self) -> None:
        """Wait for the engine's process to end."""
        self._socket.close()
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def end_by_force(self, after: float) -> None:
        """End both processes in `after` seconds, whatever they do then: threads that are stuck cannot be ended."""

        def end() -> None:
            time.sleep(after)
            logger.warning("still busy: the server ends with its work undone")
            logging.shutdown()
            self.process.kill()
            os._exit(0)

        Thread(target=end, daemon=True).start()

    def probe(self, patience: float) -> bool:
        """Ask whether the engine's loop turns: False when it is gone, or has not answered such a question between two
        steps for `patience` seconds."""
        if self.dead:
            return False
        if self._question is None:
            self._question = next(self._numbers), time.monotonic()
            self._send(messages.Ask(self._question[0], "alive"))
        return time.monotonic() - self._question[1] < patience

    def _send(self, command: Any) -> None:
        self._connection.send(command)

    def _take_answer(self, answer: messages.Answer) -> None:
        if self._question is not None and answer.number == self._question[0]:
            self._question = None
        super()._take_answer(answer)

    def _lost(self) -> None:
        self.dead, self._question = True, None
        self.metrics.gauges = messages.Gauges()
        if not self._is_leaving:
            self.metrics.take_failures(
                sum(generation.params.n for generation, _ in self._generations.values()) + self._num_asked
            )
            self.died.set()
        self.abort_all(EngineDead())
        self.end_records()


def _error_of(fault: messages.Fault) -> ForgeError:
    return RequestFailed(fault.message) if fault.internal else UsageError(fault.message)
