"""`python -m forge.bench.gpu_session --out DIR`: every question that needs a GPU, asked in one command of ten minutes.

A GPU is lent for minutes, so nothing may cost the figures that are already there. Each stage runs in a process of its
own with a deadline. A stage that raises, hangs or is killed costs itself alone. Every figure is on disk as soon as it
is known: `session.json` is rewritten after each one, `log.txt` has all output and every traceback, and a stage that
hangs leaves the stacks of its threads there before it is killed. `--stages` continues in the same DIR.

This file imports the standard library alone; the stages (`gpu_stages.py`) add NumPy, torch and Triton. What a stage
needs beyond that, it names, and is skipped where that is missing.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from forge.errors import UsageError

RESULTS, LOG = "session.json", "log.txt"
LEAST_SECONDS = 5.0
"""A stage that would get less is not started."""
STACKS_BEFORE_END = 2.0
"""Seconds before its deadline at which a stage that hangs writes its threads' stacks."""
LOG_HEAD, LOG_TAIL = 1 << 18, 1 << 19
"""Bytes of a stage's output that are kept, from its beginning and its end: the whole log fits into a few megabytes."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""


@dataclass(frozen=True)
class Stage:
    """One question, in a process of its own."""

    name: str
    title: str
    seconds: float
    """Its deadline, if the budget has so much left."""
    target: str
    """`module:function`, called with a `Report`."""


def _stages(*rows: tuple[str, float, str]) -> tuple[Stage, ...]:
    return tuple(Stage(name, title, seconds, f"forge.bench.gpu_stages:{name}") for name, seconds, title in rows)


STAGES = _stages(
    ("machine", 40, "versions, clocks, limits, missing packages"),
    ("compiling", 90, "all kernels compiled, in parallel"),
    ("kernels", 130, "every kernel in bfloat16 against float64, dependent launches on and off, 50 times"),
    ("bundled", 40, "the bundled model against the CPU"),
    ("steps", 120, "0.6B: steps by host and device clock, the top kernels, requests"),
    ("large", 120, "4B: 512 in, 1 out at 1, 16, 96 and 128 at a time"),
    ("switches", 150, "what each switch is worth"),
    ("quantized", 60, "Q8_0: decodes of 0.6B and 4B"),
    ("tests", 240, "the tests of forge/backends/cuda on this GPU"),
    ("tiles", 180, "faster tiles than the chosen ones"),
    ("record", 60, "forge cuda --record"),
    ("http", 90, "0.6B over HTTP"),
    ("peers", 240, "transformers on the same weights"),
)
"""In the order in which their answers are worth most."""


class Skip(Exception):
    """A stage cannot run here; the text says why."""


class Report:
    """A stage's side: figures to the session, one JSON line each."""

    def __init__(self, send: Callable[[dict[str, Any]], None], out: Path, deadline: float, rehearsal: bool):
        self._send, self._deadline = send, deadline
        self.out = out
        self.rehearsal = rehearsal
        """Whether this is the CPU at toy sizes, with Triton interpreted."""

    def __call__(self, name: str, value: Any, *, quiet: bool = False) -> None:
        """One figure: anything that JSON holds. quiet: kept, and not printed."""
        self._send({"figure": name, "value": value, "quiet": quiet})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Work whose failure is to cost itself alone: its traceback goes to the log, its reason becomes the figure."""
        try:
            yield
        except Exception as error:
            print(f"--- {name} failed", flush=True)
            traceback.print_exc()
            self(name, {"failed": one_line(error)})


class Session:
    """What is known so far, on disk at any moment."""

    def __init__(self, out: Path, budget: float, rehearsal: bool = False, say: Callable[[str], None] = print):
        """Raises `UsageError` if `out` cannot be written."""
        self.out, self._say, self._rehearsal = out, say, rehearsal
        self._ends = time.monotonic() + budget
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.results = _earlier_results(out / RESULTS)
            self._write()
        except OSError as error:
            raise UsageError(f"--out {out}: {error.strerror or error}") from None

    def run(self, stages: Sequence[Stage]) -> None:
        """Run them in order, each for as long as it may."""
        for stage in stages:
            self.results["stages"][stage.name] = {"status": "not started", "figures": {}}
        self._write()
        for stage in stages:
            left = self._ends - time.monotonic()
            if left >= LEAST_SECONDS:
                self._run(stage, min(stage.seconds, left))
        self._say_the_rest(stages)

    def _run(self, stage: Stage, seconds: float) -> None:
        self._say(f"{stage.name}: {stage.title} (at most {seconds:.0f} s)")
        entry = self.results["stages"][stage.name]
        entry["status"] = "running"  # what remains if this process is killed
        self._write()
        started = time.monotonic()
        try:
            entry |= self._supervise(stage, seconds)
        except BaseException:
            entry |= {"status": "interrupted"}
            raise
        finally:
            entry["seconds"] = round(time.monotonic() - started, 1)
            self._write()
            reason = f": {entry['reason']}" if entry.get("reason") else ""
            self._say(f"{stage.name}: {entry['status']} in {entry['seconds']} s{reason}")

    def _supervise(self, stage: Stage, seconds: float) -> dict[str, str]:
        """The stage's process from its start to its end; its status and reason."""
        deadline = time.monotonic() + seconds
        reading, writing = os.pipe()
        with (self.out / LOG).open("ab") as log:
            log.write(f"\n=== {stage.name}: {stage.title}\n".encode())
            log.flush()
            begin = log.tell()
            command = [sys.executable, "-u", "-m", "forge.bench.gpu_session", "--out", str(self.out)]
            command += ["--child", stage.target, "--budget", f"{seconds:.1f}", "--pipe", str(writing)]
            command += ["--rehearse"] if self._rehearsal else []
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,  # so that its own processes end with it
                env=self._environment(),
            )
        os.close(writing)
        messages: dict[str, str] = {}
        try:
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                for message in _messages(pipe, process, deadline):
                    messages |= self._take(stage, message)
            crashed = process.poll() is not None and process.returncode < 0
            # Writing the stacks of a running interpreter may crash it: that is its deadline too.
            overdue = time.monotonic() >= deadline - (STACKS_BEFORE_END if crashed else 0) and (
                crashed or process.returncode is None
            )
        finally:
            _end(process)
            _shorten(self.out / LOG, begin)
        if overdue:
            return {"status": "deadline", "reason": f"not done after {seconds:.0f} s"}
        if messages:
            return messages
        if process.returncode:
            return {"status": "killed", "reason": _last_line(self.out / LOG) + f" (exit status {process.returncode})"}
        return {"status": "done"}

    def _take(self, stage: Stage, message: dict[str, Any]) -> dict[str, str]:
        """Keep a figure; what the message says of the stage's end, if anything."""
        if "figure" not in message:
            return {name: message[name] for name in ("status", "reason") if name in message}
        self.results["stages"][stage.name]["figures"][message["figure"]] = message["value"]
        self._write()
        if not message.get("quiet"):
            self._say(f"  {message['figure']}: {_short(message['value'])}")
        return {}

    def _environment(self) -> dict[str, str]:
        """Stages find this forge wherever they are started from, and report without delay."""
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        return environment | ({"TRITON_INTERPRET": "1"} if self._rehearsal else {})

    def _write(self) -> None:
        """All or nothing: a reader of the file never sees half of it, even if this process is killed."""
        text = json.dumps(self.results, indent=1, ensure_ascii=False)
        partial = self.out / f"{RESULTS}.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.out / RESULTS)

    def _say_the_rest(self, stages: Sequence[Stage]) -> None:
        rest = [
            stage.name for stage in stages if self.results["stages"][stage.name]["status"] not in ("done", "skipped")
        ]
        if rest:
            self._say(f"to continue: --stages {','.join(rest)}")


