"""A chapter's text as data: prose and the directives between it, and the steps in which it is read.

A directive is a fenced block whose info string begins with `forge`; `chapters/README.md` describes each kind. What is
wrong with one is said with the line of the file on which it stands.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forge.book.measured import expressions_in, names_in
from forge.errors import ForgeError

_FENCE = re.compile(r"^(`{3,}|~{3,})\s*(.*?)\s*$")
_TITLE = re.compile(r"^# (?:\d+ · )?(.+)$")
_CHOICE = re.compile(r"^- (?P<text>.+), if (?P<condition>.+)$")
_KEY = re.compile(r"^(?P<key>[a-z]+): *(?P<value>.*)$")


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


@dataclass(frozen=True)
class Source:
    """A definition of the engine to show."""

    dotted: str
    light: tuple[str, ...] = ()
    start: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Choice:
    text: str
    condition: str
    """An expression that is true where this is the right one. The first such choice is."""


@dataclass(frozen=True)
class Predict:
    """A question that is asked before what answers it is shown."""

    question: str
    answer: str
    """A number, as one placeholder: `{{climb.last_over_second:times}}`. Empty where there are choices."""
    choices: tuple[Choice, ...]
    why: str
    """What is said once the answer is known."""

    def names(self) -> set[str]:
        """The runs that its answer depends on."""
        expressions = [choice.condition for choice in self.choices] or expressions_in(self.answer)
        return set().union(*map(names_in, expressions))


@dataclass(frozen=True)
class Verdict:
    """Where a prediction is held against what was measured. Not written in a text: it follows from where its run is."""

    predict: Predict


@dataclass(frozen=True)
class Claim:
    sentence: str
    expression: str


@dataclass(frozen=True)
class Check:
    """Sentences held against what was just measured."""

    claims: tuple[Claim, ...]
    certain: bool
    """They follow from how the engine works, so one that does not hold is a bug. Otherwise they are about time, and a
    busy machine may make them untrue."""


Block = Prose | Run | Source | Predict | Verdict | Check
Step = tuple[Block, ...]
"""What is read in one go: a pause follows it, or a question that it ends with."""


@dataclass(frozen=True)
class Chapter:
    title: str
    blocks: tuple[Block, ...]
    """In the order of the text, verdicts where they are due."""

    def runs(self) -> tuple[Run, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Run))

    def steps(self) -> tuple[Step, ...]:
        """A step begins at each heading of the second level, at each run, and after each question."""
        steps: list[list[Block]] = [[]]
        for block in self.blocks:
            starts = isinstance(block, Run) or (isinstance(block, Prose) and block.text.startswith("## "))
            if (starts or _ends(steps[-1])) and steps[-1]:
                steps.append([])
            steps[-1].append(block)
        return tuple(tuple(step) for step in steps if step)


def parse_chapter(text: str, name: str = "chapter") -> Chapter:
    """`name` is the file's, for messages. Raises `ChapterError` with the line that is wrong."""
    lines = text.splitlines()
    title = _TITLE.match(lines[0]) if lines else None
    if title is None:
        raise ChapterError(f"{name}:1: a chapter begins with its title, such as '# 1 · A forward pass'")
    try:
        blocks = list(_blocks(lines[1:]))
    except _WrongLine as wrong:
        raise ChapterError(f"{name}:{wrong.line + 2}: {wrong.message}") from None
    names = [block.name for block in blocks if isinstance(block, Run) and block.name]
    for block in blocks:
        unknown = sorted(names_of(block) - set(names))
        if unknown:
            raise ChapterError(f"{name}: no run is called {unknown[0]!r}; there are {', '.join(names) or 'none'}")
    return Chapter(title[1], tuple(_with_verdicts(blocks)))


def names_of(block: Block) -> set[str]:
    """The runs that what `block` says depends on."""
    return set().union(*map(names_in, expressions_of(block)))


def expressions_of(block: Block) -> list[str]:
    """Every expression in `block`, those in its texts included."""
    if isinstance(block, Predict):
        texts = [block.question, block.answer, block.why, *(choice.text for choice in block.choices)]
        expressions = [choice.condition for choice in block.choices]
    elif isinstance(block, Check):
        texts = [claim.sentence for claim in block.claims]
        expressions = [claim.expression for claim in block.claims]
    else:
        texts, expressions = ([block.text] if isinstance(block, Prose) else []), []
    return [*expressions, *(expression for text in texts for expression in expressions_in(text))]


class _WrongLine(Exception):
    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line, self.message = line, message


def _ends(step: Sequence[Block]) -> bool:
    return bool(step) and isinstance(step[-1], Predict)


