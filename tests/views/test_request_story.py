"""One request's story: everything that happened to it, in order, with steps, times and reasons."""

import pytest

from forge.errors import UsageError
from forge.views.run_summary import request_of, story_of, story_screen
from forge.views.screen import draw
from tests.trace.runs import crowded
from tests.views.records import piped, written
from tests.views.test_scheduler import history

RUN = crowded()
REQUESTS = history().requests()
PREEMPTED = next(one for one in REQUESTS if one.preemptions)


def test_the_story_has_every_row_and_every_decision():
    for request in REQUESTS:
        story = story_of(request, RUN.steps)
        kinds = [event.kind for event in story]
        assert kinds.count("admitted") == len(request.admissions) and kinds.count("preempted") == len(
            request.preemptions
        )
        assert kinds.count("waits") == len(request.waits) and kinds[0] == "arrives"
        computed = {
            step for event in story if event.kind == "computes" for step in range(event.step, event.last_step + 1)
        }
        assert computed == {span.step for span in request.forwards}
        assert [event.step for event in story] == sorted(event.step for event in story)


def test_a_preempted_request_waits_after_it_lost_its_place():
    kinds = [event.kind for event in story_of(PREEMPTED, RUN.steps)]
    assert kinds.index("preempted") < len(kinds) - 1 - kinds[::-1].index("admitted")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_fits_and_says_what_it_came_to(width):
    console = piped(width)
    draw(console, story_screen(PREEMPTED, RUN.steps))
    shown = written(console)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.startswith("What happened to this request?") and "for a second time" in " ".join(shown.split())
    assert "victim of seq" in " ".join(shown.split()) and "preempted 1 time" in " ".join(shown.split())


def test_a_number_that_the_run_does_not_have_is_refused():
    with pytest.raises(UsageError, match="no seq 99; there are 0 to"):
        request_of(REQUESTS, 99)
    with pytest.raises(UsageError, match="no requests"):
        request_of((), 1)
