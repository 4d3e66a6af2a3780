"""Several engines at work, as they are shown."""

from dataclasses import replace

from forge.trace.records import RouteRecord
from forge.views.summary import RunLabel
from forge.views.traffic import ReplicasView, Traffic
from tests.views.records import piped, step, written

ROUTE = RouteRecord("cmpl-0123456789", "prefix", "left", "prefix", 2, 80, 40, 240, "left", 240, 80)


def steps():
    yield replace(step(1, 4, 1.0), replica="left", routes=(ROUTE,))
    yield replace(step(1, 4, 1.0), replica="right")


def test_in_a_pipe_each_step_has_its_engine_and_each_request_its_reason():
    console = piped()
    with Traffic(console, RunLabel("http://x", "", "", "")) as traffic:
        for record in steps():
            traffic.step(record)
    lines = written(console).splitlines()
    assert lines[0] == "23456789 → left  has 240 tokens of it; load 80, the least busy 40"
    assert lines[1].startswith("left  step ") and lines[2].startswith("right  step ")


def test_the_picture_has_a_row_for_each_engine_and_the_last_routes():
    view = ReplicasView(piped())
    for record in steps():
        view.step(record)
    title, _, table, _, heading, route = view.lines()
    assert title.plain == "Which engine does what, and why?" and table.row_count == 2
    assert "why they went there" in heading.plain and "has 240 tokens of it" in route.plain
