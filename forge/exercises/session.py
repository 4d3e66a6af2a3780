"""The exercises of one reader: the files in a folder, the checks of them, and how far the reader is.

Progress lies beside the book's, as one small JSON file: which exercises have passed and how many hints were read.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.book.progress import state_file
from forge.errors import ForgeError, UsageError
from forge.exercises.catalog import Entry, available
from forge.exercises.result import Result

DEADLINE = 120.0
"""Seconds that a whole check may take. A single call is ended much earlier (`exercise.time_limit`)."""
_PRINTED_LINES = 12


@dataclass
class Builds:
    """How far a reader is."""

    passed: set[int] = field(default_factory=set)
    hints: dict[int, int] = field(default_factory=dict)
    """How many were read, by exercise."""
    last: int | None = None
    """The exercise that was started or checked last."""


def load_builds() -> Builds:
    """What cannot be read counts as empty."""
    try:
        found: dict[str, Any] = json.loads(_file().read_text(encoding="utf-8"))
        hints = {int(number): int(read) for number, read in found["hints"].items()}
        return Builds(set(map(int, found["passed"])), hints, found["last"] and int(found["last"]))
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return Builds()


def save_builds(builds: Builds) -> None:
    """What cannot be written is not written."""
    state = {"passed": sorted(builds.passed), "hints": builds.hints, "last": builds.last}
    with suppress(OSError, RuntimeError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(state), encoding="utf-8")
        written.replace(path)


def _file() -> Path:
    return state_file().with_name("exercises.json")


def next_entry(builds: Builds) -> Entry | None:
    """The exercise to go on with: the last one, until it has passed; then the first that has not."""
    unfinished = [entry for entry in available() if entry.number not in builds.passed]
    return next((entry for entry in unfinished if entry.number == builds.last), next(iter(unfinished), None))


def start(entry: Entry, folder: Path) -> Path:
    """Write the template. Raises `UsageError` where there is a file already."""
    path = folder / entry.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(entry.template.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UsageError(f"{path} is there already: forge build check {entry.number}, or move it away") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    builds = load_builds()
    builds.last = entry.number
    save_builds(builds)
    return path


def path_of(entry: Entry, folder: Path) -> Path:
    """Raises `UsageError` if the exercise was not started."""
    path = folder / entry.file_name
    if not path.is_file():
        raise UsageError(f"{path}: no such file. forge build start {entry.number} writes it")
    return path


def check(entry: Entry, path: Path, deadline: float = DEADLINE) -> Result:
    """Check a file in a process of its own, and keep what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "result.json")
        command = [sys.executable, "-m", "forge.exercises.child", str(entry.number), str(path), str(written)]
        ran = _run(command, deadline)
        try:
            found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return _ended(entry, ran, deadline)
    result = Result(**found | {"calls": tuple(found["calls"]), "printed": _last_lines(ran.stdout)})
    builds = load_builds()
    builds.last = entry.number
    (builds.passed.add if result.passed else builds.passed.discard)(entry.number)
    save_builds(builds)
    return result


@dataclass(frozen=True)
class _Ran:
    status: int | None
    """None: it ran past the deadline."""
    stdout: str
    stderr: str


def _run(command: list[str], deadline: float) -> _Ran:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, err = process.communicate(timeout=deadline)
        return _Ran(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return _Ran(None, out, err)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _ended(entry: Entry, ran: _Ran, deadline: float) -> Result:
    """The process ended without a result."""
    from forge.exercises.exercise import UNIVERSAL

    if ran.status is None:
        rule, found = "endless", f"the check had not ended after {deadline:g} seconds, and was stopped"
    elif ran.status < 0 or "os._exit" in ran.stderr or not ran.stderr:
        rule, found = "raises", f"the process that ran the check ended with status {ran.status}"
    else:
        raise ForgeError(f"the check of exercise {entry.number} failed itself: {ran.stderr.strip().splitlines()[-1]}")
    sentence, question = UNIVERSAL[rule].sentence, UNIVERSAL[rule].question
    return Result(entry.number, entry.name, False, rule, sentence, found, question=question)


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-_PRINTED_LINES:])
