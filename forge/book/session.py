"""One reader's way through one chapter: what the runs measured so far, and what was guessed before they did."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.book.chapter import ANSWER, Block, Chapter, Claim, Finding, Outcome, Predict, Run, Step, Verdict, names_of
from forge.book.given import LoadMeter, OtherLoad
from forge.book.measured import Touch, Unmeasured, evaluate, fill
from forge.errors import UsageError
from forge.views.screen import Report

RunCommand = Callable[[str], Report]
"""Runs a command line and returns what it found. Raises `ForgeError` for one that cannot run."""

_NUMBER = re.compile(r"^(?P<number>[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*(?P<unit>\S.*)?$", re.IGNORECASE)
_UNITS: Mapping[str, Mapping[str, float]] = {
    "ms": {"ms": 1, "milliseconds": 1, "s": 1e3, "seconds": 1e3, "µs": 1e-3, "us": 1e-3, "microseconds": 1e-3},
    "percent": {"": 0.01, "%": 0.01, "percent": 0.01},
    "rate": {"tok/s": 1, "tokens/s": 1, "/s": 1},
    "size": {"b": 1, "byte": 1, "bytes": 1, "kb": 1e3, "kib": 1 << 10, "mb": 1e6, "mib": 1 << 20, "gb": 1e9},
    "times": {"x": 1, "×": 1, "times": 1},
}  # fmt: skip
"""Format of an answer → the units that a guess may have, and the factor of each. No unit is the answer's own."""
_EXAMPLES = {
    "count": "a whole number, such as 12",
    "ms": "a number of milliseconds, such as 2.5",
    "percent": "a percentage, such as 35 %",
    "rate": "a number per second, such as 150",
    "size": "a size in bytes, such as 6144 or 6.1 kB",
    "times": "a number of times, such as 2.5",
}
ON_THE_MARK, CLOSE = 1.1, 1.5
"""A guess that is off by no more than this factor."""


@dataclass(frozen=True)
class Guess:
    """What the reader predicted, before the run."""

    text: str
    """The reader's own words."""
    value: float | int
    """A number in the answer's own unit, or the index of a choice."""


@dataclass(frozen=True)
class Judged:
    """A claim and whether the measurement confirms it."""

    claim: Claim
    holds: bool | None
    """None if this run cannot tell, or if the sentence is not claimed."""
    unclaimed: bool = False
    """The claim's condition does not hold."""


