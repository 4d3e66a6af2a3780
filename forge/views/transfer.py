"""The progress of a file on its way to the disk, downloaded or made, and the lines that say what came of it."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from forge.views.formatting import parameters, plural, size
from forge.views.palette import ACCENT
from forge.views.terminal import can_redraw
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.model.pulled import PulledModel
    from forge.model.synth import SyntheticFile


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
