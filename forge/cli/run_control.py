"""Loading a model and driving a run, as every command does it: with a bar for a large model, and a Ctrl-C that is heard
between two steps, so that what was generated is kept. Here too a run is recorded (`--trace`) and stepped through
(`--step`), whichever command it is of. Last come several requests in one engine, each of which arrives while those
before it are running.
"""

import gc
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import typer

from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import INTERRUPTED, ForgeError, UsageError
from forge.trace.records import EndRecord
from forge.views.progress import LoadingBar
from forge.views.summary import RunLabel, RunResult
from forge.views.terminal import open_console, open_error_console

if TYPE_CHECKING:
    import numpy as np

    from forge.engine.outputs import RequestOutput
    from forge.llm import LLM, Prompt
    from forge.trace.pauses import Pauses
    from forge.trace.recorder import TraceHeader
    from forge.trace.records import StepRecord
    from forge.views.block_map import CacheFigures
    from forge.views.blocks import BlockScreen
    from forge.views.history import History
    from forge.workload.requests import Request

Found = Any
"""A command's result: a `Report`, which the command line then shows; an exit status; or nothing."""


def create_llm(engine_args: EngineArgs | str, **changed: Any) -> "LLM":
    """Load the model, with some options changed. Standard error shows the progress."""
    gc.disable()  # a vocabulary's objects stay: looking through them takes a tenth of the time
    try:
        from forge.llm import LLM
        from forge.model.catalog import model_name

        args = EngineArgs(engine_args) if isinstance(engine_args, str) else engine_args
        args = replace(args, **changed)
        with LoadingBar(open_error_console(), model_name(Path(str(args.model))) or str(args.model)) as bar:
            return LLM.from_engine_args(replace(args, on_load_progress=bar, on_compile_progress=bar.compiling))
    finally:
        gc.enable()


def run_label(llm: "LLM") -> RunLabel:
    return RunLabel(llm.model_name, llm.kv, llm.device, llm.device_description)


def warm_up(llm: "LLM", prompt: str) -> None:
    """Generate a few tokens that are not timed: a process's first forward pays for memory that has never been touched.
    With speculation a few more, because no draft tokens are proposed until a plain forward's time is known.

    What a prefix cache would remember of them is forgotten.
    """
    max_tokens = 24 if llm.engine.proposers else 2
    llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    forget_prefixes(llm)


def forget_prefixes(llm: "LLM") -> None:
    """Empty the index of a prefix cache; another cache has none."""
    from forge.cache.prefix import PrefixKvCache

    if isinstance(llm.engine.cache, PrefixKvCache):
        llm.engine.cache.reset()


class AnyRun(Protocol):
    """What can be driven: a `Run`, or anything else that advances an engine as it is iterated over."""

    def __iter__(self) -> "Iterator[StepRecord]": ...

    def abort(self) -> None: ...

    @property
    def outputs(self) -> "list[RequestOutput]": ...


class StepSubscriber:
    """Records the steps of a command's runs in a trace, and lets a reader step through them."""

    def __init__(self, trace: Path | None = None, step: bool = False):
        """Raises a `ForgeError` where the trace cannot be written, or without a terminal to step in."""
        self.steps = step
        if step:
            from forge.views.stepper import require_terminal

            require_terminal(open_console())
        self._writer = None
        if trace is not None:
            from forge.trace.recorder import TraceWriter

            self._writer = TraceWriter(trace)

    @property
    def is_on(self) -> bool:
        return self.steps or self._writer is not None

    def begin(self, llm: "LLM") -> None:
        if self._writer is not None:
            self._writer.begin(trace_header(llm))

    def record(self, record: "StepRecord | EndRecord") -> None:
        if self._writer is not None:
            self._writer.write(record)


NO_SUBSCRIBER = StepSubscriber()


def drive(
    llm: "LLM",
    run: AnyRun,
    params: SamplingParams,
    on_step: "Callable[[StepRecord], None]",
    subscriber: StepSubscriber = NO_SUBSCRIBER,
) -> RunResult:
    """Advance `run` to its end, or to Ctrl-C, handing on every step as it happens."""
    return replace(advance(llm, run, on_step, subscriber), sampled=not params.greedy)


REPEATS, REPEAT_SECONDS = 3, 10.0
"""How often a run is repeated for its times, itself included, and for how long: a large model's run is long enough."""


def fastest(first: "RunResult", again: "Callable[[], RunResult]") -> "tuple[RunResult, int]":
    """`first` with the shortest of each forward's times in several equal runs, and how many these were.

    What else the machine does can only lengthen a forward, and it rarely lengthens the same one in every run.
    """
    runs = [first]
    spent = lasted = sum(first.forward_ms) / 1e3
    while len(runs) < REPEATS and spent + lasted < REPEAT_SECONDS and not runs[-1].interrupted:
        runs.append(again())
        lasted = sum(runs[-1].forward_ms) / 1e3
        spent += lasted
    if runs[-1].interrupted:
        return replace(first, interrupted=True), len(runs)
    steps = zip(*(run.records for run in runs), strict=True)
    records = tuple(min(step, key=lambda record: record.forward_ms) for step in steps)
    outputs = min((run.outputs for run in runs), key=lambda outputs: outputs[0].metrics.time_to_first_token_ms or 0.0)
    return replace(first, records=records, outputs=outputs), len(runs)


