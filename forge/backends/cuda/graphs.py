"""CUDA graphs by hand: a step's launches recorded once, and from then on one call.

A decode step of a 0.6B model launches some 140 kernels of a few microseconds each; asking for them one by one from
Python takes longer than they run. A graph of one *shape* asks for all of them at once. What differs between two steps
of a shape is read from device memory (`inputs.py`).

A shape is captured when it comes for the second time: the first time it runs eagerly, which also compiles its kernels,
so that nothing is compiled or loaded while a capture is under way. What graphs read and write must stay where it is, so
moving a buffer drops them all.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from forge.trace.records import Execution

MAX_GRAPHS = 128
"""Shapes that are kept captured; what comes after runs eagerly."""


@dataclass(frozen=True)
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    logits: torch.Tensor
    execution: Execution


class Graphs:
    """The captured shapes of one network on one storage. They do not keep the storage alive."""

    def __init__(self, pause_gc: bool = False):
        """pause_gc: collect no garbage during a capture. It takes time, and what it frees may be the device's."""
        self._pause_gc = pause_gc
        self._captured: dict[Hashable, _Captured] = {}
        self._seen: set[Hashable] = set()
        self._refused: dict[Hashable, str] = {}
        self._pool: Any = None
        """Torch's handle of the memory that all graphs share."""
        self.last: torch.cuda.CUDAGraph | None = None
        """The graph that was replayed last, for timing it by itself."""

    def drop(self) -> None:
        """Forget all captures, because something that they read or write has moved. Their kernels stay compiled."""
        self._captured.clear()
        self._refused.clear()
        self._pool = self.last = None

    def run(self, shape: Hashable, rows: int, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Execution]:
        """Return what `compute` returns for `shape`, by replay if possible, and how it was run.

        shape: whatever two steps must have in common to share a graph. rows: its rows, for the record.
        """
        captured = self._captured.get(shape)
        if captured is None:
            if shape not in self._seen:
                self._seen.add(shape)
                return compute(), Execution("eager", "the first step of this shape", rows)
            if len(self._captured) >= MAX_GRAPHS:
                return compute(), Execution("eager", f"{MAX_GRAPHS} other shapes are captured", rows)
            if shape not in self._refused:
                self._try(shape, rows, compute)
            if shape in self._refused:
                return compute(), Execution("eager", self._refused[shape], rows)
            captured = self._captured[shape]
        captured.graph.replay()
        self.last = captured.graph
        return captured.logits, captured.execution

    def _try(self, shape: Hashable, rows: int, compute: Callable[[], torch.Tensor]) -> None:
        """Capture a shape. If that fails (no memory, say), the shape runs eagerly from then on, with the reason."""
        try:
            graph, logits = self._capture(compute)
            self._captured[shape] = _Captured(graph, logits, Execution("graph", f"captured for {rows} rows", rows))
        except RuntimeError as error:
            self._refused[shape] = f"cannot be captured: {' '.join(str(error).split())[:120]}"

    def _capture(self, compute: Callable[[], torch.Tensor]) -> "tuple[torch.cuda.CUDAGraph, torch.Tensor]":
        """Capture a graph in the memory pool that all graphs share: they never run at the same time."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        without_gc = _no_garbage_collection() if self._pause_gc else nullcontext()
        with without_gc, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = compute()
        self._pool = self._pool or graph.pool()
        return graph, logits


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
