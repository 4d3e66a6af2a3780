"""Metrics of all replicas under vLLM's names, with a label that says which replica, and a front's own."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from forge.cluster.wire import ReplicaUpdate
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.messages import Gauges, Ready
from forge.server.metrics import Metrics, family, text_of

_SAME_CLOCK = 0.5
"""Seconds that an update may take from a replica on the same machine, whose monotonic clock is this process's."""


class Front(Protocol):
    """The part of a front that its metrics read."""

    num_resumed: int

    def replica_of(self, request_id: str) -> str | None: ...


class ClusterMetrics:
    """A `Metrics` for each replica that can be reached. Reads as one `Metrics`.

    When a replica is gone its series go with it: a counter that never moves again says nothing.
    """

    def __init__(self, ready: Ready, front: Front):
        self._new, self._front = partial(Metrics, ready), front
        self._by_replica: dict[str, Metrics] = {}
        self._offsets: dict[str, float] = {}
        """Of each replica's clock: this process's less the replica's, in seconds."""
        self._gone: Counter[str] = Counter()
        """Of replicas that have left."""
        self._num_failed = 0

    def join(self, name: str) -> None:
        """Add the metrics of a replica that can be reached."""
        self._by_replica.setdefault(name, self._new(replica=name))

    def leave(self, name: str) -> None:
        """Drop the metrics of a replica that is gone."""
        metrics = self._by_replica.pop(name, None)
        if metrics is not None:
            self._gone.update(metrics.counts)
            self._offsets.pop(name, None)

    def take_update(self, name: str, update: ReplicaUpdate, now: float) -> None:
        """Count a replica's update at `now`, in seconds on this process's monotonic clock."""
        offset = now - update.clock
        self._offsets[name] = min(offset, self._offsets.get(name, offset))
        metrics = self._by_replica[name]
        metrics.gauges = update.gauges or metrics.gauges
        for step in update.steps:
            metrics.take_step(step)

    def take_output(self, output: RequestOutput, params: SamplingParams, arrived: float) -> None:
        """As `Metrics.take_output`. The output's times are on its replica's clock."""
        name = self._front.replica_of(output.request_id)
        if name in self._by_replica:
            self._by_replica[name].take_output(output, params, arrived - self._offset(name))

    def timed(self, name: str, output: RequestOutput, arrived: float, first_token: float | None) -> RequestOutput:
        """The output of a request that went on at `name`, with the times that its client saw: when it came, and when
        its first token did, if another engine chose that. Both are on this process's clock."""
        offset, samples = self._offset(name), []
        for sample in output.outputs:
            times = replace(sample.metrics, arrived=arrived - offset)
            if first_token is not None:
                first = first_token - offset
                times = replace(times, first_token=first, admitted=min(first, times.admitted or first))
            samples.append(replace(sample, metrics=times))
        return replace(output, outputs=tuple(samples))

    def _offset(self, name: str) -> float:
        """What this process's clock is ahead of a replica's, in seconds."""
        offset = self._offsets.get(name, 0.0)
        return 0.0 if abs(offset) < _SAME_CLOCK else offset

    def take_end(self, name: str | None, reason: Literal["abort", "error"], num_choices: int) -> None:
        """Count a request that ended before its engine ended it. name: its replica; None if none had it."""
        self._num_failed += num_choices * (reason == "error")
        if name in self._by_replica:
            self._by_replica[name].finished[reason] += num_choices

    def take_answered(self, name: str, lengths: Sequence[int], seconds: float) -> None:
        """Count prefill-only requests that a replica has answered: the tokens of each."""
        self._by_replica[name].take_answers(lengths, seconds)

    # What the endpoints tell and the client knows better, with its replica

    def take_answers(self, lengths: Sequence[int], seconds: float) -> None:
        pass

    def take_abort(self) -> None:
        pass

    @property
    def counts(self) -> Counter[str]:
        counts = self._gone.copy()
        for metrics in self._by_replica.values():
            counts.update(metrics.counts)
        return counts

    @property
    def gauges(self) -> Gauges:
        states = [metrics.gauges for metrics in self._by_replica.values()]
        return Gauges(*map(sum, zip(Gauges(), *states, strict=True)))

    def text(self, model_name: str) -> str:
        """Write everything in Prometheus' text format: each name once, with the replicas' values under it."""
        labels = f"model_name={json.dumps(model_name)}"
        fronts = (
            ("replicas_reachable", "gauge", "Engines that this front can reach.", len(self._by_replica)),
            ("requests_resumed_total", "counter", "Requests that went on elsewhere.", self._front.num_resumed),
            ("requests_failed_total", "counter", "Choices that no engine could finish.", self._num_failed),
        )
        families = [
            family(f"forge:{name}", kind, help_text, {labels: value}) for name, kind, help_text, value in fronts
        ]
        for name in sorted(self._by_replica):
            families += self._by_replica[name].families(model_name)
        return text_of(families)
