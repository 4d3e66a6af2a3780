"""`python -m chapters.outcomes 3`: every outcome of every verdict and finding of a chapter, with facts that lead to it.

A run shows one outcome of each. To see the others, single facts of that run are varied until their conditions hold: so
each outcome is known to be reachable, and its sentences are read with numbers under which they are said.
"""

import ast
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from forge.book.catalog import find
from forge.book.chapter import ANSWER, Block, Chapter, Check, Finding, Outcome, Predict, expressions_of
from forge.book.measured import Path, Touch, Unmeasured, check_expression, evaluate, fill
from forge.book.session import chosen, explanation, right_answer
from forge.cli.chapters import new_session
from forge.views.palette import QUIET, TITLE, TROUBLE
from forge.views.terminal import open_console
from forge.views.text import one_line

TRIES = 4000
OTHERWISE = "otherwise"
_GIVEN = re.compile(r"\"(\w+)\" in given")
_NULLABLE = re.compile(r"([\w.\[\]]+) is None")
"""What an expression asks for that a run may not have."""
_CONSTANT = re.compile(r"(?<![\w.\]])\d[\d_]*\.?\d*(?:e-?\d+)?|\"[^\"]*\"|'[^']*'")


@dataclass(frozen=True)
class Rendered:
    """One outcome as a reader would see it."""

    question: str
    """Of the prediction; or the beginning of the sentence, for a finding or a claim."""
    condition: str
    """`otherwise` for the last one."""
    text: str | None
    """None where no facts were found that lead to it."""


def render_outcomes(chapter: Chapter, measured: Mapping[str, Any]) -> list[Rendered]:
    """Render every outcome. `measured`: the facts of a real run, from which the search starts; a second search assumes
    that the reader gave every option that a condition asks for."""
    rendered_blocks = [rendered for block in chapter.blocks for rendered in _rendered(block, measured)]
    if all(rendered.text is not None for rendered in rendered_blocks):
        return rendered_blocks
    expressions = " ".join(expression for block in chapter.blocks for expression in expressions_of(block))
    with_options = {**measured, "given": _GIVEN.findall(expressions)}
    again = [rendered for block in chapter.blocks for rendered in _rendered(block, with_options)]
    return [first if first.text is not None else second for first, second in zip(rendered_blocks, again, strict=True)]


def print_outcomes(console: Console, outcomes: Sequence[Rendered]) -> None:
    question = None
    for outcome in outcomes:
        if outcome.question != question:
            question = outcome.question
            console.print(Text(f"\n{question}", TITLE))
        console.print(Text(f"when {outcome.condition}" if outcome.condition != OTHERWISE else OTHERWISE, QUIET))
        shown = Text("no facts were found that lead to it", TROUBLE) if outcome.text is None else one_line(outcome.text)
        console.print(Padding(shown, (0, 0, 0, 2), expand=False))


def _rendered(block: Block, measured: Mapping[str, Any]) -> Iterator[Rendered]:
    if isinstance(block, Predict):
        yield from _of_prediction(block, measured)
    elif isinstance(block, Finding):
        for outcome in block.outcomes:
            yield _find(outcome.text[:60], block.outcomes, outcome, measured)
    elif isinstance(block, Check) and not block.certain:
        for claim in block.claims:
            if claim.otherwise:
                outcomes = (Outcome(claim.expression, claim.sentence), Outcome(None, claim.otherwise))
                yield from (_find(claim.sentence[:60], outcomes, outcome, measured) for outcome in outcomes)


def _of_prediction(predict: Predict, measured: Mapping[str, Any]) -> Iterator[Rendered]:
    question = predict.short_question
    expressions = [predict.expression] if predict.answer else []
    expressions += [predict.condition] if predict.condition else []
    expressions += [outcome.condition for outcome in predict.outcomes if outcome.condition]
    expressions += [choice.condition for choice in predict.choices if choice.condition]

    def text(touch: Touch) -> str:
        return f"{_answer(predict, measured, touch)} {explanation(predict, measured, touch)}".strip()

    def find(condition: str | None, holds: Callable[[Touch], bool]) -> Rendered:
        touch = _search(holds, expressions, _with_answer(predict, measured, _untouched))
        return Rendered(question, condition or OTHERWISE, None if touch is None else text(touch))

    def is_right(index: int) -> Callable[[Touch], bool]:
        return lambda touch: right_answer(predict, measured, touch) == index

    def is_chosen(outcome: Outcome) -> Callable[[Touch], bool]:
        return lambda touch: chosen(predict.outcomes, _with_answer(predict, measured, touch), touch) is outcome

    for index, choice in enumerate(predict.choices):
        if choice.condition != "False":
            yield find(choice.condition, is_right(index))
    for outcome in predict.outcomes:
        yield find(outcome.condition, is_chosen(outcome))
    if not predict.choices and not predict.outcomes:
        yield Rendered(question, "always", text(_untouched))


