"""Shows a command's output in a chapter a screen at a time, and waits for a key after each.

It stands in place of standard output, so that streamed text, colours and live views stay as they are. A view that moves
the cursor draws over itself and is not counted.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console

from forge.views.keys import EOF, open_keys
from forge.views.terminal import can_redraw

_MOVES = re.compile(r"\x1b\[\d*(?:;\d*)?[ABCDHJf]|\x1b\[\?1049")
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x1b\x07]*(?:\x1b\\|\x07)")
MORE = "-- any key: more   q: no more --"


class EnoughRead(KeyboardInterrupt):
    """Raised when the reader quits a command's output; the command ends as with Ctrl-C."""


class PagedOutput:
    """A text file that waits after `height` lines of `width` columns, and otherwise behaves as the file below it."""

    def __init__(self, file: IO[str], height: int, width: int, goes_on: Callable[[], bool]):
        """goes_on: waits for the reader and returns false if they quit, which raises `EnoughRead`."""
        self._file, self._height, self._width, self._goes_on = file, max(2, height), max(1, width), goes_on
        self._lines = self._column = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if _MOVES.search(text) or threading.current_thread() is not threading.main_thread():
            self._lines = 0
            return self._file.write(text)
        for line in text.splitlines(keepends=True):
            if self._lines >= self._height - 1:
                self._lines = self._column = 0
                self._file.flush()
                if not self._goes_on():
                    raise EnoughRead
            self._file.write(line)
            self._column += len(_CODES.sub("", line).rstrip("\n"))
            if line.endswith("\n"):
                self._lines += max(1, -(-self._column // self._width))
                self._column = 0
        return len(text)


@contextmanager
def paged_output(console: Console) -> Iterator[None]:
    """Make standard output wait for a key after each screen while the context is open, if it is a terminal."""
    if not can_redraw(console):
        yield
        return

    def goes_on() -> bool:
        file.write(MORE)
        file.flush()
        with open_keys(console) as keys:
            key = keys.read_key()
        file.write("\r\x1b[2K")
        return key not in ("q", EOF)

    file = sys.stdout
    width, height = console.size
    sys.stdout = PagedOutput(file, height, width, goes_on)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout = file
