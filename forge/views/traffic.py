"""Real traffic as it happens: the scheduler's picture for as long as a server runs, or a line per step in a pipe."""

from rich.console import Console

from forge.trace.records import StepRecord
from forge.views.history import History
from forge.views.replicas import ReplicasView
from forge.views.run_live import serving_view
from forge.views.run_view import RunView
from forge.views.summary import RunLabel

MAX_STEPS = 5_000
"""Steps after which a history begins anew: a server has no end, and its past is not shown."""


class Traffic:
    """Follows the steps of a server. Used as a context manager."""

    def __init__(self, console: Console, label: RunLabel, max_num_seqs: int | None = None, order: str = "fcfs"):
        self._console, self._new = console, lambda: History(label, max_num_seqs, order)
        self._history, self._view = self._begin()
        self._replicas: ReplicasView | None = None
        """In the place of the view, once a step of one of several engines has come."""

    def _begin(self) -> tuple[History, RunView]:
        history = self._new()
        return history, serving_view(self._console, history)

    def __enter__(self) -> "Traffic":
        self._view.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        (self._replicas or self._view).__exit__(*exception)

    def step(self, record: StepRecord) -> None:
        """A step has ended."""
        if record.replica:
            self._of_replicas().step(record)
            return
        if len(self._history) == MAX_STEPS:
            self._view.__exit__(None, None, None)
            self._history, self._view = self._begin()
            self._view.__enter__()
        self._history.feed(record)
        self._view.step(record)

    def _of_replicas(self) -> ReplicasView:
        if self._replicas is None:
            self._view.__exit__(None, None, None)
            self._replicas = ReplicasView(self._console).__enter__()
        return self._replicas
