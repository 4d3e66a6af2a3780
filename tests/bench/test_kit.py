"""What benchmarks share: turns, comparisons, options."""

from dataclasses import dataclass

import pytest

from forge.bench.kit import Figure, at_least_one, compared, effort_of, in_turns, select
from forge.cli.options import parse_numbers
from forge.errors import UsageError


def test_contenders_take_turns_and_the_first_rounds_do_not_count():
    log = []

    def work(contender, turn):
        log.append((contender, turn))
        return contender * turn

    assert in_turns({"one": 1, "two": 10}, work, rounds=2, warm=1) == {"one": [1, 2], "two": [10, 20]}
    assert log == [(10, 0), (1, 0), (1, 1), (10, 1), (10, 2), (1, 2)]


def test_a_comparison_is_made_pair_by_pair():
    found = compared({"off": [2.0, 8.0], "on": [1.0, 2.0]})
    assert found == {"off": Figure(5.0, 2.0, 8.0, 2), "on": Figure(1.5, 1.0, 2.0, 2), "ratio": Figure(3.0, 2.0, 4.0, 2)}
    assert compared({"off": [2.0], "on": [1.0]}, faster=1)["ratio"].median == 0.5


def test_an_effort_takes_what_was_given():
    @dataclass(frozen=True)
    class Effort:
        steps: int = 60
        rounds: int = 5

    assert effort_of(Effort(), steps=3, rounds=None) == Effort(3, 5)


def test_options_without_a_meaning_are_refused_in_one_line():
    assert parse_numbers("4, 16", "--batch", "1,4,16") == [4, 16] and select("b,a", ("a", "b", "c")) == ("a", "b")
    with pytest.raises(UsageError, match=r"--batch takes numbers from 1 with commas, such as 1,4,16, and not '0'"):
        parse_numbers("0", "--batch", "1,4,16")
    with pytest.raises(UsageError, match="unknown part 'd'; there are a, b, c"):
        select("d", ("a", "b", "c"), "part")
    with pytest.raises(UsageError, match="--prompt-tokens is at least 1, and 0 is less"):
        at_least_one(prompt_tokens=0, reps=None)
