"""Metrics of all replicas: each has vLLM's names, and a label that says which replica it is."""

from collections.abc import Callable, Sequence
from typing import Any

from forge.cluster.replica import Report
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.messages import Gauges, Ready
from forge.server.metrics import Metrics, text_of

_SAME_CLOCK = 0.5
"""Seconds that a report may take from a replica on the same machine, whose monotonic clock is this process's."""


class ClusterMetrics:
    """A `Metrics` for each replica, and one for what no replica has answered for. Reads as one `Metrics`."""

    def __init__(self, model_name: str, ready: Ready, replica_of: Callable[[str], str | None]):
        self._new = lambda name: Metrics(
            model_name, ready.max_model_len, ready.num_blocks, ready.block_size, replica=name
        )
        self._replica_of = replica_of
        self._by_replica: dict[str, Metrics] = {}
        self._gauges: dict[str, Gauges] = {}
        self._offsets: dict[str, float] = {}
        """Of each replica's clock: this process's less the replica's, in seconds."""

    def of(self, name: str) -> Metrics:
        """A replica's own. Those of one that has died stay."""
        if name not in self._by_replica:
            self._by_replica[name] = self._new(name)
        return self._by_replica[name]

    def take_report(self, name: str, report: Report, now: float) -> None:
        """What a replica told, at `now` in seconds on this process's monotonic clock."""
        offset = now - report.clock
        self._offsets[name] = min(offset, self._offsets.get(name, offset))
        self._gauges[name] = report.gauges or self._gauges.get(name, Gauges())
        for step in report.steps:
            self.of(name).take_step(step)

    def join(self, name: str) -> None:
        """A replica runs."""
        self._gauges.setdefault(name, Gauges())

    def leave(self, name: str) -> None:
        """A replica has ended: it has no gauges any more."""
        self._gauges.pop(name, None)

    def take_output(self, output: RequestOutput, params: SamplingParams, arrived: float) -> None:
        """As `Metrics.take_output`. The output's times are on its replica's clock."""
        name = self._replica_of(output.request_id) or ""
        offset = self._offsets.get(name, 0.0)
        self.of(name).take_output(output, params, arrived - (0.0 if abs(offset) < _SAME_CLOCK else offset))

    def take_answers(self, lengths: Sequence[int], seconds: float) -> None:
        self.of("").take_answers(lengths, seconds)

    def take_abort(self) -> None:
        self.of("").take_abort()

    def take_failures(self, num_failed: int) -> None:
        self.of("").take_failures(num_failed)

    def take_step(self, step: Any) -> None:
        """Steps come with their replica's reports."""

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self._by_replica.values())

    @property
    def generation_tokens(self) -> int:
        return sum(one.generation_tokens for one in self._by_replica.values())

    def text(self, gauges: Gauges) -> str:
        """Everything, in Prometheus' text format: each name once, with the replicas' values under it."""
        names = sorted({*self._by_replica, *self._gauges})
        return text_of(family for name in names for family in self.of(name).families(self._gauges.get(name, Gauges())))
