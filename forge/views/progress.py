"""What is shown while something takes its time: the line of a measurement, and bars for files, kernels and inputs.

Nothing is drawn where there is no terminal. Small models load before a bar could be read, so they show none.
Compiling kernels happens once per machine and takes seconds, so a line announces it even in a pipe.
"""

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from forge.views.palette import ACCENT, QUIET
from forge.views.run_view import LiveView
from forge.views.terminal import can_redraw, open_error_console
from forge.views.text import one_line


class BenchProgress(LiveView):
    """One line on a terminal that says what is being done, gone when it is. In a pipe nothing, or with `lines` a line
    for each thing that is done."""

    def __init__(self, console: Console, lines: bool = False):
        super().__init__(console)
        self._lines, self._told = lines, ""

    def __call__(self, text: str) -> None:
        """Say what begins. It is drawn now and never in between: that would take time from what is measured."""
        if self._shows:
            self._live.update(Text(one_line(text), QUIET, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._lines and text != self._told:
            self._told = text
            self._console.print(Text(one_line(text)), soft_wrap=True)


def progress_line(lines: bool = False) -> BenchProgress:
    """Return a line that shows progress on standard error. lines: whether a pipe gets a line for each thing that is
    done, as a benchmark of minutes needs it."""
    return BenchProgress(open_error_console(), lines)


LARGE_FILE = 100_000_000
"""Bytes above which a file shows its progress."""
COMPILING = "compiling kernels for this machine, once"
_STEPS = 200
"""Redraws of a bar, at most."""
FEW_INPUTS = 4
"""Inputs from which on a bar is shown."""


class _Bars:
    """Bars on `console`, gone when they are left."""

    def __init__(self, console: Console):
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, *amount: ProgressColumn, width: int = 40, moves: bool = False) -> Progress:
        """Start a progress bar. moves: redraw it several times a second, and not only when it is told of more."""
        columns = TextColumn("{task.description}", markup=False), BarColumn(width, complete_style=ACCENT), *amount
        progress = Progress(*columns, console=self._console, auto_refresh=moves, refresh_per_second=4, transient=True)
        progress.start()
        self._progress = progress
        return progress

    def _show(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, total=total, completed=done)
            self._progress.refresh()


class CountingBar(_Bars):
    """A callback `(done, in all)` of work on many inputs, or with another `column` on as much of something else as
    `least`."""

    def __init__(
        self,
        console: Console,
        title: str,
        least: int = FEW_INPUTS,
        column: type[ProgressColumn] = MofNCompleteColumn,
    ):
        super().__init__(console)
        self._title, self._least, self._column, self._drawn = title, least, column, -1

    def __call__(self, done: int, total: int) -> None:
        if total < self._least or not can_redraw(self._console):
            return
        if self._progress is None:
            self._task = self._start(self._column()).add_task(self._title, total=total)
        step = done * _STEPS // total
        if step != self._drawn:
            self._drawn = step
            self._show(done, total)


class LoadingBar(CountingBar):
    """A callback `(done bytes, total bytes)` of a model that is loaded."""

    def __init__(self, console: Console, name: str):
        super().__init__(console, f"loading {one_line(name)}", LARGE_FILE + 1, DownloadColumn)

    def compiling(self, done: int, total: int) -> None:
        """Show that `done` of `total` kernels are compiled; called before each and after the last. One kernel can take
        half a minute, so the elapsed time is drawn too, by a thread."""
        if not can_redraw(self._console):
            if done == 0:
                self._console.print(COMPILING, highlight=False)
            return
        if done == 0 or self._progress is None:
            self.__exit__()
            progress = self._start(MofNCompleteColumn(), TimeElapsedColumn(), width=20, moves=True)
            self._task = progress.add_task(COMPILING, total=total)
        self._show(done, total)


class TransferBar(_Bars):
    """A callback `(file name, done bytes, total bytes)` that draws one bar per file.

    What was there before the first call, of a download that is resumed, does not count for the speed.
    """

    def __init__(self, console: Console):
        super().__init__(console)
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        if not can_redraw(self._console):
            return
        columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        progress = self._progress or self._start(*columns, moves=True)
        if name not in self._tasks:
            self._tasks[name] = progress.add_task(one_line(name), total=total, completed=done)
        progress.update(self._tasks[name], completed=done, total=total)
