"""What a measurement says while it runs: one line on a terminal, a line for each thing in a pipe."""

import pytest

from forge.views.progress import BenchProgress
from tests.views.records import piped, terminal, written


def test_a_pipe_gets_a_line_for_each_thing_that_is_done():
    with BenchProgress(console := piped(40), lines=True) as say:
        for text in ("load", "decode at 16", "decode at 16", "prefill of 512 tokens, and a long description of it"):
            say(text)
    assert written(console) == "load\ndecode at 16\nprefill of 512 tokens, and a long description of it\n"


def test_other_commands_say_nothing_in_a_pipe():
    with BenchProgress(console := piped()) as say:
        say("load")
    assert written(console) == ""


@pytest.mark.parametrize("lines", [True, False])
def test_a_terminal_has_one_line_that_goes(lines):
    with BenchProgress(console := terminal(), lines) as say:
        say("load")
        say("decode")
    assert "load" in written(console) and not written(console).endswith("decode\n")
