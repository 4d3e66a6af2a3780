"""Compiling a client's grammar first where time and memory are limited: in processes of its own (`sandbox_process`).

What passes is known to be affordable, and is compiled again where it is used. Measured: a compiled grammar cannot be
sent, and its masks would cost a round trip each; compiling twice costs what checking before queueing always has.

The process starts with the first grammar or with `start`, and again when it has died. Equal grammars share one job, and
what was decided is remembered.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from forge.engine.structured_output import Grammar, StructuredOutput
from forge.errors import ForgeError, UsageError
from forge.grammar.compiler import GrammarCompiler, check_size
from forge.grammar.vocabulary import Vocabulary

MAX_JOBS = 512
"""Grammars that wait or are being compiled: of as many that explode, an ordinary one waits for none."""
MAX_REMEMBERED = 256
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables for a process that forks: its libraries must start no threads."""


class CompilersBusy(ForgeError):
    """Too many grammars are waiting to be compiled."""

    def __init__(self, num_jobs: int):
        super().__init__(f"{num_jobs} grammars are waiting to be compiled: come back later")


@dataclass(eq=False)
class _Job:
    number: int
    structured: StructuredOutput
    waiters: list[Future[StructuredOutput]] = field(default_factory=list)
    was_resent: bool = False


class GrammarSandbox:
    """Checks grammars of one vocabulary. May be called from several threads; nothing in it blocks."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        self._vocabulary = vocabulary
        self._lock = threading.RLock()
        self._numbers = count()
        self._jobs: dict[int, _Job] = {}
        self._job_of: dict[StructuredOutput, _Job] = {}
        self._decided: OrderedDict[StructuredOutput, StructuredOutput | UsageError] = OrderedDict()
        """The last used is the last."""
        self._process: _Process | None = None

    @property
    def num_waiting(self) -> int:
        """The number of grammars that wait or are being compiled."""
        return len(self._jobs)

    def start(self) -> None:
        """Start the process, if it does not run."""
        with self._lock:
            if self._process is None:
                self._process = _Process(self._vocabulary, self._take, self._restart)

    def check(self, structured: StructuredOutput) -> "Future[StructuredOutput]":
        """Check a grammar; the future's result is the same grammar, without notations that take long to read, once it
        is known to compile within the limits.

        Raises `UsageError` for a text that is too long and `CompilersBusy` for too many grammars at once."""
        check_size(structured)
        waiter: Future[StructuredOutput] = Future()
        with self._lock:
            plain = structured if structured.thinking == "none" else replace(structured, thinking="none")
            decided = self._decided.get(plain)
            if decided is None:
                self._enqueue(plain, waiter)
                return waiter
            self._decided.move_to_end(plain)
        _resolve(waiter, decided)
        return waiter

    def close(self) -> None:
        """End the process. What waits for it fails."""
        with self._lock:
            process, self._process = self._process, None
            jobs = list(self._jobs.values())
            self._forget(*jobs)
        if process is not None:
            process.close()
        for job in jobs:
            _resolve_all(job, CompilersBusy(len(jobs)))

    def _enqueue(self, structured: StructuredOutput, waiter: "Future[StructuredOutput]") -> None:
        job = self._job_of.get(structured)
        if job is None:
            if len(self._jobs) >= MAX_JOBS:
                raise CompilersBusy(len(self._jobs))
            job = _Job(next(self._numbers), structured)
            self._jobs[job.number] = self._job_of[structured] = job
            self._send(job)
        job.waiters.append(waiter)
        waiter.add_done_callback(partial(self._leave, job))

    def _send(self, job: _Job) -> None:
        self.start()
        assert self._process is not None, "it has been started"
        self._process.send({"id": job.number, "form": job.structured.form()})

    def _leave(self, job: _Job, waiter: "Future[StructuredOutput]") -> None:
        """Remove a waiter. If it was the last to leave before the decision, the job ends."""
        if not waiter.cancelled():
            return
        with self._lock:
            job.waiters.remove(waiter)
            if not job.waiters and job.number in self._jobs:
                self._forget(job)
                if self._process is not None:
                    self._process.send({"cancel": job.number})

    def _forget(self, *jobs: _Job) -> None:
        for job in jobs:
            del self._jobs[job.number], self._job_of[job.structured]

    def _take(self, answer: dict[str, Any]) -> None:
        """Give the process's decision to those that wait for it."""
        with self._lock:
            job = self._jobs.get(answer["id"])
            if job is None:
                return  # all its waiters have left
            self._forget(job)
            outcome = _outcome(answer, len(self._jobs))
            if not isinstance(outcome, CompilersBusy):
                self._decided[job.structured] = outcome
                if len(self._decided) > MAX_REMEMBERED:
                    self._decided.popitem(last=False)
        _resolve_all(job, outcome)

    def _restart(self, process: "_Process") -> None:
        """Give each job of a process that has died to another process, once."""
        with self._lock:
            if self._process is not process:
                return  # it was closed
            self._process = None
            lost = [job for job in self._jobs.values() if job.was_resent]
            self._forget(*lost)
            for job in self._jobs.values():
                job.was_resent = True
                self._send(job)
        for job in lost:
            _resolve_all(job, ForgeError("the process that compiles grammars has died"))


