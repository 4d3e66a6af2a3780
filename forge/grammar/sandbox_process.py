"""`python -m forge.grammar.sandbox_process`: compiles grammars in workers, each of which can be ended.

The supervisor loads the vocabulary once and forks its workers from there, so that a worker that is killed is replaced
within milliseconds. It has two of them. Every grammar goes to the first, newest before oldest, and may take `QUICK` of
its time; one that takes longer begins again on the second, which has a lower priority and `MOST`. So a grammar that
explodes delays the next by `QUICK` at most, and any number of them leave the processor to the engine.

Time is the processor's: a timer of the worker writes a byte for each `TICK`, also while it is inside the library, and
the supervisor counts. Memory and stack are limited by the system; a worker that wants more dies of it.

Standard input has the vocabulary in the first line and a job or a cancellation in each further one, standard output an
answer for each job, all of it JSON. The supervisor ends when its input does.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar.compiler import TOO_DEEP, compile_grammar, refusal, without_gbnf
from forge.grammar.vocabulary import Vocabulary, ll_tokenizer

TICK = 0.05
QUICK, MOST = 0.1, 0.5
"""Seconds of the processor. The largest grammars that are allowed (64,000 characters) take 0.06 to 0.15, a bomb any."""
MEMORY = 256 << 20
"""Bytes, beyond those of the vocabulary."""
STACK = 4 << 20
"""Bytes: half of what a thread of the engine's process has, which compiles the same grammar afterwards."""
MAX_SLOW = 8
"""Grammars that wait for the second worker. A further one is refused when it has taken `QUICK`."""
DEADLINE = 30.0
"""Seconds that a job may wait and take together."""
_CROWD, _SLOW = 10, 15
"""Nice levels: of the first worker while grammars that explode come in a row, and of the second."""

_OUT_OF_MEMORY, _FAILED = 1, 2
"""Exit statuses of a worker. The library aborts where memory ends; Python can say so."""

Job = dict[str, Any]
"""Its `id`, the `form` of its `StructuredOutput`, and the `deadline`."""
Compile = Callable[[StructuredOutput], None]


class _Lines:
    """The lines that come from a pipe."""

    def __init__(self, fd: int):
        self.fd, self._bytes = fd, b""

    def read(self) -> list[bytes]:
        """Those that the next piece completes. Raises EOFError at the end."""
        piece = os.read(self.fd, 1 << 20)
        if not piece:
            raise EOFError
        *lines, self._bytes = (self._bytes + piece).split(b"\n")
        return lines


