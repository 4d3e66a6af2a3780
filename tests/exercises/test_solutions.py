"""Right solutions in any style pass; each wrong one fails under the rule that names its mistake.

The wrong ones are written by hand (`mistakes`) and made of the right ones (`mutation`): all of the latter with
FORGE_ALL_TESTS, else every few of them.
"""

import os

import pytest

from forge.exercises import find_entry
from forge.exercises.catalog import available
from forge.exercises.result import Result
from tests.exercises.judging import Judged, judge_all, judges
from tests.exercises.mistakes import SOLVED, right, right_ones, wrong_ones
from tests.exercises.mutation import mutants

ALL = bool(os.environ.get("FORGE_ALL_TESTS"))
SHARE = 30
"""Of so many wrong solutions one is checked without FORGE_ALL_TESTS."""

EQUIVALENT = {
    "sampling": {"line 20: the condition is True": "a min_p of 0 keeps every token anyway"},
    "attention": {
        "line 15: reversed": "rows are independent",
        "line 17: reversed": "heads are independent",
    },
    "contiguous_cache": {
        "line 30: arguments exchanged": "a minimum",
        "line 31: arguments exchanged": "a minimum",
    },
    "block_pool": {
        "line 6: without 'self.num_blocks = num_blocks'": "the base has set it",
        "line 6: without 'self.reference_counts = [0] * num_blocks'": "the base has set it",
        "line 6: without 'self.num_references = 0'": "the base has set it",
        "line 6: without 'self.free = list(range(num_blocks - 1, -1, -1))'": "the base has set it",
        "line 17: reversed": "the same number of blocks",
        "line 44: reversed": "a sum over tables",
        "line 45: reversed": "a sum over blocks",
    },
    "paged_cache": {
        "line 45: arguments exchanged": "a minimum",
        "line 46: arguments exchanged": "a minimum",
        "line 56: reversed": "references are counted in any order",
    },
    "prefix_index": {"line 45: reversed": "the lost blocks come in any order"},
    "scheduler": {"line 19: reversed": "there is one prompt under way at most"},
    "preemption": {"line 10: max is the other": "the policy is the reader's"},
    "streaming_text": {
        "line 26: reversed": "a minimum",
        "line 33: 0 is -1": "a slice ends at the end",
        "line 34: reversed": "a maximum",
        "line 35: reversed": "a maximum",
        "line 35: 1 is 0": "every text ends with an empty one",
        "line 37: arguments exchanged": "a maximum",
    },
    "grammar_mask": {
        "line 7: without \"if depth == 0 and last != '':\"": "what follows refuses each character, too",
        "line 8: the condition is False": "what follows refuses each character, too",
        "line 8: without 'return None'": "what follows refuses each character, too",
        "line 8: 0 is -1": "what follows refuses each character, too",
    },
    "ngram_proposer": {
        "line 13: the condition is True": "a proposal of no token is no proposal",
        "line 18: 1 is 2": "no n-gram begins before the text",
        "line 19: without 'while following and len(following) < max_tokens:'": "fewer may be proposed",
        "line 21: the condition is False": "fewer may be proposed",
        "line 21: without operand 0": "something always follows an earlier occurrence",
        "line 21: Lt is Gt": "fewer may be proposed",
    },
}
"""Mutants that do what the right solution does, or something else that is right, and why."""


def _is_checked(number: int) -> bool:
    return ALL or number % SHARE == 0


WRONG = [(name, wrong) for name in SOLVED for number, wrong in enumerate(wrong_ones(name)) if _is_checked(number)]
RIGHT = [(name, variant) for name in SOLVED for number, variant in enumerate(right_ones(name)) if _is_checked(number)]
MUTANTS = [
    (name, what, source)
    for name in SOLVED
    for number, (what, source) in enumerate(mutants(right(name)))
    if _is_checked(number + 5)
]


@pytest.fixture(scope="module")
def judged() -> dict[tuple[str, str], Judged]:
    """What the checks say of all solutions of this file, by exercise and source."""
    sources = {(name, right(name)) for name in SOLVED}
    sources |= {(name, variant.source) for name, variant in (*WRONG, *RIGHT)}
    sources |= {(name, source) for name, _, source in MUTANTS}
    sources |= {(entry.name, entry.template.read_text(encoding="utf-8")) for entry in available()}
    ordered = sorted(sources)
    with judges() as pool:
        return dict(zip(ordered, judge_all(pool, ordered), strict=True))


def _result(judgement: Judged) -> Result:
    assert isinstance(judgement, Result), judgement
    return judgement


@pytest.mark.parametrize("name", SOLVED)
def test_a_right_solution_passes(name, judged):
    result = _result(judged[name, right(name)])
    assert result.passed, _said(result)
    assert set(result.functions.values()) == {"right"}


@pytest.mark.parametrize(("name", "variant"), RIGHT, ids=lambda value: getattr(value, "what", value))
def test_a_right_solution_in_another_style_passes(name, variant, judged):
    result = _result(judged[name, variant.source])
    assert result.passed, _said(result)


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda value: getattr(value, "what", value))
def test_a_mistake_is_named(name, wrong, judged):
    result = _result(judged[name, wrong.source])
    assert not result.passed and result.rule == wrong.rule, _said(result)
    assert result.sentence and result.found and result.question, _said(result)
    assert len(result.calls) <= 18, _said(result)


@pytest.mark.parametrize("name", SOLVED)
def test_a_mutant_is_caught_unless_it_is_listed_as_right(name, judged):
    survivors = {what for of, what, source in MUTANTS if of == name and _result(judged[of, source]).passed}
    expected = {what for of, what, _ in MUTANTS if of == name and what in EQUIVALENT.get(name, {})}
    assert survivors == expected


@pytest.mark.parametrize("name", SOLVED)
def test_every_exercise_has_25_wrong_solutions_and_some_right_ones(name):
    made = [what for what, _ in mutants(right(name)) if what not in EQUIVALENT.get(name, {})]
    assert len(made) >= 25 and len(wrong_ones(name)) >= 20 and len(right_ones(name)) >= 3


@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_is_listed_as_right_is_a_mutant(name):
    assert EQUIVALENT[name].keys() <= {what for what, _ in mutants(right(name))}


@pytest.mark.parametrize("entry", available(), ids=lambda entry: entry.name)
def test_a_template_says_what_is_not_written(entry, judged):
    result = _result(judged[entry.name, entry.template.read_text(encoding="utf-8")])
    assert result.rule == "unwritten", _said(result)
    assert all(name in result.found for name in entry.exercise().functions)


def test_every_exercise_that_there_is_has_a_solution():
    assert [entry.name for entry in available()] == SOLVED
    assert all(find_entry(str(entry.number)) == entry for entry in available())


def _said(result: Result) -> str:
    return "\n".join([f"{result.rule}: {result.found}", str(result.line), *result.calls, result.before, result.after])
