"""A reader's file as a module, what of it is written, the line of it at which an exception was raised, and the limits
on its code: the time of a call, the memory of the process, the size of the files that it writes.

A call is ended by a thread that raises `Endless` in the one that calls, so neither signals nor a main thread are
needed. A call that cannot be interrupted, because it is inside one long operation of C, ends the process:
`faulthandler` needs no interpreter for that, and writes down where it was.
"""

import ast
import ctypes
import faulthandler
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock, Thread, get_ident
from types import ModuleType
from typing import TextIO


def load(path: str | Path) -> ModuleType:
    """Import the file as a module that may import the files beside it. Raises what the file raises."""
    path = Path(path).resolve()
    spec = spec_from_file_location(f"exercise_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def unwritten(path: str | Path, functions: Sequence[str]) -> tuple[str, ...]:
    """List the functions whose body is still the template's `raise NotImplementedError`."""
    written = _functions_in(Path(path).read_text(encoding="utf-8"))
    return tuple(name for name in functions if name in written and _is_stub(written[name].body))


def source_of(path: Path, functions: Sequence[str]) -> str:
    """Return the source of the reader's functions, without docstrings."""
    text = path.read_text(encoding="utf-8")
    lines, shown = text.splitlines(), []
    for name, function in _functions_in(text).items():
        if name in functions:
            first = function.body[0]
            has_words = ast.get_docstring(function) is not None
            words = range(first.lineno - 1, first.end_lineno or first.lineno) if has_words else range(0)
            kept = range(function.lineno - 1, function.end_lineno or function.lineno)
            shown.append("\n".join(lines[index] for index in kept if index not in words))
    return "\n\n".join(shown)


def _functions_in(text: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file and the methods of its classes, by names as in `MyBlockPool.allocate`."""
    functions = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            functions |= {f"{node.name}.{item.name}": item for item in node.body if isinstance(item, ast.FunctionDef)}
    return functions


def _is_stub(body: list[ast.stmt]) -> bool:
    *before, last = body
    if not isinstance(last, ast.Raise) or not all(isinstance(statement, ast.Expr | ast.Pass) for statement in before):
        return False
    raised = last.exc.func if isinstance(last.exc, ast.Call) else last.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def is_missing(piece: ModuleType, function: str) -> bool:
    """True if the file does not define this function itself, but lacks it, inherits it or imports it from forge."""
    name, _, method = function.partition(".")
    holder = getattr(piece, name, None)
    if not method or holder is None:
        return holder is None or _is_of_forge(holder)
    owner = next((kind for kind in getattr(holder, "__mro__", ()) if method in vars(kind)), None)
    return owner is None or _is_of_forge(owner) or _is_of_forge(vars(owner)[method])


def _is_of_forge(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("forge.")


def line_in(path: str, error: BaseException) -> str | None:
    """Return `file.py:12: the line` for the last line of this file in the traceback; None if none is in it."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{Path(path).name}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if not frames:
        return None
    return line_at(path, frames[-1].lineno or 0)


def line_at(path: str, number: int) -> str:
    """Return `file.py:12: the line`."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"{Path(path).name}:{number}: {text}"


CALL_SECONDS = 2.0
"""A call of the reader's code that computes for longer does not end. By the processor's clock; on the wall's it may
take `PATIENCE` times as long."""
PATIENCE = 8
MEMORY_BYTES = 1 << 30
"""Memory that the reader's code may take beyond what the process has before it is loaded."""
FILE_BYTES = 16 << 20
"""The most that a file may grow to."""
_TICK = 0.05
_STUCK_SECONDS = 20
"""Seconds without a chance for another thread to run, after which the process is ended."""


class Endless(BaseException):
    """A call took too long. No `Exception`: the reader's own `except` must not catch it."""


class _Watch:
    """Times one call and ends it from another thread."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.thread: Thread | None = None
        self.caller = 0
        self.processor = self.wall = 0.0
        """The processor's and the wall's time at which the call must be over; 0 while no call is timed."""
        self.has_fired = False
        self.traces: TextIO | None = None
        """The file that `faulthandler` writes to, once the process may be ended."""

    def begin(self, seconds: float) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = Thread(target=self._run, daemon=True, name="time limit")
            self.thread.start()
        with self.lock:
            self.caller, self.has_fired = get_ident(), False
            self.processor, self.wall = time.process_time() + seconds, time.monotonic() + PATIENCE * seconds

    def end(self) -> None:
        while True:
            try:
                with self.lock:
                    self.wall = 0.0
                    if self.has_fired:  # an exception that has not been raised yet must not hit what comes next
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.caller), None)
                return
            except Endless:  # raised just now
                continue

    def _run(self) -> None:
        last = 0.0
        while True:
            time.sleep(_TICK)
            if self.traces is not None and time.monotonic() - last > 1:
                last = time.monotonic()
                faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True, file=self.traces)
            with self.lock:
                if self.wall and (time.process_time() > self.processor or time.monotonic() > self.wall):
                    self.has_fired = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.caller), ctypes.py_object(Endless))
                    self.processor = time.process_time() + 1  # once more, if the reader's code has caught it
                    self.wall = time.monotonic() + PATIENCE


_watch = _Watch()


@contextmanager
def time_limit(seconds: float | None = None) -> Iterator[None]:
    """Raise `Endless` in the block if it runs longer than this (None: `CALL_SECONDS`). Inside another limit it has no
    effect."""
    if _watch.wall and _watch.caller == get_ident():
        yield
        return
    limit = CALL_SECONDS if seconds is None else seconds
    try:
        _watch.begin(limit)
        yield
    except Endless as error:
        error.args = (f"it had not returned after {limit:g} seconds",)
        raise
    finally:
        _watch.end()


def limit_process(traces: TextIO | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
    """Limit the memory and the files of this process from now on.

    memory_bytes: beyond what it has. traces: where to write at which line the process was when it had to be ended
    because one operation took too long; None does not end it.
    """
    with suppress(ImportError, ValueError, OSError):  # a system without such limits
        import resource

        limits = [(resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_CORE, 0)]
        if sys.platform == "linux":
            with open("/proc/self/status", encoding="ascii") as status:
                data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
            limits.insert(0, (resource.RLIMIT_DATA, data + memory_bytes))
        for which, limit in limits:
            hard = resource.getrlimit(which)[1]
            resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    if traces is not None:
        faulthandler.enable(traces)
        _watch.traces = traces
        with time_limit():
            pass  # starts the thread
