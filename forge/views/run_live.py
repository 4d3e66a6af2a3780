"""A run of many requests while it happens: the picture of the latest step on a terminal, a line per step in a pipe.

Drawn between steps, in the engine's own thread and a few times a second, so that watching costs little.
"""

from typing import Protocol

from rich.console import Console
from rich.text import Text

from forge.trace.records import StepRecord
from forge.views.history import History
from forge.views.live import LiveView, Unwatched
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
        return Unwatched()
    return LiveServing(console, history) if can_redraw(console) else PlainServing(console)


class PlainServing(Unwatched):
    """One line per step as it happens."""

    def __init__(self, console: Console):
        self._console = console

    def step(self, record: StepRecord) -> None:
        print_step_line(self._console, record)


class LiveServing(LiveView):
    """The latest step; gone when the run is over."""

    def __init__(self, console: Console, history: History):
        super().__init__(console, FRAMES_PER_SECOND)
        self._history = history

    def step(self, record: StepRecord) -> None:
        self.draw()

    def frame(self, width: int, height: int) -> list[Text]:
        return scheduler_lines(self._history, len(self._history) - 1, width, height - 1)
