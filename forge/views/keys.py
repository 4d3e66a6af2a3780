"""Single keys from a terminal, for views that go on when a key is pressed.

    with open_keys(console) as keys:
        while (key := keys.read_key()) not in ("q", EOF):
            ...

A key is the character typed, or a name: `enter`, `space`, `tab`, `backspace`, `escape`, `up`, `down`, `left`, `right`,
`home`, `end`, `page-up`, `page-down`, `delete`; `RESIZE` when the terminal has another size now (or came back to the
foreground) and what is on it should be drawn again; `EOF` when no key will come any more. Ctrl-C is a
KeyboardInterrupt, as everywhere. Whatever happens, the terminal is left as it was found.

Where single keys cannot be had (a dumb terminal, standard input that is none) lines are read: the first character of a
line counts, an empty line is `enter`.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Self

from rich.console import Console

RESIZE, EOF, TIMEOUT = "resize", "eof", ""
NEXT_KEYS = ("n", "enter", "space", "right", "down", "page-down")
BACK_KEYS = ("b", "backspace", "left", "up", "page-up")
"""Keys that go on and back, wherever there are pages or steps."""

_CONTROLS = {"\r": "enter", "\n": "enter", " ": "space", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}
_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "[H": "home", "[F": "end",
    "OA": "up", "OB": "down", "OC": "right", "OD": "left", "OH": "home", "OF": "end",
    "[1~": "home", "[4~": "end", "[3~": "delete", "[5~": "page-up", "[6~": "page-down", "[7~": "home", "[8~": "end",
}  # fmt: skip
_ESCAPE_SECONDS = 0.05
"""Seconds after an escape character within which what comes belongs to it."""


def is_listening() -> bool:
    """Return whether standard input is a terminal."""
    try:
        return sys.stdin.isatty()
    except ValueError:  # it is closed
        return False


def open_keys(console: Console) -> "Keys":
    """Return the keys of the terminal that `console` draws on."""
    has_termios = find_spec("termios") is not None  # absent on Windows
    usable = has_termios and is_listening() and not console.is_dumb_terminal
    return TerminalKeys(sys.stdin.fileno()) if usable else Keys()


def read_line(prompt: str, prefill: str = "") -> str | None:
    """Return a line from the reader, who may edit `prefill`; None at the end of input. Ctrl-C is a
    KeyboardInterrupt."""
    readline = readline_if_any()
    if readline and prefill:
        readline.set_startup_hook(lambda: readline.insert_text(prefill))
    try:
        return input(prompt)
    except EOFError:
        return None
    finally:
        if readline and prefill:
            readline.set_startup_hook(None)


class Keys:
    """Where keys come from: lines, in which the first character counts. Used as a context manager."""

    single = False
    """Whether a key counts the moment it is pressed, or only with the line that it begins."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        pass

    def read_key(self, timeout: float | None = None) -> str:
        """Return the next key. From a terminal: `TIMEOUT` (an empty string) after `timeout` seconds without one."""
        try:
            line = sys.stdin.readline()
        except ValueError:
            return EOF
        if not line:
            return EOF
        return line.strip()[:1] or "enter"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which the terminal is as it was before, for reading a line or running a command.

        Keys that were typed before its end are discarded: they were meant for what was on the screen then.
        """
        try:
            yield
        finally:
            with suppress(ImportError, ValueError):  # Windows has no termios; standard input may be closed
                _discard_typed(sys.stdin.fileno())

    muted = paused
    """Returns a context in which typed keys are neither echoed nor kept. Ctrl-C works."""


class TerminalKeys(Keys):
    """Keys from a terminal in cbreak mode: no echo, no waiting for a line, signals as usual."""

    single = True

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._pending = b""
        self._before: list[Any] | None = None
        self._wake: int | None = None
        """Where a signal is told to a wait."""
        self._taken = False
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        import termios

        self._before = termios.tcgetattr(self._descriptor)
        self._wake, waker = os.pipe()
        for descriptor in (self._wake, waker):
            os.set_blocking(descriptor, False)
            self._undo.callback(os.close, descriptor)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGWINCH, signal.SIGCONT):
                self._undo.callback(signal.signal, number, signal.signal(number, self._woken))
            # A signal that comes just before the wait below, Ctrl-C too, would otherwise be noticed after the next key.
            self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(waker, warn_on_full_buffer=False))
        self._take()
        return self

    def __exit__(self, *exception) -> None:
        self._give_back()
        self._undo.close()
        self._wake = None

    def read_key(self, timeout: float | None = None) -> str:
        while not self._pending:
            event = self._wait(timeout)
            if event != "input":
                return event
            with suppress(OSError):  # Linux says EIO once the other side has hung up
                self._pending = os.read(self._descriptor, 1024)
            if not self._pending:
                return EOF
        return self._decode()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._give_back()
        try:
            yield
        finally:
            self._take()
            self._discard()

    @contextmanager
    def muted(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._discard()

    def _discard(self) -> None:
        self._pending = b""
        _discard_typed(self._descriptor)

    def _wait(self, timeout: float | None) -> str:
        """Wait for `input`, for `RESIZE`, or for `TIMEOUT`; return which came first."""
        import select

        assert self._wake is not None, "keys are read inside the context"
        ready = select.select([self._descriptor, self._wake], [], [], timeout)[0]
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, 1024)
            return RESIZE
        return "input" if ready else TIMEOUT

    def _decode(self) -> str:
        """Take one key off what has been read."""
        if self._pending[:1] == b"\x1b":
            return self._escape()
        if self._pending[:1] == b"\x04":
            self._pending = self._pending[1:]
            return EOF
        for length in range(1, 5):  # a character of UTF-8
            with suppress(UnicodeDecodeError):
                character = self._pending[:length].decode("utf-8")
                self._pending = self._pending[length:]
                return _CONTROLS.get(character, character)
        self._pending = self._pending[1:]
        return "\ufffd"

    def _escape(self) -> str:
        """Return the key that an escape sequence stands for; `escape` where the character came alone."""
        import select

        if len(self._pending) == 1 and select.select([self._descriptor], [], [], _ESCAPE_SECONDS)[0]:
            self._pending += os.read(self._descriptor, 1024)
        text = self._pending[1:].decode("latin-1")
        if text[:1] not in ("[", "O"):
            self._pending = self._pending[1:]
            return "escape"
        end = next((index for index in range(1, len(text)) if "@" <= text[index] <= "~"), len(text) - 1)
        self._pending = self._pending[end + 2 :]
        return _SEQUENCES.get(text[: end + 1], "escape")

    def _take(self) -> None:
        import termios
        import tty

        self._taken = True
        tty.setcbreak(self._descriptor, termios.TCSADRAIN)

    def _give_back(self) -> None:
        import termios

        assert self._before is not None, "it was taken before"
        self._taken = False
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def _woken(self, number, frame) -> None:
        if number == signal.SIGCONT and self._taken:
            self._take()  # the shell has put the terminal in order meanwhile


def _discard_typed(descriptor: int) -> None:
    import termios

    with suppress(termios.error):  # the terminal is gone
        termios.tcflush(descriptor, termios.TCIFLUSH)


def readline_if_any() -> Any:
    """Return the module `readline`, which gives `input` line editing and history; None where there is none."""
    try:
        import readline
    except ImportError:
        return None
    return readline
