"""Several requests in one engine, each of which arrives while those before it run: driven, watched and timed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import typer

from forge.cli.run_control import drive, forget_prefixes
from forge.engine.sampling_params import SamplingParams
from forge.errors import INTERRUPTED, UsageError
from forge.views.summary import RunResult
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.llm import LLM, Prompt
    from forge.trace.records import StepRecord
    from forge.views.block_map import CacheFigures
    from forge.views.blocks import BlockScreen
    from forge.workload.requests import Request


def arriving(llm: "LLM", prompt: "Prompt", params: "SamplingParams", step: int) -> "Request":
    """Make a request that comes when this many steps have been made, or as soon as nothing else is left to do."""
    from forge.workload.requests import Request

    text, token_ids = (prompt, llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
    return Request(tuple(token_ids), params.max_tokens, step, sampling=params, prompt=text)


def drive_arrivals(
    llm: "LLM",
    arrivals: "Sequence[Request]",
    on_step: "Callable[[StepRecord], None]" = lambda record: None,
) -> RunResult:
    """Run all requests to their ends, or to Ctrl-C, handing on every step as it happens. `arrivals` are in the order of
    their steps. Raises `UsageError` for a request that can never run."""
    from forge.workload.requests import Workload, WorkloadRun

    run = WorkloadRun(llm.engine, Workload(tuple(arrivals), "steps"))
    try:
        result = drive(llm, run, on_step)
    finally:
        run.abort()
    if run.refused:
        raise UsageError(run.refused[0][1])
    return result


def watch_arrivals(
    llm: "LLM", arrivals: "Sequence[Request]", screen: "BlockScreen", pace: float, quiet: bool
) -> RunResult:
    """Drive the arrivals with the blocks on the terminal, unless `quiet`, and remember the steps in `screen`."""
    from forge.views.blocks import BlocksView

    llm.engine.scheduler.keep_block_map = True
    screen.since = llm.engine.cache.stats()
    try:
        with BlocksView(open_console(), screen, pace, quiet) as watch:
            return whole(drive_arrivals(llm, arrivals, watch.step))
    finally:
        llm.engine.scheduler.keep_block_map = False


TIMES = 3
"""How often a run is timed; the fastest counts."""


@dataclass(frozen=True)
class WatchedRun:
    """Arrivals that were watched once and then timed."""

    screen: "BlockScreen"
    """The screen that showed the watched run."""
    watched: RunResult
    timed: RunResult
    """The same without a view."""

    @classmethod
    def of(cls, llm: "LLM", arrivals: "Sequence[Request]", question: str, pace: float, quiet: bool) -> Self:
        """Watch, which warms up, and then time. Each run begins with an empty prefix index."""
        from forge.views.blocks import BlockScreen

        screen, timed = BlockScreen(question), []
        forget_prefixes(llm)
        watched = watch_arrivals(llm, arrivals, screen, pace, quiet)
        for _ in range(TIMES):
            forget_prefixes(llm)
            timed.append(whole(drive_arrivals(llm, arrivals)))
        return cls(screen, watched, min(timed, key=lambda result: result.seconds))

    @cached_property
    def figures(self) -> "CacheFigures":
        from forge.views.block_map import CacheFigures

        return CacheFigures.of(self.watched.records, self.watched.outputs)


def same_tokens(*runs: WatchedRun) -> bool:
    """Return whether all of them gave the same tokens, watched and timed."""
    return len({result.token_ids for run in runs for result in (run.watched, run.timed)}) == 1


def whole(result: RunResult) -> RunResult:
    """Return a complete result, or end the command if Ctrl-C cut it short: half an experiment says nothing."""
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    return result
