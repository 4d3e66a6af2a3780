"""Two runs of the same prompt side by side: whether the tokens are the same, and what each cost.

`compare_runs` turns two results into a `Comparison`, plain data; the rest of the file draws one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forge.trace.records import StepRecord, TokenRecord
from forge.views.curves import curve_plot, shape_sentence, short_name
from forge.views.figures import count, ms, plural, rate, size, times
from forge.views.generation import sample_texts
from forge.views.json_output import climb_object, run_object
from forge.views.metrics import metrics_lines, with_unit
from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.summary import Forward, RunResult
from forge.views.terminal import can_redraw, print_table
from forge.views.text import one_line, quoted, tail

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Side:
    """One of the two runs, under the value that made it different."""

    name: str
    """As given on the command line: `off`."""
    result: RunResult
    logits: Sequence["np.ndarray"]
    """Float32 `[vocab]` for each output token of the first sample."""

    @property
    def tokens(self) -> tuple[TokenRecord, ...]:
        """The first sample's, in order."""
        first = min((token.seq_id for record in self.result.records for token in record.tokens), default=0)
        return tuple(token for record in self.result.records for token in record.tokens if token.seq_id == first)


@dataclass(frozen=True)
class LogitDifference:
    """How far apart two lists of logits are, over the forwards in which both sides had seen the same tokens."""

    largest: float
    forward: int
    """Where it is, counted from 1."""
    forwards: int
    """How many were compared."""
    same_bits: bool


@dataclass(frozen=True)
class Comparison:
    question: str
    option: str
    """The option that differs: `--kv`."""
    sides: tuple[Side, Side]
    identical: bool
    """Every sample of both sides has the same tokens."""
    first_difference: int | None
    """The first output token at which the first samples differ, counted from 1."""
    logits: LogitDifference | None
    """None where the two cannot be held against each other: other vocabularies, or nothing generated."""


def compare_runs(question: str, option: str, left: Side, right: Side) -> Comparison:
    ids = [[sample.token_ids for sample in side.result.output.outputs] for side in (left, right)]
    first = _first_difference(ids[0][0], ids[1][0])
    shared = min(len(left.logits), len(right.logits)) if first is None else first
    logits = _logit_difference(left.logits[:shared], right.logits[:shared])
    return Comparison(question, option, (left, right), ids[0] == ids[1], first, logits)


def question_for(option: str) -> str:
    """The title of a comparison: what somebody who varies `option` wants to know."""
    return _QUESTIONS.get(option, f"Does {option} change what the model says, and what does it cost?")


_QUESTIONS = {
    "--kv": "Does the cache change what the model says, and what does it cost?",
    "--model": "What does another model say, and what does it cost?",
    "--device": "Does the device change what the model says, and which is faster?",
    "--threads": "What do more threads buy?",
    "--speculate": "Does guessing ahead change what the model says, and what does it gain?",
    "--k": "How many tokens should be guessed at a time?",
    "--kv-dtype": "What does rounding keys and values change, and what does it save?",
}


def comparison_object(comparison: Comparison) -> dict[str, Any]:
    """A comparison for `--json`."""
    logits = comparison.logits
    return {
        "option": comparison.option,
        "identical": comparison.identical,
        "first_difference": comparison.first_difference,
        "largest_logit_difference": None if logits is None else logits.largest,
        "logits_compared": 0 if logits is None else logits.forwards,
        "logits_same_bits": None if logits is None else logits.same_bits,
        "sides": [
            {
                "value": side.name,
                "last_over_second_forward": side.result.last_over_second,
                **run_object(side.result, token_text=str),
                **climb_object(side.result.forwards),
            }
            for side in comparison.sides
        ],
    }


class ComparisonProgress:
    """The curves as they grow, on a terminal; nothing in a pipe. Gone when both sides have run."""

    def __init__(self, console: Console, question: str, names: Sequence[str], num_points: int, quiet: bool = False):
        self._console, self._question = console, question
        self._names, self._num_points = names, num_points
        self._forwards: list[list[Forward]] = [[] for _ in names]
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if can_redraw(console) and not quiet else None
        )
        self._undrawn = 0.0

    def __enter__(self) -> "ComparisonProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    def step(self, side: int, record: StepRecord) -> None:
        self._forwards[side].append(Forward.of(len(self._forwards[side]) + 1, record))
        self._undrawn += record.forward_ms
        if self._live and self._undrawn > 50:  # of the engine's time, so that drawing is a small part of it
            self._undrawn = 0.0
            plot = curve_plot(self._names, self._forwards, self._num_points, self._console.width)
            self._live.update(Group(Text(self._question, TITLE), Text(""), *plot), refresh=True)


