"""`python -m forge.exercises.child TASK NUMBER FILE RESULT TRACES OPTIONS`

Run a reader's file in this process, within limits, and write the result to RESULT as JSON. TASK: `check` calls the
reader's code by itself; `run` runs the real engine and the bundled model on it and on the engine's own, for the same
requests; `cost` times both at three sizes, in turns. TRACES: where to write at which line the process was, should it
have to be ended. OPTIONS: of `run`, as JSON.
"""

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from timeit import timeit
from types import ModuleType
from typing import Any
from unittest.mock import patch

from rich.console import Console

from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.exercises import session
from forge.exercises.catalog import Entry, find_entry
from forge.exercises.exercise import BROKEN, Exercise, Mistake, Trial
from forge.exercises.loading import Endless, is_missing, limit_process, line_in, load, time_limit, unwritten
from forge.exercises.screens import comparison_screen
from forge.exercises.session import Comparison, Measured, Ran, Result, State
from forge.llm import LLM
from forge.views.screen import draw

_IMPORT_SECONDS = 10
_CALL_SECONDS = 4.0
"""The time limit of one call of the reader's code in a run. A forward pass of the model does not count."""


def check_here(entry: Entry, path: Path) -> Result:
    """Check a file in this process."""
    exercise = entry.exercise()
    states: dict[str, State] = dict.fromkeys(exercise.functions, "not checked")
    try:
        piece = loaded(exercise, path)
    except Mistake as mistake:
        return _failed(entry, mistake, states)
    missing = set(unwritten(path, exercise.functions))
    states |= dict.fromkeys(missing, "not written")
    first: Mistake | None = None
    for part in exercise.parts:
        if not missing.isdisjoint(part.functions) or (part.alone and not missing):
            continue
        try:
            part.check(piece)
        except BROKEN as error:
            first = first or (error if isinstance(error, Mistake) else _unforeseen(piece, error))
            states[part.functions[-1]] = "wrong"
            if not missing:
                break
        else:
            states |= {name: "right" for name in part.functions if states[name] == "not checked"}
    if first is None and missing:
        names = ", ".join(name for name in exercise.functions if name in missing)
        first = Mistake("unwritten", f"not written yet: {names}")
    if first is not None:
        return _failed(entry, first, states)
    return Result(entry.number, entry.name, True, functions=states)


def loaded(exercise: Exercise, path: Path) -> ModuleType:
    """Import the reader's file. Raises `Mistake` if the import fails."""
    where = str(path.resolve())
    try:
        with time_limit(_IMPORT_SECONDS):
            piece = load(where)
    except Endless as error:
        raise Mistake("endless", f"importing the file: {error}", line=line_in(where, error)) from None
    except BROKEN as error:
        raise Mistake("imports", f"{type(error).__name__}: {error}", line=line_in(where, error)) from None
    for name in exercise.functions:
        if is_missing(piece, name):
            raise Mistake("missing", f"there is no {name} in the file")
    return piece


def _unforeseen(piece: ModuleType, error: BaseException) -> Mistake:
    """Translate an exception that the check itself raised because of what the reader's code returned."""
    trial = Trial(piece)
    if line_in(trial.path, error) or isinstance(error, Endless | SystemExit | MemoryError):
        return trial.mistake_of(error)
    if isinstance(error, AssertionError) and str(error):
        return Mistake("conforms", str(error))
    return Mistake("unusable", f"{type(error).__name__}: {error}")


def _failed(entry: Entry, mistake: Mistake, states: dict[str, State]) -> Result:
    told = {name: getattr(mistake, name) for name in ("calls", "before", "after", "line")}
    return Result.failed(entry, mistake.rule, mistake.finding, functions=states, **told)


def compare(entry: Entry, path: Path, model: str | None = None, limit: Callable[[], None] = lambda: None) -> Comparison:
    """Run the engine with its own part and with the reader's. Raises `BrokenRun`, with the reader's line, if the
    reader's code raises."""
    exercise = entry.exercise()
    reference = _run(exercise, model)
    limit()
    try:
        with time_limit(_CALL_SECONDS):
            beside = [passed for passed in session.passed_entries(path.parent) if passed.name in exercise.beside]
            parts = {part.name: load(path.parent / part.file_name) for part in beside} | {entry.name: load(path)}
        with assembled(parts) as calls:
            yours = _run(exercise, model, parts[entry.name])
    except BROKEN as error:
        raise _broken(entry, path, error) from None
    return Comparison(exercise, yours, reference, calls[entry.name])