@dataclass
class Session:
    """One reader's way through a chapter: pages shown, predictions made, commands run."""

    chapter: Chapter
    run_command: RunCommand
    commands: dict[Run, str] = field(default_factory=dict)
    """The command lines that the reader put in place of the chapter's."""
    reports: dict[Run, Report] = field(default_factory=dict)
    guesses: dict[Predict, Guess] = field(default_factory=dict)
    loads: dict[Run, OtherLoad] = field(default_factory=dict)
    """Other programs' load on the processors during each run."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the model that the chapter runs."""
    drawn: dict[Run, tuple[str, ...]] = field(default_factory=dict)
    """The lines of each report as they were drawn, for a session that goes on later."""
    given: Sequence[str] = ()
    """Names of the options that the reader gave."""
    goes_on: str = ""
    """A sentence that says what `forge next` opens after this chapter."""

    @property
    def measured(self) -> dict[str, Any]:
        """The facts of each named run that has happened, and the names of `GIVEN`, which always exist."""
        named = {run.name: report.facts for run, report in self.reports.items() if run.name}
        busy = any(load.is_busy for load in self.loads.values())
        return {"machine": {"busy": busy}, "model": self.model, "given": list(self.given)} | named

    def command(self, run: Run) -> str:
        return self.commands.get(run, run.command)

    def perform(self, run: Run) -> Report:
        """Run the experiment, again if it has run. Raises whatever the command raises, and then keeps the earlier
        result."""
        meter = LoadMeter()
        report = self.run_command(self.command(run))
        self.reports[run], self.loads[run] = report, meter.read()
        return report

    def unperformed(self, steps: Sequence[Step]) -> list[Run]:
        """Return the runs of `steps` that have not happened and are not left out."""
        runs = [block for step in steps for block in step if isinstance(block, Run)]
        return [run for run in runs if run not in self.reports and not self.leaves_out(run)]

    def leaves_out(self, block: Block) -> bool:
        """True if the block is a run whose condition does not hold, or depends on one."""
        if isinstance(block, Run):
            return bool(block.condition) and not evaluate(block.condition, self.measured)
        left_out = {run.name for run in self.chapter.runs() if self.leaves_out(run)}
        predict = block.predict if isinstance(block, Verdict) else block
        return bool(left_out) and bool(names_of(predict) & left_out)

    def steps(self) -> tuple[Step, ...]:
        """Return the chapter's steps without the blocks that are left out; a run that is left out keeps its place."""
        kept = (
            tuple(block for block in step if isinstance(block, Run) or not self.leaves_out(block))
            for step in self.chapter.steps()
        )
        return tuple(step for step in kept if step)

    def fill(self, text: str) -> str:
        return fill(text, self.measured)

    def judge(self, claims: Sequence[Claim]) -> list[Judged]:
        measured = self.measured
        judged = []
        for claim in claims:
            try:
                if claim.condition and not evaluate(claim.condition, measured):
                    judged.append(Judged(claim, None, unclaimed=True))
                else:
                    judged.append(Judged(claim, bool(evaluate(claim.expression, measured))))
            except Unmeasured:
                judged.append(Judged(claim, None))
        return judged

    def is_right(self, predict: Predict) -> bool | None:
        """True if the guess was right or close; None without a guess or an answer."""
        guess, actual = self.guesses.get(predict), right_answer(predict, self.measured)
        if guess is None or actual is None:
            return None
        return guess.value == actual if predict.choices else is_close(float(guess.value), actual)

    def score(self) -> tuple[int, int]:
        """Count (guesses that were right or close, guesses whose answer is known)."""
        judged = [self.is_right(predict) for predict in self.guesses]
        return judged.count(True), sum(verdict is not None for verdict in judged)

    def saved(self) -> dict[str, Any]:
        """Return, as plain data, what `restore` needs to go on without running anything again."""
        return {
            "model": self.model,
            "given": list(self.given),
            "typed": {run.command: self.command(run) for run in self.chapter.runs()},
            "runs": [
                {
                    "command": run.command,
                    "facts": report.facts,
                    "status": report.status,
                    "lines": self.drawn.get(run, ()),
                    "load": [self.loads[run].processors, self.loads[run].of],
                }
                for run, report in self.reports.items()
            ],
            "guesses": {predict.question: guess.text for predict, guess in self.guesses.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over the runs and the guesses of an earlier session; those that the chapter no longer has are left out.

        Raises `LookupError`, `TypeError` or `ValueError` for what `saved` has not made.
        """
        runs = {run.command: run for run in self.chapter.runs()}
        self.model, self.given = dict(saved["model"]), tuple(map(str, saved.get("given", ())))
        self.commands = {run: str(saved["typed"].get(command, command)) for command, run in runs.items()}
        for past_run in saved["runs"]:
            run = runs.get(past_run["command"])
            if run is not None:
                processors, of = past_run["load"]
                lines = tuple(map(str, past_run["lines"]))
                self.loads[run] = OtherLoad(float(processors), int(of))
                self.reports[run] = Report(
                    dict(past_run["facts"]), partial(_print_lines, lines), int(past_run["status"])
                )
                self.drawn[run] = lines
        for block in self.chapter.blocks:
            if isinstance(block, Predict) and block.question in saved["guesses"]:
                self.guesses[block] = parse_guess(block, saved["guesses"][block.question])

    def verdict(self, predict: Predict) -> str | None:
        """Say what the reader guessed, the answer, and how close that was; None if this run does not decide."""
        guess, actual = self.guesses.get(predict), right_answer(predict, self.measured)
        if actual is None:
            return None
        if predict.choices:
            return self._choice_verdict(predict, guess, int(actual))
        answer = self.fill(predict.answer)
        if guess is None:
            return f"It is {answer}."
        in_its_form = fill(predict.answer.replace(predict.expression, ANSWER), {ANSWER: guess.value})
        nearness = "exact" if in_its_form == answer else closeness(float(guess.value), actual)
        return f"You said {guess.text}. It is {answer}: your guess was {nearness}."

    def _choice_verdict(self, predict: Predict, guess: Guess | None, right: int) -> str:
        answer = f"{choice_name(right)}, {self.fill(predict.choices[right].text)}."
        if guess is None:
            return f"It is {answer}"
        if guess.value == right:
            return f"You said {choice_name(right)}, and it is {answer}"
        return f"You said {guess.text}, {self.fill(predict.choices[int(guess.value)].text)}. It is {answer}"

    def finding(self, finding: Finding) -> str | None:
        """Return the sentences that this run confirms; None if it does not decide."""
        measured = self.measured
        outcome = chosen(finding.outcomes, measured)
        return None if outcome is None else fill(outcome.text, measured)


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        shown = Text.from_ansi(line)
        shown.truncate(console.width)
        console.print(shown)


def chosen(outcomes: Sequence[Outcome], measured: Mapping[str, Any], touch: Touch | None = None) -> Outcome | None:
    """Return the first outcome whose condition holds; None if nothing was measured that decides."""
    for outcome in outcomes:
        try:
            if outcome.condition is None or evaluate(outcome.condition, measured, touch):
                return outcome
        except Unmeasured:
            return None
    return None


def right_answer(predict: Predict, measured: Mapping[str, Any], touch: Touch | None = None) -> float | int | None:
    """Return the number that is asked for, or the index of the right choice; None if this run does not tell."""
    try:
        if predict.condition and not evaluate(predict.condition, measured, touch):
            return None
        if not predict.choices:
            value = evaluate(predict.expression, measured, touch)
            return value if isinstance(value, float | int) else None
        holds = [
            choice.condition is not None and bool(evaluate(choice.condition, measured, touch))
            for choice in predict.choices
        ]
    except Unmeasured:
        return None
    otherwise = [choice.condition for choice in predict.choices].index(None)
    return holds.index(True) if any(holds) else otherwise


def explanation(predict: Predict, measured: Mapping[str, Any], touch: Touch | None = None) -> str:
    """Join the chosen outcome's text, the right choice's text, and the text that holds for every run."""
    answer, texts = right_answer(predict, measured, touch), []
    if answer is None:
        return ""
    if predict.choices:
        texts.append(predict.choices[int(answer)].why)
    else:
        measured = {**measured, ANSWER: answer}
    if predict.outcomes:
        outcome = chosen(predict.outcomes, measured, touch)
        texts.append("" if outcome is None else outcome.text)
    return " ".join(fill(text, measured, touch) for text in (*texts, predict.why) if text)


def choice_name(index: int) -> str:
    """Return a choice's name: 1, 2, 3, …"""
    return str(index + 1)


def parse_guess(predict: Predict, text: str) -> Guess:
    """Parse a reader's answer. Raises `UsageError`, which says what is valid, if it is not."""
    text = text.strip()
    if predict.choices:
        names = [choice_name(index) for index in range(len(predict.choices))]
        if text not in names:
            raise UsageError(f"one of {', '.join(names)}")
        return Guess(text, names.index(text))
    form = predict.answer.removesuffix("}}").rpartition(":")[2]
    example = _EXAMPLES.get(form, "a number")
    match = _NUMBER.match(text)
    if match is None:
        raise UsageError(example)
    value, unit = float(match["number"].replace(",", "")), (match["unit"] or "").lower()
    units = {"": 1.0, **_UNITS.get(form, dict.fromkeys(re.findall(r"\w+", predict.question.lower()), 1))}
    if unit not in units or (form == "percent" and not unit and 0 < abs(value) < 1):
        raise UsageError(example)
    if form == "count" and not value.is_integer():
        raise UsageError(example)
    return Guess(text, int(value) if form == "count" else value * units[unit])


def is_close(guess: float, actual: float) -> bool:
    """True if the guess is off by no more than the factor `CLOSE`."""
    if guess <= 0 or actual <= 0:
        return guess == actual
    return max(guess / actual, actual / guess) <= CLOSE


def closeness(guess: float, actual: float) -> str:
    """Say in words how far off a guess is."""
    if guess == actual:
        return "exact"
    side = "low" if guess < actual else "high"
    if guess <= 0 or actual <= 0:
        return f"too {side}"
    factor = max(guess / actual, actual / guess)
    if factor <= ON_THE_MARK:
        return "nearly exact"
    return f"a little too {side}" if is_close(guess, actual) else f"too {side} by a factor of {factor:,.1f}"
