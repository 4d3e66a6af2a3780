"""A chapter's text as data: prose and the directives between it, and the steps in which it is read.

A directive is a fenced block whose info string begins with `forge`; `chapters/README.md` describes each kind. What is
wrong with one is said with the line of the file on which it stands.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from forge.book.measured import check_expression, expressions_in, names_in
from forge.book.source_code import Span
from forge.errors import ForgeError

_FENCE = re.compile(r"^(`{3,}|~{3,})\s*(.*?)\s*$")
_TITLE = re.compile(r"^# (?:\d+ · )?(.+)$")
_CHOICE = re.compile(r"^- (?P<text>.+), (?:if (?P<condition>.+)|(?P<word>otherwise|never))$")
_KEY = re.compile(r"^(?P<key>[a-z]+): *(?P<value>.*)$")


ANSWER = "answer"
"""Name of the answer's number in the conditions and texts of a prediction's outcomes."""
GIVEN = ("machine", "model", "given")
"""Facts that are there without a run (`session.Session.measured`)."""


class ChapterError(ForgeError):
    """A chapter's text is not well formed."""


@dataclass(frozen=True)
class Prose:
    """Markdown, with placeholders for what runs measure."""

    text: str


@dataclass(frozen=True)
class Run:
    """A command to run, and the name by which the rest of the chapter knows what it measured."""

    name: str
    command: str
    """As a reader would type it: `forge naive --only run "Once upon a time" 128`."""
    condition: str = ""
    """An expression over `GIVEN`. Where it does not hold, the command is not run, and what depends on it is not
    shown."""
    unclaimed: str = ""
    """The text in its place where the condition does not hold."""


@dataclass(frozen=True)
class Source:
    """A definition of the engine to show."""

    dotted: str
    light: tuple[str, ...] = ()
    spans: tuple[Span, ...] = (Span(),)
    omitted: str = ""
    """A few words about what is left out after the last span."""


@dataclass(frozen=True)
class Outcome:
    """A sentence for one way in which a run can turn out."""

    condition: str | None
    """An expression. None: whenever no condition before it holds."""
    text: str


@dataclass(frozen=True)
class Choice:
    """One answer of a multiple-choice question."""

    text: str
    condition: str | None
    """An expression that is true where this is the right one. None: whenever no other is. `False`: never."""
    why: str = ""
    """The explanation if it is the right one."""


@dataclass(frozen=True)
class Predict:
    """A question that the reader answers before the page shows the answer."""

    question: str
    answer: str
    """A number, as one placeholder: `{{climb.last_over_second:times}}`. Empty where there are choices."""
    choices: tuple[Choice, ...]
    why: str
    """The explanation that is true of every run; it follows the outcome."""
    outcomes: tuple[Outcome, ...] = ()
    """The first whose condition holds is said once the answer is known."""
    restated: str = ""
    """The question as its verdict repeats it; by default its sentences that end with a question mark."""
    untold: str = ""
    """The text if the run does not tell the answer."""
    condition: str = ""
    """An expression. Where it does not hold, the run does not tell."""

    @property
    def expression(self) -> str:
        """The expression that computes a numeric answer."""
        return expressions_in(self.answer)[0]

    @property
    def short_question(self) -> str:
        sentences = re.split(r"(?<=[.?!])\s+", self.question)
        asking = [sentence for sentence in sentences if sentence.endswith("?")]
        return self.restated or " ".join(asking) or self.question

    def names(self) -> set[str]:
        """Return the names of the runs that its answer depends on."""
        conditions = [self.condition, *(choice.condition for choice in self.choices)]
        conditions += [outcome.condition for outcome in self.outcomes]
        expressions = [*filter(None, conditions), *expressions_in(self.answer)]
        return set().union(*map(names_in, expressions)) - {ANSWER, *GIVEN}


@dataclass(frozen=True)
class Verdict:
    """Compares a prediction with what was measured. It is not in the text: its place follows from the prediction's
    runs."""

    predict: Predict


@dataclass(frozen=True)
class Finding:
    """A statement about a run: the first outcome whose condition holds."""

    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Claim:
    """A statement of a page that is held against the run on the same page."""

    sentence: str
    expression: str
    otherwise: str = ""
    """The text if the expression does not hold."""
    condition: str = ""
    """An expression. Where it does not hold the sentence is not claimed."""
    unclaimed: str = ""
    """The text if the condition does not hold."""


@dataclass(frozen=True)
class Check:
    """Claims that are checked against what was just measured."""

    claims: tuple[Claim, ...]
    certain: bool
    """Whether the claims follow from how the engine works, so that one that does not hold is a bug. Otherwise they are
    about time, and a busy machine may make them untrue."""


