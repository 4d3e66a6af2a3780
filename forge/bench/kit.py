"""What every benchmark is made of: a command that measures and shows, figures with their spread, turns, shared options.

A benchmark's result is one dictionary of plain values, dataclasses and `Figure`s, its *facts*: `--json` prints them,
nothing rounded, and the screen is drawn from them.
"""

import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from statistics import median, quantiles
from typing import Annotated, Any, TypeVar

import typer

from forge.cli import machine
from forge.cli.arguments import command
from forge.errors import INTERRUPTED, UsageError
from forge.llm import LLM
from forge.option import flag_of
from forge.views.json_output import plain
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, report
from forge.views.text import one_line
from forge.workload.requests import PASSAGE

Facts = dict[str, Any]
Progress = Callable[[str], None]
"""Called with what is about to be done."""
_Effort = TypeVar("_Effort")
_Found = TypeVar("_Found")
_Contender = TypeVar("_Contender")
MEASURE = "Measurement"


def option(help: str, *names: str, default: str | bool = True, **more: Any) -> Any:
    """Declare an option of a benchmark's command. default: what `--help` shows as the default if the value itself would
    not tell."""
    return typer.Option(*names, help=help, show_default=default, rich_help_panel=MEASURE, **more)


QuickOption = Annotated[bool, option("Few and short turns: to see it run.", "--quick")]


def benchmark(screen: Callable[[Facts], Iterable[Part]]) -> Callable[[Callable[..., Any]], Callable[..., Report]]:
    """Turn a function that measures into a command: its options are the function's parameters but the first, which is
    called with what is about to be done. The function returns its facts, or yields what is known so far, the last being
    the whole. The command exits with status 1 if the facts say that `identical` is false."""

    def decorate(measure: Callable[..., Any]) -> Callable[..., Report]:
        declared = signature(measure, eval_str=True)

        def run(**options: Any) -> Report:
            with progress_line(lines=True) as say:
                facts = {"machine": machine.cpu_model()} | last_of(measure(say, **options))
            status = INTERRUPTED if facts.get("interrupted") else int(not facts.get("identical", True))
            return report(plain(facts), lambda: screen(facts), status)

        run.__signature__ = declared.replace(  # type: ignore[attr-defined]
            parameters=list(declared.parameters.values())[1:], return_annotation=Report
        )
        run.__doc__, run.__name__ = measure.__doc__, measure.__name__
        bench_command = command(run)
        bench_command.measure = measure  # type: ignore[attr-defined]
        return bench_command

    return decorate


def last_of(measuring: Facts | Generator[Facts, None, None]) -> Facts:
    """Return the facts, or the last ones of a generator that yields what is known so far. Ctrl-C keeps those, marked
    `interrupted`."""
    if isinstance(measuring, dict):
        return measuring
    facts = None
    try:
        for facts in measuring:  # noqa: B007 (the last one is the whole)
            pass
    except KeyboardInterrupt:
        if facts is None:
            raise
        return facts | {"interrupted": True}
    finally:
        measuring.close()
    assert facts is not None, "a benchmark has at least a beginning"
    return facts


@dataclass(frozen=True)
class Figure:
    """The median of some repetitions, and how far they lie apart."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Build a figure whose low and high are the least and the greatest value. Raises ValueError if there are
        none."""
        return cls(median(values), min(values), max(values), len(values))

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> "Figure":
        """Build a figure whose low and high are the quartiles, so that one disturbed step does not count."""
        if len(values) < 2:
            return cls.of(values)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high, len(values))

    def text(self, show: Callable[[float], str]) -> str:
        """Format as `44.1 (43.8–44.6)`."""
        return f"{show(self.median)} ({show(self.low)}–{show(self.high)})"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide `values` by `others`, pair by pair, and leave out values without a partner.

    Both of a pair were measured in one round, so a machine that slows down for a while slows both down. A comparison's
    figure is the median of these ratios.
    """
    return [value / divisor for value, divisor in zip(values, others, strict=False)]


def in_turns(
    contenders: Mapping[str, _Contender], work: Callable[[_Contender, int], _Found], rounds: int, warm: int = 0
) -> dict[str, list[_Found]]:
    """Call `work(contender, turn)` for every contender in each round, in the opposite order in every second one.

    `warm` rounds run first and are left out of the result: name → what `work` returned in each of `rounds` rounds.
    """
    taken: dict[str, list[_Found]] = {name: [] for name in contenders}
    for turn in range(warm + rounds):
        for name in contenders if turn % 2 else reversed(list(contenders)):
            taken[name].append(work(contenders[name], turn))
    return {name: turns_taken[warm:] for name, turns_taken in taken.items()}


def compared(
    values: Mapping[str, Sequence[float]], of: Callable[[Sequence[float]], Figure] = Figure.of, faster: int = 0
) -> Facts:
    """Return the figures of two contenders' turns by name, and `ratio`: of the turns' ratios, the first over the
    second, or with `faster` the second over the first."""
    pair = list(values.values())
    return {name: of(series) for name, series in values.items()} | {"ratio": of(ratios(pair[faster], pair[1 - faster]))}


class PromptMaker:
    """Prompts that have nothing in common, of tokens that a model has seen."""

    def __init__(self, llm: LLM):
        self._passage, self._rng = list(llm.tokenizer.encode(PASSAGE)), random.Random(1)

    def prompts(self, number: int, length: int) -> list[list[int]]:
        return [self._rng.choices(self._passage, k=length) for _ in range(number)]


def about(llm: LLM) -> Facts:
    """Return what ran, on what."""
    return {"model": llm.model_name, "device": f"{llm.device} ({llm.device_description})"}


def where(facts: Mapping[str, Any], *more: str) -> str:
    """Return the line under a title: `tales, cpu (…) on this processor; 5 turns`."""
    on = f" on {one_line(facts['machine'])}" if facts.get("machine") else ""
    named = [one_line(facts[name]) for name in ("model", "device") if name in facts]
    return "; ".join([", ".join(named) + on, *more])


def effort_of(wanted: _Effort, **given: Any) -> _Effort:
    """Return a run's effort, with the given values in the place of its own."""
    return replace(wanted, **{name: value for name, value in given.items() if value is not None})  # type: ignore


def select_peers(names: list[str] | None, known: Mapping[str, str]) -> tuple[str, ...]:
    """Parse `all`, `none`, or names of peers, in the order of `known`. Raises `UsageError` for an unknown name."""
    if names == ["none"]:
        return ()
    return select(None if names in (None, ["all"]) else ",".join(names or ()), tuple(known), "peer")


def select(names: str | None, known: Sequence[_Found], what: str = "figure") -> tuple[_Found, ...]:
    """Return the entries of `known` (names, or objects with a `name`) that `names`, with commas, lists, in the order of
    `known`; None lists all. Raises `UsageError` for an unknown name."""
    by_name = {getattr(choice, "name", choice): choice for choice in known}
    chosen = [*by_name] if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in by_name:
            raise UsageError(f"unknown {what} {name!r}; there are {', '.join(map(str, by_name))}")
    return tuple(choice for name, choice in by_name.items() if name in chosen)


def at_least_one(**values: float | None) -> None:
    """Raise `UsageError` for an option below 1; None stands for one that was not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag_of(name)} is at least 1, and {value:g} is less")
