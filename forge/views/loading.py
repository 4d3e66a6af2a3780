"""What is shown while a model becomes ready: a bar for a large file, and for kernels that have to be compiled.

Small models load before a bar could be read, so they show none. Compiling happens once per machine and takes seconds,
so it is always announced, by a line where there is no terminal to draw on.
"""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from forge.views.palette import ACCENT
from forge.views.terminal import can_redraw
from forge.views.text import one_line

WORTH_A_BAR = 100_000_000
"""Bytes above which a file shows its progress."""
COMPILING = "compiling kernels for this machine, once"
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
            self._progress = self._new_progress(DownloadColumn())
            self._task = self._progress.add_task(f"loading {self._name}", total=total)
        step = done * _STEPS // total
        if step != self._drawn:
            self._drawn = step
            self._progress.update(self._task, completed=done)
            self._progress.refresh()

    def compiling(self, done: int, total: int) -> None:
        """`done` of `total` kernels are compiled; called before each and after the last. One kernel can take half a
        minute, so the elapsed time is drawn too, by a thread."""
        if not can_redraw(self._console):
            if done == 0:
                self._console.print(COMPILING, highlight=False)
            return
        if done == 0 or self._progress is None:
            self.__exit__()
            self._progress = self._new_progress(MofNCompleteColumn(), TimeElapsedColumn(), moves=True)
            self._task = self._progress.add_task(COMPILING, total=total)
        self._progress.update(self._task, completed=done)
        self._progress.refresh()

    def _new_progress(self, *amount: ProgressColumn, moves: bool = False) -> Progress:
        """moves: it is drawn anew several times a second, and not only when it is told of more."""
        bar = BarColumn(20 if moves else 40, complete_style=ACCENT)
        columns = (TextColumn("{task.description}", markup=False), bar, *amount)
        progress = Progress(*columns, console=self._console, auto_refresh=moves, refresh_per_second=4, transient=True)
        progress.start()
        return progress
