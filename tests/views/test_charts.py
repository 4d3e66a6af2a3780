import pytest

from forge.views.charts import CUT, Curve, bar, line_plot, row_of, sparkline, throughput_plot


def test_a_bar_is_as_long_as_its_share_of_the_scale():
    assert bar(10, 10, 20) == "█" * 20
    assert bar(5, 10, 20) == "█" * 10
    assert bar(0, 10, 20) == ""


def test_something_is_never_drawn_as_nothing():
    assert bar(0.001, 10, 20) == "▏"


def test_a_bar_above_the_scale_is_cut_and_marked():
    assert bar(11, 10, 20) == "█" * 19 + CUT


@pytest.mark.parametrize(("scale", "width"), [(0, 10), (10, 0)])
def test_a_bar_without_scale_or_room_is_empty(scale, width):
    assert bar(1, scale, width) == ""


def test_a_sparkline_has_a_column_per_value_until_there_is_no_room():
    assert sparkline([0, 4, 8], 8, 10) == "▁▅█"
    assert len(sparkline(list(range(100)), 100, 10)) == 10


def test_grouped_values_are_their_mean():
    assert sparkline([0, 8, 0, 8], 8, 2) == "▅▅"


def test_a_sparkline_of_zeros_is_flat():
    assert sparkline([0, 0, 0], 0, 10) == "▁▁▁"


def test_a_plot_has_exactly_its_height_and_width():
    lines = line_plot([Curve([1, 2, 3], "red"), Curve([3, 3, 3], "blue")], 3, 3, 20, 5)
    assert [line.cell_len for line in lines] == [20] * 5


def test_a_climbing_curve_goes_from_the_lower_left_to_the_upper_right():
    lines = [line.plain for line in line_plot([Curve([0, 1, 2, 3], "red")], 3, 4, 10, 4)]
    assert lines[0].strip() and lines[0].rstrip() == lines[0] and lines[0][0] == " "
    assert lines[-1][0] != " " and lines[-1][-1] == " "


def test_one_value_is_one_dot_and_none_are_no_dots():
    def drawn(values):
        return "".join(line.plain for line in line_plot([Curve(values, "red")], 1, 5, 10, 4)).replace(" ", "")

    assert len(drawn([1])) == 1
    assert drawn([]) == ""


def test_values_outside_the_scale_stay_on_the_canvas():
    lines = line_plot([Curve([-5, 50, float("1e9")], "red")], 10, 3, 8, 3)
    assert len(lines) == 3


def test_a_row_counts_from_the_upper_edge():
    assert row_of(10, 10, 6) == 0
    assert row_of(0, 10, 6) == 5


def test_throughput_over_time_is_drawn_with_both_axes():
    times = [0.1 * number for number in range(20)] + [2 + 0.01 * number for number in range(200)]
    lines = [line.plain for line in throughput_plot(times, 4.0, 60, "")]
    assert len(lines) == 9 and 95 < int(lines[0].split()[0]) < 110 and lines[7].strip().startswith("0")
    assert lines[-1].split() == ["0", "4.00", "s"] and max(map(len, lines)) <= 60
    assert not lines[1][9:30].strip() and lines[1][30:].strip()  # the most is in the second half


def test_throughput_of_a_few_tokens_is_drawn_too():
    assert len(throughput_plot([0.0], 0.5, 40, "")) == 9
