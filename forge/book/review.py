"""Questions that a reader answered wrong, asked again from the next day on until the answer is right.

Only questions that ask about no run: the ones of "Test yourself", and what a chapter asks before it explains.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta

from forge.book.catalog import Entry
from forge.book.chapter import Predict
from forge.book.progress import Progress
from forge.book.session import Guess, right_answer

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
