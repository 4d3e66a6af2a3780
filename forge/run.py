"""A run: what `LLM.start` returns, whose steps commands and screens iterate over."""

from collections.abc import Iterator

import numpy as np

from forge.engine.engine import Engine
from forge.engine.outputs import RequestOutput
from forge.trace.records import StepRecord

Requests = list[tuple[str, tuple[int, ...]]]
"""Queued requests: the id of each, and of its samples' sequences."""


class Run:
    """Requests under way: iterate to advance them step by step, then read `outputs`."""

    def __init__(self, engine: Engine, requests: Requests, keep_logits: bool = False):
        self._engine = engine
        self._request_ids = [request_id for request_id, _ in requests]
        self._outputs: list[RequestOutput] | None = None
        self._logits: list[np.ndarray] = []
        self._watched = requests[0][1][0] if keep_logits else None
        if keep_logits:
            engine.on_logits.append(self._keep)

    def __iter__(self) -> Iterator[StepRecord]:
        """Advance the engine until every request of this run has ended, yielding what each step did.

        Iterating again goes on where it stopped, after an exception too. Other runs of the same engine advance with it.
        """
        while True:
            with self._engine.lock:
                if self._close_if_ended():
                    return
                if self._watched is not None:
                    self._logits = self.logits  # without what a step that raised has left
                record = self._engine.step()
                self._close_if_ended()  # now, so that `outputs` are whole if the caller stops at this record
            yield record

    def abort(self) -> None:
        """Abort the unfinished requests, keeping what they produced."""
        with self._engine.lock:
            if not self._close_if_ended():
                for request_id in self._request_ids:
                    self._engine.abort(request_id)
                self._close_if_ended()

    @property
    def outputs(self) -> list[RequestOutput]:
        """One output per prompt, in order. Complete once the iteration has ended or after `abort()`."""
        with self._engine.lock:
            if self._close_if_ended() and self._outputs is not None:
                return self._outputs
            return [self._engine.output(request_id) for request_id in self._request_ids]

    @property
    def seed(self) -> int:
        """The seed in use, chosen or drawn."""
        return self.outputs[0].seed

    @property
    def logits(self) -> list[np.ndarray]:
        """Float32 `[vocab]` for each token of the first sample, with `keep_logits`."""
        del self._logits[len(self.outputs[0].outputs[0].token_ids) :]  # a step that raised may have left more
        return self._logits

    def _keep(self, seq_id: int, logits: np.ndarray) -> None:
        if seq_id == self._watched:
            self._logits.append(logits)

    def _close_if_ended(self) -> bool:
        """Once every request has ended, take the outputs and drop the requests from the engine; return whether they
        have."""
        if self._outputs is None and not any(map(self._engine.is_unfinished, self._request_ids)):
            outputs = [self._engine.output(request_id) for request_id in self._request_ids]
            self._on_end(outputs)
            self._outputs = outputs
            if self._watched is not None:
                self._engine.on_logits.remove(self._keep)
            for request_id in self._request_ids:
                self._engine.forget(request_id)
        return self._outputs is not None

    def _on_end(self, outputs: list[RequestOutput]) -> None:
        """Do nothing; a subclass acts here when the run has ended."""