class _Worker:
    """A forked process that compiles one grammar at a time."""

    def __init__(self, compile_: Compile, nice: int):
        self.nice, self.ticks = nice, 0
        (jobs, self._jobs), (answers_fd, answers), (self.ticks_fd, ticks) = os.pipe(), os.pipe(), os.pipe()
        self.answers = _Lines(answers_fd)
        self.pid = os.fork()
        if not self.pid:
            try:
                _work(compile_, nice, jobs, answers, ticks)
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)
            finally:
                os._exit(_FAILED)
        for end in (jobs, answers, ticks):
            os.close(end)
        os.set_blocking(self.ticks_fd, False)

    def begin(self, job: Job) -> None:
        self.take_ticks()
        self.ticks = 0
        with suppress(BrokenPipeError):  # it has died: its answers end
            _write_line(self._jobs, job["form"])

    def take_ticks(self) -> None:
        with suppress(BlockingIOError):
            self.ticks += len(os.read(self.ticks_fd, 1 << 10))

    def end(self) -> int:
        """End it and return its status, as `os.waitpid` does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for end in (self._jobs, self.answers.fd, self.ticks_fd):
            os.close(end)
        return os.waitpid(self.pid, 0)[1]


@dataclass
class Lane:
    """A worker, and the jobs that wait for it."""

    worker: _Worker
    seconds: float
    newest_first: bool
    job: Job | None = None
    waiting: list[Job] = field(default_factory=list)

    def begin_next(self) -> None:
        if self.job is None and self.waiting:
            self.job = self.waiting.pop(-1 if self.newest_first else 0)
            self.worker.begin(self.job)


class Supervisor:
    """Hands jobs to the workers, and replaces those that have to be ended."""

    def __init__(self, compile_: Compile, jobs: _Lines, answers: int):
        self._compile, self._jobs, self._answers = compile_, jobs, answers
        self._quick = Lane(_Worker(compile_, 0), QUICK, newest_first=True)
        self._slow = Lane(_Worker(compile_, _SLOW), MOST, newest_first=False)
        self._lanes = (self._quick, self._slow)

    def run(self) -> None:
        """Until the input ends."""
        try:
            while True:
                for lane in self._lanes:
                    lane.begin_next()
                self._wait()
        except (EOFError, BrokenPipeError):
            pass
        finally:
            for lane in self._lanes:
                lane.worker.end()

    def _wait(self) -> None:
        """Wait for what happens next, and take it."""
        is_busy = any(lane.job is not None for lane in self._lanes)
        ends = [end for lane in self._lanes for end in (lane.worker.answers.fd, lane.worker.ticks_fd)]
        ready = select.select([self._jobs.fd, *ends], [], [], 1.0 if is_busy else None)[0]
        for lane in self._lanes:
            worker = lane.worker
            if worker.answers.fd in ready:
                self._take_answer(lane)
            elif worker.ticks_fd in ready:
                worker.take_ticks()
                if lane.job is not None and worker.ticks * TICK >= lane.seconds:
                    self._overrun(lane)
        if self._jobs.fd in ready:
            for line in self._jobs.read():
                self._take_order(json.loads(line))
        self._drop_late()

    def _take_order(self, order: dict[str, Any]) -> None:
        if "form" in order:
            self._quick.waiting.append(order | {"deadline": time.monotonic() + DEADLINE})
            return
        for lane in self._lanes:
            lane.waiting = [job for job in lane.waiting if job["id"] != order["cancel"]]
            if lane.job is not None and lane.job["id"] == order["cancel"]:
                lane.job = None
                self._replace(lane)

    def _take_answer(self, lane: Lane) -> None:
        try:
            for line in lane.worker.answers.read():
                assert lane.job is not None, "an answer is to a job"
                self._answer(lane.job, json.loads(line) | {"is_slow": lane is self._slow})
                lane.job = None
        except EOFError:  # the worker has died
            job, lane.job = lane.job, None
            status = self._replace(lane)
            was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            if job is not None and was_killed and "again" not in job:  # perhaps before it began
                lane.waiting.append(job | {"again": True})
            elif job is not None:
                self._refuse(job, _why_it_died(status))
        if lane is self._quick and lane.worker.nice and not lane.waiting and lane.job is None:
            self._replace(lane)  # the crowd has gone

    def _overrun(self, lane: Lane) -> None:
        job, lane.job = lane.job, None
        self._replace(lane)
        assert job is not None, "only a job takes time"
        if lane is self._quick and len(self._slow.waiting) < MAX_SLOW:
            self._slow.waiting.append(job)
        elif lane is self._quick:
            self._refuse(job, f"it takes more than {QUICK} s to compile, and {MAX_SLOW} such wait: make it simpler")
        else:
            self._refuse(job, f"it takes more than {MOST} s to compile: make it simpler")

    def _replace(self, lane: Lane) -> int:
        """A new worker for a lane; the status of the one that was ended."""
        status = lane.worker.end()
        lane.worker = _Worker(self._compile, _SLOW if lane is self._slow else _CROWD if lane.waiting else 0)
        return status

    def _drop_late(self) -> None:
        now = time.monotonic()
        for lane in self._lanes:
            late = [job for job in lane.waiting if job["deadline"] < now]
            lane.waiting = [job for job in lane.waiting if job["deadline"] >= now]
            if lane.job is not None and lane.job["deadline"] < now:
                late.append(lane.job)
                lane.job = None
                self._replace(lane)
            for job in late:
                if lane is self._slow:
                    self._refuse(job, f"it takes more than {QUICK} s to compile, and others wait: make it simpler")
                else:
                    self._answer(job, {"busy": True})

    def _refuse(self, job: Job, why: str) -> None:
        self._answer(job, {"error": str(refusal(StructuredOutput(**job["form"]), why))})

    def _answer(self, job: Job, answer: dict[str, Any]) -> None:
        _write_line(self._answers, answer | {"id": job["id"]})


def _why_it_died(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS):
        return TOO_DEEP
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _FAILED:
        return "the compiler failed at it"
    return f"it takes more than {MEMORY >> 20} MB to compile: make it simpler"


def _work(compile_: Compile, nice: int, jobs: int, answers: int, ticks: int) -> None:
    """A worker's life: a line with a form, a line with the answer."""
    _keep_open(jobs, answers, ticks)
    os.nice(nice)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, STACK)
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY)
    os.set_blocking(ticks, False)
    signal.signal(signal.SIGPROF, lambda number, frame: None)  # the byte is written by the interpreter
    signal.set_wakeup_fd(ticks, warn_on_full_buffer=False)
    lines = _Lines(jobs)
    with suppress(EOFError):
        while True:
            for line in lines.read():
                _write_line(answers, _compiled(compile_, StructuredOutput(**json.loads(line))))


