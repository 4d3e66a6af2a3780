"""Requests while they are served: a picture of the latest step, or a table of several engines; lines in a pipe."""

from collections import deque
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.text import Text

from forge.trace.explain import explain_route
from forge.trace.records import RouteRecord, StepRecord
from forge.views.charts import bar
from forge.views.formatting import count, percent
from forge.views.history import History
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.run_view import LiveView
from forge.views.scheduler import print_step_line, scheduler_lines, step_line
from forge.views.screen import Table
from forge.views.summary import RunLabel
from forge.views.terminal import cut
from forge.views.text import one_line


class ServingView(LiveView):
    """Feeds a history. On a terminal its latest step, gone when the run is over; in a pipe a line for each step as it
    happens."""

    def __init__(self, console: Console, history: History, quiet: bool = False):
        super().__init__(console, quiet)
        self._history, self._quiet = history, quiet

    def step(self, record: StepRecord) -> None:
        self._history.feed(record)
        if not (self._shows or self._quiet):
            print_step_line(self._console, record)
        self.redraw()

    def frame(self) -> Group:
        width, height = self._console.size
        return Group(*scheduler_lines(self._history, len(self._history) - 1, width, height - 1))


QUESTION = "Which engine does what, and why?"
ROUTES_SHOWN = 8
_BAR = 16


class ReplicasView(LiveView):
    """Follows the steps of all engines: a table and the last routes on a terminal, a line for each in a pipe."""

    def __init__(self, console: Console):
        super().__init__(console)
        self._last: dict[str, StepRecord] = {}
        """Each engine's latest step."""
        self._tokens: dict[str, int] = {}
        """Each engine's tokens generated while it was watched."""
        self._routes: deque[RouteRecord] = deque(maxlen=ROUTES_SHOWN)

    def step(self, record: StepRecord) -> None:
        """Show a step that a replica's engine has just ended."""
        self._last[record.replica] = record
        self._tokens[record.replica] = self._tokens.get(record.replica, 0) + len(record.tokens)
        self._routes.extend(record.routes)
        if not self._shows:
            for route in record.routes:
                self._console.print(self._route_line(route), soft_wrap=True)
            self._console.print(self._name(record.replica).append(f"  {step_line(record)}", ""), soft_wrap=True)
        self.redraw()

    def frame(self) -> Group:
        return Group(*self.lines())

    def lines(self) -> Iterator[RenderableType]:
        """Yield the picture, at the width that the console has now."""
        yield Text(QUESTION, TITLE)
        yield Text()
        rows = []
        for name, record in self._last.items():
            used = record.cache.used_blocks / max(1, record.cache.num_blocks)
            blocks = Text(bar(used, 1, _BAR), self._style(name)).append(f" {percent(used)}", QUIET)
            running, waiting = record.queues.running, record.queues.waiting
            rows.append((self._name(name), count(running), count(waiting), count(self._tokens[name]), blocks))
        yield Table(("engine", "running", "waiting", "tokens", "blocks in use"), rows, lefts=(4,)).rich()
        if self._routes:
            yield Text()
            yield Text("The last requests, and why they went there", f"{TITLE} {ACCENT}")
        for route in self._routes:
            yield cut(self._route_line(route), self._console.width)

    def _route_line(self, route: RouteRecord) -> Text:
        line = Text(f"{one_line(route.request_id)[-8:]} → ", QUIET, no_wrap=True)
        return line.append(self._name(route.replica)).append(f"  {explain_route(route)}", QUIET)

    def _name(self, name: str) -> Text:
        return Text(one_line(name), self._style(name))

    def _style(self, name: str) -> str:
        return sequence_style(list(self._last).index(name) if name in self._last else 0)


MAX_STEPS = 5_000
"""Steps after which a history begins anew: a server has no end, and its past is not shown."""


class Traffic:
    """Follows the steps of a server. Used as a context manager."""

    def __init__(self, console: Console, label: RunLabel, max_num_seqs: int | None = None, order: str = "fcfs"):
        self._console, self._new = console, lambda: History(label, max_num_seqs, order)
        self._history = self._new()
        self._view: ServingView | ReplicasView = ServingView(console, self._history)
        """The view of one engine, until a step of one of several has come."""

    def __enter__(self) -> "Traffic":
        self._view.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._view.__exit__(*exception)

    def step(self, record: StepRecord) -> None:
        """Show a step that has just ended."""
        if not record.replica:
            if len(self._history) == MAX_STEPS:
                self._history = self._new()
                self._change_to(ServingView(self._console, self._history))
        elif not isinstance(self._view, ReplicasView):
            self._change_to(ReplicasView(self._console))
        self._view.step(record)

    def _change_to(self, view: ServingView | ReplicasView) -> None:
        self._view.__exit__()
        self._view = view.__enter__()
