"""How far a reader has come: which chapters were finished, where the last one was left, and what its runs found.

One small JSON file in the user's state folder (`$XDG_STATE_HOME/forge`, by default `~/.local/state/forge`). It is a
convenience: one that cannot be read counts as empty, one that cannot be written is not written.

`forge review` asks again what was answered wrong, from the next day on until the answer is right: only questions that
ask about no run, which are the ones of "Test yourself", and what a chapter asks before it explains.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from forge.book.catalog import Entry
from forge.book.chapter import Predict
from forge.book.session import Guess, right_answer
from forge.views.json_output import to_json
from forge.views.palette import ACCENT, GOOD, QUIET
from forge.views.screen import Part, Table, title


@dataclass
class Progress:
    """A reader's progress; chapters are named by their command."""

    pages: dict[str, int] = field(default_factory=dict)
    """The page on which a chapter was left, counted from 0."""
    finished: set[str] = field(default_factory=set)
    last: str | None = None
    """The chapter that was read last."""
    review: dict[str, str] = field(default_factory=dict)
    """Questions that were answered wrong, and the day from which on they are asked again."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """State of the last chapter, if it was left in the middle: `Session.saved`, and what identifies its text."""

    def reach(self, command: str, page: int, num_pages: int) -> None:
        """Note that the reader is on this page. The last page finishes the chapter, which then begins anew when it is
        opened."""
        self.last = command
        if page >= num_pages - 1:
            self.finished.add(command)
            self.pages.pop(command, None)
            self.session = {}
        else:
            self.pages[command] = page


def state_file(name: str = "chapters.json") -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    folder = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    return folder / "forge" / name


def write_state(name: str, state: Mapping[str, Any]) -> None:
    """Replace the file of that name in the state folder, or leave it where it cannot be written."""
    with suppress(OSError, RuntimeError):  # the latter where there is no home
        path = state_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(to_json(state), encoding="utf-8")
        written.replace(path)


def read_state(name: str) -> dict[str, Any]:
    """Return what the file of that name holds; nothing where it cannot be read."""
    try:
        state = json.loads(state_file(name).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def load_progress() -> Progress:
    saved = read_state("chapters.json")
    try:
        pages = {str(command): int(page) for command, page in saved["pages"].items()}
        last = saved["last"]
        session = dict(saved.get("session", {}))
        review = {str(key): str(day) for key, day in saved.get("review", {}).items()}
        return Progress(pages, set(map(str, saved["finished"])), None if last is None else str(last), review, session)
    except (ValueError, TypeError, AttributeError, LookupError):
        return Progress()


def save_progress(progress: Progress) -> None:
    write_state("chapters.json", vars(progress) | {"finished": sorted(progress.finished)})


def next_entry(every: Sequence[Entry], progress: Progress) -> Entry | None:
    """Return the chapter to go on with: the one left in the middle, else the first unfinished one after it, else the
    first unfinished one at all; None when all are finished."""
    commands = [entry.command for entry in every]
    last = commands.index(progress.last) if progress.last in commands else -1
    if last >= 0 and progress.last in progress.pages:
        return every[last]
    unfinished = [entry for entry in (*every[last + 1 :], *every) if entry.command not in progress.finished]
    return unfinished[0] if unfinished else None


QUESTION = "What is there to read?"


def chapter_objects(entries: Sequence[Entry], progress: Progress) -> list[dict[str, Any]]:
    """Return the list of chapters as facts. page: the page on which it was left, counted from 1; None where it was not
    begun, or read to its end since. finished: the reader has read it to its end at least once."""
    return [
        {
            "number": entry.number,
            "command": entry.command,
            "title": entry.chapter.title,
            "pages": len(entry.chapter.steps()),
            "page": progress.pages[entry.command] + 1 if entry.command in progress.pages else None,
            "finished": entry.command in progress.finished,
        }
        for entry in entries
    ]


def chapters_screen(chapters: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    yield from (title(QUESTION), None)
    shown = {"mark": lambda finished: "✓" if finished else "", "state": _state}
    columns = (": {number}", ": {finished:mark}", ": forge {command}", ": {title}", ": {:state}")
    styles = {1: GOOD, 2: ACCENT, 4: QUIET}
    yield Table.of(chapters, *columns, formats=shown, names=0, lefts=(1, 2, 3, 4), styles=styles, wraps=(3,))
    finished = sum(chapter["finished"] for chapter in chapters)
    yield from (None, f"{finished} of {len(chapters)} finished. forge next goes on where you stopped.")


def _state(chapter: Mapping[str, Any]) -> str:
    if chapter["page"] is not None:
        return f"page {chapter['page']} of {chapter['pages']}"
    return "finished" if chapter["finished"] else ""


AGAIN = timedelta(days=1)


@dataclass(frozen=True)
class Question:
    """One question of a chapter."""

    entry: Entry
    predict: Predict

    @property
    def key(self) -> str:
        """The question's key in the file."""
        return f"{self.entry.command}: {self.predict.question}"

    @property
    def right(self) -> int:
        """The index of the right choice."""
        index = right_answer(self.predict, {})
        assert isinstance(index, int), "it asks about no run"
        return index


def questions(entries: tuple[Entry, ...]) -> list[Question]:
    """List every question that can be asked without a run, in the order of the chapters."""
    asked = ((entry, block) for entry in entries for block in entry.chapter.blocks if isinstance(block, Predict))
    return [Question(entry, predict) for entry, predict in asked if predict.choices and not predict.names()]


def note_answers(progress: Progress, entry: Entry, guesses: Mapping[Predict, Guess], today: date) -> None:
    """Note which of a chapter's questions were answered wrong. A question that is already due stays due."""
    for question in questions((entry,)):
        guess = guesses.get(question.predict)
        if guess is not None and guess.value != question.right:
            progress.review.setdefault(question.key, (today + AGAIN).isoformat())


def due(progress: Progress, entries: tuple[Entry, ...], today: date) -> Iterator[Question]:
    """Return the questions to ask today."""
    for question in questions(entries):
        if progress.review.get(question.key, "9") <= today.isoformat():
            yield question


def settle(progress: Progress, question: Question, guess: Guess, today: date) -> bool:
    """Take an answer in a review: a right one removes the question, a wrong one asks it again tomorrow. Returns whether
    it was right."""
    is_right = guess.value == question.right
    if is_right:
        progress.review.pop(question.key, None)
    else:
        progress.review[question.key] = (today + AGAIN).isoformat()
    return is_right
