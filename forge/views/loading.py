"""The progress bar of a large model's loading. Small models load before a bar could be read, so they show none."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from forge.views.palette import ACCENT
from forge.views.terminal import can_redraw
from forge.views.text import one_line

WORTH_A_BAR = 100_000_000
"""Bytes above which a file shows its progress."""
_STEPS = 200
"""Redraws over the whole loading, at most."""


class LoadingBar:
    """A callback `(done bytes, total bytes)` that draws itself on `console`, and is gone when the loading is over."""

    def __init__(self, console: Console, name: str):
        self._console, self._name = console, one_line(name)
        self._progress: Progress | None = None
        self._drawn = -1

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(self, *exception) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None

    def __call__(self, done: int, total: int) -> None:
        if total <= WORTH_A_BAR or not can_redraw(self._console):
            return
        if self._progress is None:
            self._progress = self._new_progress()
            self._task = self._progress.add_task(f"loading {self._name}", total=total)
        step = done * _STEPS // total
        if step != self._drawn:
            self._drawn = step
            self._progress.update(self._task, completed=done)
            self._progress.refresh()

    def _new_progress(self) -> Progress:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(complete_style=ACCENT), DownloadColumn())
        progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        progress.start()
        return progress
