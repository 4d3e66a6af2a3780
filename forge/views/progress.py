"""What is shown while something takes its time: the line of a measurement, and bars for files, kernels and inputs.

Nothing is drawn where there is no terminal. Small models load before a bar could be read, so they show none.
Compiling kernels happens once per machine and takes seconds, so a line announces it even in a pipe.
"""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from forge.views.formatting import parameters, plural, size
from forge.views.palette import ACCENT, QUIET
from forge.views.terminal import can_redraw, open_error_console
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.model.pulled import PulledModel
    from forge.model.synth import SyntheticFile

from rich.progress import (
    MofNCompleteColumn,
    ProgressColumn,
    TimeElapsedColumn,
)


class BenchProgress:
    """One line on a terminal that says what is being done, gone when it is. In a pipe nothing, or with `lines` a line
    for each thing that is done."""

    def __init__(self, console: Console, lines: bool = False):
        self._console, self._lines, self._told = console, lines, ""
        # Drawn when something new begins and never in between: that would take time from what is measured.
        self._live = Live(console=console, auto_refresh=False, transient=True) if can_redraw(console) else None

    def __enter__(self) -> "BenchProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, text: str) -> None:
        if self._live:
            self._live.update(Text(one_line(text), QUIET, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._lines and text != self._told:
            self._told = text
            self._console.print(Text(one_line(text)), soft_wrap=True)


def progress_line(lines: bool = False) -> BenchProgress:
    """lines: whether a pipe gets a line for each thing that is done, as a benchmark of minutes needs it."""
    return BenchProgress(open_error_console(), lines)


LARGE_FILE = 100_000_000
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
        if total <= LARGE_FILE or not can_redraw(self._console):
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


class TransferBar:
    """A callback `(file name, done bytes, total bytes)` that draws one bar per file while it is entered, and is gone
    afterwards. Without a terminal it draws nothing.

    What was there before the first call, of a download that is resumed, does not count for the speed.
    """

    def __init__(self, console: Console):
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "TransferBar":
        if can_redraw(self._console):
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(complete_style=ACCENT),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __call__(self, name: str, done: int, total: int) -> None:
        if self._progress is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(one_line(name), total=total, completed=done)
        self._progress.update(self._tasks[name], completed=done, total=total)


def print_synthetic(console: Console, path: str, written: "SyntheticFile") -> None:
    """One line of what the file is, one of what its weights are stored as."""
    types = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in _largest_first(written.type_bytes))
    console.print(
        f"{one_line(path)}: {size(written.bytes)}, {parameters(written.parameters)} random parameters in "
        f"{plural(written.tensors, 'tensor')}"
    )
    console.print(f"weights: {types}")


def print_pulled(console: Console, pulled: "PulledModel") -> None:
    """Where the model is now, and how to run it."""
    console.print(f"{one_line(str(pulled.path))}: {size(pulled.bytes)}", soft_wrap=True)
    console.print(f"run it: forge generate --model {one_line(pulled.name)} ...", soft_wrap=True)


def _largest_first(type_bytes: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(type_bytes.items(), key=lambda item: -item[1])


FEW_INPUTS = 4
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
        if total < FEW_INPUTS or not can_redraw(self._console):
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
