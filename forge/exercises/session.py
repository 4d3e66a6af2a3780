"""The exercises of one reader: the files in a folder, what is run of them, and how far the reader is in that folder.

Progress lies beside the book's, as one small JSON file: of each folder which exercises have passed, how many hints were
read, and from which template each file was begun.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from forge.book.progress import read_state, write_state
from forge.errors import ForgeError, UsageError
from forge.exercises.catalog import ENTRIES, Entry
from forge.views.screen import Report

if TYPE_CHECKING:
    from forge.exercises.exercise import Exercise
    from forge.trace.records import StepRecord

State = Literal["right", "wrong", "not written", "not checked"]


@dataclass(frozen=True)
class Result:
    """The outcome of one check."""

    number: int
    name: str
    passed: bool
    rule: str | None = None
    """The name of the rule that is broken."""
    sentence: str = ""
    """The rule."""
    found: str = ""
    calls: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    line: str | None = None
    """The reader's line, where there is one."""
    question: str = ""
    functions: Mapping[str, State] = field(default_factory=dict)
    """The state of each function of the exercise."""
    printed: str = ""
    """The last lines that the reader's code printed."""
    changed: bool = False
    """Whether the exercise has changed since the reader's file was begun."""

    @classmethod
    def failed(cls, entry: Entry, rule: str, found: str, **more: Any) -> "Result":
        """Describe a broken rule in the words of the exercise. more: further fields."""
        words = entry.exercise().rule(rule)
        return cls(entry.number, entry.name, False, rule, words.sentence, found, question=words.question, **more)


@dataclass(frozen=True)
class Ran:
    """One run of the engine."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    records: "tuple[StepRecord, ...]"
    token_text: Callable[[int], str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def num_steps(self) -> int:
        return len(self.records)

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(record.ended - record.started for record in self.records)
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def fullest(self) -> "StepRecord":
        """The step with most blocks in use."""
        return max(self.records, key=lambda record: (record.cache.used_blocks, record.cache.tokens_held))


@dataclass(frozen=True)
class Comparison:
    """The same requests with the reader's part and with the engine's own."""

    exercise: "Exercise"
    yours: Ran
    reference: Ran
    calls: Mapping[str, int]
    """How often the run called each of the reader's functions."""

    @property
    def identical(self) -> bool:
        return self.yours.token_ids == self.reference.token_ids


@dataclass(frozen=True)
class Measured:
    """One size: the microseconds of each round, for the reader's part and the engine's own."""

    size: str
    yours: Sequence[float]
    reference: Sequence[float]

    @property
    def ratio(self) -> float:
        """Median time of the reader's part over that of the engine's own."""
        return median(self.yours) / median(self.reference)

    @property
    def is_noise(self) -> bool:
        """True if the middle halves of the two sides' rounds overlap, so that their medians cannot be compared."""
        yours, reference = sorted(self.yours), sorted(self.reference)
        quarter = len(yours) // 4
        return yours[quarter] <= reference[-1 - quarter] and reference[quarter] <= yours[-1 - quarter]


DEADLINE = 90.0
"""Seconds that a whole check or run may take. A single call is ended much earlier (`loading.time_limit`)."""
DEFAULT_FOLDER = "exercises"
_STATE = "exercises.json"
_PRINTED_LINES = 12
_LAST_WORDS_SECONDS = 3
_MEMORY = "Cannot allocate memory|MemoryError|bad_alloc|out of memory"


@dataclass
class Builds:
    """How far a reader is in one folder."""

    passed: set[int] = field(default_factory=set)
    hints: dict[int, int] = field(default_factory=dict)
    """The number of hints that were read, by exercise."""
    templates: dict[int, str] = field(default_factory=dict)
    """The fingerprint of the template that each file was begun from."""
    last: int | None = None
    """The exercise that was started or checked last."""


def load_builds(folder: Path) -> Builds:
    """Read the progress of a folder. A file that cannot be read counts as empty."""
    try:
        state = read_state(_STATE)["folders"][str(folder.resolve())]
        hints = {int(number): int(read) for number, read in state["hints"].items()}
        templates = {int(number): str(text) for number, text in state["templates"].items()}
        return Builds(set(map(int, state["passed"])), hints, templates, state["last"] and int(state["last"]))
    except (ValueError, TypeError, AttributeError, LookupError):
        return Builds()


