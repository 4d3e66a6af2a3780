"""The engine's own process: it takes commands between two steps and turns the engine while there is work.

Nothing here waits for the HTTP process. What cannot be sent yet joins the next update, so a step is never held up by a
socket; nor is what no client would get yet sent, for each update costs both processes more than all that is in it. An
exception inside a step fails the requests of that step, one in carrying out a command fails the command, and the engine
goes on. The process ends when its socket closes, whatever became of the one at the other end.
"""

import gc
import logging
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from forge.engine.engine import Engine
from forge.engine.sampling_params import SamplingParams
from forge.engine.token_filter import vocabulary_bytes
from forge.errors import ForgeError, UsageError
from forge.grammar.work_estimate import estimate
from forge.llm import LLM
from forge.server import messages
from forge.server.request_log import RequestLog
from forge.trace.records import FinishRecord, StepRecord

logger = logging.getLogger("forge.engine")

_RECEIVE = 1 << 16
"""Bytes to receive at once. Room for more takes 20 µs to get from the system, whatever comes."""
_MOST_SECONDS = 0.05
"""Seconds between two updates at most, if no stream is waiting for one."""
_TOKENS_BETWEEN_STEPS = 1 << 17
"""Prompt tokens that are queued between two steps, at most. Each takes some 0.1 µs: a question may have millions of
them."""
COMPILER_POLL = 0.002
"""Seconds between two looks at the grammars that are being compiled, while there is nothing else to do."""


def main(connection: socket.socket, model: str, options: dict[str, Any]) -> None:
    """Load the model, report it, and serve until the socket closes. The process's entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process decides when this one ends
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(message)s")
    with connection, reporting_failures(connection):
        llm = LLM(model, **options)
        connection.sendall(messages.frame(ready_message(llm)))
        llm.trust_grammars()  # while the other process makes its application
        gc.freeze()  # a model's objects stay: no collection has to look at them
        EngineServer(llm, connection).run()


@contextmanager
def reporting_failures(connection: socket.socket) -> Iterator[None]:
    """Send `LoadFailed` if the model cannot be loaded within this context. The other process may have ended."""
    try:
        yield
    except ForgeError as error:
        connection.sendall(messages.frame(messages.LoadFailed(str(error), error.exit_code)))
    except MemoryError:
        message = "out of memory: take a smaller model, or a smaller --max-model-len"
        connection.sendall(messages.frame(messages.LoadFailed(message)))
    except (BrokenPipeError, ConnectionResetError):
        pass


def ready_message(llm: LLM) -> messages.Ready:
    spec = llm.tokenizer.spec
    spec = replace(spec, tokens=tuple(spec.tokens), merges=tuple(spec.merges))  # a file's own are read as they are used
    longest = min(llm.max_model_len, llm.engine.cache.max_sequence_length)
    return messages.Ready(
        llm.model_name,
        llm.kv,
        llm.device,
        llm.device_description,
        longest,
        llm.model.vocab_size,
        llm.load_seconds,
        llm.pooling,
        _checked_sampling(llm.default_sampling),
        llm.model.labels,
        llm.engine.cache.stats().num_blocks,
        llm.engine.cache.block_size,
        type(llm.tokenizer),
        spec,
    )


def _checked_sampling(recommended: Mapping[str, float]) -> Mapping[str, float]:
    """Return the sampling that the model's file recommends, or nothing if it makes no sense."""
    try:
        SamplingParams(**recommended)  # type: ignore[arg-type]  # numbers by name
    except UsageError:
        return {}
    return recommended


@dataclass(slots=True, eq=False)
class _Request:
    """A request that the engine is working on."""

    key: int
    request_id: str
    stream: bool
    seq_ids: tuple[int, ...]
    silent: set[int]
    """The samples whose first token is yet to come."""
    fault: messages.Fault | None = None
    """Why a sample of it ended as an error."""


@dataclass(slots=True, eq=False)
class _Group:
    """The prefill-only requests of one question."""

    number: int
    requests: dict[int, str] = field(default_factory=dict)
    """A sequence's id → the request's id."""
    missing: int = 0
    """Requests that have not ended, queued or not."""