def _find(question: str, outcomes: Sequence[Outcome], outcome: Outcome, measured: Mapping[str, Any]) -> Rendered:
    conditions = [tried.condition for tried in outcomes if tried.condition]
    touch = _search(lambda touch: chosen(outcomes, measured, touch) is outcome, conditions, measured)
    text = None if touch is None else fill(outcome.text, measured, touch)
    return Rendered(question, outcome.condition or OTHERWISE, text)


def _answer(predict: Predict, measured: Mapping[str, Any], touch: Touch) -> str:
    if predict.choices:
        right = right_answer(predict, measured, touch)
        return "" if right is None else f"It is {right + 1}, {fill(predict.choices[int(right)].text, measured, touch)}."
    return f"It is {fill(predict.answer, measured, touch)}."


def _with_answer(predict: Predict, measured: Mapping[str, Any], touch: Touch) -> Mapping[str, Any]:
    return {**measured, ANSWER: right_answer(predict, measured, touch)} if predict.answer else measured


def _untouched(path: Path, value: Any) -> Any:
    return value


def _search(holds: Callable[[Touch], bool], expressions: Sequence[str], measured: Mapping[str, Any]) -> Touch | None:
    """Vary the values that the expressions read until `holds` is true; None if no variation is found."""
    if holds(_untouched):
        return _untouched
    leaves = _leaves(expressions, measured)
    nullable = _leaves([part for expression in expressions for part in _NULLABLE.findall(expression)], measured)
    constants = [_constant(text) for expression in expressions for text in _CONSTANT.findall(expression)]
    draw = random.Random(0)
    for attempt in range(TRIES):
        values = _varied(leaves, constants, draw, spread=0.1 + 3 * attempt / TRIES)
        values |= {path: None for path in nullable if draw.random() < 0.2}

        def touch(path: Path, value: Any, values: Mapping[Path, Any] = values) -> Any:
            return values.get(path, value)

        if holds(touch):
            return touch
    return None


def _leaves(expressions: Sequence[str], measured: Mapping[str, Any]) -> dict[Path, Any]:
    """Return the single values that the expressions read, by their paths."""
    read: dict[Path, Any] = {}

    def note(path: Path, value: Any) -> Any:
        if path[0] != ANSWER:
            read[path] = value
        return value

    for expression in expressions:
        for part in _parts(expression):
            with suppress(Unmeasured):
                evaluate(part, measured, note)
    return read


def _parts(expression: str) -> list[str]:
    """Return the expression and those parts of it that evaluation may skip: operands of `and` and `or`, all of a
    generator."""
    parts = [expression]
    for node in ast.walk(check_expression(expression)):
        if isinstance(node, ast.BoolOp):
            parts += map(ast.unparse, node.values)
        elif isinstance(node, ast.GeneratorExp):
            parts.append(ast.unparse(ast.ListComp(node.elt, node.generators)))
    return parts


def _varied(
    leaves: Mapping[Path, Any], constants: Sequence[Any], draw: random.Random, spread: float
) -> dict[Path, Any]:
    """Replace some leaves by other values, scaled each by its own factor or all by the same."""
    chance = draw.choice((0.2, 0.5, 1.0))
    together = 10 ** draw.uniform(-spread, spread)
    at_once = draw.random() < 0.3
    values = {}
    for path, value in leaves.items():
        if draw.random() < chance:
            factor = together if at_once else 10 ** draw.uniform(-spread, spread)
            replaced = _other(value, factor, constants, list(leaves.values()), draw)
            is_share = str(path[-1]).endswith("share") and isinstance(replaced, float)
            values[path] = min(1.0, replaced) if is_share else replaced
    return values


def _other(value: Any, factor: float, constants: Sequence[Any], values: Sequence[Any], draw: random.Random) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return draw.random() < 0.5
    if value is None:
        return draw.choice([None, 1.0, factor])
    same = [
        constant
        for constant in (*constants, *values)
        if isinstance(constant, str) == isinstance(value, str) and constant is not None
    ]
    if isinstance(value, str):
        return draw.choice([*same, "another"])
    if draw.random() < 0.2:
        return draw.choice(same) if same else value
    varied = value * factor
    return max(0, math.ceil(varied) if factor > 1 else math.floor(varied)) if isinstance(value, int) else varied


def _constant(text: str) -> Any:
    if text[0] in "\"'":
        return text[1:-1]
    number = float(text.replace("_", ""))
    return int(number) if number.is_integer() else number


def main() -> None:
    """Run a chapter's experiments and print every outcome that its text has."""
    session = new_session(find(sys.argv[1]).chapter)
    for run in session.chapter.runs():
        session.perform(run)
    print_outcomes(open_console(), render_outcomes(session.chapter, session.measured))


if __name__ == "__main__":
    main()
