"""What an exercise is, and what a check says of a wrong solution.

A check calls the reader's code through a `Trial`, which writes down each call as a line of Python, ends a
call that does not return, and turns what went wrong into a `Mistake`: the rule, what was found, the calls, the state
before and after the last of them, and a question.
"""

import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from forge.cache.eviction import EvictionPolicy
from forge.cache.factory import CacheFactory, CacheSize
from forge.cache.kv_cache import KvCache
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.exercises.loading import Endless, line_in, time_limit
from forge.llm import LLM
from forge.pieces import current_pieces, standing_in
from forge.trace.records import StepRecord

_Base = TypeVar("_Base")
BROKEN = (Exception, Endless, SystemExit)
"""Exceptions that a call of the reader's code may raise."""


@dataclass(frozen=True)
class Rule:
    """One promise of an exercise, with the question that a reader gets when it is broken."""

    sentence: str
    question: str
    """A question for a reader whose code breaks the rule."""


def words_of(exercise: str) -> dict[str, Any]:
    """Read what an exercise says to its reader: some fields of its `Exercise`, from `templates/<exercise>.toml`."""
    path = Path(__file__).parent / "templates" / f"{exercise}.toml"
    words = tomllib.loads(path.read_text(encoding="utf-8"))
    return words | {"rules": {name: Rule(*pair) for name, pair in words["rules"].items()}}


UNIVERSAL: Mapping[str, Rule] = words_of("universal")["rules"]
"""The rules of every exercise."""


def to_write(*names: str) -> Callable[[type[_Base]], type[_Base]]:
    """Take these functions of the engine's own away from a base class: the reader writes them."""

    def decorate(kind: type[_Base]) -> type[_Base]:
        for name in names:
            setattr(kind, name, _not_written(name))
        return kind

    return decorate


def _not_written(name: str) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise NotImplementedError(name)

    return function


@dataclass(frozen=True)
class Part:
    """A group of functions that is checked as soon as all of them are written."""

    functions: tuple[str, ...]
    """Names as in the file: `greedy`, `MyBlockPool.allocate`."""
    check: Callable[[ModuleType], None]
    """Raises `Mistake`."""
    alone: bool = False
    """Whether it is checked only while other functions are not written yet: a later part checks the same and more."""

    @classmethod
    def of(cls, kind: str, methods: str, check: Callable[[ModuleType], None], alone: bool = False) -> "Part":
        """Build a part from `methods` of one class, given as names with spaces between them."""
        return cls(tuple(f"{kind}.{name}" for name in methods.split()), check, alone)


@dataclass(frozen=True)
class Costs:
    """The benchmark of an exercise: the same work at three sizes, from small to large."""

    words: str
    """What is done at a size, `{}`."""
    sizes: Sequence[int]
    prepare: Callable[[ModuleType | None, int], Callable[[], object]]
    """Prepares the work on the reader's part, or on the engine's own (None), and returns the function to time."""


Driven = tuple[list[RequestOutput], list[StepRecord]]
Drive = Callable[[LLM, Sequence[str], SamplingParams, ModuleType | None], Driven]
"""Runs prompts; returns outputs and steps. The last argument is the reader's file; None for the engine's own part."""


def plain_drive(llm: LLM, prompts: Sequence[str], params: SamplingParams, piece: ModuleType | None) -> Driven:
    """Run the prompts as `LLM.generate` does."""
    run = llm.start(list(prompts), params)
    records = list(run)
    return run.outputs, records


def cache_of_kind(kind: str, replace_cache: Callable[[Any, CacheSize], KvCache]) -> AbstractContextManager[None]:
    """Give new engines `replace_cache(cache, size)` for each cache of this kind; "" stands for every kind."""
    create_before = current_pieces().kv_cache

    def create(mode: str | CacheFactory, size: CacheSize, evict: str | EvictionPolicy) -> KvCache:
        cache = create_before(mode, size, evict)
        return replace_cache(cache, size) if kind in ("", cache.kind) else cache

    return standing_in(kv_cache=create)


@dataclass(frozen=True)
class Exercise:
    """One exercise. `engine` puts the reader's part into the engine."""

    parts: Sequence[Part]
    rules: Mapping[str, Rule]
    hints: Sequence[str]
    solution: Sequence[str]
    """The engine's own, by dotted name: at most 30 lines together."""
    differs: str
    """Why the engine's own is written differently."""
    next_question: str
    """A question to think about after passing."""
    costs: Costs
    engine: Callable[[ModuleType], AbstractContextManager[object]] = nullcontext
    """Puts the reader's part into every engine that is made while the context lasts. The default leaves the engine's
    own part in place: `drive` alone brings the reader's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the `LLM` that `run` shows."""
    drive: Drive = plain_drive
    beside: Sequence[str] = ()
    """Exercises whose parts stand in the same run, if they have passed."""
    prompts: Sequence[str] = ("Once upon a time",)
    params: Sequence[Mapping[str, Any]] = ({"max_tokens": 48, "ignore_eos": True},)
    """All prompts run once with each of these."""
    view: str = "text"
    """The picture that `run` shows beside the text: `blocks`, `scheduler` or `speculation`."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that the template defines, in its order."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.functions))

    def rule(self, name: str) -> Rule:
        return self.rules[name] if name in self.rules else UNIVERSAL[name]


@dataclass(eq=False)
class Mistake(Exception):
    """A promise that the reader's code breaks."""

    rule: str
    finding: str
    calls: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    line: str | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.finding}"


