"""`python -m forge.grammar.sandbox_process`: compiles grammars in workers, each of which can be ended.

The supervisor loads the vocabulary once and forks its workers from there, so that a worker that is killed is replaced
within milliseconds. Each lane has a worker and a slice of the processor's time. Every grammar starts in the first lane;
the system kills a worker whose slice is over, and its grammar begins again in the next lane, with a larger slice and a
lower priority. In each lane the grammar with the least estimated work is the next (`work_estimate`), of equals the
newest. So a grammar that explodes delays an ordinary one by a slice of `LANES[0]` at most, and any number of them leave
the processor to the engine: most of a crowd are refused after that slice.

Memory and stack are limited by the system, too; a worker that wants more dies of it.

Standard input has the vocabulary in the first line and a job or a cancellation in each further one, standard output an
answer for each job, all of it JSON. The supervisor ends when its input does.
"""

import json
import math
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
from forge.grammar.work_estimate import estimate

LANES = ((0.02, 0), (0.1, 10), (0.5, 15))
"""Seconds of the processor and nice level. An ordinary schema takes 0.004 to 0.01 s, the largest grammars that are
allowed (64,000 characters) 0.06 to 0.15 s, a bomb any."""
MEMORY = 256 << 20
"""Bytes, beyond those of the vocabulary."""
STACK = 4 << 20
"""Bytes: half of what a thread of the engine's process has, which compiles the same grammar afterwards."""
MAX_WAITING = (0, 32, 8)
"""Grammars that wait for a lane, but for the first. Of more, the one with the most estimated work leaves it."""
_TOO_MUCH = 1 << 20
"""Estimated work that no grammar within the limits has: one that leaves a full lane is refused, and need not come
again."""
DEADLINE = 30.0
"""Seconds that a job may wait and take together."""

_OUT_OF_MEMORY, _FAILED = 1, 2
"""Exit statuses of a worker. The library aborts where memory ends; Python can say so."""

Job = dict[str, Any]
"""A dict with its `id`, the `form` of its `StructuredOutput`, the estimated `work`, and the `deadline`."""
Compile = Callable[[StructuredOutput], None]


class _Lines:
    """Reads lines from a pipe."""

    def __init__(self, fd: int):
        self.fd, self._bytes = fd, b""

    def read(self) -> list[bytes]:
        """Return the lines that the next piece completes. Raises EOFError at the end."""
        piece = os.read(self.fd, 1 << 20)
        if not piece:
            raise EOFError
        *lines, self._bytes = (self._bytes + piece).split(b"\n")
        return lines


class _Worker:
    """A forked process that compiles one grammar at a time."""

    def __init__(self, compile_: Compile, nice: int):
        (jobs, self._jobs), (answers_fd, answers) = os.pipe(), os.pipe()
        self.answers = _Lines(answers_fd)
        self.pid = os.fork()
        if not self.pid:
            try:
                _work(compile_, nice, jobs, answers)
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)
            finally:
                os._exit(_FAILED)
        for end in (jobs, answers):
            os.close(end)

    def begin(self, job: Job, seconds: float) -> None:
        with suppress(BrokenPipeError):  # it has died: its answers end
            _write_line(self._jobs, {"form": job["form"], "seconds": seconds})

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """End the worker and return its status, as `os.waitpid` does."""
        self.kill()
        for end in (self._jobs, self.answers.fd):
            os.close(end)
        return os.waitpid(self.pid, 0)[1]


@dataclass
class Lane:
    """A worker with the jobs that wait for it."""

    worker: _Worker
    seconds: float
    nice: int
    job: Job | None = None
    waiting: list[Job] = field(default_factory=list)

    def begin_next(self) -> None:
        if self.job is None and self.waiting:
            self.job = min(self.waiting, key=lambda job: (job["work"], -job["id"]))
            self.waiting.remove(self.job)
            self.worker.begin(self.job, self.seconds)

    def end_job(self) -> None:
        """End the job that runs. Its worker's answers end when the system has taken back its memory."""
        assert self.job is not None, "it runs"
        self.job |= {"deadline": math.inf, "is_over": True}
        self.worker.kill()


