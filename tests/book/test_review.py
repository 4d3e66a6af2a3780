from datetime import date

import pytest

from forge.book.catalog import entries, find
from forge.book.progress import Progress, due, load_progress, note_answers, questions, save_progress, settle
from forge.book.session import Guess

TODAY, TOMORROW = date(2026, 11, 23), date(2026, 11, 24)


@pytest.fixture
def wrong() -> Progress:
    """A reader who got the first question of chapter 4 wrong, and the second right."""
    first, second, *_ = questions((find("4"),))
    progress = Progress()
    guesses = {first.predict: Guess("1", (first.right + 1) % 3), second.predict: Guess("1", second.right)}
    note_answers(progress, find("4"), guesses, TODAY)
    return progress


def test_every_chapter_tests_its_reader_and_each_question_has_a_right_answer():
    for entry in entries():
        own = questions((entry,))
        assert len(own) >= 3 and "## Test yourself" in entry.path.read_text(encoding="utf-8")
        assert all(0 <= question.right < len(question.predict.choices) for question in own)
        assert len({question.right for question in own}) > 1, "the right answer stands at different places"


def test_what_was_wrong_is_asked_the_next_day_and_not_before(wrong):
    assert len(wrong.review) == 1
    assert list(due(wrong, entries(), TODAY)) == []
    assert [question.key for question in due(wrong, entries(), TOMORROW)] == list(wrong.review)


def test_a_right_answer_settles_a_question_and_a_wrong_one_puts_it_off_by_a_day(wrong):
    (question,) = due(wrong, entries(), TOMORROW)
    assert not settle(wrong, question, Guess("1", (question.right + 1) % 3), TOMORROW)
    assert list(due(wrong, entries(), TOMORROW)) == []
    assert settle(wrong, question, Guess("1", question.right), date(2026, 11, 25)) and wrong.review == {}


def test_the_command_asks_and_remembers(forge, wrong, monkeypatch, state_home):
    assert "Nothing to review today" in forge("review").out
    (key,) = wrong.review
    wrong.review[key] = "2026-01-01"
    save_progress(wrong)
    (question,) = due(wrong, entries(), TODAY)
    answers = iter(["9", str(question.right + 1)])
    monkeypatch.setattr("forge.views.keys.read_line", lambda prompt: next(answers))
    out = " ".join(forge("review").out.split())
    assert question.predict.question in out and "That should be one of 1, 2, 3." in out and "1 of 1 right." in out
    assert load_progress().review == {}