def _compiled(compile_: Compile, structured: StructuredOutput) -> dict[str, Any]:
    """The answer to a job."""
    spent = int(time.process_time() + MOST)
    _limit(resource.RLIMIT_CPU, spent + 2)  # it ends, too, where the supervisor has been killed
    signal.setitimer(signal.ITIMER_PROF, TICK, TICK)
    try:
        structured = without_gbnf(structured)
        compile_(structured)
    except UsageError as error:
        return {"error": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"form": structured.form()}


def _keep_open(*kept: int) -> None:
    """Close all other files: a pipe ends when all its ends are closed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    edges = [2, *sorted(kept), max(os.sysconf("SC_OPEN_MAX"), 1 << 16)]
    for low, high in pairwise(edges):
        os.closerange(low + 1, high)


def _limit(what: int, amount: int) -> None:
    """Lower a limit, where this system has it."""
    _, hard = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _address_space() -> int:
    """Bytes of this process's address space."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 4 << 30  # not on this system


def _write_line(fd: int, value: Any) -> None:
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with its input
        signal.signal(number, signal.SIG_IGN)
    jobs, answers = _Lines(0), os.dup(1)
    os.dup2(2, 1)
    lines: list[bytes] = []
    try:
        while not lines:
            lines = jobs.read()
    except EOFError:
        return
    vocabulary = vocabulary_from_json(json.loads(lines[0]))
    library = ll_tokenizer(vocabulary)

    def compile_(structured: StructuredOutput) -> None:
        compile_grammar(structured, library, vocabulary)

    with suppress(UsageError):
        compile_(StructuredOutput(json={"type": "object"}))  # what the first grammar loads, no worker loads again
    supervisor = Supervisor(compile_, jobs, answers)
    for line in lines[1:]:
        supervisor._take_order(json.loads(line))
    supervisor.run()


def vocabulary_to_json(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "special_token_ids": vocabulary.special_token_ids,
        "eos_token_ids": sorted(vocabulary.eos_token_ids),
    }


def vocabulary_from_json(plain: dict[str, Any]) -> Vocabulary:
    tokens = [token.encode("latin-1") for token in plain["tokens"]]
    return Vocabulary(tokens, plain["special_token_ids"], frozenset(plain["eos_token_ids"]))


if __name__ == "__main__":
    main()
    sys.exit(0)
