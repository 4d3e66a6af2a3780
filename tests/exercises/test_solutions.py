"""Right solutions in any style pass; each wrong one fails under the rule that names its mistake.

The wrong ones are written by hand (`mistakes`) and made of the right ones (`mutation`).
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from forge import exercises
from forge.exercises import ENTRIES, find_entry
from forge.exercises.session import Result
from tests.exercises.judging import Judged, judge_all, judges
from tests.exercises.mistakes import SOLVED, Variant, right, right_ones, wrong_ones
from tests.mutation import mutants

EQUIVALENT = {
    "sampling": {"line 20: the condition is True": "a min_p of 0 keeps every token anyway"},
    "attention": {
        "line 15: reversed": "rows are independent",
        "line 17: reversed": "heads are independent",
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
        "line 56: reversed": "references are counted in any order",
    },
    "prefix_index": {"line 45: reversed": "the lost blocks come in any order"},
    "scheduler": {
        "line 11: reversed": "decodes come in any order",
        "line 19: reversed": "there is one prompt under way at most",
        "line 19: only the first time": "there is one prompt under way at most",
        "line 19: without 'if plan.budget <= 0:'": "decodes leave something to one prompt",
        "line 20: the condition is False": "decodes leave something to one prompt",
        "line 20: LtE is Lt": "decodes leave something to one prompt",
        "line 20: 0 is -1": "decodes leave something to one prompt",
        "line 20: without 'break'": "decodes leave something to one prompt",
        "line 21: continue": "there is one prompt under way at most",
        "line 25: without 'return None'": "None is returned anyway",
    },
    "preemption": {"line 10: max is the other": "the policy is the reader's"},
    "streaming_text": {
        "line 26: reversed": "a minimum",
        "line 33: 0 is -1": "a slice ends at the end",
        "line 34: reversed": "a maximum",
        "line 35: reversed": "a maximum",
        "line 35: 1 is 0": "every text ends with an empty one",
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


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_rule_has_its_words_and_is_checked_somewhere(entry):
    folder = Path(exercises.__file__).parent
    sources = "".join((folder / f"{name}.py").read_text("utf-8") for name in (entry.name, "trials"))
    exercise = entry.exercise()
    assert [name for name in exercise.rules if f'"{name}"' not in sources] == []
    assert all(rule.sentence and rule.question.endswith("?") for rule in exercise.rules.values())
    assert exercise.hints and exercise.solution and exercise.differs and exercise.next_question


@dataclass(frozen=True)
class Judgements:
    """What the checks say of one in `share` of all solutions."""

    share: int
    judged: dict[tuple[str, str], Judged]

    def of(self, name: str, source: str) -> Result:
        judgement = self.judged[name, source]
        assert isinstance(judgement, Result), judgement
        return judgement


def _right(name: str, share: int) -> list[Variant]:
    return right_ones(name)[::share]


def _wrong(name: str, share: int) -> list[Variant]:
    return wrong_ones(name)[::share]


def _mutants(name: str, share: int) -> list[tuple[str, str]]:
    return list(mutants(right(name)))[share // 6 :: share]


@pytest.fixture(scope="module", params=[60, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def judgements(request) -> Judgements:
    share = request.param
    sources = {(entry.name, entry.template.read_text(encoding="utf-8")) for entry in ENTRIES}
    for name in SOLVED:
        sources |= {(name, solution.source) for solution in (*_right(name, share), *_wrong(name, share))}
        sources |= {(name, source) for _, source in _mutants(name, share)} | {(name, right(name))}
    ordered = sorted(sources)
    with judges() as pool:
        return Judgements(share, dict(zip(ordered, judge_all(pool, ordered), strict=True)))


@pytest.mark.parametrize("name", SOLVED)
def test_a_right_solution_passes_in_any_style(name, judgements):
    result = judgements.of(name, right(name))
    assert result.passed, _said(result)
    assert set(result.functions.values()) == {"right"}
    results = {variant.what: judgements.of(name, variant.source) for variant in _right(name, judgements.share)}
    assert results and not [(what, _said(result)) for what, result in results.items() if not result.passed]


@pytest.mark.parametrize("name", SOLVED)
def test_mistakes_are_named(name, judgements):
    mistakes = _wrong(name, judgements.share)
    assert mistakes
    for wrong in mistakes:
        result = judgements.of(name, wrong.source)
        assert not result.passed and result.rule == wrong.rule, (wrong.what, _said(result))
        assert result.sentence and result.found and result.question, (wrong.what, _said(result))
        assert len(result.calls) <= 18, (wrong.what, _said(result))


@pytest.mark.parametrize("name", SOLVED)
def test_a_mutant_is_caught_unless_it_is_listed_as_right(name, judgements):
    tried = _mutants(name, judgements.share)
    assert tried
    survivors = {what for what, source in tried if judgements.of(name, source).passed}
    assert survivors == {what for what, _ in tried if what in EQUIVALENT.get(name, {})}


@pytest.mark.parametrize("name", SOLVED)
def test_every_exercise_has_25_wrong_solutions_and_some_right_ones(name):
    made = [what for what, _ in mutants(right(name)) if what not in EQUIVALENT.get(name, {})]
    assert len(made) >= 25 and len(wrong_ones(name)) >= 20 and len(right_ones(name)) >= 3


@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_is_listed_as_right_is_a_mutant(name):
    assert EQUIVALENT[name].keys() <= {what for what, _ in mutants(right(name))}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_template_says_what_is_not_written(entry, judgements):
    result = judgements.of(entry.name, entry.template.read_text(encoding="utf-8"))
    assert result.rule == "unwritten", _said(result)
    assert all(name in result.found for name in entry.exercise().functions)


def test_every_exercise_that_there_is_has_a_solution():
    assert [entry.name for entry in ENTRIES] == SOLVED
    assert all(find_entry(str(entry.number)) == entry for entry in ENTRIES)


def _said(result: Result) -> str:
    return "\n".join([f"{result.rule}: {result.found}", str(result.line), *result.calls, result.before, result.after])