@dataclass(frozen=True)
class Recap:
    """The end of a chapter. The pager adds the reader's score and where to go on."""

    lines: tuple[str, ...] = ()
    """What to remember, in sentences."""
    commands: tuple[str, ...] = ()
    """What to run next."""


RECAP_LINES = 5
Block = Prose | Run | Source | Predict | Verdict | Finding | Check | Recap
Step = tuple[Block, ...]
"""The blocks that are read in one go: a pause follows, or the question that they end with."""


@dataclass(frozen=True)
class Chapter:
    """A chapter of the book: its pages, in order."""

    title: str
    blocks: tuple[Block, ...]
    """Its blocks in the order of the text, verdicts where they are due, the recap last."""

    @property
    def names(self) -> set[str]:
        """Everything that its text refers to: runs, and the names of `GIVEN` that it needs."""
        expressions = [expression for block in self.blocks for expression in expressions_of(block)]
        return set().union(*map(names_in, expressions)) - {ANSWER}

    def runs(self) -> tuple[Run, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Run))

    def steps(self) -> tuple[Step, ...]:
        """Split the blocks into steps: one begins at each heading of level two, each run, the recap, and after each
        question."""
        steps: list[list[Block]] = [[]]
        for block in self.blocks:
            starts = isinstance(block, Run | Recap) or (isinstance(block, Prose) and block.text.startswith("## "))
            if steps[-1] and (starts or isinstance(steps[-1][-1], Predict)):
                steps.append([])
            steps[-1].append(block)
        return tuple(tuple(step) for step in steps if step)


def parse_chapter(text: str, name: str = "chapter") -> Chapter:
    """Parse a chapter's text. `name` is the file's, for messages. Raises `ChapterError` with the wrong line."""
    lines = text.splitlines()
    title = _TITLE.match(lines[0]) if lines else None
    if title is None:
        raise ChapterError(f"{name}:1: a chapter begins with its title, such as '# 1 · A forward pass'")
    try:
        blocks = list(_blocks(lines[1:]))
    except _WrongLine as wrong:
        raise ChapterError(f"{name}:{wrong.line + 2}: {wrong.message}") from None
    except SyntaxError as error:
        raise ChapterError(f"{name}: not an expression: {(error.text or '').strip()}") from None
    names = [block.name for block in blocks if isinstance(block, Run) and block.name]
    taken = sorted({ANSWER, *GIVEN} & set(names))
    if taken:
        raise ChapterError(f"{name}: no run can be called {taken[0]!r}: this name is taken")
    for block in blocks:
        unknown = sorted(names_of(block) - set(names))
        if unknown:
            raise ChapterError(f"{name}: no run is called {unknown[0]!r}; there are {', '.join(names) or 'none'}")
    recaps = [block for block in blocks if isinstance(block, Recap)]
    if len(recaps) > 1:
        raise ChapterError(f"{name}: a chapter has one recap, and this one has {len(recaps)}")
    body = [block for block in blocks if not isinstance(block, Recap)]
    return Chapter(title[1], (*_with_verdicts(body), *(recaps or [Recap()])))


def names_of(block: Block) -> set[str]:
    """Return the names of the runs that `block` depends on."""
    return set().union(*map(names_in, expressions_of(block))) - {ANSWER, *GIVEN}


def expressions_of(part: Any) -> list[str]:
    """Return every expression in a block or a part of one: its conditions, and the placeholders in its texts."""
    if isinstance(part, str):
        return expressions_in(part)
    if isinstance(part, tuple):
        return [expression for item in part for expression in expressions_of(item)]
    if not is_dataclass(part) or isinstance(part, Verdict):
        return []
    held = {field.name: getattr(part, field.name) for field in fields(part)}
    conditions = [held.pop(name, None) for name in ("condition", "expression")]
    return [*filter(None, conditions), *expressions_of(tuple(held.values()))]


class _WrongLine(Exception):
    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line, self.message = line, message


def _with_verdicts(blocks: Sequence[Block]) -> Iterator[Block]:
    """Insert each prediction's verdict after the last run that it depends on, or at once if none follows."""
    open_predictions: list[tuple[Predict, set[str]]] = []
    over: set[str] = set()
    for block in blocks:
        yield block
        if isinstance(block, Predict):
            open_predictions.append((block, block.names()))
        elif isinstance(block, Run):
            over.add(block.name)
        due = [entry for entry in open_predictions if entry[1] <= over]
        for entry in due:
            open_predictions.remove(entry)
            yield Verdict(entry[0])