class Trial:
    """Calls the reader's code and writes down each call as a line of Python that can be pasted."""

    setup_lines: tuple[str, ...] = ()
    """Lines that precede the calls of every such trial."""

    def __init__(self, piece: ModuleType, *setup: str):
        """setup: lines that precede the calls of this trial. In each line `piece` is the reader's module."""
        self.piece, self.path = piece, str(piece.__file__)
        loading = f'from forge.exercises import load; piece = load("{_shown(self.path)}")'
        self.calls = [loading, *self.setup_lines, *setup]
        self.setup = len(self.calls)
        self.before: Callable[[], str] = str
        """Draws the state before the last call."""

    def restart(self) -> None:
        """Drop the calls so far: what comes does not depend on them."""
        del self.calls[self.setup :]

    def draw(self) -> str:
        """Draw the state in the form of the chapter's picture."""
        return ""

    def capture(self) -> Callable[[], str]:
        """Capture the present state and return a function that draws it."""
        drawn = self._drawn()
        return lambda: drawn

    def call(self, line: str, function: Callable[..., Any], *arguments: Any, expect: tuple[type, ...] = ()) -> Any:
        """Call the function and return its result. Raises `Mistake` for any exception that is not in `expect`, and if
        the call has changed an argument."""
        self.before = self.capture()
        self.calls.append(line)
        copies = [copied(argument) for argument in arguments]
        try:
            with time_limit():
                result = function(*arguments)
        except BROKEN as error:
            if isinstance(error, expect):
                self.calls[-1] = f"{line}  # {type(error).__name__}: {error}"
                raise
            raise self.mistake_of(error) from None
        for argument, copy in zip(arguments, copies, strict=True):
            if not same(argument, copy):
                raise self.broken("untouched", f"{_short(copy)} has become {_short(argument)}")
        if result is not None:
            self.calls[-1] = f"{line}  # {_short(result)}"
        return result

    def call_anew(self, line: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function as `call` does, without the calls so far: it does not depend on them."""
        self.restart()
        return self.call(line, function, *arguments)

    def mistake_of(self, error: BaseException) -> Mistake:
        if isinstance(error, Mistake):
            return error
        where = line_in(self.path, error)
        if isinstance(error, NotImplementedError):
            return Mistake("unwritten", f"not written yet: {error}", line=where)
        if isinstance(error, Endless):
            return self.broken("endless", str(error), where)
        if isinstance(error, SystemExit):
            return self.broken("exits", f"it called exit({error.code!r})", where)
        if isinstance(error, MemoryError):
            return self.broken("memory", "no memory was left", where)
        message = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
        return self.broken("raises", message, where)

    def broken(self, rule: str, finding: str, line: str | None = None) -> Mistake:
        return Mistake(rule, finding, tuple(self.calls), self.before(), self._drawn(), line)

    def require(self, holds: object, rule: str, finding: str) -> None:
        if not holds:
            raise self.broken(rule, finding)

    def require_growth(
        self, line: str, work: Callable[[int], Callable[[], object]], small: int, large: int, most: float
    ) -> None:
        """Require that the work on `large` takes at most `most` times as long as that on `small`; of several tries the
        fastest counts.

        line: the work on `large` as Python. work: prepares it. By the processor's clock, which a busy machine does not
        change; `most` is several times what a right solution needs.
        """
        self.restart()
        self.calls.append(line)
        factor = float("inf")
        for _ in range(3):  # a busy machine can only make one of the two slower
            seconds = [self._fastest(work(size), size) for size in (small, large)]
            factor = min(factor, seconds[1] / seconds[0])
            if factor <= most:
                break
        finding = (
            f"{large // small} times the size takes {factor:.0f} times as long, and {most:g} times are more than enough"
        )
        self.require(factor <= most, "slow", finding)
        self.calls.pop()

    def _fastest(self, prepared: Callable[[], object], size: int) -> float:
        """Return the seconds of the fastest of several calls."""
        best, spent, repeats = float("inf"), 0.0, 0
        while repeats < 2 or (spent < 0.03 and repeats < 40):
            started = time.thread_time()
            try:
                with time_limit():
                    prepared()
            except Endless as error:
                raise self.broken("slow", f"for a size of {size:,} {error}", line_in(self.path, error)) from None
            except BROKEN as error:
                raise self.mistake_of(error) from None
            seconds = time.thread_time() - started
            best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
            if spent > 1:
                break
        return max(best, 2e-6)

    def _drawn(self) -> str:
        try:
            with time_limit():
                return self.draw()
        except BROKEN:  # the reader's state may be anything
            return ""


def _shown(path: str) -> str:
    """Shorten a path to one relative to the working folder if it lies below that."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def _short(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:59]}…"


def copied(value: Any) -> Any:
    """Copy lists, tuples, arrays and plain dataclasses at any depth; return any other value itself."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple):
        items = [copied(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if _is_frozen(value):
        held = {member.name: getattr(value, member.name) for member in fields(value) if member.init}
        if any(isinstance(item, np.ndarray | list | tuple) for item in held.values()):
            return replace(value, **{name: copied(item) for name, item in held.items()})
    return value


def are_ids(value: Any) -> bool:
    """True for a list, a tuple or an array of whole numbers."""
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(item, Integral) for item in value)


def _is_frozen(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen  # type: ignore


def same(value: Any, copy: Any) -> bool:
    """True if a value still equals the copy that `copied` took."""
    if value is copy:
        return True
    if type(value) is not type(copy):
        return False
    if isinstance(value, np.ndarray):
        return value.shape == copy.shape and np.array_equal(value, copy, equal_nan=value.dtype.kind == "f")
    if isinstance(value, list | tuple):
        return len(value) == len(copy) and all(map(same, value, copy))
    if isinstance(value, dict):
        return value.keys() == copy.keys() and all(same(value[key], copy[key]) for key in value)
    if _is_frozen(value):
        return all(
            same(getattr(value, member.name), getattr(copy, member.name)) for member in fields(value) if member.init
        )
    return bool(value == copy)