@dataclass(frozen=True)
class RepeatedRun:
    """A greedy run of one prompt, repeated for its times."""

    llm: "LLM"
    prompt: str
    params: SamplingParams
    result: RunResult
    runs: int

    @classmethod
    def of(cls, engine_args: EngineArgs, prompt: str, max_tokens: int, subscriber: StepSubscriber) -> "RepeatedRun":
        """Run the prompt, watched the first time; the fastest of each forward's times count."""
        from forge.views.generation import watching

        params, llm = SamplingParams(max_tokens=max_tokens, ignore_eos=True), create_llm(engine_args)
        warm_up(llm, prompt)
        with watching(open_console(), run_label(llm), prompt) as view:
            first = drive(llm, llm.start([prompt], params), params, view.step, subscriber)
            again = lambda: drive(llm, llm.start([prompt], params), params, lambda record: None)  # noqa: E731
            return cls(llm, prompt, params, *fastest(first, again))


def advance(
    llm: "LLM",
    run: AnyRun,
    on_step: "Callable[[StepRecord], None]",
    subscriber: StepSubscriber = NO_SUBSCRIBER,
    history: "History | None" = None,
) -> RunResult:
    """Advance a run to its end, or to Ctrl-C, with `subscriber`. Where it is stepped through, `on_step` sees the steps
    when that is over: only one of the two can have the screen. `history`, if given, is fed every step first. Raises
    `ForgeError` if a sample ended as an `error`."""
    from forge.trace.pauses import Pauses

    subscriber.begin(llm)
    pauses, stepper = Pauses(), None
    records: list[StepRecord] = []
    steps: Iterable[StepRecord] = run
    if subscriber.steps:
        from forge.views.stepper import Stepper

        history = history if history is not None else new_history(llm)
        stepper, steps = Stepper(open_console(), history), map(pauses.step, run)
    ended_early = False
    with interruption() as requested, stepper or nullcontext():
        for record in steps:
            records.append(record)
            subscriber.record(record)
            if history is not None:
                history.feed(record)
            if stepper is None:
                on_step(record)
                goes_on = not requested()
            else:
                with pauses.pause():
                    goes_on = stepper.asks_for_another(requested)
            if not goes_on:
                run.abort()
                ended_early = True
                break
        if stepper is not None and not ended_early:
            stepper.ended(requested)
        interrupted = ended_early if stepper is None else requested()
    for record in records if stepper is not None else ():
        on_step(record)
    outputs = tuple(_without_pauses(output, pauses) for output in run.outputs)
    for output in outputs:
        subscriber.record(end_record(output))
    for sample in [sample for output in outputs for sample in output.outputs]:
        if sample.finish_reason == "error":
            raise ForgeError("; ".join(sample.errors))
    left = ended_early and not interrupted
    return RunResult(run_label(llm), tuple(records), outputs, interrupted=interrupted or ended_early, left=left)


def _without_pauses(output: "RequestOutput", pauses: "Pauses") -> "RequestOutput":
    samples = tuple(replace(sample, metrics=pauses.metrics(sample.metrics)) for sample in output.outputs)
    return replace(output, outputs=samples)


def new_history(llm: "LLM") -> "History":
    from forge.views.history import History

    config = llm.engine.scheduler.config
    return History(run_label(llm), config.max_num_seqs, config.order_name)


def trace_header(llm: "LLM") -> "TraceHeader":
    """Describe a run for the first line of its trace."""
    from forge.trace.recorder import TraceHeader

    config = llm.engine.scheduler.config
    return TraceHeader(
        **vars(run_label(llm)),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        chunked_prefill=config.chunked_prefill,
        order=config.order_name,
        preempt=config.preempt_name,
        preemption=config.preemption,
        num_host_blocks=config.num_host_blocks,
        command=tuple(sys.argv[1:]),
    )


def end_record(output: "RequestOutput") -> EndRecord:
    samples = output.outputs
    reasons = tuple(sample.finish_reason for sample in samples if sample.finish_reason is not None)
    return EndRecord(output.request_id, reasons, tuple(sample.metrics for sample in samples))


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C only makes the yielded function answer True; a second one interrupts at once."""
    pressed = False

    def remember(signum, frame) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def exit_status(*results: RunResult) -> int:
    return INTERRUPTED if any(result.interrupted and not result.left for result in results) else 0


def arriving(llm: "LLM", prompt: "Prompt", params: "SamplingParams", step: int) -> "Request":
    """Make a request that comes when this many steps have been made, or as soon as nothing else is left to do."""
    from forge.workload.requests import Request

    text, token_ids = (prompt, llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, prompt)
    return Request(tuple(token_ids), params.max_tokens, step, sampling=params, prompt=text)


def drive_arrivals(
    llm: "LLM",
    arrivals: "Sequence[Request]",
    on_step: "Callable[[StepRecord], None]" = lambda record: None,
    keep_logits: bool = False,
) -> RunResult:
    """Run all requests to their ends, or to Ctrl-C, handing on every step as it happens.

    `arrivals` are in the order of their steps. `keep_logits` keeps those of every token, for comparing. Raises
    `UsageError` for a request that can never run.
    """
    from forge.workload.requests import Workload, WorkloadRun

    run, logits = WorkloadRun(llm.engine, Workload(tuple(arrivals), "steps")), dict[int, "list[np.ndarray]"]()
    if keep_logits:
        llm.engine.on_logits.append(lambda seq_id, row: logits.setdefault(seq_id, []).append(row))
    try:
        driven = advance(llm, run, on_step)
    finally:
        llm.engine.on_logits.clear()
        run.abort()
    if run.refused:
        raise UsageError(run.refused[0][1])
    kept = tuple(tuple(logits[seq_id]) for seq_id in sorted(logits))
    return replace(driven, logits=kept)


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
