"""Load a model and drive a run, as every command does: with a bar for a large model, and a Ctrl-C that is heard between
two steps, so that what was generated is kept. Here too a run is recorded (`--trace`) and stepped through (`--step`).
"""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import INTERRUPTED, ForgeError
from forge.trace.records import EndRecord
from forge.views.progress import LoadingBar
from forge.views.summary import RunLabel, RunResult
from forge.views.terminal import open_console, open_error_console

if TYPE_CHECKING:
    from forge.engine.outputs import RequestOutput
    from forge.llm import LLM
    from forge.trace.pauses import Pauses
    from forge.trace.recorder import TraceHeader
    from forge.trace.records import StepRecord
    from forge.views.history import History

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
    """Empty the index of a prefix cache; another cache has none. No request may be running."""
    from forge.cache.prefix import PrefixKvCache

    if isinstance(llm.engine.cache, PrefixKvCache):
        llm.engine.cache.clear()


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
    on_step: "Callable[[StepRecord], None]" = lambda record: None,
    subscriber: StepSubscriber = NO_SUBSCRIBER,
    sampled: bool = False,
) -> RunResult:
    """Advance a run to its end, or to Ctrl-C, handing on every step as it happens. sampled: whether tokens are drawn.
    Raises `ForgeError` if a sample ended as an `error`."""
    subscriber.begin(llm)
    if subscriber.steps:
        return _step_through(llm, run, on_step, subscriber, sampled)
    records: list[StepRecord] = []
    with interruption() as requested:
        for record in run:
            records.append(record)
            subscriber.record(record)
            on_step(record)
            if requested():
                run.abort()
                break
    result = RunResult(run_label(llm), tuple(records), tuple(run.outputs), sampled, interrupted=requested())
    return _ended(result, subscriber)


def _step_through(
    llm: "LLM", run: AnyRun, on_step: "Callable[[StepRecord], None]", subscriber: StepSubscriber, sampled: bool
) -> RunResult:
    """Advance a run at the reader's keys. `on_step` sees the steps when that is over: only one of the two can have the
    screen. Times are without those that the reader took."""
    from forge.trace.pauses import Pauses
    from forge.views.stepper import Stepper

    history, pauses, left = new_history(llm), Pauses(), False
    with interruption() as requested, Stepper(open_console(), history) as stepper:
        for record in map(pauses.step, run):
            subscriber.record(record)
            history.feed(record)
            with pauses.pause():
                goes_on = stepper.asks_for_another(requested)
            if not goes_on:
                run.abort()
                left = not requested()
                break
        else:
            stepper.ended(requested)
    for record in history.records:
        on_step(record)
    outputs = tuple(_without_pauses(output, pauses) for output in run.outputs)
    result = RunResult(run_label(llm), tuple(history.records), outputs, sampled, left or requested(), left)
    return _ended(result, subscriber)


def _ended(result: RunResult, subscriber: StepSubscriber) -> RunResult:
    """Record how each request has ended. Raises `ForgeError` if one of them ended as an `error`."""
    for output in result.outputs:
        subscriber.record(end_record(output))
    for sample in [sample for output in result.outputs for sample in output.outputs]:
        if sample.finish_reason == "error":
            raise ForgeError("; ".join(sample.errors))
    return result


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
