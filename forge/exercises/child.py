"""`python -m forge.exercises.child NUMBER FILE RESULT`

Check a reader's file in this process, and write the result to RESULT as
JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from forge.exercises.catalog import Entry, find_entry
from forge.exercises.exercise import Endless, Exercise, Mistake, Trial, time_limit
from forge.exercises.loading import line_in, load
from forge.exercises.result import Result


def check_here(entry: Entry, path: Path) -> Result:
    """Check a file in this process."""
    exercise = entry.exercise()
    try:
        piece = _loaded(exercise, path)
        try:
            exercise.check(piece)
        except (Exception, Endless) as error:
            raise (error if isinstance(error, Mistake) else _unforeseen(piece, error)) from None
    except Mistake as mistake:
        return _failed(entry, exercise, mistake)
    return Result(entry.number, entry.name, True)


def _loaded(exercise: Exercise, path: Path) -> ModuleType:
    where = str(path.resolve())
    try:
        with time_limit(10):
            piece = load(where)
    except Endless as error:
        raise Mistake("endless", f"importing the file: {error}", line=line_in(where, error)) from None
    except (Exception, SystemExit) as error:
        raise Mistake("imports", f"{type(error).__name__}: {error}", line=line_in(where, error)) from None
    for name in exercise.names:
        if not hasattr(piece, name):
            raise Mistake("missing", f"there is no {name} in the file")
    return piece


def _unforeseen(piece: ModuleType, error: BaseException) -> BaseException:
    """An exception that came through the reader's code is a mistake of it; any other is one of the check."""
    trial = Trial(piece)
    if isinstance(error, AssertionError) and line_in(trial.path, error) is None:
        return Mistake("conforms", str(error)) if str(error) else error
    return trial.mistake_of(error) if line_in(trial.path, error) or isinstance(error, Endless) else error


def _failed(entry: Entry, exercise: Exercise, mistake: Mistake) -> Result:
    rule = exercise.rule(mistake.rule)
    return Result(
        entry.number,
        entry.name,
        False,
        mistake.rule,
        rule.sentence,
        mistake.found,
        mistake.calls,
        mistake.before,
        mistake.after,
        mistake.line,
        rule.question,
    )


def main(args: Sequence[str]) -> None:
    number, path, written = args
    result = check_here(find_entry(number), Path(path))
    Path(written).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
