"""Costs from times that are given."""

import pytest

from forge.speculation.controller import Costs
from forge.speculation.costs import CostMeter

ASSUMED = Costs(0.1, 0.02)


def test_what_was_assumed_holds_until_something_is_measured():
    assert CostMeter(ASSUMED).costs(1) == ASSUMED


def test_rows_and_guesses_are_priced_in_plain_steps():
    meter = CostMeter(ASSUMED)
    for rows in (1, 5, 3):
        meter.add_forward(rows, 10 + 0.5 * rows)
    meter.add_guesses(1, 4, 8.4)

    alone = meter.costs(1)
    assert alone.guess == pytest.approx(2.1 / 10.5)
    assert alone.row == pytest.approx(0.5 / 10.5)


def test_in_a_batch_a_guess_for_each_is_a_row_for_each():
    meter = CostMeter(ASSUMED)
    for rows in (8, 16, 40):
        meter.add_forward(rows, 10 + 0.5 * rows)
    meter.add_guesses(8, 2, 4.2)

    assert meter.costs(8).row == pytest.approx(8 * 0.5 / 14)
    assert meter.costs(8).guess == pytest.approx(2.1 / 14)


def test_one_slow_step_changes_nothing():
    meter = CostMeter(ASSUMED)
    for index in range(15):
        meter.add_forward(1, 900.0 if index == 7 else 10.0)
        meter.add_guesses(1, 4, 700.0 if index == 0 else 8.0)  # the first read the prompt

    assert meter.costs(1).guess == pytest.approx(0.2)


def test_with_one_size_of_step_only_the_price_of_rows_stays_assumed():
    meter = CostMeter(ASSUMED)
    meter.add_forward(5, 10.0)
    meter.add_guesses(1, 4, 8.0)

    assert meter.costs(1) == Costs(pytest.approx(0.2), ASSUMED.row)


def test_no_measurements_make_a_forward_take_less_than_no_time():
    for points in ([(1, 5.0), (9, 1.0)], [(1, 0.1), (9, 10.0)]):
        meter = CostMeter(ASSUMED)
        for rows, ms in points:
            meter.add_forward(rows, ms)
        meter.add_guesses(1, 1, 1.0)
        for num_sequences in (1, 4, 16):
            costs = meter.costs(num_sequences)
            assert costs.row >= 0
            assert costs.guess > 0
