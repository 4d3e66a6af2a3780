"""A run that is repeated for its times."""

from dataclasses import replace

import pytest

from forge.experiments import repeated_run
from tests.views.records import run_of


def times(*ms: float):
    return run_of([(1, one) for one in ms])


def test_each_forward_counts_with_its_shortest_time_of_all_runs():
    later = iter([times(4.0, 9.0, 2.0), times(3.0, 8.0, 7.0)])
    result, runs = repeated_run.fastest(times(5.0, 6.0, 9.0), lambda: next(later))
    assert [forward.ms for forward in result.forwards] == [3.0, 6.0, 2.0] and runs == repeated_run.REPEATS == 3


def test_a_run_that_takes_long_is_not_repeated():
    long = times(1e3 * repeated_run.REPEAT_SECONDS / 2, 1.0)
    assert repeated_run.fastest(long, lambda: pytest.fail("repeated")) == (long, 1)


def test_ctrl_c_in_a_repetition_ends_the_command_with_what_the_first_run_had():
    first = times(5.0, 6.0)
    result, runs = repeated_run.fastest(first, lambda: replace(times(1.0), interrupted=True))
    assert result == replace(first, interrupted=True) and runs == 2