class EngineServer:
    """An engine at one end of a socket."""

    def __init__(self, llm: LLM, connection: socket.socket):
        self.llm = llm
        self.engine: Engine = llm.engine
        self._socket = connection
        connection.setblocking(False)
        self._inbox, self._outbox = messages.Inbox(), messages.Outbox(connection)
        self._update = messages.Update()
        self._urgent = False
        """Whether a client waits for what the update has."""
        self._last_sent = 0.0
        self._num_streams = 0
        self._requests: dict[int, _Request] = {}
        self._samples: dict[int, tuple[_Request, int]] = {}
        """A sequence's id → its request, and which sample it is."""
        self._groups: dict[int, _Group] = {}
        """A question's number → its requests."""
        self._group_of: dict[int, _Group] = {}
        """A prefill-only request's sequence id → the question that it belongs to."""
        self._asked: deque[tuple[_Group, list[int], Any]] = deque()
        """Requests of questions that are not queued yet."""
        self._watched = False
        self._gauges: messages.Gauges | None = None
        self._log = RequestLog(self.engine.timeline)
        self._open = True
        self._compiling: list[tuple[messages.Submit, Future[Any]]] = []
        """Requests that wait for their grammar, which is compiled on another thread."""
        self._compilers = {slow: ThreadPoolExecutor(1, "forge-grammars") for slow in (False, True)}
        """Two threads, so that grammars that take long do not hold up the others."""
        self._unprepared: dict[bool, list[tuple[int, int, SamplingParams, Future[None]]]] = {False: [], True: []}
        """Heaps of what the compilers are to do, by the estimated work and the request's key."""

    def run(self) -> None:
        """Serve until the socket closes."""
        while self._open:
            busy = self.engine.has_unfinished() or self._asked
            self._receive(wait=not busy)
            self._submit_compiled()
            self._queue_asked()
            if self.engine.has_unfinished():
                self._step()
            self._send()

    # Commands

    def _receive(self, wait: bool) -> None:
        """Carry out the commands that have come. `wait` until there is one, or until the socket takes more."""
        if wait:
            writing = [] if self._outbox.is_empty else [self._socket]
            select.select([self._socket], writing, [], COMPILER_POLL if self._compiling else None)
        if not self._read(self._socket, self._inbox):
            self._open = False

    def _read(self, connection: socket.socket, inbox: messages.Inbox) -> bool:
        """Carry out the commands that have come on a connection; return whether it is still open."""
        while True:
            try:
                data = connection.recv(_RECEIVE)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                return False
            for command in inbox.feed(data):
                self._obey(command)

    def _obey(self, command: Any) -> None:
        """Carry out a command, or answer why it fails."""
        try:
            self._carry_out(command)
        except Exception as error:
            self._answer_for(command, fault_of(error))

    def _answer_for(self, command: Any, fault: messages.Fault) -> None:
        """Report a failed command to the client that waits for its result."""
        if isinstance(command, messages.Submit):
            self._update.refused.append(messages.Refusal(command.key, fault))
        elif isinstance(command, messages.Ask | messages.AskTasks):
            self._update.answers.append(messages.Answer(command.number, None, fault))

    def _carry_out(self, command: messages.Command) -> None:
        if isinstance(command, messages.Submit):
            self._submit(command)
        elif isinstance(command, messages.Abort):
            if (request := self._requests.get(command.key)) is not None:
                self.engine.abort(request.request_id)
                self._take_output(request, None)
            self._compiling = [pair for pair in self._compiling if pair[0].key != command.key]
        elif isinstance(command, messages.Watch):
            self._watched = command.is_on
        elif isinstance(command, messages.AskTasks):
            group = self._groups[command.number] = _Group(command.number, missing=len(command.requests))
            self._asked.extend([(group, token_ids, task) for token_ids, task in command.requests])
        elif isinstance(command, messages.Withdraw):
            if command.number in self._groups:
                self._end_group(self._groups[command.number], messages.Fault("the client has left"))
        else:
            value = getattr(self, f"_answer_{command.subject}")(*command.arguments)
            self._update.answers.append(messages.Answer(command.number, value, None))

    def _submit(self, command: messages.Submit) -> None:
        params = command.params
        if params.structured is None and not params.bad_words:
            self._queue(command)
        else:
            is_slow = params.structured is not None and params.structured.is_slow
            work = estimate(params.structured) if params.structured is not None else 0
            prepared: Future[None] = Future()
            self._compiling.append((command, prepared))
            heappush(self._unprepared[is_slow], (work, command.key, params, prepared))
            self._compilers[is_slow].submit(self._prepare_least, is_slow)

    def _prepare_least(self, is_slow: bool) -> None:
        """Prepare the request whose grammar is the least work, so that a crowd of large ones holds none up."""
        _, _, params, prepared = heappop(self._unprepared[is_slow])
        try:
            self._prepare(params)
            prepared.set_result(None)
        except Exception as error:
            prepared.set_exception(error)

    def _prepare(self, params: SamplingParams) -> None:
        """Do on another thread what takes long of queueing a request; it is kept for then."""
        if params.bad_words:
            vocabulary_bytes(self.engine.tokenizer, self.llm.model.vocab_size)
        if params.structured is not None and self.engine.compile_grammar is not None:
            self.engine.compile_grammar(params.structured)

    def _submit_compiled(self) -> None:
        """Queue the requests whose grammars are compiled, which the engine then finds in the compiler's cache."""
        for command, compiled in [pair for pair in self._compiling if pair[1].done()]:
            self._compiling.remove((command, compiled))
            try:
                compiled.result()
                self._queue(command)
            except Exception as error:
                self._answer_for(command, fault_of(error))

    def _queue(self, command: messages.Submit) -> None:
        key, request_id, token_ids, params, prompt, priority, salt, stream = command
        seq_ids = self._add_request(key, request_id, token_ids, params, prompt=prompt, priority=priority, salt=salt)
        self._update.accepted.append(key)
        silent = set(range(params.n)) if stream else set()
        request = self._requests[key] = _Request(key, request_id, stream, seq_ids, silent)
        self._num_streams += stream
        for sample, seq_id in enumerate(seq_ids):
            self._samples[seq_id] = request, sample
        self._log.begin(request_id, seq_ids)

    def _add_request(self, key: int, *arguments: Any, **options: Any) -> tuple[int, ...]:
        return self.engine.add_request(*arguments, **options)

    def _answer_alive(self) -> bool:
        return True

    def _answer_timeline(self, request_id: str) -> dict[str, Any] | None:
        """Return what happened to a request; None if it is not known (any more)."""
        return self._log.timeline(request_id)

    def _queue_asked(self) -> None:
        """Queue requests of questions, `_TOKENS_BETWEEN_STEPS` or little more. A refused one ends its question."""
        num_tokens = 0
        while self._asked and num_tokens < _TOKENS_BETWEEN_STEPS:
            group, token_ids, task = self._asked.popleft()
            if group.number not in self._groups:
                continue  # the question has ended
            num_tokens += len(token_ids)
            request_id = f"ask-{group.number}-{len(group.requests)}"
            try:
                (seq_id,) = self.engine.add_request(request_id, token_ids, SamplingParams(), task=task)
            except Exception as error:
                self._end_group(group, fault_of(error))
                continue
            group.requests[seq_id] = request_id
            self._group_of[seq_id] = group

    def _end_group(self, group: _Group, fault: messages.Fault | None) -> None:
        """Answer a question whose requests have all ended, or end now."""
        if fault is not None:
            for request_id in group.requests.values():
                self.engine.abort(request_id)
        results = [self.engine.output(request_id).outputs[0].readout for request_id in group.requests.values()]
        for seq_id, request_id in group.requests.items():
            self.engine.forget(request_id)
            del self._group_of[seq_id]
        del self._groups[group.number]
        if fault is None and None in results:
            fault = messages.Fault("the engine could not answer", internal=True)
        self._update.answers.append(messages.Answer(group.number, results if fault is None else None, fault))

    # Steps

    def _step(self) -> None:
        try:
            record = self.engine.step()
        except Exception as error:
            self._fail(error)
            return
        update = self._update
        samples = self._samples
        for seq_id, _, token_id, text, _, logprobs in record.tokens:
            request, sample = samples[seq_id]
            if request.stream:
                update.tokens.append((request.key, sample, token_id, text, logprobs))
                if sample in request.silent:
                    request.silent.remove(sample)
                    self._urgent = True
        ended: dict[_Request, None] = {}
        for finish in record.finished:
            if finish.seq_id not in samples:
                self._take_readout(finish)
                continue
            request, sample = samples[finish.seq_id]
            ended[request] = None
            if finish.error is not None:
                request.fault = messages.Fault(finish.error, internal=not finish.by_request)
            if request.stream:
                update.sample_ends.append(
                    messages.SampleEnd(request.key, sample, finish.reason, finish.text, finish.stop)
                )
        update.steps.append(_summary(record))
        if self._watched:
            update.records.append(record)
        for request in ended:
            if not self.engine.is_unfinished(request.request_id):
                self._take_output(request, request.fault)

    def _take_readout(self, finish: FinishRecord) -> None:
        group = self._group_of.get(finish.seq_id)
        if group is None:
            return  # it was answered with the error of another of its requests
        group.missing -= 1
        if finish.error is not None:
            self._end_group(group, messages.Fault(finish.error, internal=True))
        elif not group.missing:
            self._end_group(group, None)

    def _fail(self, error: Exception) -> None:
        """End the requests of a step that ended in `error`. The engine undoes the step."""
        if isinstance(error, ForgeError):
            message = str(error)
        else:
            logger.error("a step failed", exc_info=error)
            message = f"the step that this request was part of failed ({type(error).__name__})"
        failed = set(self.engine.fail_step())
        for group in list(self._groups.values()):
            if not failed.isdisjoint(group.requests.values()):
                self._end_group(group, messages.Fault(message, internal=True))
        for request in [request for request in self._requests.values() if request.request_id in failed]:
            self._take_output(request, messages.Fault(message, internal=True))

    def _take_output(self, request: _Request, fault: messages.Fault | None) -> None:
        """Send the output of a request that has ended, and forget it."""
        output = self.engine.output(request.request_id)
        self._log.end(request.request_id)
        self.engine.forget(request.request_id)
        self._num_streams -= request.stream
        del self._requests[request.key]
        for seq_id in request.seq_ids:
            del self._samples[seq_id]
        self._update.ends.append(messages.RequestEnd(request.key, output, fault))

    # Updates

    def _send(self) -> None:
        """Send an update if it is due and the socket takes it; otherwise it waits for the next time."""
        try:
            self._outbox.flush()
            if not self._outbox.is_empty or not self._is_due():
                return
            gauges = self._current_gauges()
            if gauges != self._gauges:
                self._gauges = self._update.gauges = gauges
            if not self._update.is_empty:
                update, self._update = self._update, messages.Update()
                self._urgent, self._last_sent = False, time.perf_counter()
                self._outbox.put(update)
        except (BrokenPipeError, ConnectionResetError):
            self._open = False

    def _is_due(self) -> bool:
        """Return whether an update would bring what its reader passes on at once: the rest comes when all streams may
        have another event, or when there is nothing left to do."""
        if self._urgent or self._update.is_awaited or not self.engine.has_unfinished():
            return True
        num_streams = self._num_paced()
        pause = messages.pause_between_events(num_streams, self.llm.device) if num_streams else _MOST_SECONDS
        return time.perf_counter() - self._last_sent >= min(pause, _MOST_SECONDS)

    def _num_paced(self) -> int:
        """Return the number of streams that share the events of each second."""
        return self._num_streams

    def _current_gauges(self) -> messages.Gauges:
        queues, stats = self.engine.scheduler.queues, self.engine.cache.stats()
        pool = (stats.used_blocks, stats.num_blocks, stats.prefix_queries, stats.prefix_hits)
        return messages.Gauges(queues.waiting, queues.running, queues.swapped, *pool)


def fault_of(error: Exception) -> messages.Fault:
    """Return what a client is told of an error in its command. The engine's own errors go to the log."""
    if isinstance(error, ForgeError):
        return messages.Fault(str(error))
    logger.error("a command failed", exc_info=error)
    return messages.Fault(f"the engine failed at it ({type(error).__name__})", True)


def _summary(record: StepRecord) -> messages.StepSummary:
    cycles = [cycle for cycle in record.cycles if cycle.proposed]
    return messages.StepSummary(
        (record.ended - record.started) * 1e3,
        record.ended,
        sum([item.num_tokens for item in record.items if item.phase != "decode"]),
        sum([item.phase == "decode" for item in record.items]),
        len(record.tokens),
        len(record.preempted),
        tuple([(cycle.proposer, len(cycle.proposed), cycle.num_accepted, cycle.won) for cycle in cycles]),
    )
