"""`python -m forge.exercises.child TASK NUMBER FILE RESULT TRACES [OPTIONS]`

Run a reader's file in this process, within limits, and write the result to RESULT as JSON. TASK: `check`, `run` or
`cost`. TRACES: where to write at which line the process was, should it have to be ended. OPTIONS: of `run`, as JSON.
"""

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from forge.errors import ForgeError
from forge.exercises.catalog import Entry, find_entry
from forge.exercises.exercise import BROKEN, Exercise, Mistake, Trial
from forge.exercises.loading import Endless, is_missing, limit_process, line_in, load, time_limit, unwritten
from forge.exercises.running import compare, facts, measure
from forge.exercises.screens import comparison_screen
from forge.exercises.session import Result, State
from forge.views.screen import draw

_IMPORT_SECONDS = 10


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


def run_here(entry: Entry, path: Path, options: Mapping[str, Any], limit: Callable[[], None]) -> dict[str, Any]:
    """Run the engine on a file in this process, and draw the screen. limit: called before the file is loaded."""
    try:
        comparison = compare(entry, path, options["model"], limit)
    except ForgeError as error:
        return {"error": str(error)}
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
    draw(console, comparison_screen(entry, comparison))
    return {"facts": facts(comparison), "screen": written.getvalue()}


def main(args: Sequence[str]) -> None:
    task, number, path, written, traces, *options = args
    entry, file = find_entry(number), Path(path)
    with open(traces, "w", encoding="utf-8") as trace:
        status = 0
        try:
            result = _performed(task, entry, file, options, lambda: limit_process(trace))
            Path(written).write_text(json.dumps(result), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads that the reader's code has left behind are not waited for


def _performed(
    task: str, entry: Entry, file: Path, options: Sequence[str], limit: Callable[[], None]
) -> Mapping[str, Any]:
    if task == "run":
        return run_here(entry, file, json.loads(options[0]), limit)
    entry.exercise()
    limit()
    if task == "cost":
        return {"costs": [asdict(measured) for measured in measure(entry, file)]}
    return asdict(check_here(entry, file))


if __name__ == "__main__":
    main(sys.argv[1:])
