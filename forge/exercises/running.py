"""The reader's part beside the engine's own: `forge build run` runs the real engine and the bundled model on each for
the same requests, and `forge build solution` times both at three sizes, in turns.

The reader's code runs in a process of its own (`child`), which draws the screen of a run too.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.exercises import session
from forge.exercises.catalog import Entry, find_entry
from forge.exercises.exercise import BROKEN, Exercise, Trial
from forge.exercises.loading import line_in, load, time_limit
from forge.llm import LLM
from forge.trace.records import StepRecord
from forge.views.screen import Report

_CALL_SECONDS = 4.0
"""A call of the reader's code in a run. The model's forward passes are none."""


@dataclass(frozen=True)
class Ran:
    """One run of the engine."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[StepRecord, ...]
    token_text: Callable[[int], str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(record.ended - record.started for record in self.records)
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def fullest(self) -> StepRecord:
        """The step with most blocks in use."""
        return max(self.records, key=lambda record: (record.cache.used_blocks, record.cache.tokens_held))


@dataclass(frozen=True)
class Comparison:
    """The same requests with the reader's part and with the engine's own."""

    exercise: Exercise
    yours: Ran
    reference: Ran
    calls: Mapping[str, int]
    """How often the run called each of the reader's functions."""

    @property
    def identical(self) -> bool:
        return self.yours.token_ids == self.reference.token_ids


class BrokenRun(ForgeError):
    """The engine stopped on the reader's code."""


def run(
    entry: Entry, path: Path, console: Console, model: str | None = None, deadline: float = session.DEADLINE
) -> Report:
    """Run the engine on the reader's code. The screen is drawn there, with the escape codes of this console's terminal.
    Raises `BrokenRun`, with the reader's line, if it cannot."""
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
    found, screen = ended.result["facts"], Text.from_ansi(ended.result["screen"])
    return Report(found, lambda console: console.print(screen, end="", soft_wrap=True), 0 if found["identical"] else 1)


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
        "steps": len(comparison.yours.records),
        "steps_own": len(comparison.reference.records),
        "calls": dict(comparison.calls),
    }


_ROUNDS = 9
_ROUND_SECONDS = 0.01
"""Seconds that a round of one side takes at least: short work is repeated."""


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
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started) / repeats * 1e6


def compare_costs(entry: Entry, path: Path) -> list[Measured] | None:
    """Run the benchmark in a process of its own. None if the reader's code did not end it."""
    ended = session.in_child("cost", entry, path)
    return None if ended.result is None else [Measured(**cost) for cost in ended.result["costs"]]
