"""The engine's process of a replica: an `EngineServer` with any number of fronts.

Each front has a connection of its own (`wire`), on which it gets one message per update: its own requests' tokens, and
what every front wants to know of the engine (load, cache events, steps). When a front goes away its requests are
aborted; their tokens are remembered for a while, so that another front can resume them.

The process belongs to the actor that Ray placed: it ends when the actor's end of the control socket closes.
"""

import gc
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.cache.prefix import PrefixKvCache
from forge.cluster import wire
from forge.cluster.events import CacheEvents, EventLog, LoadMeter
from forge.engine.handoff import KvHandoff, add_handed_over, add_resumed, hand_off
from forge.errors import ForgeError, UsageError
from forge.llm import LLM
from forge.server.engine_process import COMPILER_POLL, EngineServer, ready_message, reporting_failures
from forge.server.messages import Abort, Ask, AskTasks, Fault, Inbox, Outbox, Submit, Watch, Withdraw, frame, received

logger = logging.getLogger("forge.engine")

REMEMBERED = 512
"""Ended requests whose tokens are kept."""
_HANDOFF_BLOCKS = 1 << 16
"""Room in the host pool for what other engines hand over. It takes memory for as long as something waits there."""
_RAY_ENDS = 2.0
"""Seconds after its actor's end that Ray, on this node, may still be ending."""
_HAND_OVER_SECONDS = 30.0
"""How long a computed prompt waits for the engine that takes it."""


class _Front:
    """One front: its connection, and what it has yet to be told."""

    def __init__(self, connection: socket.socket, update: wire.ReplicaUpdate):
        self.connection, self.inbox, self.outbox = connection, Inbox(), Outbox(connection)
        self.update = update
        self.is_watching = False
        self.num_streams = 0
        """At all engines, when it sent its last request."""


