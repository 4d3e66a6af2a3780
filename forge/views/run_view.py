"""A view of a run: entered before the run starts, fed every step, and told of the end.

It must not slow the engine that it watches: it draws between steps, in this thread, a few times a second, because a
drawing thread would take the interpreter away from a kernel in the middle of a step.
"""

import time
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from forge.trace.records import StepRecord
from forge.views.summary import RunResult
from forge.views.terminal import can_redraw


class RunView:
    """Follows one run, and shows nothing. A context manager, so that the terminal is restored whatever happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        """Show a step that has just ended."""

    def finish(self, result: RunResult) -> None:
        """Show the end of the run, which Ctrl-C may have brought early. The whole text is in its outputs: records have
        only what was new in each step."""


class LiveView(RunView):
    """A picture on a terminal, each in the place of the one before; gone when the view is left. Nothing in a pipe."""

    frames_per_second: float = 10

    def __init__(self, console: Console, quiet: bool = False):
        """quiet: nothing on a terminal either."""
        self._console, self._shows = console, can_redraw(console) and not quiet
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._next_frame = 0.0

    def __enter__(self) -> Self:
        if self._shows:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Take the picture away. Closing again does nothing."""
        if self._shows:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    def redraw(self) -> None:
        """Draw the frame, unless the last one was drawn less than 1 / `frames_per_second` ago."""
        if self._shows and time.monotonic() >= self._next_frame:
            self._live.update(self.frame(), refresh=True)
            self._next_frame = time.monotonic() + 1 / self.frames_per_second

    def frame(self) -> RenderableType:
        """Return the picture as it is now."""
        raise NotImplementedError
