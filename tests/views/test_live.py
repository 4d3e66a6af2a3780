"""Pictures that are drawn anew while a run goes on."""

from forge.views.live import LiveView, Unwatched
from tests.views.records import piped, step, terminal, written


class Counted(LiveView):
    frames = 0

    def frame(self, width, height):
        self.frames += 1
        return [f"frame {self.frames} of {width} columns"]


def test_it_is_drawn_no_oftener_than_it_may_be_unless_at_once():
    with Counted(terminal(), per_second=0.001) as view:
        for _ in range(5):
            view.draw()
        assert view.frames == 1
        view.draw(at_once=True)
        assert view.frames == 2


def test_one_that_is_not_shown_writes_nothing():
    console = piped()
    with Counted(console, shown=False) as view:
        view.draw(at_once=True)
    assert written(console) == "" and view.frames == 0


def test_a_view_that_shows_nothing_takes_every_step():
    with Unwatched() as view:
        assert view.step(step(1, 4, 1.0)) is None
