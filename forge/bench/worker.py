"""A process's own side of a benchmark: it is told what to do line by line, and does nothing in between.

The conversation is one JSON object per line on standard input, answered by one JSON object per line on standard output:

    {"do": "load", "model": …}                         → {"ok": {"description": …, "seconds": …}}
    {"do": "prepare", "kind": "decode", …}             → {"ok": {"setting": …, "seconds": …}}
    {"do": "turn", "min_steps": 3, "min_seconds": 0.1} → {"ok": {"seconds": […], "top_tokens": […]}}
    {"do": "memory"}                                   → {"ok": {"peak_bytes": …}}

What goes wrong is answered too, as one line of text: {"error": …}; or {"missing": …} where the library that would be
measured is not there. The process ends when its standard input closes, which happens whenever the parent ends, however
it ends, and at once: the input is read by a thread that does nothing else. Ctrl-C is the parent's to handle.

`python worker.py NAME` runs the worker that `NAME.py` beside this file defines. Only the standard library is used here,
because it may run in an interpreter that has no forge.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

WORTH_WARMING_SECONDS = 0.2
"""A step that takes longer is not repeated before it is timed: waking up costs it nothing that could be seen."""
MOST_STEPS = 200
TRIAL_TOKENS = 8192
"""Tokens of all sequences up to which a case is repeated: to try each setting of a program with it, or to warm up."""
_Setting = TypeVar("_Setting")


class Missing(Exception):
    """What would be measured is not installed here, or cannot take this model. The text says why."""


class Worker:
    """What answers requests: each of its public methods is one, takes the request's fields but `do`, and returns the
    answer. A program that computes steps has `load`, `prepare` and `_step`, which returns a step's seconds."""

    _expected = 0.0
    """Seconds of the last step."""
    _top_tokens: Sequence[int] = ()

    def turn(self, min_steps: int, min_seconds: float) -> Mapping[str, Any]:
        seconds = take_turn(self._step, min_steps, min_seconds, self._expected)
        self._expected = seconds[-1]
        return {"seconds": seconds, "top_tokens": self._top_tokens}

    def memory(self) -> Mapping[str, Any]:
        return {"peak_bytes": peak_memory()}

    def _set_up_fastest(
        self, settings: Iterable[_Setting], set_up: Callable[[_Setting], object], steps: int
    ) -> _Setting:
        """Try each setting for some steps; return the one with the shortest step, which is set up again if another was
        tried after it."""
        shortest: dict[_Setting, float] = {}
        for setting in settings:
            set_up(setting)
            shortest[setting] = min(self._step() for _ in range(steps))
        best = min(shortest, key=lambda setting: shortest[setting])
        if best != setting:
            set_up(best)
            self._step()
        self._expected = shortest[best]
        return best

    def _step(self) -> float:
        raise NotImplementedError


def for_trial(context: int, token_ids: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Shorten a case to `TRIAL_TOKENS`: return its context and its token ids. A prompt loses its last tokens, a decode
    the last ones of its context."""
    length = len(token_ids[0])
    kept = min(length, TRIAL_TOKENS // len(token_ids))
    return max(0, context - (length - kept)), [ids[:kept] for ids in token_ids]


def import_peer(package: str, *modules: str) -> list[Any]:
    """Import a peer's modules. Raises `Missing`, which says how to install its `package`, if one cannot be imported."""
    try:
        return [import_module(module) for module in modules]
    except Exception as error:  # a shared library that does not load raises what it likes
        raise Missing(f"pip install {package} for {sys.executable} ({error})") from None


def serve_requests(worker: object) -> None:
    """Answer requests until standard input closes. Returns never: the process ends, with the programs that it runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up between the answers
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        answer = respond(worker, requests.get())
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(0)


def respond(worker: object, line: str) -> dict[str, Any]:
    """Return the answer to one line."""
    try:
        request = json.loads(line)
        return {"ok": dict(getattr(worker, request.pop("do"))(**request))}
    except Missing as reason:
        return {"missing": one_line(reason)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {one_line(error)}"}


def take_turn(step: Callable[[], float], min_steps: int, min_seconds: float, expected: float) -> list[float]:
    """Time at least `min_steps` steps that take `min_seconds` together; return the seconds of each.

    step: does its work and returns how long it took, without what it had to put in order before and after. expected:
    how long one took last time; before short ones, one more runs untimed, because this process was idle until now.
    """
    if expected < WORTH_WARMING_SECONDS:
        step()
    taken: list[float] = []
    while len(taken) < MOST_STEPS and (len(taken) < min_steps or sum(taken) < min_seconds):
        taken.append(step())
    return taken


def peak_memory() -> int:
    """Return the most memory that this process ever had, in bytes: its high-water mark, mapped files' pages
    included."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `work` returns, and the seconds it took."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def plural(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def _read(requests: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    if os.getpgrp() == os.getpid():  # as `BenchProcess` starts it
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def load_worker(name: str) -> Worker:
    """Make the worker that a module of this folder defines. What it imports from `forge.bench.worker` is this module,
    in an interpreter without forge too."""
    sys.modules["forge.bench.worker"] = sys.modules[__name__]
    spec = spec_from_file_location(f"forge.bench.{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, "it is a file of Python"
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    (kind,) = (kind for kind in Worker.__subclasses__() if kind.__module__ == spec.name)
    return kind()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are not for others to find
    serve_requests(load_worker(sys.argv[1]))