def _blocks(lines: Sequence[str]) -> Iterator[Block]:
    prose: list[str] = []
    index = 0
    while index < len(lines):
        fence = _FENCE.match(lines[index])
        if fence is None:
            if lines[index].startswith("## "):
                yield from _prose(prose)
                prose = []
            prose.append(lines[index])
            index += 1
            continue
        end = next((place for place in range(index + 1, len(lines)) if lines[place].strip() == fence[1]), None)
        if end is None:
            raise _WrongLine(index, "this fence is never closed")
        kind, *words = fence[2].split() or [""]
        if kind == "forge":
            yield from _prose(prose)
            prose = []
            yield _directive(words, lines[index + 1 : end], index)
        else:
            prose.extend(lines[index : end + 1])
        index = end + 1
    yield from _prose(prose)


def _prose(lines: Sequence[str]) -> Iterator[Prose]:
    text = "\n".join(lines).strip("\n")
    if text:
        block = Prose(text)
        names_of(block)
        yield block


def _directive(words: Sequence[str], body: Sequence[str], line: int) -> Block:
    kinds: dict[str, Callable[[Sequence[str]], Block]]
    kinds = {
        "run": partial(_run, words[1:]), "source": _source, "predict": _predict, "finding": _finding,
        "check": partial(_check, True), "expect": partial(_check, False), "recap": _recap,
    }  # fmt: skip
    if not words or words[0] not in kinds:
        raise _WrongLine(line, f"unknown directive {' '.join(words)!r}; there are {', '.join(kinds)}")
    if words[0] != "run" and len(words) > 1:
        raise _WrongLine(line, f"{words[0]} takes no name")
    try:
        block = kinds[words[0]](body)
        names_of(block)
    except ValueError as error:
        raise _WrongLine(line, str(error)) from None
    except SyntaxError as error:
        raise _WrongLine(line, f"not an expression: {(error.text or '').strip()}") from None
    return block


def _run(names: Sequence[str], body: Sequence[str]) -> Run:
    commands: list[str] = []
    keys = {"if": "", "else": ""}
    for text in filter(str.strip, body):
        match = _KEY.match(text)
        if match and match["key"] in keys:
            keys[match["key"]] = match["value"]
        else:
            commands.append(text)
    if len(commands) != 1 or shlex.split(commands[0])[:1] != ["forge"]:
        raise ValueError("a run is one command line that begins with forge")
    if len(names) > 1 or not all(name.isidentifier() for name in names):
        raise ValueError("a run's name is one word")
    if bool(keys["if"]) != bool(keys["else"]):
        raise ValueError("a run's 'if: CONDITION' has an 'else: SENTENCE' for where it is left out")
    return Run(names[0] if names else "", commands[0].strip(), keys["if"], keys["else"])


def _source(body: Sequence[str]) -> Source:
    dotted = [text.strip() for text in body[:1]]
    if not dotted or not dotted[0]:
        raise ValueError("a source begins with a dotted name")
    light: list[str] = []
    spans: list[Span] = []
    omitted = ""
    for text in filter(str.strip, body[1:]):
        match = _KEY.match(text)
        if match is None or match["key"] not in ("light", "from", "to", "omit"):
            raise ValueError(f"{text.strip()!r} is not one of light, from, to and omit")
        key, value = match["key"], match["value"]
        if key == "light":
            light.append(value)
        elif key == "omit":
            omitted = value
        elif key == "from" or not spans:
            spans.append(Span(value if key == "from" else None, value if key == "to" else None, omitted))
            omitted = ""
        elif spans[-1].stop is None:
            spans[-1] = replace(spans[-1], stop=value)
        else:
            raise ValueError("each 'to' but the first follows a 'from'")
    if any(span.stop is None for span in spans[:-1]):
        raise ValueError("each 'from' but the last has a 'to'")
    return Source(dotted[0], tuple(light), tuple(spans) or (Span(),), omitted)


