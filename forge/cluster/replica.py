"""What runs in a replica: an engine on a thread of its own, and the actor that Ray Serve starts, checks and restarts.

The actor speaks the messages that `forge serve`'s two processes speak: a `Submit` comes in, `Update`s go out. It has
three streams and questions: `generate` is one request; `follow` is all that routers, metrics and views want to know;
`ask` is a question between two steps. Every method takes a `RouteRequest` first, by which the router chooses.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from forge.cache.prefix import PrefixKvCache
from forge.cluster.events import NO_EVENTS, CacheEvents, EventLog
from forge.cluster.fleet import RouteRequest
from forge.cluster.handoff import HandoffEngine, prefill_of
from forge.engine.handoff import KvHandoff
from forge.errors import ForgeError
from forge.llm import LLM
from forge.server.engine_process import ready_message
from forge.server.messages import (
    Abort,
    Answer,
    Ask,
    AskTasks,
    Gauges,
    Inbox,
    LoadFailed,
    Ready,
    StepSummary,
    Submit,
    Update,
    Watch,
    Withdraw,
    frame,
)
from forge.trace.records import StepRecord

logger = logging.getLogger("forge.cluster")

_REPORT_PAUSE = 0.01
"""Seconds between two reports to one follower. A new prefix is known to the router this much later at most."""


_DEAD = "the engine of this replica has died"


class ReplicaFailed(RuntimeError):
    """A replica could not do what it was asked, and another might."""


@dataclass
class Report:
    """What a replica has to tell since its last report to the same follower."""

    clock: float = 0.0
    """The replica's monotonic clock, in seconds, when this was sent."""
    events: CacheEvents = NO_EVENTS
    whole: bool = False
    """Whether `events` is all that the cache has, as the first report says."""
    gauges: Gauges | None = None
    steps: list[StepSummary] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)


class _Stream:
    """What waits to be sent of one request."""

    def __init__(self) -> None:
        self.update, self._came = Update(), asyncio.Event()

    def wake(self) -> None:
        self._came.set()

    async def next(self) -> Update:
        await self._came.wait()
        self._came.clear()
        update, self.update = self.update, Update()
        return update


class _Follower:
    """What waits to be sent to one follower."""

    def __init__(self, held: set[int], gauges: Gauges):
        self.published, self.evicted = set(held), set[int]()
        self.report, self.came = Report(whole=True, gauges=gauges), asyncio.Event()
        self.came.set()

    def add(self, update: Update, events: CacheEvents) -> None:
        report = self.report
        report.steps += update.steps
        report.records += update.records
        report.gauges = update.gauges or report.gauges
        for now, before, keys in (
            (self.published, self.evicted, events.published),
            (self.evicted, self.published, events.evicted),
        ):
            now.update(keys)
            before.difference_update(keys)
        self.came.set()

    async def next(self) -> Report:
        await self.came.wait()
        self.came.clear()
        report, self.report = self.report, Report()
        report.events = CacheEvents(tuple(self.published), tuple(self.evicted))
        self.published, self.evicted = set(), set()
        report.clock = time.perf_counter()
        return report