def _with_verdicts(blocks: Sequence[Block]) -> Iterator[Block]:
    """Each prediction's verdict after the last of the runs that it depends on, or at once if they are all over."""
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
        end = _closing(lines, index, fence[1])
        kind, *words = fence[2].split() or [""]
        if kind == "forge":
            yield from _prose(prose)
            prose = []
            yield _directive(words, lines[index + 1 : end], index)
        else:
            prose.extend(lines[index : end + 1])
        index = end + 1
    yield from _prose(prose)


def _closing(lines: Sequence[str], opening: int, fence: str) -> int:
    for index in range(opening + 1, len(lines)):
        if lines[index].strip() == fence:
            return index
    raise _WrongLine(opening, "this fence is never closed")


def _prose(lines: Sequence[str]) -> Iterator[Prose]:
    text = "\n".join(lines).strip("\n")
    if text:
        yield Prose(text)


def _directive(words: Sequence[str], body: Sequence[str], line: int) -> Block:
    kinds: dict[str, Callable[[Sequence[str], Sequence[str]], Block]]
    kinds = {"run": _run, "source": _source, "predict": _predict, "check": _check, "expect": _check}
    if not words or words[0] not in kinds:
        raise _WrongLine(line, f"unknown directive {' '.join(words)!r}; there are {', '.join(kinds)}")
    if words[0] != "run" and len(words) > 1:
        raise _WrongLine(line, f"{words[0]} takes no name")
    try:
        return kinds[words[0]](words, body)
    except ValueError as error:
        raise _WrongLine(line, str(error)) from None
    except SyntaxError as error:
        raise _WrongLine(line, f"not an expression: {(error.text or '').strip()}") from None


def _run(words: Sequence[str], body: Sequence[str]) -> Run:
    commands = [text for text in body if text.strip()]
    if len(commands) != 1 or shlex.split(commands[0])[:1] != ["forge"]:
        raise ValueError("a run is one command line that begins with forge")
    _, *names = words
    if len(names) > 1 or not all(name.isidentifier() for name in names):
        raise ValueError("a run's name is one word")
    return Run(names[0] if names else "", commands[0].strip())


def _source(words: Sequence[str], body: Sequence[str]) -> Source:
    keys: dict[str, list[str]] = {"light": [], "from": [], "to": []}
    dotted = [text.strip() for text in body[:1]]
    if not dotted or not dotted[0]:
        raise ValueError("a source begins with a dotted name")
    for text in body[1:]:
        found = _KEY.match(text)
        if text.strip() and (found is None or found["key"] not in keys):
            raise ValueError(f"{text.strip()!r} is not one of light, from and to")
        if found:
            keys[found["key"]].append(found["value"])
    if len(keys["from"]) > 1 or len(keys["to"]) > 1:
        raise ValueError("a source has one beginning and one end")
    return Source(dotted[0], tuple(keys["light"]), *(keys[key][0] if keys[key] else None for key in ("from", "to")))


def _predict(words: Sequence[str], body: Sequence[str]) -> Predict:
    question: list[str] = []
    choices: list[Choice] = []
    keys: dict[str, list[str]] = {}
    last: list[str] = question
    for text in body:
        found, choice = _KEY.match(text), _CHOICE.match(text)
        if found and found["key"] in ("answer", "why"):
            last = keys.setdefault(found["key"], [])
            last.append(found["value"])
        elif choice and last is question:
            names_in(choice["condition"])
            choices.append(Choice(choice["text"], choice["condition"]))
        else:
            last.append(text)
    answer = " ".join(keys.get("answer", [])).strip()
    if bool(answer) == bool(choices):
        raise ValueError("a prediction has an answer, or choices of which each ends with ', if CONDITION'")
    if answer and len(expressions_in(answer)) != 1:
        raise ValueError("an answer is one placeholder, such as {{climb.last_over_second:times}}")
    return Predict(_paragraph(question), answer, tuple(choices), _paragraph(keys.get("why", [])))


def _check(words: Sequence[str], body: Sequence[str]) -> Check:
    claims: list[Claim] = []
    sentence: list[str] = []
    for text in body:
        if text.startswith("    "):
            names_in(text)
            claims.append(Claim(" ".join(sentence), text.strip()))
            sentence = []
        elif text.strip():
            sentence.append(text.strip())
    if sentence or not claims or not all(claim.sentence for claim in claims):
        raise ValueError("a check is sentences, each followed by an expression that is indented by four spaces")
    return Check(tuple(claims), certain=words[0] == "check")


def _paragraph(lines: Sequence[str]) -> str:
    return "\n".join(lines).strip()
