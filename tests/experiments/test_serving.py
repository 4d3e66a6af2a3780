"""The serving chapter's screen, from visits made by hand."""

from dataclasses import replace

import pytest

from forge.experiments.serving import clients_object, screen
from forge.experiments.serving.clients import Crowd, Crowded, Ending, Overload, Visit
from forge.views.screen import draw
from tests.views.records import piped, written


def visit(kind: str, number: int, **more) -> Visit:
    asked = 0.02 * number
    events = [asked + 0.005 + 0.01 * event for event in range(20)]
    fields = {"chunks": events, "completion_tokens": 64, "finish_reason": "length", "text": "x", "ended": asked + 0.2}
    return Visit(asked, kind=kind, request_id=f"cmpl-{number}", began_to_read=asked, **fields | more)


def crowded(**more) -> Crowded:
    visits = [visit("reads", 0), visit("leaves", 1, completion_tokens=None, finish_reason="left"), visit("late", 2)]
    visits += [visit("reads", number) for number in range(3, 14)]
    seen = {"running": 9.0, "waiting": 0.0, "usage": 0.25, "aborted": 1.0, "generated": 700.0}
    fields = {"alone": visit("reads", 20), "afterwards": seen | {"running": 0.0, "usage": 0.0}} | more
    ending = Ending(visit("reads", 30), "503", 0, 0.4)
    return Crowded(
        Crowd(),
        tuple(visits),
        (0.7, 2.0),
        (seen,),
        overload=Overload(64, 429, 0.5, "1", 200),
        ending=ending,
        records=(),
        ready_seconds=1.0,
        **fields,
    )


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_is_whole_even_where_no_step_was_told(width):
    result, console = crowded(), piped(width)
    draw(console, screen(result, clients_object(result, "tales", "prefix")))
    shown = written(console)
    assert max(map(len, shown.splitlines())) <= width
    assert "14 clients, one every 20 ms" in shown and "… and 4 more readers" in shown
    assert "503 for who came; exit 0 after 0.4 s" in shown and "✓ identical" in shown


def test_another_story_alone_is_said_and_is_a_fact():
    result, console = crowded(alone=visit("reads", 20, text="y")), piped(80)
    facts = clients_object(result, "tales", "prefix")
    draw(console, screen(result, facts))
    assert not facts["identical"] and "✗ the first client's story is another one alone" in written(console)


def test_two_requests_without_a_text_are_not_the_same_story():
    result = crowded(alone=visit("reads", 20, text=""))
    result = replace(result, visits=tuple(replace(silent, text="") for silent in result.visits))
    assert not clients_object(result, "tales", "prefix")["identical"]


def test_times_are_the_clients_own():
    facts = clients_object(crowded(), "tales", "prefix")
    assert facts["first_ms"]["p50"] == pytest.approx(5.0) and facts["longest_gap_ms"] == pytest.approx(10.0)
    assert facts["per_token_ms"]["p50"] == pytest.approx(190 / 63)
    assert facts["clients"][2]["per_token_ms"] is None, "what already lay there has no gaps"
    assert facts["steps"]["seen"] == 0 and facts["leaver"]["blocks"] is None and facts["late"]["done_after_ms"] is None