class _Process:
    """One run of `sandbox_process`, with a thread that writes to it and one that reads."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        on_answer: Callable[[dict[str, Any]], None],
        on_end: "Callable[[_Process], None]",
    ):
        self._vocabulary, self._on_answer, self._on_end = vocabulary, on_answer, on_end
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._popen = subprocess.Popen(  # in this session: another one would have a share of the processor of its own
            [sys.executable, "-P", "-m", "forge.grammar.sandbox_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"forge-sandbox-{work.__name__}", daemon=True).start()

    def send(self, order: dict[str, Any]) -> None:
        self._orders.put(order)

    def close(self) -> None:
        self._orders.put(None)

    def _write(self) -> None:
        from forge.grammar.sandbox_process import vocabulary_to_json

        stdin = self._popen.stdin
        assert stdin is not None, "it is a pipe"
        order: dict[str, Any] | None = vocabulary_to_json(self._vocabulary())
        with suppress(BrokenPipeError):  # it has died, which the other thread sees
            while order is not None:
                stdin.write(json.dumps(order).encode() + b"\n")
                stdin.flush()
                order = self._orders.get()
        with suppress(BrokenPipeError):
            stdin.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None, "it is a pipe"
        with self._popen.stdout as answers:
            for line in answers:
                self._on_answer(json.loads(line))
        self._popen.wait()
        self._orders.put(None)
        self._on_end(self)


class SandboxedCompiler:
    """Checks a grammar in a sandbox, then compiles it here. Sandboxes are shared by all models of one vocabulary."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler

    def __call__(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar. Raises `UsageError` for one that is wrong, or exceeds a limit."""
        check_size(structured)
        waiter = _shared_sandbox(self._compiler.vocabulary).check(structured)
        try:
            self._compiler.load()  # while the process starts
            affordable = waiter.result()
        except BaseException:
            waiter.cancel()
            raise
        return self._compiler(replace(affordable, thinking=structured.thinking))


_SANDBOXES: dict[tuple[int, str], GrammarSandbox] = {}
"""The shared sandboxes, by process (a forked one cannot use its parent's) and vocabulary."""


def _shared_sandbox(vocabulary: Vocabulary) -> GrammarSandbox:
    """Return the sandbox of all vocabularies with these tokens."""
    return _SANDBOXES.setdefault((os.getpid(), vocabulary.fingerprint), GrammarSandbox(lambda: vocabulary))


def _outcome(answer: dict[str, Any], num_jobs: int) -> StructuredOutput | UsageError | CompilersBusy:
    if "form" in answer:
        return StructuredOutput(**answer["form"], is_slow=answer["is_slow"])
    return UsageError(answer["error"]) if "error" in answer else CompilersBusy(num_jobs)


def _resolve(waiter: "Future[StructuredOutput]", outcome: StructuredOutput | ForgeError) -> None:
    if not waiter.set_running_or_notify_cancel():
        return
    if isinstance(outcome, StructuredOutput):
        waiter.set_result(outcome)
    else:
        waiter.set_exception(outcome)


def _resolve_all(job: _Job, outcome: StructuredOutput | ForgeError) -> None:
    for waiter in list(job.waiters):
        _resolve(waiter, outcome)