class ReplicaEngine(EngineServer):
    """An engine that several fronts share, that computes prompts for other engines, and that goes on where others
    ended."""

    def __init__(self, llm: LLM, control: socket.socket, listening: socket.socket, secret: bytes, raylet: int):
        """raylet: the process id of Ray on this node, which has started the actor at the other end of `control`."""
        super().__init__(llm, control)
        self._raylet = raylet
        self._update: wire.ReplicaUpdate = wire.ReplicaUpdate()
        self._listening, self._secret = listening, secret
        self._arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Connections of new fronts, and hand-overs that have been fetched, from other threads."""
        self._bell, self._bell_end = socket.socketpair()
        self._bell.setblocking(False)
        self._fronts: dict[socket.socket, _Front] = {}
        self._front_of: dict[int, _Front] = {}
        """From the key of a request, or the number of a question, to who asked."""
        self._speaking: _Front
        """Whose command is being carried out."""
        self._places: dict[int, wire.Place] = {}
        self._handoffs: dict[int, KvHandoff] = {}
        """What another engine has computed of a request that is to be queued."""
        self._handed_off: OrderedDict[int, tuple[float, KvHandoff]] = OrderedDict()
        """Computed prompts by their request's key, and when they were."""
        self._remembered: OrderedDict[str, tuple[int, tuple[tuple[int, ...], ...]]] = OrderedDict()
        """Of ended requests the seed, and the tokens of each sample."""
        self._resumed: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        """Of requests that went on here, the tokens of each sample that came from other engines."""
        host = self.engine.scheduler.host_pool
        host.num_blocks = max(host.num_blocks, _HANDOFF_BLOCKS)
        self._meter = LoadMeter(self.engine.scheduler)
        self._events, self._held = EventLog(), set[int]()
        if isinstance(self.engine.cache, PrefixKvCache):
            self._events.observe(self.engine.cache.index)
        self._pulsed: list[socket.socket] = []
        self._is_orphan = False
        """Ray has ended on this node, and its actor with it: this engine goes on for the fronts that it has, and ends
        with the last of them."""
        self._num_steps = self._failed_in_a_row = 0
        self._step_began: float | None = None

    def run(self) -> None:
        for target in (self._admit_connections, self._beat, self._outlive_actor):
            threading.Thread(target=target, name="forge-connections", daemon=True).start()
        try:
            super().run()
        finally:
            self._open = False
            for connection in (self._listening, *self._fronts, *self._pulsed):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    # Other threads

    def _admit_connections(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # the process is ending
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        purpose: wire.Purpose | None = wire.admit(connection, self._secret)
        match purpose:
            case "front":
                self._tell(connection)
            case "pulse":
                self._pulsed.append(connection)
            case None:
                connection.close()

    def _tell(self, arrival: Any) -> None:
        """Give the engine's loop something from another thread."""
        self._arrivals.put(arrival)
        with suppress(BlockingIOError):
            self._bell_end.send(b"!")

    @property
    def pulse(self) -> wire.Pulse:
        began = self._step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        scheduler = self.engine.scheduler
        num_sequences = len(scheduler.running) + len(scheduler.queue.sequences)
        return wire.Pulse(self._num_steps, seconds, self._failed_in_a_row, num_sequences)

    def _beat(self) -> None:
        while self._open:
            data = self.pulse.packed()
            for connection in list(self._pulsed):
                try:
                    connection.send(data)
                except BlockingIOError:
                    pass
                except OSError:
                    connection.close()
                    self._pulsed.remove(connection)
            time.sleep(wire.PULSE_INTERVAL)

    def _outlive_actor(self) -> None:
        """When the actor has ended, end too, unless Ray ends with it on this node."""
        select.select([self._socket], [], [])
        deadline = time.monotonic() + _RAY_ENDS
        while not self._is_orphan and time.monotonic() < deadline:
            self._is_orphan = not _is_running(self._raylet)
            time.sleep(0.05)
        self._open = self._is_orphan and bool(self._fronts)
        self._tell(None)

    # Commands

    def _receive(self, wait: bool) -> None:
        """Carry out what the fronts ask. `wait` until there is something, or until one takes more."""
        reading = [self._bell, *self._fronts]
        writing = [front.connection for front in self._fronts.values() if not front.outbox.is_empty] if wait else []
        seconds = 0.0 if not wait else (COMPILER_POLL if self._compiling else None)
        readable, _, _ = select.select(reading, writing, [], seconds)
        for connection in readable:
            if connection is self._bell:
                self._take_arrivals()
            else:
                front = self._speaking = self._fronts[connection]
                if not self._read(connection, front.inbox):
                    self._drop(front)

    def _answer_for(self, command: Any, fault: Fault) -> None:
        super()._answer_for(command.submit if isinstance(command, wire.Place) else command, fault)

    def _take_arrivals(self) -> None:
        self._bell.recv(4096)
        while not self._arrivals.empty():
            match self._arrivals.get():
                case socket.socket() as connection:
                    update = wire.ReplicaUpdate(events=CacheEvents(tuple(self._held)), gauges=self._current_gauges())
                    self._fronts[connection] = _Front(connection, update)
                    self._urgent = True
                case (wire.Place() as place, handoff):
                    if place.submit.key in self._front_of:  # else its front has left or aborted it
                        if handoff is not None:
                            self._handoffs[place.submit.key] = handoff
                        self._obey(place.submit)

    def _drop(self, front: _Front) -> None:
        """A front is gone: end its requests."""
        front.connection.close()
        del self._fronts[front.connection]
        for key in [key for key, asker in self._front_of.items() if asker is front]:
            self._forget(key)
            for command in (Abort(key), Withdraw(key)):  # of a request, or of a question: the other does nothing
                super()._carry_out(command)
        self._set_watched()
        if self._is_orphan and not self._fronts:
            self._open = False

    def _forget(self, key: int) -> None:
        self._front_of.pop(key, None)
        self._places.pop(key, None)
        self._handoffs.pop(key, None)

    def _carry_out(self, command: Any) -> None:
        match command:
            case wire.Place(Submit(key) as submit, source=source, num_streams=num_streams):
                self._places[key], self._front_of[key] = command, self._speaking
                self._speaking.num_streams = num_streams
                if source is None:
                    super()._carry_out(submit)
                else:
                    threading.Thread(target=self._fetch, args=(command, source), daemon=True).start()
            case Watch(is_on):
                self._speaking.is_watching = is_on
                self._set_watched()
            case Abort(key):
                super()._carry_out(command)
                self._forget(key)
            case Ask(number) | AskTasks(number):
                self._front_of[number] = self._speaking
                super()._carry_out(command)
            case _:
                super()._carry_out(command)

    def _set_watched(self) -> None:
        self._watched = any(front.is_watching for front in self._fronts.values())

    def _add_request(self, key: int, *arguments: Any, **options: Any) -> tuple[int, ...]:
        place, handoff = self._places.pop(key, None), self._handoffs.pop(key, None)
        if place is not None and place.emitted:
            seq_ids = add_resumed(self.engine, place.emitted, *arguments, **options)
            self._resumed[arguments[0]] = tuple([len(sample.token_ids) for sample in place.emitted])
            if len(self._resumed) > REMEMBERED:
                self._resumed.popitem(last=False)
        elif handoff is not None:
            seq_ids = self._add_handed_over(handoff, *arguments, **options)
        else:
            hands_over = place is not None and place.hands_over
            seq_ids = self.engine.add_request(*arguments, retain_cache=hands_over, **options)
            if place is not None and hands_over:
                self._places[key] = place  # until it has ended
        if place is not None:
            if place.trace:
                logger.info("[%s] %s %s", place.trace, arguments[0], _what_begins(place, handoff))
            cached = handoff.position if handoff is not None else place.cached_tokens
            self._meter.take(seq_ids[0], cached)
        return seq_ids

    def _add_handed_over(self, handoff: KvHandoff, *arguments: Any, **options: Any) -> tuple[int, ...]:
        try:
            return add_handed_over(self.engine, handoff, *arguments, **options)
        except UsageError as error:  # of another model, as during an update
            logger.warning("a hand-over is not used: %s", error)
            return self.engine.add_request(*arguments, **options)

    # Hand-overs

    def _fetch(self, place: wire.Place, source: wire.Source) -> None:
        """On a thread of its own: get what another engine has computed. Without it the prompt is computed here."""
        handoff = None
        try:
            handoff = wire.fetch(source.address, source.key, self._secret)
        except (ForgeError, OSError) as error:
            logger.warning("no hand-over for %s: %s", place.submit.request_id, error)
        self._tell((place, handoff))

    def _answer_handoff(self, key: int) -> KvHandoff | None:
        """The computed prompt of a request that ended here; None where it is gone."""
        _, handoff = self._handed_off.pop(key, (0.0, None))
        return handoff

    def _answer_timeline(self, request_id: str) -> dict[str, Any] | None:
        """As `EngineServer`'s. Of tokens that came from another engine no times are known."""
        timeline, lengths = super()._answer_timeline(request_id), self._resumed.get(request_id)
        if timeline is not None and lengths is not None:
            step = timeline["events"][0]["step"] if timeline["events"] else 0
            for sample, length in zip(timeline["samples"], lengths, strict=True):
                sample["tokens"] = [{}] * length + sample["tokens"]
            event = {"step": step, "event": "resume", "why": f"resumed behind {max(lengths)} tokens of another engine"}
            timeline["events"].insert(0, event | {"sample": 0})
        return timeline

    def _answer_tokens(self, request_id: str) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        """The seed of a request and the tokens of its samples so far; None for one that is not known (any more)."""
        if any(request.request_id == request_id for request in self._requests.values()):
            output = self.engine.output(request_id)
            return output.seed, tuple([sample.token_ids for sample in output.outputs])
        return self._remembered.get(request_id)

    def _take_output(self, request: Any, fault: Fault | None) -> None:
        super()._take_output(request, fault)
        output = self._update.ends[-1].output
        self._remembered[request.request_id] = output.seed, tuple([sample.token_ids for sample in output.outputs])
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        place = self._places.pop(request.key, None)
        seq_id = request.seq_ids[0]
        if place is not None and place.hands_over and self.engine.is_retained(seq_id):
            self._handed_off[request.key] = time.monotonic(), hand_off(self.engine, seq_id)
            self.engine.release(seq_id)
        now = time.monotonic()
        while self._handed_off and now - next(iter(self._handed_off.values()))[0] > _HAND_OVER_SECONDS:
            self._handed_off.popitem(last=False)

    # Steps

    def _step(self) -> None:
        self._step_began, failed = time.monotonic(), self._failed_in_a_row
        super()._step()
        self._step_began = None
        self._num_steps += 1
        if self._failed_in_a_row == failed:
            self._failed_in_a_row = 0

    def _fail(self, error: Exception) -> None:
        self._failed_in_a_row += 1
        super()._fail(error)

    # Updates

    def _send(self) -> None:
        """Give each front its part of what has happened, if that is due, and send what its socket takes."""
        if self._is_due():
            self._share()
            self._urgent, self._last_sent = False, time.perf_counter()
        for front in list(self._fronts.values()):
            try:
                self._put(front)
            except OSError:
                self._drop(front)

    def _num_paced(self) -> int:
        """Return what `EngineServer` does; a front with streams at several engines passes on no more for that. One that
        is alone here does not wait."""
        if self._num_streams <= 1:
            return self._num_streams
        return max([self._num_streams, *[front.num_streams for front in self._fronts.values()]])

    def _share(self) -> None:
        """Divide the update among the fronts."""
        update, self._update = self._update, wire.ReplicaUpdate()
        events, load = self._events.take(), self._meter.load()
        self._held.update(events.published)
        self._held.difference_update(events.evicted)
        current = self._current_gauges()
        gauges = current if current != self._gauges else None
        self._gauges = current
        for front in self._fronts.values():
            pending = front.update
            pending.steps += update.steps
            pending.gauges = gauges or pending.gauges
            pending.events = pending.events.then(events)
            pending.load, pending.failed_in_a_row = load, self._failed_in_a_row
            if front.is_watching:
                pending.records += update.records
        front_of = self._front_of
        for key in update.accepted:
            if key in front_of:
                front_of[key].update.accepted.append(key)
        for kind in ("tokens", "sample_ends", "refused", "ends", "answers"):
            for item in getattr(update, kind):
                if item[0] in front_of:  # the key of its request, or the number of its question
                    getattr(front_of[item[0]].update, kind).append(item)
        for key in [refusal.key for refusal in update.refused] + [end.key for end in update.ends]:
            self._forget(key)
        for answer in update.answers:
            front_of.pop(answer.number, None)

    def _put(self, front: _Front) -> None:
        """Send what a front's socket takes of its last update, and then the next one if it has news."""
        front.outbox.flush()
        update = front.update
        has_news = update.is_awaited or update.failed_in_a_row or update.tokens or update.steps or update.events
        if front.outbox.is_empty and (has_news or update.gauges is not None):
            front.update = wire.ReplicaUpdate()
            update.clock = time.perf_counter()
            front.outbox.put(update)


def _is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that has may still wait for its parent to notice."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")  # of Linux
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _what_begins(place: wire.Place, handoff: KvHandoff | None) -> str:
    """What an engine does with a request that it takes, for its log."""
    if place.hands_over:
        return f"is computed for another engine: {len(place.submit.token_ids)} tokens"
    if handoff is not None:
        return f"goes on behind {handoff.position} prompt tokens that another engine has computed"
    if place.emitted:
        return f"goes on behind {max(len(sample.token_ids) for sample in place.emitted)} tokens of another engine"
    return f"begins: {len(place.submit.token_ids)} tokens"


def main() -> None:
    """The process's entry point: load, tell the actor the address and what is served, and serve until it ends.

    Its one argument is the file descriptor of the control socket, whose first message says what to load.
    """
    logging.basicConfig(format="%(levelname)s %(message)s")
    logger.setLevel(logging.INFO)
    control = wire.starters_socket()
    host, secret, raylet, model, options = next(received(control))
    with reporting_failures(control):
        llm = LLM(model, **options)
        llm.trust_grammars()
        listening = wire.listen(host)
        address: wire.Address = listening.getsockname()[:2]
        control.sendall(frame((address, ready_message(llm))))
        gc.freeze()  # as `engine_process` does: a model's objects stay
        ReplicaEngine(llm, control, listening, secret, raylet).run()
    os._exit(0)  # threads that wait for connections do not hold it up


if __name__ == "__main__":
    main()
