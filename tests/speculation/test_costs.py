"""Costs from times that are given."""

import pytest

from forge.speculation.controller import CostMeter, Costs

ASSUMED = Costs(0.1, 0.02)


def metered(forwards: dict[int, float], guesses: dict[int, float] | None = None, times: int = 3) -> CostMeter:
    """A meter that has measured forwards, {rows: ms}, and guesses, {sequences: ms of one guess for each}."""
    meter = CostMeter(ASSUMED)
    for _ in range(times):
        for rows, ms in forwards.items():
            meter.add_forward(rows, ms)
        for num_sequences, ms in (guesses or {}).items():
            meter.add_proposal(num_sequences, 4, 4 * ms)
    return meter


def test_what_was_assumed_holds_until_something_is_measured():
    assert CostMeter(ASSUMED).costs(1) == ASSUMED


def test_one_measurement_or_two_say_nothing_yet():
    assert metered({1: 10.0}, {1: 9.0}, times=2).costs(1) == ASSUMED
    assert metered({1: 10.0}, {1: 9.0}, times=3).costs(1) != ASSUMED


def test_rows_and_guesses_are_priced_in_plain_steps():
    alone = metered({rows: 10 + 0.5 * rows for rows in (1, 5, 3)}, {1: 2.1}).costs(1)

    assert alone.token == pytest.approx(2.1 / 10.5)
    assert alone.row == pytest.approx(0.5 / 10.5)


def test_in_a_batch_a_guess_for_each_is_a_row_for_each():
    meter = metered({rows: 10 + 0.5 * rows for rows in (8, 16, 40)}, {8: 2.1})

    assert meter.costs(8).row == pytest.approx(8 * 0.5 / 14)
    assert meter.costs(8).token == pytest.approx(2.1 / 14)


def test_a_guess_costs_what_it_did_in_the_batch_that_is_nearest_in_size():
    meter = metered(dict.fromkeys((1, 9), 10.0), {2: 1.0, 9: 3.0})

    assert [meter.costs(size).token for size in (1, 5, 6, 40)] == pytest.approx([0.1, 0.1, 0.3, 0.3])


def test_one_slow_step_changes_nothing():
    meter = CostMeter(ASSUMED)
    for index in range(15):
        meter.add_forward(1, 900.0 if index == 7 else 10.0)
        meter.add_proposal(1, 4, 700.0 if index == 0 else 8.0)  # the first read the prompt

    assert meter.costs(1).token == pytest.approx(0.2)


@pytest.mark.parametrize("rows", [1, 5])
def test_with_one_size_of_step_only_the_price_of_rows_stays_assumed(rows):
    costs = metered({rows: 10.0}, {1: 2.0}).costs(1)

    assert costs.row == pytest.approx(ASSUMED.row)
    assert costs.token == pytest.approx(0.2 * (1 + (rows - 1) * ASSUMED.row))


def test_a_forward_is_known_once_it_was_measured_eight_times():
    assert metered({1: 10.0, 4: 11.0}, times=7).plain_forwards_left == 1
    assert metered({1: 10.0}, times=8).plain_forwards_left == 0
    assert metered({4: 10.0}, times=9).plain_forwards_left == 0


def test_guesses_that_are_cheaper_than_was_known_make_it_unlearn_what_it_knew():
    meter = metered({1: 10.0}, {1: 30.0})
    assert meter.costs(1).token == pytest.approx(3.0)

    meter.add_bound(1, 1, 40.0)  # read a text besides: says nothing
    assert meter.costs(1).token == pytest.approx(3.0)
    meter.add_bound(1, 1, 5.0)

    assert meter.costs(1).token == ASSUMED.token


def test_rows_that_no_longer_occur_are_left_out_but_for_plain_steps():
    meter = metered({1: 10.0, 5: 90.0})
    assert meter.costs(1).row == pytest.approx(1.0)  # five rows take as long as five forwards, and more
    for num_forwards, row in ((64, 1.0), (65, ASSUMED.row)):
        meter = metered({1: 10.0, 5: 90.0})
        for _ in range(num_forwards):
            meter.add_forward(1, 10.0)
        assert meter.costs(1).row == pytest.approx(row)

    meter = metered({1: 10.0, 5: 12.0})
    for _ in range(70):
        meter.add_forward(5, 12.0)
    assert meter.costs(1).row == pytest.approx(0.05)


def test_costs_follow_what_is_measured_later():
    meter = metered({1: 10.0, 5: 12.0}, {1: 1.0})
    before = meter.costs(1)
    for _ in range(15):
        meter.add_proposal(1, 1, 5.0)
        meter.add_forward(1, 10.0)
        meter.costs(1)  # asked before every step

    assert before.token == pytest.approx(0.1)
    assert meter.costs(1).token == pytest.approx(0.5)


def test_no_measurements_make_a_forward_take_less_than_no_time():
    for points in ({1: 5.0, 9: 1.0}, {1: 0.1, 9: 10.0}):
        for num_sequences in (1, 4, 16):
            costs = metered(points, {1: 1.0}).costs(num_sequences)
            assert costs.row >= 0
            assert costs.token > 0
