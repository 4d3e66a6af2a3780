import re

from forge.views.progress import LARGE_FILE, LoadingBar
from tests.views.records import piped, terminal, written
from tests.waiting import until


def load(console, total):
    with LoadingBar(console, "big[bold]") as bar:
        for done in range(0, total + 1, total // 10):
            bar(done, total)
    return written(console)


def test_a_large_model_shows_its_progress_and_takes_it_away():
    out = load(terminal(), LARGE_FILE * 2)
    assert "loading big[bold]" in out
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l")


def test_a_small_model_shows_nothing():
    assert load(terminal(), LARGE_FILE) == ""


def test_a_pipe_shows_nothing():
    assert load(piped(), LARGE_FILE * 2) == ""


def test_the_bar_is_taken_away_when_loading_fails():
    console = terminal()
    try:
        with LoadingBar(console, "big") as bar:
            bar(1, LARGE_FILE * 2)
            raise RuntimeError
    except RuntimeError:
        pass
    assert written(console).rfind("\x1b[?25h") > 0


def test_the_time_moves_while_a_single_kernel_is_compiled():
    console = terminal()
    with LoadingBar(console, "big") as bar:
        bar.compiling(0, 11)
        assert "0/11" in written(console)
        assert until(lambda: re.search(r"0:0\d:(?!00)", written(console)))
