"""What an exercise is, and what a check says of a wrong solution.

A check calls the reader's code through a `Trial`, which writes down each call as a line of Python, ends a
call that does not return, and turns what went wrong into a `Mistake`: the rule, what was found, the calls, the state
before and after the last of them, and a question.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from forge.errors import ForgeError
from forge.exercises.loading import line_in
from forge.testing.caches import Operation, failure, random_operations, shrunk
from forge.trace.records import BlockMap

CALL_SECONDS = 2.0
"""A call of the reader's code that takes longer does not end."""
_TRIES = 400
"""How many shorter lists a failing list is compared with."""
_LENGTHS = (4, 8, 16, 40, 120)
"""Of random lists of operations: short ones first, so that what fails is short already."""


@dataclass(frozen=True)
class Rule:
    """One promise of an exercise."""

    sentence: str
    question: str
    """What to ask a reader whose code breaks it."""


UNIVERSAL = {
    "unwritten": Rule("Every function of the exercise is written.", "What does its docstring ask for?"),
    "endless": Rule("Every call returns.", "Which condition ends this loop, and what makes it true?"),
    "raises": Rule("No call raises an exception but those that its docstring names.", "What was this line given?"),
    "imports": Rule("The file can be imported.", "Does `python` on this file alone say the same?"),
    "missing": Rule("The names of the template stay as they are.", "Was a class or a function renamed?"),
}


@dataclass(frozen=True)
class Exercise:
    """One exercise. `check` raises `Mistake`; `engine` puts the reader's part into the engine."""

    names: tuple[str, ...]
    """What the template defines."""
    rules: Mapping[str, Rule]
    hints: Sequence[str]
    solution: Sequence[str]
    """The engine's own, by dotted name."""
    check: Callable[[ModuleType], None]
    engine: Callable[[ModuleType], AbstractContextManager[Mapping[str, Any]]]
    """The options of an `LLM` that runs on the reader's part, for as long as the context lasts. If options are not
    enough: as `prepare`, a function of that `LLM`; or as `drive`, one of it, the prompts and the `SamplingParams`,
    which returns outputs and steps."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The options of the same `LLM` on the engine's own part."""
    beside: str = "forge's own"
    """What a run calls the engine's own part."""
    prompts: Sequence[str] = ("Once upon a time",)
    params: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 48, "ignore_eos": True})
    view: str = "text"
    """What `run` shows beside the text: `blocks`, `scheduler` or `speculation`."""

    def rule(self, name: str) -> Rule:
        return self.rules[name] if name in self.rules else UNIVERSAL[name]


class Mistake(Exception):
    """A promise that the reader's code breaks."""

    def __init__(
        self,
        rule: str,
        found: str,
        calls: Sequence[str] = (),
        before: str = "",
        after: str = "",
        line: str | None = None,
    ):
        super().__init__(f"{rule}: {found}")
        self.rule, self.found, self.calls = rule, found, tuple(calls)
        self.before, self.after, self.line = before, after, line


class Endless(BaseException):
    """A call took too long. No `Exception`: the reader's own `except` must not catch it."""


@contextmanager
def time_limit(seconds: float = CALL_SECONDS) -> Iterator[None]:
    """Raise `Endless` in what runs too long. Inside another limit it changes nothing."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Endless(f"it had not returned after {seconds:g} seconds")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class Trial:
    """Calls of the reader's code, each written down as a line of Python that can be pasted."""

    def __init__(self, piece: ModuleType, *setup: str):
        """setup: lines in front of the calls. Each line of the calls knows the reader's module as `piece`."""
        self.path = str(piece.__file__)
        self.calls = [f'from forge.exercises import load; piece = load("{_shown(self.path)}")', *setup]
        self.before: Callable[[], str] = str
        """Draws the state before the last call."""

    def draw(self) -> str:
        """The state, as the chapter's picture has it."""
        return ""

    def capture(self) -> Callable[[], str]:
        """The state as it is now, to be drawn later if it is needed."""
        drawn = self._drawn()
        return lambda: drawn

    def call(self, line: str, function: Callable[..., Any], *arguments: Any, expect: tuple[type, ...] = ()) -> Any:
        """What the function returns. Raises `Mistake` for any exception but those of `expect`."""
        self.before = self.capture()
        self.calls.append(line)
        try:
            with time_limit():
                result = function(*arguments)
        except (Exception, Endless) as error:
            if isinstance(error, expect):
                self.calls[-1] = f"{line}  # {type(error).__name__}: {error}"
                raise
            raise self.mistake_of(error) from None
        if result is not None:
            self.calls[-1] = f"{line}  # {_short(result)}"
        return result

    def mistake_of(self, error: BaseException) -> Mistake:
        if isinstance(error, Mistake):
            return error
        where = line_in(self.path, error)
        if isinstance(error, NotImplementedError):
            return Mistake("unwritten", f"not written yet: {error}", line=where)
        if isinstance(error, Endless):
            return self.broken("endless", str(error), where)
        said = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
        return self.broken("raises", said, where)

    def broken(self, rule: str, found: str, line: str | None = None) -> Mistake:
        return Mistake(rule, found, self.calls, self.before(), self._drawn(), line)

    def require(self, holds: object, rule: str, found: str) -> None:
        if not holds:
            raise self.broken(rule, found)

    def _drawn(self) -> str:
        try:
            with time_limit():
                return self.draw()
        except (Exception, Endless):  # the reader's state may be anything
            return ""


def _shown(path: str) -> str:
    """From the working folder, where it lies below that."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def _short(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:59]}…"


def search(new: Callable[[], Any], weighted: Mapping[str, int], lists: int = 60) -> None:
    """Raise the `Mistake` of the shortest list of random operations that is found; return if all lists go well."""
    for length in _LENGTHS:
        for seed in range(lists if length <= 16 else lists // 4):
            operations = random_operations(seed + 1000 * length, length, weighted)
            failed = failure(new, operations)
            if failed is None:
                continue
            if isinstance(failed[1], Mistake) and failed[1].rule == "endless":
                raise failed[1]  # each list that is tried would take seconds
            found = shrunk(new, operations, _TRIES)
            raise failed[1] if found is None else _with_small_numbers(new, *found)


def _with_small_numbers(new: Callable[[], Any], error: Exception, operations: list[Operation]) -> Exception:
    """The failure of the same list with the smallest counts that still fail."""
    for index, (kind, which, count, word) in enumerate(operations):
        for smaller in range(count):
            changed = [*operations[:index], (kind, which, smaller, word), *operations[index + 1 :]]
            found = failure(new, changed)
            if found is not None and found[0] == len(operations):
                error, operations = found[1], changed
                break
    return error


def drawing(block_map: BlockMap) -> str:
    """The pool and the tables as `--show blocks` draws them."""
    from forge.views.block_map import SequenceNames, pool_lines, table_lines

    names = SequenceNames()
    for table in block_map.tables:
        names.number(table.owner)
    lines = [*pool_lines(block_map, names, 72, 4), *table_lines(block_map, names, 72, 8)]
    return "\n".join(line.plain for line in lines)


__all__ = ["Exercise", "Mistake", "Operation", "Rule", "Trial", "drawing", "search", "time_limit"]