def save_builds(folder: Path, builds: Builds) -> None:
    """Write the progress of a folder. An error of the file system is ignored."""
    state = read_state(_STATE)
    folders = state.get("folders")
    state["folders"] = folders if isinstance(folders, dict) else {}
    state["folders"][str(folder.resolve())] = asdict(builds) | {"passed": sorted(builds.passed)}
    state["folder"] = str(folder.resolve())
    write_state(_STATE, state)


def find_folder(chosen: Path | None = None) -> Path:
    """Return the reader's folder: the chosen one; else the working folder, or the nearest `exercises` in it or above
    it, that contains such a file; else the folder used last; else `exercises` in the working folder."""
    if chosen is not None:
        return chosen
    here = Path.cwd()
    for folder in (here, *(above / DEFAULT_FOLDER for above in (here, *here.parents))):
        if any((folder / entry.file_name).is_file() for entry in ENTRIES):
            return Path(os.path.relpath(folder)) if folder.is_relative_to(here) else folder
    last = read_state(_STATE).get("folder")
    return Path(last) if isinstance(last, str) and Path(last).is_dir() else Path(DEFAULT_FOLDER)


def next_entry(builds: Builds) -> Entry | None:
    """Return the exercise to go on with: the last one until it has passed, then the first that has not."""
    unfinished = [entry for entry in ENTRIES if entry.number not in builds.passed]
    return next((entry for entry in unfinished if entry.number == builds.last), next(iter(unfinished), None))


def start(entry: Entry, folder: Path) -> Path:
    """Write the template. Raises `UsageError` if the file exists."""
    path = folder / entry.file_name
    text = entry.template.read_text(encoding="utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} is there already: forge build check {entry.number}, or forge build reset {entry.number}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    builds = load_builds(folder)
    builds.last = entry.number
    builds.templates[entry.number] = _fingerprint(text)
    save_builds(folder, builds)
    return path


def reset(entry: Entry, folder: Path) -> tuple[Path, Path]:
    """Begin an exercise again: the file is kept under another name, its ✓ and its hints are forgotten, the template is
    written. Returns the new file and the old one's new name. Raises `UsageError` if the exercise was not started."""
    path = path_of(entry, folder)
    numbers = (number for number in range(1, 10_000))
    kept = next(old for number in numbers if not (old := path.with_suffix(f".{number}.py")).exists())
    path.rename(kept)
    builds = load_builds(folder)
    builds.passed.discard(entry.number)
    builds.hints.pop(entry.number, None)
    save_builds(folder, builds)
    return start(entry, folder), kept


def has_changed(entry: Entry, builds: Builds) -> bool:
    """True if the template has changed since the reader's file was begun."""
    begun = builds.templates.get(entry.number)
    return begun is not None and begun != _fingerprint(entry.template.read_text(encoding="utf-8"))


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path_of(entry: Entry, folder: Path) -> Path:
    """Return the reader's file. Raises `UsageError` if the exercise was not started."""
    path = folder / entry.file_name
    if not path.is_file():
        raise UsageError(f"{path}: no such file. forge build start {entry.number} writes it")
    return path


@dataclass(frozen=True)
class Ended:
    """A child process that has ended."""

    status: int | None
    """Its exit status; None if it ran past the deadline."""
    result: Mapping[str, Any] | None
    """The result that it wrote; None if it ended before that."""
    printed: str
    stderr: str
    line: str | None
    """The reader's line that was running when the process had to be ended."""

    @property
    def failure(self) -> tuple[str, str]:
        """Return the broken rule and what happened, for a process that left no result. Raises `ForgeError` for a
        mistake that is not the reader's."""
        if self.status is None:
            return "endless", "it had not ended at the deadline, and was stopped"
        if "Timeout (" in self.stderr:
            return "endless", "one operation did not end, and the process was stopped"
        if re.search(_MEMORY, self.stderr):
            return "memory", "no memory was left"
        if self.status < 0 or not self.stderr.strip():
            return "exits", f"the process ended with status {self.status}"
        raise ForgeError(f"the exercise failed itself: {self.stderr.strip().splitlines()[-1]}")


def in_child(task: str, entry: Entry, path: Path, **options: Any) -> Ended:
    """Run a task of `child` in a process of its own. When it ends, every process that it started is killed."""
    with tempfile.TemporaryDirectory() as folder:
        result, traces, out, err = (Path(folder, name) for name in ("result.json", "traces", "out", "err"))
        command = [sys.executable, "-m", "forge.exercises.child", task, str(entry.number), str(path)]
        command += [str(result), str(traces), json.dumps(options)]
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
            )
            try:
                status: int | None = process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                status = None
                with suppress(OSError, subprocess.TimeoutExpired):
                    process.send_signal(signal.SIGABRT)  # on which it writes where it is
                    process.wait(_LAST_WORDS_SECONDS)
            finally:
                with suppress(OSError):
                    if hasattr(os, "killpg"):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.wait()
        trace, printed = _text(traces), "\n".join(_text(out).splitlines()[-_PRINTED_LINES:])
        try:
            written = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            written = None
        return Ended(status, written, printed, _text(err) + trace, _line_in_trace(trace, path))


