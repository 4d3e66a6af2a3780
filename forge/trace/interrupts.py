"""Ctrl-C that waits for the end of what must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def late_interrupt() -> Iterator[None]:
    """Handle SIGINT at the end of the block. It comes to the main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[tuple[int, FrameType | None]] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: signals.append((number, frame)))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            handler(*signals[0])
