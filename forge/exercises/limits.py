"""Limits on the reader's code: the time of a call, the memory of the process, the size of the files that it writes.

A call is ended by a thread that raises `Endless` in the one that calls, so neither signals nor a main thread are
needed. A call that cannot be interrupted, because it is inside one long operation of C, ends the process:
`faulthandler` needs no interpreter for that, and writes down where it was.
"""

import ctypes
import faulthandler
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread, get_ident
from typing import TextIO

CALL_SECONDS = 2.0
"""A call of the reader's code that computes for longer does not end. By the processor's clock; on the wall's it may
take `PATIENCE` times as long."""
PATIENCE = 8
MEMORY_BYTES = 1 << 30
"""What the reader's code may take beyond what the process has before it is loaded."""
FILE_BYTES = 16 << 20
"""The most that a file may grow to."""
_TICK = 0.05
_STUCK_SECONDS = 20
"""After this long without a chance for another thread to run, the process is ended."""


class Endless(BaseException):
    """A call took too long. No `Exception`: the reader's own `except` must not catch it."""


class _Watch:
    """Times one call and ends it from another thread."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.thread: Thread | None = None
        self.caller = 0
        self.processor = self.wall = 0.0
        """When the call is over at the latest; 0 while none is timed."""
        self.has_fired = False
        self.traces: TextIO | None = None
        """Where `faulthandler` writes, once the process may be ended."""

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

        if sys.platform == "linux":
            with open("/proc/self/status", encoding="ascii") as status:
                data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
            _lower(resource.RLIMIT_DATA, data + memory_bytes)
        _lower(resource.RLIMIT_FSIZE, FILE_BYTES)
        _lower(resource.RLIMIT_CORE, 0)
    if traces is not None:
        faulthandler.enable(traces)
        _watch.traces = traces
        with time_limit():
            pass  # starts the thread


def _lower(which: int, limit: int) -> None:
    import resource

    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
