"""The line that says what a measurement is doing."""

from rich.console import Console
from rich.live import Live
from rich.text import Text

from forge.views.palette import QUIET
from forge.views.terminal import can_redraw, open_error_console
from forge.views.text import one_line


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
