"""One reader's way through one chapter: what the runs measured so far, and what was guessed before they did."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.book.chapter import Chapter, Claim, Predict, Run, Step
from forge.book.measured import Unmeasured, evaluate, expressions_in, fill
from forge.errors import UsageError
from forge.views.report import Report

RunCommand = Callable[[str], Report]
"""Runs a command line and returns what it found. Raises `ForgeError` for one that cannot run."""

_NUMBER = re.compile(r"^(?P<number>[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(?P<unit>\S.*)?$", re.IGNORECASE)
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
ON_THE_MARK, CLOSE = 1.1, 1.5
"""A guess that is off by no more than this factor."""


@dataclass(frozen=True)
class Guess:
    text: str
    """As the reader wrote it."""
    value: float | int
    """A number in the answer's own unit, or the index of a choice."""


@dataclass(frozen=True)
class Judged:
    """A claim held against what was measured."""

    claim: Claim
    holds: bool | None
    """None where this run cannot tell."""


@dataclass
class Reading:
    chapter: Chapter
    run_command: RunCommand
    commands: dict[Run, str] = field(default_factory=dict)
    """The command lines that the reader put in place of the chapter's."""
    reports: dict[Run, Report] = field(default_factory=dict)
    guesses: dict[Predict, Guess] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, Mapping[str, Any]]:
        """The facts of each named run that has happened."""
        return {run.name: report.facts for run, report in self.reports.items() if run.name}

    def command(self, run: Run) -> str:
        return self.commands.get(run, run.command)

    def perform(self, run: Run) -> Report:
        """Run it, again if need be. Raises whatever the command raises, with what was measured before still there."""
        report = self.run_command(self.command(run))
        self.reports[run] = report
        return report

    def unperformed(self, steps: Sequence[Step]) -> list[Run]:
        """The runs of `steps` that have not happened."""
        runs = [block for step in steps for block in step if isinstance(block, Run)]
        return [run for run in runs if run not in self.reports]

    def fill(self, text: str) -> str:
        return fill(text, self.measured)

    def judge(self, claims: Sequence[Claim]) -> list[Judged]:
        measured = self.measured
        judged = []
        for claim in claims:
            try:
                judged.append(Judged(claim, bool(evaluate(claim.expression, measured))))
            except Unmeasured:
                judged.append(Judged(claim, None))
        return judged

    def right_choice(self, predict: Predict) -> int | None:
        """The index of the choice that turned out right; None where nothing tells."""
        try:
            holds = [bool(evaluate(choice.condition, self.measured)) for choice in predict.choices]
        except Unmeasured:
            return None
        return holds.index(True) if any(holds) else None

    def verdict(self, predict: Predict) -> str | None:
        """What the answer is, and how close the guess was, in a sentence or two; None where this run does not tell."""
        guess = self.guesses.get(predict)
        if predict.choices:
            right = self.right_choice(predict)
            if right is None:
                return None
            answer = f"It is {choice_name(right)}, {self.fill(predict.choices[right].text)}."
            if guess is None:
                return answer
            return f"{answer} You said {choice_name(int(guess.value))}{', too' if guess.value == right else ''}."
        answer = self.fill(predict.answer)
        try:
            (expression,) = expressions_in(predict.answer)
            actual = float(evaluate(expression, self.measured))
        except (Unmeasured, TypeError, ValueError):
            return None
        if guess is None:
            return f"It is {answer}."
        return f"It is {answer}. You said {guess.text}: {closeness(float(guess.value), actual)}."


def choice_name(index: int) -> str:
    """What a choice is called: 1, 2, 3, …"""
    return str(index + 1)


def parse_guess(predict: Predict, text: str) -> Guess:
    """What a reader's answer means. Raises `UsageError`, saying what would do, if it means nothing."""
    text = text.strip()
    if predict.choices:
        names = [choice_name(index) for index in range(len(predict.choices))]
        if text not in names:
            raise UsageError(f"one of {', '.join(names)}")
        return Guess(text, names.index(text))
    found = _NUMBER.match(text)
    if found is None:
        raise UsageError("a number")
    value = float(found["number"].replace(",", ""))
    unit = (found["unit"] or "").lower()
    if predict.answer.endswith(":percent}}"):
        value /= 100
    elif predict.answer.endswith(":size}}"):
        value *= _PREFIXES.get(unit[:1], 1)
    return Guess(text, value)


def closeness(guess: float, actual: float) -> str:
    """In words, how far off a guess is."""
    if guess == actual:
        return "exactly"
    if guess <= 0 or actual <= 0:
        return "too low" if guess < actual else "too high"
    factor = max(guess / actual, actual / guess)
    if factor <= ON_THE_MARK:
        return "on the mark"
    side = "low" if guess < actual else "high"
    return f"close, a little {side}" if factor <= CLOSE else f"too {side}, by a factor of {factor:,.1f}"
