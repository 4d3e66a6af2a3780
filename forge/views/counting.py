"""A bar for work on many inputs: how many are done. Nothing where there are few, or no terminal to draw on."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from forge.views.palette import ACCENT
from forge.views.terminal import can_redraw

WORTH_A_BAR = 4
"""Inputs from which on a bar is shown."""


class CountingBar:
    """A callback `(done, in all)` that draws itself on `console`, and is gone when the work is over."""

    def __init__(self, console: Console, what: str):
        self._console, self._what = console, what
        self._progress: Progress | None = None

    def __enter__(self) -> "CountingBar":
        return self

    def __exit__(self, *exception) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __call__(self, done: int, total: int) -> None:
        if total < WORTH_A_BAR or not can_redraw(self._console):
            return
        if self._progress is None:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(complete_style=ACCENT),
                MofNCompleteColumn(),
            )
            self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=total)
        self._progress.update(self._task, total=total, completed=done)
        self._progress.refresh()
