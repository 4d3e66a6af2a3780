"""A run of one prompt that is repeated for its times."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from forge.cli.run_control import StepSubscriber, create_llm, drive, run_label, warm_up
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.views.generation import LiveGeneration
from forge.views.summary import RunResult
from forge.views.terminal import open_console

if TYPE_CHECKING:
    from forge.llm import LLM

REPEATS, REPEAT_SECONDS = 3, 10.0
"""How often a run is repeated for its times, itself included, and for how long: a large model's run is long enough."""


def fastest(first: RunResult, again: Callable[[], RunResult]) -> tuple[RunResult, int]:
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
    params: SamplingParams
    result: RunResult
    runs: int

    @classmethod
    def of(cls, engine_args: EngineArgs, prompt: str, max_tokens: int, subscriber: StepSubscriber) -> Self:
        """Run the prompt, watched the first time; the fastest of each forward's times count."""
        params, llm = SamplingParams(max_tokens=max_tokens, ignore_eos=True), create_llm(engine_args)
        warm_up(llm, prompt)
        with LiveGeneration(open_console(), run_label(llm), prompt) as view:
            first = drive(llm, llm.start([prompt], params), view.step, subscriber)
            return cls(llm, params, *fastest(first, lambda: drive(llm, llm.start([prompt], params))))