def run_engine(folder: Path, arguments: Sequence[str]) -> int:
    """Run a command on the reader's own engine, in a process of its own on this terminal. Returns its exit status."""
    command = [sys.executable, "-m", "forge.cli.build", str(folder), *arguments]
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the process has it too, and ends as the command does
            continue
        except BaseException:
            process.kill()
            process.wait()
            raise


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""


def _line_in_trace(trace: str, path: Path) -> str | None:
    """Return the reader's line that is innermost in the dumped traceback."""
    from forge.exercises.loading import line_at

    where = re.search(rf'File "{re.escape(str(path.resolve()))}", line (\d+)', trace)
    return line_at(str(path.resolve()), int(where.group(1))) if where else None


def check(entry: Entry, path: Path) -> Result:
    """Check a file in a process of its own, and note down the result."""
    ended = in_child("check", entry, path)
    if ended.result is not None:
        result = Result(**dict(ended.result) | {"calls": tuple(ended.result["calls"]), "printed": ended.printed})
    else:
        result = Result.failed(entry, *ended.failure, line=ended.line, printed=ended.printed)
    builds = load_builds(path.parent)
    builds.last = entry.number
    (builds.passed.add if result.passed else builds.passed.discard)(entry.number)
    save_builds(path.parent, builds)
    return replace(result, changed=has_changed(entry, builds))


def passed_entries(folder: Path) -> tuple[Entry, ...]:
    """List the exercises of this folder that have passed and whose files still exist."""
    passed = load_builds(folder).passed
    return tuple(entry for entry in ENTRIES if entry.number in passed and (folder / entry.file_name).is_file())


class BrokenRun(ForgeError):
    """The engine stopped on the reader's code."""

    def __init__(self, entry: Entry, words: str, line: str | None):
        at = f" ({line})" if line else ""
        super().__init__(f"the engine stopped on your code: {words}{at}. forge build check {entry.number} says more")


def run(entry: Entry, path: Path, console: Console, model: str) -> Report:
    """Run the engine on the reader's code. The screen is drawn there, with the escape codes of this console's terminal.
    Raises `ForgeError` if it cannot; `BrokenRun` names the reader's line."""
    terminal = {"width": console.width, "force_terminal": console.is_terminal, "color_system": console.color_system}
    ended = in_child("run", entry, path, model=model, **terminal)
    if ended.result is None:
        raise BrokenRun(entry, ended.failure[1], ended.line)
    if "error" in ended.result:
        raise ForgeError(ended.result["error"])
    found, screen = ended.result["facts"], Text.from_ansi(ended.result["screen"])
    return Report(found, lambda console: console.print(screen, end="", soft_wrap=True), 0 if found["identical"] else 1)


def compare_costs(entry: Entry, path: Path) -> list[Measured] | None:
    """Time the reader's part beside the engine's own. None if the reader's code did not end the benchmark."""
    ended = in_child("cost", entry, path)
    return None if ended.result is None else [Measured(**cost) for cost in ended.result["costs"]]
