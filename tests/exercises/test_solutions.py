"""A right solution of each exercise passes; each wrong one fails under the rule that names its mistake."""

import pytest

from forge.exercises import find_entry
from forge.exercises.catalog import available
from tests.exercises.mistakes import SOLVED, checked, right, wrong_ones


@pytest.mark.parametrize("name", SOLVED)
def test_a_right_solution_passes(name, tmp_path):
    result = checked(name, right(name), tmp_path)
    assert result.passed, _said(result)


@pytest.mark.parametrize(
    "wrong",
    [wrong for name in SOLVED for wrong in wrong_ones(name)],
    ids=lambda wrong: f"{wrong.name}: {wrong.mistake}",
)
def test_a_mistake_is_named(wrong, tmp_path):
    result = checked(wrong.name, wrong.source, tmp_path)
    assert not result.passed and result.rule == wrong.rule, _said(result)
    assert result.sentence and result.found and result.question, _said(result)
    assert len(result.calls) <= 18, _said(result)


@pytest.mark.parametrize("name", SOLVED)
def test_every_exercise_has_wrong_solutions(name):
    assert len(wrong_ones(name)) >= 6


@pytest.mark.parametrize("entry", available(), ids=lambda entry: entry.name)
def test_a_template_says_what_is_not_written(entry, tmp_path):
    result = checked(entry.name, entry.template.read_text(encoding="utf-8"), tmp_path)
    assert result.rule == "unwritten", _said(result)


def test_every_exercise_that_there_is_has_a_solution():
    assert [entry.name for entry in available()] == SOLVED
    assert all(find_entry(str(entry.number)) == entry for entry in available())


def _said(result) -> str:
    return "\n".join([f"{result.rule}: {result.found}", str(result.line), *result.calls, result.before, result.after])
