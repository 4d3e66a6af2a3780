"""A run of many requests while it happens: the picture of the latest step on a terminal, a line per step in a pipe.

Drawn between steps, in the engine's own thread and a few times a second, so that watching costs little.
"""

import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from forge.trace.records import StepRecord
from forge.views.history import History
from forge.views.scheduler import print_step_line, scheduler_lines
from forge.views.terminal import can_redraw

FRAMES_PER_SECOND = 10


class ServingView(Protocol):
    """Follows one run. Used as a context manager, so that the terminal is restored whatever happens."""

    def __enter__(self) -> "ServingView": ...

    def __exit__(self, *exception) -> None: ...

    def step(self, record: StepRecord) -> None:
        """A step has ended, and `history` has it."""


def serving_view(console: Console, history: History, quiet: bool = False) -> ServingView:
    """The view that fits what `console` writes to; one that shows nothing if `quiet`."""
    if quiet:
        return Unseen()
    return LiveServing(console, history) if can_redraw(console) else PlainServing(console)


class Unseen:
    """Shows nothing."""

    def __enter__(self) -> "Unseen":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass


class PlainServing(Unseen):
    """One line per step as it happens."""

    def __init__(self, console: Console):
        self._console = console

    def step(self, record: StepRecord) -> None:
        print_step_line(self._console, record)


class LiveServing:
    """The latest step; gone when the run is over."""

    def __init__(self, console: Console, history: History):
        self._console, self._history = console, history
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._next_frame = 0.0

    def __enter__(self) -> "LiveServing":
        self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        self._live.update(Text(""), refresh=True)
        self._live.stop()

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if now >= self._next_frame:
            width, height = self._console.size
            lines = scheduler_lines(self._history, len(self._history) - 1, width, height - 1)
            self._live.update(Group(*lines), refresh=True)
            self._next_frame = time.monotonic() + 1 / FRAMES_PER_SECOND