def _earlier_results(path: Path) -> dict[str, Any]:
    """Return those of the session that is continued, or none."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        return results if isinstance(results.get("stages"), dict) else {"stages": {}}
    except (FileNotFoundError, json.JSONDecodeError, AttributeError):
        return {"stages": {}}


def _messages(pipe, process: subprocess.Popen, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield what a stage says until it ends or its time does. A line that it did not finish is dropped."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            # A process that the stage started may hold the pipe open, so its own end is looked for as well.
            if not selector.select(min(0.2, max(0.0, deadline - time.monotonic()))):
                if process.poll() is not None:
                    return
                continue
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pass
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                try:
                    message = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(message, dict):
                    yield message


def _end(process: subprocess.Popen) -> None:
    """End the stage and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _shorten(log: Path, begin: int) -> None:
    """Keep the beginning and the end of what a stage wrote from `begin` on."""
    with log.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end - begin <= LOG_HEAD + LOG_TAIL:
            return
        file.seek(end - LOG_TAIL)
        tail = file.read()
        file.seek(begin + LOG_HEAD)
        file.write(f"\n… {end - begin - LOG_HEAD - LOG_TAIL:,} bytes left out …\n".encode() + tail)
        file.truncate()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return one_line(next((line for line in reversed(lines) if line.strip()), "no output"))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:199] + "…"


def one_line(error: object) -> str:
    name = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
    return name + " ".join(str(error).split())[:300]


def child(target: str, out: Path, seconds: float, pipe: int, rehearsal: bool) -> int:
    """A stage's process."""
    _end_with_parent()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, seconds - STACKS_BEFORE_END), exit=False)
    messages = os.fdopen(pipe, "w", encoding="utf-8")

    def send(message: dict[str, Any]) -> None:
        messages.write(json.dumps(message, default=str) + "\n")
        messages.flush()

    module, _, function = target.partition(":")
    try:
        stage = getattr(import_module(module), function)
        stage(Report(send, out, time.monotonic() + seconds, rehearsal))
    except Skip as reason:
        send({"status": "skipped", "reason": one_line(str(reason))})
    except BaseException as error:
        traceback.print_exc()
        send({"status": "failed", "reason": one_line(error)})
    else:
        send({"status": "done"})
    sys.stdout.flush()
    sys.stderr.flush()
    messages.close()
    os._exit(0)  # a library's thread may hang at the end; every figure is out


def _end_with_parent() -> None:
    """If the session is killed, its stage must not keep the GPU."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    except AttributeError:  # not on this system
        pass


def chosen_stages(names: str | None) -> list[Stage]:
    """Return the named stages in the session's order; all without names. Raises `UsageError` for an unknown one."""
    known = [stage.name for stage in STAGES]
    chosen = [name.strip() for name in names.split(",")] if names else known
    for name in chosen:
        if name not in known:
            raise UsageError(f"--stages {name}: unknown; there are {', '.join(known)}")
    return [stage for stage in STAGES if stage.name in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m forge.bench.gpu_session", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results; what it has is continued")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all (540)")
    parser.add_argument("--stages", help="which, with commas: " + ", ".join(stage.name for stage in STAGES))
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: the CPU, toy sizes, Triton interpreted")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child, options.out, options.budget, options.pipe, options.rehearse)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        stages = chosen_stages(options.stages)
        if not options.budget >= LEAST_SECONDS:
            raise UsageError(f"--budget {options.budget:g}: give at least {LEAST_SECONDS:g} seconds")
        Session(options.out, options.budget, options.rehearse, lambda text: print(text, flush=True)).run(stages)
    except UsageError as error:
        print(f"gpu_session: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(import_module("forge.bench.gpu_session").main())  # as the module whose `Skip` the stages raise
