"""Screens made of parts: what a template shows, how a table is built of columns, and what is drawn of each part."""

from dataclasses import dataclass

import pytest
from rich.text import Text

from forge.views.formatting import formatted
from forge.views.screen import Fitting, Hanging, Table, check, draw, fill, leads_on, question, report, sides, title
from tests.views.records import piped, written


@dataclass(frozen=True)
class Spread:
    low: float
    high: float

    def text(self, show) -> str:
        return f"{show(self.low)}–{show(self.high)}"


@dataclass(frozen=True)
class Run:
    name: str
    ms: float | None
    parts: dict
    spread: Spread = Spread(1.0, 2.5)


RUNS = (Run("one", 1.26, {"kv": (3, 5)}), Run("two", None, {"kv": None}))


def drawn(*parts, width: int = 80) -> str:
    console = piped(width)
    draw(console, parts)
    return written(console)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{name}: {ms:ms ms}", "one: 1.3 ms"),
        ("{parts.kv.1} of {parts.kv.0:plural token}", "5 of 3 tokens"),
        ("{spread:.1f x}", "1.0–2.5 x"),
        ("{ms:upside}", "upside 1.26"),
    ],
)
def test_a_template_takes_keys_attributes_and_places_in_forms_with_units(template, shown):
    assert fill(template, RUNS[0], upside=lambda value: f"upside {value}") == shown


def test_what_is_not_there_is_shown_as_nothing_and_has_no_unit():
    assert fill("{ms:ms ms}", RUNS[1]) == fill("{parts.kv.0:count}", RUNS[1]) == "–"


def test_a_form_that_a_value_cannot_have_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        formatted("text", ".2f")
    with pytest.raises(AttributeError):
        fill("{nothing_of_that_name}", RUNS[0])


def test_a_table_has_a_row_per_item_and_leaves_out_what_the_row_above_says():
    rows = [{"router": name, "engines": engines} for name in ("prefix", "random") for engines in (2, 4)]
    table = Table.of(rows, "router: {router}", "engines: {engines:count}", grouped=1)
    assert table.headings == ["router", "engines"]
    assert table.rows == [["prefix", "2"], ["", "4"], ["random", "2"], ["", "4"]]


def test_a_row_may_have_a_style_of_its_own():
    table = Table.of([1, 2], ": {}", row_style=lambda number: "bold" if number == 2 else "")
    assert [row[0].style for row in table.rows] == ["", "bold"]


def test_two_sides_are_columns_and_a_gain_is_said():
    out = drawn(sides(("left", "right"), RUNS, "time: {ms:ms ms}", "speed: {spread.high:.1f}", gains={"speed": 2.5}))
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["time", "1.3", "ms", "–"],
        ["speed", "2.5", "2.5", "2.5", "x"],
    ]


def test_the_widest_tables_that_fit_are_drawn():
    wide, narrow = Table(["a" * 40, "b" * 40], [("1", "2")]), Table(["a"], [("1",)])
    assert "b" in drawn(Fitting([[wide], [narrow]]), width=100) and "b" not in drawn(
        Fitting([[wide], [narrow]]), width=60
    )


def test_every_part_is_drawn_at_the_width_of_the_console():
    out = drawn(
        *question("Why?", "about"),
        Hanging(Text("first second"), 2),
        lambda width: [f"{width} columns"],
        check(True, "the same"),
        check(False, "the same"),
        leads_on("and on"),
        width=8,
    )
    assert [line.rstrip() for line in out.splitlines()] == [
        "Why?",
        "about",
        "",
        "first",
        "  second",
        "8",
        "columns",
        "✓ the",
        "same",
        "✗ not",
        "the same",
        "",
        "and on",
    ]


def test_a_report_is_drawn_as_often_as_it_is_asked_for():
    found = report({"one": 1}, lambda: iter([title("Once")]), 3)
    for _ in range(2):
        console = piped()
        found.draw(console)
        assert written(console) == "Once\n"
    assert found.facts == {"one": 1} and found.status == 3
