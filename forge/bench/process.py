"""Our side of a benchmark's processes: each is started, asked in turn, and surely gone in the end.

Each program that is measured runs in a process of its own, so that none shares threads, memory or a library's settings
with another. See `worker.py` for the conversation. Should this process die before it has closed them, a worker sees
its input close and ends itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from forge.bench.cases import FORGE, Case
from forge.errors import ForgeError, UsageError

_FOLDER = Path(__file__).parent
REST_SECONDS = 0.03
"""Pause between two turns, in which idle threads of the one before stop spinning and go to sleep."""
PATIENCE_SECONDS = 60.0
"""A process that has spent this much time on the turns of one figure takes no more of them."""


@dataclass(frozen=True)
class Effort:
    """How long a run measures."""

    repetitions: int = 9
    loads: int = 3
    decode_steps: int = 5
    """Steps of one decode turn at least; its figure is their median."""
    turn_seconds: float = 0.1
    """Seconds of a turn, at least."""
    limit_seconds: float = 2.0
    """Seconds for measuring each of the machine's limits."""
    array_bytes: int = 1 << 30
    """Bytes of the array that memory bandwidth is measured with."""
    request_share: float = 1.0
    """The share of each load's requests that runs."""


class ProcessFailed(ForgeError):
    """A process answered that something went wrong, or died."""


class PeerMissing(ProcessFailed):
    """A peer is not installed, or cannot take the model: the benchmark goes on without it."""


@dataclass(frozen=True)
class Launch:
    """How a process is started."""

    name: str
    module: str
    """The worker's module in this package."""
    python: str = sys.executable

    def command(self) -> list[str]:
        return [self.python, str(_FOLDER / "worker.py"), self.module]

    def environment(self) -> dict[str, str]:
        """Return this process's environment; for our own interpreter, forge can be imported from any folder."""
        if self.python != sys.executable:
            return dict(os.environ)
        paths = [str(_FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class BenchProcess(AbstractContextManager["BenchProcess"]):
    """A running worker process."""

    def __init__(self, launch: Launch):
        """Raises `UsageError` if the interpreter cannot be started."""
        self.name = launch.name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self._process = subprocess.Popen(
                launch.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=launch.environment(),
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a Ctrl-C in the terminal is for us alone
            )
        except OSError as error:
            self._errors.close()
            problem = error.strerror or error
            raise UsageError(f"{launch.python}: {problem}; --peer-python is a Python interpreter") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send one request and return its answer. Raises `PeerMissing` or `ProcessFailed`."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(json.dumps({"do": do, **fields}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ProcessFailed(f"{self.name} ended during {do!r}: {self._last_words()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise PeerMissing(answer["missing"])
        if "error" in answer:
            raise ProcessFailed(f"{self.name}, {do}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """End the process, whatever it is doing, and the programs that it runs."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{last} (exit status {status})"


def measure_limits(of: Literal["cpu", "gpu"], effort: Effort) -> dict[str, Any]:
    """Return the machine's limits, measured in a process of its own."""
    with BenchProcess(Launch("the limits", "limits_worker")) as worker:
        return worker.ask(f"measure_{of}", array_bytes=effort.array_bytes, seconds=effort.limit_seconds)


class Runner(AbstractContextManager["Runner"]):
    """The processes of one run. A peer that fails is left out from there on, with its reason; if forge fails, the run
    does. As a context manager it ends every process."""

    def __init__(self, on_progress: Callable[[str], None]):
        self.say = on_progress
        self.processes: dict[str, BenchProcess] = {}
        self.skipped: list[dict[str, str]] = []

    def __exit__(self, *exception: object) -> None:
        for name in list(self.processes):
            self.close(name)

    def open(self, launch: Launch, **loading: Any) -> dict[str, Any]:
        """Start a process and have it load the model; return what it says of itself."""
        self.close(launch.name)
        process = self.processes[launch.name] = BenchProcess(launch)
        return process.ask("load", **loading)

    def close(self, name: str) -> None:
        if name in self.processes:
            self.processes.pop(name).close()

    def attempt(self, name: str, work: Callable[[], dict[str, Any]], part: str | None = None) -> dict[str, Any] | None:
        """Return what `work` gives; None if that peer has to be left out, or, where it lacks what this `part` needs,
        that part."""
        try:
            return work()
        except ProcessFailed as error:
            lacks_a_part = part is not None and isinstance(error, PeerMissing)
            if name == FORGE and not lacks_a_part:
                raise
            self.skipped.append({"name": part if part and lacks_a_part else name, "reason": str(error)})
            if not lacks_a_part:
                self.close(name)
            return None

    def ask(self, name: str, do: str, part: str | None = None, **fields: Any) -> dict[str, Any] | None:
        return self.attempt(name, lambda: self.processes[name].ask(do, **fields), part)

    def take_turns(
        self, case: Case, vocab_size: int, effort: "Effort", in_parts: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Repeat one case, A B C A B C …: every process fills its cache, then each takes its turn while the others wait
        for their input. Returns name → `setting`, `seconds` (of a step, by repetition) and `top_tokens`."""
        token_ids, taken = case.token_ids(vocab_size), {}
        for name in list(self.processes):
            self.say(f"{case.title}: {name} fills its cache")
            part = f"{name}, {case.title}" if in_parts else None
            fields = {"kind": case.kind, "context": case.context, "token_ids": token_ids}
            if answer := self.ask(name, "prepare", part, **fields):
                taken[name] = {"setting": answer["setting"], "seconds": [], "top_tokens": []}
        spent = dict.fromkeys(taken, 0.0)
        for repetition in range(effort.repetitions):
            for name in [name for name in taken if name in self.processes]:
                if taken[name]["seconds"] and spent[name] > PATIENCE_SECONDS:
                    continue
                self.say(f"{case.title}: {repetition + 1} of {effort.repetitions}, {name}")
                time.sleep(REST_SECONDS)
                started, steps = time.perf_counter(), effort.decode_steps if case.kind == "decode" else 1
                answer = self.ask(name, "turn", min_steps=steps, min_seconds=effort.turn_seconds)
                spent[name] += time.perf_counter() - started
                if answer is not None:
                    taken[name]["seconds"].append(median(answer["seconds"]))
                    taken[name]["top_tokens"] = answer["top_tokens"]
        return {name: turn for name, turn in taken.items() if turn["seconds"]}
