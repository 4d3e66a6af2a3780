"""A run of many requests while it happens: the picture of the latest step on a terminal, a line per step in a pipe."""

from rich.console import Console, Group

from forge.trace.records import StepRecord
from forge.views.history import History
from forge.views.run_view import LiveView, RunView
from forge.views.scheduler import print_step_line, scheduler_lines
from forge.views.terminal import can_redraw


def serving_view(console: Console, history: History, quiet: bool = False) -> RunView:
    """The view that fits what `console` writes to; one that shows nothing if `quiet`."""
    if quiet:
        return RunView()
    return LiveServing(console, history) if can_redraw(console) else PlainServing(console)


class PlainServing(RunView):
    """One line per step as it happens."""

    def __init__(self, console: Console):
        self._console = console

    def step(self, record: StepRecord) -> None:
        print_step_line(self._console, record)


class LiveServing(LiveView):
    """The latest step; gone when the run is over."""

    def __init__(self, console: Console, history: History):
        super().__init__(console)
        self._history = history

    def step(self, record: StepRecord) -> None:
        self.redraw()

    def frame(self) -> Group:
        width, height = self._console.size
        return Group(*scheduler_lines(self._history, len(self._history) - 1, width, height - 1))
