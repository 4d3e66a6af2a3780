"""Pictures of a run that are drawn anew while it goes on, and are gone in the end.

They are drawn between steps, in the engine's own thread, and only so often: a drawing thread would take the interpreter
away from a kernel in the middle of a step.
"""

import time
from collections.abc import Iterable
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from forge.trace.records import StepRecord

FRAMES_PER_SECOND = 20


class Unwatched:
    """A view that shows nothing. Used as a context manager, so that the terminal is restored whatever happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        """A step has ended."""


class LiveView(Unwatched):
    """A picture that `draw` draws anew, at most `per_second` times a second; its lines are `frame`'s."""

    def __init__(self, console: Console, per_second: float = FRAMES_PER_SECOND, shown: bool = True):
        """shown: false for one that never draws."""
        self._console, self._shown, self._seconds = console, shown, 1 / per_second
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._next_frame = 0.0

    def frame(self, width: int, height: int) -> Iterable[RenderableType]:
        raise NotImplementedError

    def draw(self, at_once: bool = False) -> None:
        """at_once: however short ago the last was."""
        if self._shown and (at_once or time.monotonic() >= self._next_frame):
            self._live.update(Group(*self.frame(*self._console.size)), refresh=True)
            self._next_frame = time.monotonic() + self._seconds

    def __enter__(self) -> Self:
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._live.update(Text(""), refresh=True)
            self._live.stop()
