"""forge in a process of its own on a pseudo-terminal: what it shows, what it is sent, how it leaves the terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable

from tests.cli.conftest import environment, start
from tests.waiting import PATIENCE

_CLEAR = re.compile(r"\x1b\[2J")
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x1b\x07]*(\x1b\\|\x07))")


class Terminal:
    """Used as a context manager, which ends the child if it still runs."""

    def __init__(self, *args: str, rows: int = 24, columns: int = 80, **variables: str):
        self._ours, self._theirs = pty.openpty()
        self._size(rows, columns)
        self.before = termios.tcgetattr(self._theirs)
        self.written = ""
        extra = environment(**({"TERM": "xterm-256color"} | variables))
        extra = {name: value for name, value in extra.items() if name not in ("COLUMNS", "LINES")}
        files = {"stdin": self._theirs, "stdout": self._theirs, "stderr": self._theirs}
        self._process = start(*args, **files, env=extra, start_new_session=True)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE)
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def page(self) -> str:
        """What was written since the screen was cleared, without escape codes."""
        return _ESCAPES.sub("", _CLEAR.split(self.written)[-1]).replace("\r", "")

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        self._size(rows, columns)
        self._process.send_signal(signal.SIGWINCH)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def press(self, key: str) -> str:
        """Send a key and read until the next page is whole; returns it."""
        shown = len(_CLEAR.findall(self.written))
        self.send(key)
        return self._wait(lambda: len(_CLEAR.findall(self.written)) > shown and self._is_whole(), f"page after {key!r}")

    def press_until(self, text: str, key: str = "n") -> str:
        """Send a key until `text` is on a page; returns the page."""
        while text not in self.page:
            self.press(key)
        return self.page

    def wait_for(self, text: str, times: int = 1) -> str:
        """Read until `text` is on the page, so many times; returns the page."""
        return self._wait(lambda: self.page.count(text) >= times, repr(text))

    def _wait(self, arrived: Callable[[], bool], what: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while not arrived():
            assert time.monotonic() < deadline, f"no {what} came:\n{self.page}"
            assert self._read(0.2) or self._process.poll() is None, f"it ended before {what} came:\n{self.page}"
        return self.page

    def _is_whole(self) -> bool:
        """Whether the page has its last line: keys, or a question's prompt."""
        return self.page.endswith(("[q]uit", "▌"))

    def finish(self) -> int:
        """Wait for the end; returns the exit status."""
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.page}"
            self._read(0.1)
        while self._read(0):
            pass
        return self._process.returncode

    def is_sane(self) -> bool:
        """Whether the terminal is in the modes in which it was found."""
        return termios.tcgetattr(self._theirs) == self.before

    def _read(self, timeout: float) -> bool:
        if not select.select([self._ours], [], [], timeout)[0]:
            return False
        self.written += os.read(self._ours, 65536).decode(errors="replace")
        return True

    def _size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