@contextmanager
def assembled(parts: Mapping[str, ModuleType]) -> Iterator[dict[str, dict[str, int]]]:
    """Put the reader's parts, by exercise, into every new engine while this context is open. Yields how often each
    part's functions were called. What stands inside another part comes before it, as the exercises do."""
    with ExitStack() as stack:
        calls = {}
        for name, piece in parts.items():
            exercise = find_entry(name).exercise()
            calls[name] = stack.enter_context(counted(piece, exercise.functions))
            stack.enter_context(exercise.engine(piece))
        yield calls


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

    with ExitStack() as stack:
        for name in functions:
            holder_name, _, function = name.rpartition(".")
            holder = getattr(piece, holder_name) if holder_name else piece
            stack.enter_context(patch.object(holder, function, counting(name, getattr(holder, function))))
        yield calls


def _broken(entry: Entry, path: Path, error: BaseException) -> BaseException:
    where = line_in(str(path.resolve()), error)
    if where is None and isinstance(error, ForgeError):
        return error
    piece = ModuleType("piece")
    piece.__file__ = str(path.resolve())
    return session.BrokenRun(entry, Trial(piece).mistake_of(error).finding, where)


def _run(exercise: Exercise, model: str | None, piece: ModuleType | None = None) -> Ran:
    """Run the exercise's prompts, on the reader's part if there is one."""
    llm = LLM(model or "tales", **exercise.options)
    llm.generate("warm up", SamplingParams(max_tokens=2))
    llm.engine.scheduler.keep_block_map = exercise.view == "blocks"
    runs = [exercise.drive(llm, exercise.prompts, SamplingParams(**params), piece) for params in exercise.params]
    samples = [sample for outputs, _ in runs for output in outputs for sample in output.outputs]
    texts, token_ids = zip(*((sample.text, tuple(sample.token_ids)) for sample in samples), strict=True)
    steps = tuple(record for _, records in runs for record in records)
    return Ran(texts, token_ids, steps, lambda token_id: llm.tokenizer.decode([token_id]))


def facts(comparison: Comparison) -> dict[str, Any]:
    return {
        "identical": comparison.identical,
        "texts": list(comparison.yours.texts),
        "tokens_per_second": comparison.yours.tokens_per_second,
        "tokens_per_second_own": comparison.reference.tokens_per_second,
        "steps": comparison.yours.num_steps,
        "steps_own": comparison.reference.num_steps,
        "calls": dict(comparison.calls),
    }


def run_here(entry: Entry, path: Path, limit: Callable[[], None], model: str | None, **terminal: Any) -> dict[str, Any]:
    """Run the engine on a file in this process, and draw the screen. limit: called before the file is loaded."""
    try:
        comparison = compare(entry, path, model, limit)
    except ForgeError as error:
        return {"error": str(error)}
    written = io.StringIO()
    draw(
        Console(file=written, markup=False, emoji=False, highlight=False, **terminal),
        comparison_screen(entry, comparison),
    )
    return {"facts": facts(comparison), "screen": written.getvalue()}


_ROUNDS = 9
_ROUND_SECONDS = 0.01
"""Seconds that a round of one side takes at least: short work is repeated."""


def measure(entry: Entry, path: Path) -> list[Measured]:
    """Time all sizes of an exercise's benchmark."""
    measured, costs, piece = [], entry.exercise().costs, load(path)
    for size in costs.sizes:
        sides = [(work, _repeats(work)) for work in (costs.prepare(piece, size), costs.prepare(None, size))]
        rounds = [[_timed(*side) for side in sides] for _ in range(_ROUNDS)]
        yours, reference = zip(*rounds, strict=True)
        measured.append(Measured(costs.words.format(size), yours, reference))
    return measured


def _repeats(work: Callable[[], object]) -> int:
    work()
    return max(1, min(10_000, round(_ROUND_SECONDS * 1e6 / max(1.0, _timed(work, 1)))))


def _timed(work: Callable[[], object], repeats: int) -> float:
    """Return the microseconds of one call, over `repeats` calls."""
    return timeit(work, number=repeats) / repeats * 1e6


def main(args: Sequence[str]) -> None:
    task, number, path, written, traces, options = args
    entry, file = find_entry(number), Path(path)
    with open(traces, "w", encoding="utf-8") as trace:
        status = 0
        try:
            result = _performed(task, entry, file, json.loads(options), lambda: limit_process(trace))
            Path(written).write_text(json.dumps(result), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads that the reader's code has left behind are not waited for


def _performed(
    task: str, entry: Entry, file: Path, options: Mapping[str, Any], limit: Callable[[], None]
) -> Mapping[str, Any]:
    if task == "run":
        return run_here(entry, file, limit, **options)
    entry.exercise()
    limit()
    if task == "cost":
        return {"costs": [asdict(measured) for measured in measure(entry, file)]}
    return asdict(check_here(entry, file))


if __name__ == "__main__":
    main(sys.argv[1:])
