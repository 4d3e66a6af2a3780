"""Stepping on a real terminal: forwards, backwards, to the next event, through a live run and a recorded one."""

import re
from pathlib import Path

import pytest

from forge.trace.recorder import Trace
from tests.book.terminal import Terminal
from tests.small_models import write_small_qwen3
from tests.trace.runs import HEADER, crowded, write_trace

RUN = crowded()
STEPS = len(RUN.steps)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("traces") / "run.jsonl"
    write_trace(path, Trace(HEADER, RUN.steps, RUN.ends))
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[str, ...]:
    path = write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf")
    return ("-m", str(path), "--device", "reference")


def place(page: str) -> str:
    return re.search(r"\n(\d+/\d+)", page)[1]


def first(event: str, after: int = 0) -> int:
    """The first step after `after` in which something happens, counted from 1."""
    return next(step.step for step in RUN.steps if step.step > after and getattr(step, event))


def test_a_recorded_run_goes_forwards_backwards_and_to_events(recorded):
    with Terminal("replay", recorded, "--step") as terminal:
        page = terminal.wait_for("[q]uit")
        assert page.startswith("Who runs, who waits, and why?") and place(page) == f"1/{STEPS}"
        assert place(terminal.press("n")) == f"2/{STEPS}"
        assert place(terminal.press("b")) == place(terminal.press("b")) == f"1/{STEPS}"
        page = terminal.press("p")
        assert place(page) == f"{first('preempted')}/{STEPS}" and "− preempted" in page
        page = terminal.press("f")
        assert place(page) == f"{first('finished', first('preempted'))}/{STEPS}" and "✓ finished" in page
        assert "+ admitted" in terminal.press("a")
        assert f"{STEPS}/{STEPS} (the end)" in terminal.press("r")
        assert f"{STEPS}/{STEPS} (the end)" in terminal.press("n")
        assert place(terminal.press("\x1b[H")) == f"1/{STEPS}"
        terminal.send("q")
        assert terminal.finish() == 0 and terminal.is_sane()


def test_a_live_run_is_computed_as_far_as_the_reader_goes(small):
    line = ("trace-scheduler", "-n", "3", "--prompt-tokens", "8", "--max-tokens", "6", "--max-num-seqs", "2", *small)
    with Terminal(*line, "--step") as terminal:
        assert place(terminal.wait_for("[q]uit")) == "1/1"
        assert place(terminal.press("n")) == "2/2"
        assert place(terminal.press("b")) == "1/2"
        assert place(terminal.press("n")) == "2/2"
        assert place(terminal.press("f")) == "6/6"
        page = terminal.press("a")
        assert place(page) == "7/7" and "+ admitted      2" in page
        terminal.send("r")
        assert "(the end)" in terminal.wait_for("(the end)")
        assert place(terminal.press("b")) == "11/12"
        terminal.send("q")
        assert terminal.finish() == 0 and terminal.is_sane()
        assert "What did the run come to?" in terminal.page


def test_quitting_a_live_run_ends_it_where_it_is(small):
    with Terminal("generate", "--kv", "paged", "Once", "30", *small, "--ignore-eos", "--step") as terminal:
        terminal.wait_for("[q]uit")
        assert "decode 1 seq" in terminal.press("n")
        terminal.send("q")
        assert terminal.finish() == 0 and terminal.is_sane()
        assert "ended abort" in terminal.page


def test_ctrl_c_while_a_step_is_shown_ends_the_run(small):
    with Terminal("generate", "Once", "30", *small, "--ignore-eos", "--step") as terminal:
        terminal.wait_for("[q]uit")
        terminal.interrupt()
        assert terminal.finish() == 130 and terminal.is_sane()


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_no_line_is_wider_than_the_terminal(recorded, columns):
    with Terminal("replay", recorded, "--step", columns=columns, rows=20, NO_COLOR="1") as terminal:
        terminal.wait_for("[q]")
        page = terminal.press("p") if columns > 60 else terminal.page
        assert all(len(line) <= columns for line in page.splitlines())
        assert len(page.splitlines()) <= 20
        terminal.send("q")
        assert terminal.finish() == 0


def test_without_a_terminal_stepping_is_refused_in_one_line(recorded, capfd):
    from forge.cli.main import main

    for line in (["replay", recorded, "--step"], ["generate", "Once", "--step"], ["trace-scheduler", "--step"]):
        assert main(line) == 2
        captured = capfd.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and "--step needs a terminal" in captured.err


def test_a_trace_is_not_begun_where_stepping_is_refused(tmp_path, capfd):
    from forge.cli.main import main

    path = Path(tmp_path / "run.jsonl")
    path.write_text("something else")
    assert main(["generate", "Once", "--step", "--trace", str(path)]) == 2
    assert path.read_text() == "something else"