def _entries(body: Sequence[str], keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a body at its lines `key: value`, each with the lines that follow it; what comes before has no key."""
    entries: list[tuple[str, list[str]]] = [("", [])]
    for text in body:
        match = _KEY.match(text)
        if match and match["key"] in keys:
            entries.append((match["key"], [match["value"]]))
        else:
            entries[-1][1].append(text)
    return entries


def _predict(body: Sequence[str]) -> Predict:
    entries = _entries(body, ("answer", "restated", "why", "if", "else", *_OUTCOMES))
    asked: list[str] = []
    choices: list[tuple[re.Match[str], list[str]]] = []
    for text in entries[0][1]:
        if choice := _CHOICE.match(text):
            choices.append((choice, []))
        elif choices:
            choices[-1][1].append(text.strip())
        else:
            asked.append(text)
    texts = {key: _paragraph(lines) for key, lines in entries}
    answer, condition = texts.get("answer", ""), texts.get("if", "")
    if bool(answer) == bool(choices):
        raise ValueError("a prediction has an answer, or choices of which each ends with ', if CONDITION'")
    if answer and len(expressions_in(answer)) != 1:
        raise ValueError("an answer is one placeholder, such as {{climb.last_over_second:times}}")
    if choices and [choice["word"] for choice, _ in choices].count("otherwise") != 1:
        raise ValueError("of the choices one ends with ', otherwise': it is right where no condition holds")
    if condition and "else" not in texts:
        raise ValueError("a prediction's 'if: CONDITION' has an 'else: SENTENCE' for where the run does not tell")
    why, restated, untold = (texts.get(key, "") for key in ("why", "restated", "else"))
    parsed = tuple(_choice(choice, reason) for choice, reason in choices)
    outcomes = _outcomes(entries) if {*_OUTCOMES} & {*texts} else ()
    return Predict(_paragraph(asked), answer, parsed, why, outcomes, restated, untold, condition)


def _choice(match: re.Match[str], why: Sequence[str]) -> Choice:
    condition = {"otherwise": None, "never": "False"}.get(match["word"], match["condition"])
    return Choice(match["text"], condition, _paragraph(why))


def _finding(body: Sequence[str]) -> Finding:
    entries = _entries(body, _OUTCOMES)
    if _paragraph(entries[0][1]):
        raise ValueError("a finding begins with 'when: CONDITION'")
    return Finding(_outcomes(entries))


_OUTCOMES = ("when", "otherwise")


def _outcomes(entries: Sequence[tuple[str, list[str]]]) -> tuple[Outcome, ...]:
    """Return the outcomes among the entries. The words after `when:` are a condition, and its text follows."""
    named = [(key, lines) for key, lines in entries if key in _OUTCOMES]
    if "otherwise" in [key for key, _ in named[:-1]]:
        raise ValueError("'otherwise' is the last outcome")
    if not named or named[-1][0] != "otherwise":
        raise ValueError("an 'otherwise' is missing: what is said where none of the conditions holds?")
    outcomes = []
    for key, lines in named:
        condition, text = (lines[0], lines[1:]) if key == "when" else (None, lines)
        if condition is not None:
            check_expression(condition)
        outcomes.append(Outcome(condition, _paragraph(text)))
        if not outcomes[-1].text:
            raise ValueError(f"no sentence for {condition or 'otherwise'!r}")
    return tuple(outcomes)


_OF_A_CLAIM = {"if": "condition", "else": "unclaimed", "otherwise": "otherwise"}


def _check(certain: bool, body: Sequence[str]) -> Check:
    claims: list[Claim] = []
    sentence: list[str] = []
    key = ""
    for text in body:
        match = _KEY.match(text)
        if match and match["key"] in _OF_A_CLAIM and claims and not sentence:
            key = _OF_A_CLAIM[match["key"]]
            claims[-1] = replace(claims[-1], **{key: match["value"]})
        elif text.startswith("    ") and claims and key and not sentence:
            claims[-1] = replace(claims[-1], **{key: f"{getattr(claims[-1], key)} {text.strip()}"})
        elif text.startswith("    "):
            check_expression(text)
            claims.append(Claim(" ".join(sentence), text.strip()))
            sentence, key = [], ""
        elif text.strip():
            sentence.append(text.strip())
    if sentence or not claims or not all(claim.sentence for claim in claims):
        raise ValueError("a check is sentences, each followed by an expression that is indented by four spaces")
    for claim in claims:
        if bool(claim.condition) != bool(claim.unclaimed):
            raise ValueError("a claim's 'if: CONDITION' has an 'else: SENTENCE' for where it is not claimed")
        if not certain and not claim.otherwise:
            raise ValueError(f"what is said where this is not so? {claim.sentence!r} has no 'otherwise: SENTENCE'")
    return Check(tuple(claims), certain)


def _recap(body: Sequence[str]) -> Recap:
    lines: list[str] = []
    commands: list[str] = []
    for text in filter(str.strip, body):
        match = _KEY.match(text)
        if match and match["key"] == "run":
            commands.append(match["value"])
        elif text.startswith("- "):
            lines.append(text.removeprefix("- "))
        elif lines and text.startswith("  "):
            lines[-1] += f" {text.strip()}"
        else:
            raise ValueError(f"{text.strip()!r} is neither '- A sentence.' nor 'run: forge …'")
    if not 0 < len(lines) <= RECAP_LINES:
        raise ValueError(f"a recap has 1 to {RECAP_LINES} lines, and this one has {len(lines)}")
    return Recap(tuple(lines), tuple(commands))


def _paragraph(lines: Sequence[str]) -> str:
    return "\n".join(lines).strip()