def print_comparison(console: Console, comparison: Comparison, prompt: str) -> None:
    """Question, prompt, table, picture, verdict."""
    console.print(Text(comparison.question, TITLE))
    console.print(Text(one_line(tail(prompt, 200)), QUIET))
    console.print()
    print_table(console, _table(comparison))
    sides = comparison.sides
    plot = curve_plot(
        [side.name for side in sides], [side.result.forwards for side in sides], _num_points(sides), console.width
    )
    for line in [Text(""), *plot, *legend(comparison)]:
        console.print(line)
    console.print()
    for line in verdict(comparison):
        console.print(line)


def print_interrupted(console: Console, sides: Sequence[Side]) -> None:
    """What there is of a comparison that Ctrl-C ended: each side's text and figures so far, and no verdict."""
    for side in sides:
        console.print(Text(one_line(side.name), TITLE))
        for line in [*sample_texts(side.result, ""), *metrics_lines(side.result, console.width), Text("")]:
            console.print(line)
    console.print(Text("interrupted: two whole runs are needed for a comparison"))


def verdict(comparison: Comparison) -> list[Text]:
    """Whether the two sides said the same, and how far apart their logits are."""
    logits = _logits_text(comparison.logits)
    if comparison.identical:
        tokens = sum(len(sample.token_ids) for sample in comparison.sides[0].result.output.outputs)
        return [Text.assemble(("✓ identical", GOOD), f": {plural(tokens, 'token')}, {logits}")]
    first = comparison.first_difference
    lines = [Text.assemble(("✗ the tokens differ", TROUBLE), f"{_where(first)}; {logits}")]
    return [*lines, *(_continuation(side, index, first) for index, side in enumerate(comparison.sides))]


def legend(comparison: Comparison) -> list[Text]:
    """One line per curve: what it does, and why."""
    return [
        Text.assemble((f"━━ {short_name(side.name)}  ", sequence_style(index)), shape_sentence(side.result.forwards))
        for index, side in enumerate(comparison.sides)
    ]


def _num_points(sides: Sequence[Side]) -> int:
    return max(len(side.result.records) for side in sides)


def _table(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    table.add_column("")
    for index, side in enumerate(comparison.sides):
        style = sequence_style(index)
        table.add_column(Text(short_name(side.name), style), header_style=f"{TITLE} {style}", min_width=10)
    table.add_column("")
    for name, show, value in _ROWS:
        left, right = (value(side.result) for side in comparison.sides)
        table.add_row(Text(name, QUIET), show(left), show(right), _ratio(name, left, right))
    return table


_ROWS = (
    ("time to first token", lambda value: with_unit(ms(value), "ms"), lambda run: run.time_to_first_token_ms),
    ("decode", lambda value: with_unit(rate(value), "tok/s"), lambda run: run.decode_tokens_per_second),
    ("last / second forward", times, lambda run: run.last_over_second),
    ("all forwards", lambda value: with_unit(ms(value), "ms"), lambda run: sum(run.forward_ms)),
    ("tokens computed", count, lambda run: run.tokens_computed),
    ("KV held", size, lambda run: run.kv_bytes_held),
)


def _ratio(name: str, left: float | None, right: float | None) -> str:
    """The faster over the slower, for decoding speed alone: the one figure that people quote."""
    if name != "decode" or not left or not right:
        return ""
    return times(right / left)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(left, right, strict=False), start=1):
        if one != other:
            return position
    return None if len(left) == len(right) else min(len(left), len(right)) + 1


def _logit_difference(left: Sequence["np.ndarray"], right: Sequence["np.ndarray"]) -> LogitDifference | None:
    import numpy as np

    pairs = list(zip(left, right, strict=False))
    if not pairs or pairs[0][0].shape != pairs[0][1].shape:
        return None
    largest = [float(np.max(np.abs(one - other))) for one, other in pairs]
    where = int(np.argmax(largest))  # a NaN counts as the largest
    same = all(one.tobytes() == other.tobytes() for one, other in pairs)
    return LogitDifference(largest[where], where + 1, len(pairs), same)


def _logits_text(logits: LogitDifference | None) -> str:
    if logits is None:
        return "logits not compared"
    if logits.same_bits:
        return "logits equal to the last bit (largest difference 0)"
    return f"largest logit difference {logits.largest:.3g} (forward {logits.forward} of {logits.forwards} compared)"


def _where(first_difference: int | None) -> str:
    return "" if first_difference is None else f" from output token {first_difference} on"


def _continuation(side: Side, index: int, position: int | None) -> Text:
    """What one side said at the first difference and how sure it was, or how much it said in all."""
    line = Text(f"  {one_line(side.name)}  ", sequence_style(index))
    if position is not None and position <= len(side.tokens):
        token = side.tokens[position - 1]
        text = quoted(token.text) if token.text else f"token {token.token_id}"
        return line.append(f"{text} (p {token.probability:.3f})", "default")
    ids = side.result.output.outputs[0].token_ids
    return line.append(f"{plural(len(ids), 'token')}, then {side.result.ending}", "default")