class Supervisor:
    """Hands jobs to the workers, and replaces those that have to be ended."""

    def __init__(self, compile_: Compile, jobs: _Lines, answers: int):
        self._compile, self._jobs, self._answers = compile_, jobs, answers
        self._lanes = [Lane(_Worker(compile_, nice), seconds, nice) for seconds, nice in LANES]

    def run(self) -> None:
        """Work until the input ends."""
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

    def take_order(self, order: dict[str, Any]) -> None:
        if "form" in order:
            work = estimate(StructuredOutput(**order["form"]))
            self._lanes[0].waiting.append(order | {"work": work, "deadline": time.monotonic() + DEADLINE})
            return
        for lane in self._lanes:
            lane.waiting = [job for job in lane.waiting if job["id"] != order["cancel"]]
            if lane.job is not None and lane.job["id"] == order["cancel"]:
                lane.end_job()

    def _wait(self) -> None:
        """Wait for what happens next, and handle it."""
        is_busy = any(lane.job is not None for lane in self._lanes)
        ends = [lane.worker.answers.fd for lane in self._lanes]
        ready = select.select([self._jobs.fd, *ends], [], [], 1.0 if is_busy else None)[0]
        for lane, end in zip(self._lanes, ends, strict=True):
            if end in ready:
                self._take_answer(lane)
        if self._jobs.fd in ready:
            for line in self._jobs.read():
                self.take_order(json.loads(line))
        self._drop_late()

    def _take_answer(self, lane: Lane) -> None:
        try:
            for line in lane.worker.answers.read():
                assert lane.job is not None, "an answer is to a job"
                self._answer(lane.job, json.loads(line) | {"is_slow": lane is not self._lanes[0]})
                lane.job = None
        except EOFError:  # the worker has died
            job, lane.job = lane.job, None
            status = lane.worker.end()
            lane.worker = _Worker(self._compile, lane.nice)
            if job is not None and "is_over" not in job:
                self._take_back(lane, job, status)

    def _take_back(self, lane: Lane, job: Job, status: int) -> None:
        """Hand a job whose worker has died with this status to the next lane, or refuse it."""
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        too_long = f"it takes more than {lane.seconds} s to compile"
        if killed_by == signal.SIGKILL and "again" not in job:  # perhaps before it began
            lane.waiting.append(job | {"again": True})
        elif killed_by != signal.SIGPROF:
            self._refuse(job, _why_it_died(status))
        elif lane is self._lanes[-1]:
            self._refuse(job, f"{too_long}: make it simpler")
        else:
            place = self._lanes.index(lane) + 1
            waiting = self._lanes[place].waiting
            waiting.append(job)
            if len(waiting) > MAX_WAITING[place]:
                most = max(waiting, key=lambda job: job["work"])
                waiting.remove(most)
                if most["work"] > _TOO_MUCH or self._lanes[place] is self._lanes[-1]:
                    self._refuse(most, f"{too_long}, and {MAX_WAITING[place]} such wait: make it simpler")
                else:
                    self._answer(most, {"busy": True})

    def _drop_late(self) -> None:
        now = time.monotonic()
        for lane in self._lanes:
            late = [job for job in lane.waiting if job["deadline"] < now]
            lane.waiting = [job for job in lane.waiting if job["deadline"] >= now]
            if lane.job is not None and lane.job["deadline"] < now:
                late.append(lane.job)
                lane.end_job()
            for job in late:
                if lane is self._lanes[-1]:
                    before = self._lanes[-2].seconds
                    self._refuse(job, f"it takes more than {before} s to compile, and others wait: make it simpler")
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


def _work(compile_: Compile, nice: int, jobs: int, answers: int) -> None:
    """Answer each line with a form and its time by a line with the answer: a worker's life."""
    _keep_open(jobs, answers)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(nice)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, STACK)
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY)
    lines = _Lines(jobs)
    with suppress(EOFError):
        while True:
            for line in lines.read():
                _write_line(answers, _compiled(compile_, **json.loads(line)))


def _compiled(compile_: Compile, form: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the answer to a job. SIGPROF kills this process when it has taken that much of the processor's time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        structured = without_gbnf(StructuredOutput(**form))
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


def _limit(kind: int, amount: int) -> None:
    """Lower a resource limit to `amount`, if this system has it."""
    _, hard = resource.getrlimit(kind)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _address_space() -> int:
    """Return the bytes of this process's address space."""
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
        supervisor.take_order(json.loads(line))
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
