"""`forge build run`: the real engine and the bundled model on the reader's code, beside the engine's own part.

The reader's code runs in a process of its own (`child`), which draws the screen too.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.exercises import session
from forge.exercises.catalog import Entry
from forge.exercises.comparison import Comparison, Ran
from forge.exercises.exercise import BROKEN, Exercise, Trial
from forge.exercises.loading import line_in, load, time_limit
from forge.exercises.screens import print_comparison
from forge.llm import LLM
from forge.trace.records import StepRecord

_CALL_SECONDS = 4.0
"""A call of the reader's code in a run. The model's forward passes are none."""


class BrokenRun(ForgeError):
    """The engine stopped on the reader's code."""


@dataclass(frozen=True)
class Shown:
    """The facts and the screen of a run in a process of its own."""

    facts: Mapping[str, Any]
    screen: str
    """Drawn, with the escape codes of the terminal that it was drawn for."""


def run(
    entry: Entry, path: Path, console: Console, model: str | None = None, deadline: float = session.DEADLINE
) -> Shown:
    """Run the engine on the reader's code. Raises `BrokenRun`, with the reader's line, if it cannot."""
    options = {
        "model": model,
        "width": console.width,
        "is_terminal": console.is_terminal,
        "colors": console.color_system,
    }
    ended = session.in_child("run", entry, path, json.dumps(options), deadline)
    if ended.result is None:
        _, words = ended.failure
        raise BrokenRun(_stopped(entry, words, ended.line))
    if "error" in ended.result:
        raise BrokenRun(ended.result["error"])
    return Shown(ended.result["facts"], ended.result["screen"])


def run_here(entry: Entry, path: Path, options: Mapping[str, Any], limit: Callable[[], None]) -> dict[str, Any]:
    """Do the same in this process. limit: called before the reader's file is loaded."""
    try:
        comparison = compare(entry, path, options["model"], limit)
    except (Exception, SystemExit) as error:
        if isinstance(error, ForgeError):
            return {"error": str(error)}
        raise
    written = io.StringIO()
    console = Console(
        file=written,
        width=options["width"],
        force_terminal=options["is_terminal"],
        color_system=options["colors"],
        markup=False,
        emoji=False,
        highlight=False,
    )
    print_comparison(console, entry, comparison)
    return {"facts": facts(comparison), "screen": written.getvalue()}


def compare(entry: Entry, path: Path, model: str | None = None, limit: Callable[[], None] = lambda: None) -> Comparison:
    """Run the engine with its own part and with the reader's. Raises `BrokenRun`, with the reader's line, if the
    reader's code raises."""
    exercise = entry.exercise()
    reference = _run(exercise, exercise.reference, model)
    limit()
    try:
        with time_limit(_CALL_SECONDS):
            piece = load(path)
        with counted(piece, exercise.functions) as calls, exercise.engine(piece) as options:
            yours = _run(exercise, options, model)
    except BROKEN as error:
        raise _broken(entry, path, error) from None
    return Comparison(exercise, yours, reference, calls)


@contextmanager
def counted(piece: ModuleType, functions: Sequence[str]) -> Iterator[dict[str, int]]:
    """Count the calls of the reader's functions, each under a time limit."""
    calls = dict.fromkeys(functions, 0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            with time_limit(_CALL_SECONDS):
                return function(*arguments, **named)

        return call

    places = []
    for name in functions:
        holder_name, _, method = name.partition(".")
        holder = getattr(piece, holder_name) if method else piece
        places.append((holder, method or holder_name, getattr(holder, method or holder_name)))
        setattr(holder, method or holder_name, counting(name, places[-1][2]))
    try:
        yield calls
    finally:
        for holder, name, function in places:
            setattr(holder, name, function)


def _broken(entry: Entry, path: Path, error: BaseException) -> BaseException:
    where = line_in(str(path.resolve()), error)
    if where is None and isinstance(error, ForgeError):
        return error
    piece = ModuleType("piece")
    piece.__file__ = str(path.resolve())
    return BrokenRun(_stopped(entry, Trial(piece).mistake_of(error).finding, where))


def _stopped(entry: Entry, words: str, line: str | None) -> str:
    at = f" ({line})" if line else ""
    return f"the engine stopped on your code: {words}{at}. forge build check {entry.number} says more"


def _run(exercise: Exercise, options: Mapping[str, Any], model: str | None) -> Ran:
    drive = options.get("drive", _drive)
    llm = LLM(model or "tales", **{name: options[name] for name in options if name != "drive"})
    llm.generate("warm up", SamplingParams(max_tokens=2))
    llm.engine.report_blocks = exercise.view == "blocks"
    outputs: list[RequestOutput] = []
    records: list[StepRecord] = []
    for params in exercise.params:
        more_outputs, more_records = drive(llm, exercise.prompts, SamplingParams(**params))
        outputs += more_outputs
        records += more_records
    samples = [sample for output in outputs for sample in output.outputs]
    return Ran(
        tuple(sample.text for sample in samples),
        tuple(tuple(sample.token_ids) for sample in samples),
        tuple(records),
        lambda token_id: llm.tokenizer.decode([token_id]),
    )


def _drive(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> tuple[list[RequestOutput], list[StepRecord]]:
    started = llm.start(list(prompts), params)
    records = list(started)
    return started.outputs, records


def facts(comparison: Comparison) -> dict[str, Any]:
    return {
        "identical": comparison.identical,
        "texts": list(comparison.yours.texts),
        "tokens_per_second": comparison.yours.tokens_per_second,
        "tokens_per_second_own": comparison.reference.tokens_per_second,
        "steps": len(comparison.yours.records),
        "steps_own": len(comparison.reference.records),
        "calls": dict(comparison.calls),
    }
