"""The roof of two limits, and what lies under it."""

from forge.views.charts import Point, roofline


def picture(*points: Point, width: int = 80) -> list[str]:
    return [line.plain for line in roofline(points, 50e9, 500e9, "products", width)]


def test_a_mark_lies_where_its_intensity_and_rate_are_and_is_named_once():
    plot = picture(Point("a", "slow", 1, 50e9), Point("b", "quick", 100, 500e9), Point("b", "quick", 200, 500e9))
    places = {
        line[column]: (row, column)
        for row, line in enumerate(plot[1:-2])
        for column in range(len(line))
        if line[column] in "ab"
    }
    assert places["b"][0] == 0 < places["a"][0] and places["a"][1] < places["b"][1]
    assert plot[-1].split() == ["a", "slow", "b", "quick"]


def test_the_axes_say_what_they_measure():
    plot = picture(Point("a", "it", 1, 50e9))
    assert plot[0] == "products per second (log, log)" and "products per byte" in plot[-2] and "500 G ┤" in plot[1]
    assert max(map(len, picture(Point("a", "it", 1, 50e9), width=40))) <= 40
