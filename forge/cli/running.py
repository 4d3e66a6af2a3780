"""Loading a model and driving a run, as every command does it: with a bar for a large model, and a Ctrl-C that is heard
between two steps, so that what was generated is kept.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge.cli.options import model_label

if TYPE_CHECKING:
    from forge.engine.llm import LLM, Run
    from forge.engine.sampling_params import SamplingParams
    from forge.trace.records import StepRecord
    from forge.views.summary import RunLabel, RunResult

Found = Any
"""What a command may return: a `Report`, which the command line then shows; an exit status; or nothing."""
INTERRUPTED = 130
"""The exit status of a run that Ctrl-C ended."""


def load_model(model: str, **options: Any) -> "LLM":
    """The model, loaded and ready. What takes long shows on standard error."""
    from forge.engine.llm import LLM
    from forge.views.loading import LoadingBar
    from forge.views.terminal import open_error_console

    with LoadingBar(open_error_console(), model_label(model)) as loading_bar:
        llm = LLM(model, on_load_progress=loading_bar, on_compile_progress=loading_bar.compiling, **options)
    llm.engine.report_probabilities = True
    return llm


def run_label(llm: "LLM") -> "RunLabel":
    from forge.views.summary import RunLabel

    return RunLabel(llm.model_name, llm.kv, llm.device, llm.device_description)


def warm_up(llm: "LLM", prompt: str) -> None:
    """A few tokens that nobody times: a process's first forward pays for memory that has never been touched. With
    guesses there are some more, because the first of them are held back until a plain forward's time is known."""
    from forge.engine.sampling_params import SamplingParams

    max_tokens = 24 if llm.engine.speculation.proposers else 2
    llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def drive(llm: "LLM", run: "Run", params: "SamplingParams", on_step: "Callable[[StepRecord], None]") -> "RunResult":
    """Advance `run` to its end, or to Ctrl-C, handing on every step as it happens."""
    from forge.views.summary import RunResult

    records = []
    interrupted = False
    with interruption() as requested:
        for record in run:
            records.append(record)
            on_step(record)
            if requested():
                interrupted = True
                run.abort()
                break
    return RunResult(run_label(llm), tuple(records), run.outputs[0], not params.greedy, interrupted)


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


def exit_status(*results: "RunResult") -> int:
    return INTERRUPTED if any(result.interrupted for result in results) else 0