class EngineReplica(asyncio.Protocol):
    """One engine of the cluster. Everything but the engine's thread runs on the actor's loop."""

    async def __init__(self, own_name: Callable[[], str], model: str, options: dict[str, Any]):  # type: ignore[misc]
        """Serve awaits it. own_name: gives what the router calls it. model, options: as for `LLM`."""
        self.name = own_name()
        self.dead = False
        self._failure: LoadFailed | None = None
        self._inbox, self._numbers = Inbox(), count()
        self._streams: dict[int, _Stream] = {}
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._followers: list[_Follower] = []
        self._events, self._held = EventLog(), set[int]()
        """The keys of all contents that the cache has, as told so far."""
        self._gauges = Gauges()
        try:
            llm = await asyncio.to_thread(LLM, model, **options)
        except ForgeError as error:  # started again it would fail again: `ready` says why
            self._failure = LoadFailed(str(error), error.exit_code)
            return
        if isinstance(llm.engine.cache, PrefixKvCache):
            self._events.observe(llm.engine.cache.index)
        self._ready = ready_message(llm)
        self._gauges = Gauges(num_blocks=self._ready.num_blocks)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._engine = HandoffEngine(llm, theirs)
        ours.setblocking(False)
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        threading.Thread(target=self._run_engine, args=(theirs,), name="forge-engine", daemon=True).start()

    def _run_engine(self, connection: socket.socket) -> None:
        try:
            self._engine.run()
        except BaseException as error:
            logger.error("the engine of replica %s ended", self.name, exc_info=error)
        finally:
            connection.close()  # the actor finds out by it

    # What Ray Serve calls

    async def check_health(self) -> None:
        """Raises once the engine's thread has ended: Ray Serve then starts another replica."""
        self._check_alive()

    async def ready(self, route: RouteRequest) -> Ready | LoadFailed:
        """What the server has to know of the model, or why there is none."""
        return self._failure or self._ready

    async def generate(
        self, route: RouteRequest, submit: Submit, handoff: KvHandoff | None = None
    ) -> AsyncIterator[Update]:
        """One request, as updates of it alone. Where its caller goes away, it is aborted."""
        stream = self._open(submit.key)
        if handoff is not None:
            self._engine.handoffs[submit.key] = handoff
        self._send(submit)
        ended = False
        try:
            while not ended:
                update = await stream.next()
                ended = bool(update.ends or update.refused)
                yield update
                if not ended:
                    self._check_alive()
        finally:
            self._streams.pop(submit.key, None)
            if not ended:
                self._send(Abort(submit.key))

    async def prefill(self, route: RouteRequest, submit: Submit) -> KvHandoff | None:
        """Compute a prompt but for its last token, and hand over its blocks. None for one that cannot run here: the
        engine that is to continue it says why."""
        self._engine.prefills.add(submit.key)
        try:
            async for _ in self.generate(route, prefill_of(submit)):
                pass
        finally:
            self._engine.prefills.discard(submit.key)
            handoff = self._engine.handed_off.pop(submit.key, None)
        return handoff

    async def ask(self, route: RouteRequest, what: str, arguments: tuple[Any, ...]) -> Answer:
        """The answer of `EngineServer` to a question."""
        self._check_target(route)
        return await self._asked(Ask(next(self._numbers), what, arguments))

    async def answer(self, route: RouteRequest, requests: list[tuple[list[int], Any]]) -> Answer:
        """The results of requests that keep nothing."""
        question = AskTasks(next(self._numbers), requests)
        try:
            return await self._asked(question)
        except asyncio.CancelledError:
            self._send(Withdraw(question.number))
            raise

    async def watch(self, route: RouteRequest, wanted: bool) -> None:
        """Whether reports have whole step records from now on."""
        self._check_target(route)
        self._send(Watch(wanted))

    async def follow(self, route: RouteRequest) -> AsyncIterator[Report]:
        """Reports, until the caller goes away. The first has everything that the cache has."""
        self._check_target(route)
        follower = _Follower(self._held, self._gauges)
        self._followers.append(follower)
        try:
            while not self.dead:
                yield await follower.next()
                await asyncio.sleep(_REPORT_PAUSE)
        finally:
            self._followers.remove(follower)

    def _check_target(self, route: RouteRequest) -> None:
        if route.target not in (None, self.name):
            raise ReplicaFailed(f"replica {route.target} no longer runs")

    def _check_alive(self) -> None:
        if self.dead:
            raise ReplicaFailed(_DEAD)

    # The engine's end

    def _open(self, key: int) -> _Stream:
        self._check_alive()
        stream = self._streams[key] = _Stream()
        return stream

    def _send(self, command: Any) -> None:
        if not self.dead:
            self._transport.write(frame(command))

    async def _asked(self, question: Ask | AskTasks) -> Answer:
        self._check_alive()
        future = self._questions[question.number] = asyncio.get_running_loop().create_future()
        self._send(question)
        try:
            return await future
        finally:
            del self._questions[question.number]

    def data_received(self, data: bytes) -> None:
        for update in self._inbox.feed(data):
            self._take_in(update)

    def connection_lost(self, error: Exception | None) -> None:
        self.dead = True
        for stream in self._streams.values():
            stream.wake()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(ReplicaFailed(_DEAD))
        for follower in self._followers:
            follower.came.set()

    def _take_in(self, update: Update) -> None:
        """Give each stream its part of an update, and every follower the rest."""
        events = self._events.take()
        self._held.update(events.published)
        self._held.difference_update(events.evicted)
        self._gauges = update.gauges or self._gauges
        for follower in self._followers:
            follower.add(update, events)
        woken: dict[int, _Stream] = {}

        def part(key: int) -> Update:
            """That stream's own update; one that is never read where the stream is gone."""
            stream = self._streams.get(key)
            if stream is None:
                return Update()
            woken[key] = stream
            return stream.update

        for key in update.accepted:
            part(key).accepted.append(key)
        for refusal in update.refused:
            part(refusal.key).refused.append(refusal)
        for token in update.tokens:
            part(token[0]).tokens.append(token)
        for sample_end in update.sample_ends:
            part(sample_end.key).sample_ends.append(sample_end)
        for end in update.ends:
            part(end.key).ends.append(end)
        for stream in woken.values():
            stream.wake()
        for answer in update.answers:
            self._take_answer(answer)

    def _take_answer(self, answer: Answer) -> None:
        future = self._questions.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)
