"""A chapter on a real terminal: paging, predicting, a changed size, Ctrl-C, and terminals that can do little."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forge.book.progress import load_progress
from tests.book.terminal import Terminal
from tests.cli.conftest import environment, start
from tests.small_models import write_small_qwen3


@pytest.fixture(scope="module")
def naive(tmp_path_factory) -> tuple[str, ...]:
    """Chapter 1 on a small random model that runs at once and needs no compiled kernels."""
    path = write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf")
    return ("naive", "Once", "12", "-m", str(path), "--device", "reference")


@contextmanager
def reading(*command: str, quits: str = "q", **more) -> Iterator[Terminal]:
    """A chapter on a terminal, from its first page on; at the end the reader quits, and nothing is left behind."""
    with Terminal(*command, **more) as terminal:
        terminal.wait_for("[q]uit")
        yield terminal
        terminal.send(quits)
        assert terminal.finish() == 0 and terminal.is_sane()


def to_the_second_prediction(terminal: Terminal) -> None:
    """Read on, and answer the first prediction, which is about the heads."""
    terminal.press_until("Your guess: ▌", " ")
    terminal.press("1")
    assert "--heads" in terminal.press("\r")
    terminal.press_until("Your guess: ▌", " ")


def test_reading_predicting_and_stopping(naive):
    with reading(*naive) as terminal:
        assert terminal.page.strip().startswith("── 1 · A forward pass") and " 1 / " in terminal.page
        assert " 2 / " in terminal.press("n")
        assert " 1 / " in terminal.press("b")
        to_the_second_prediction(terminal)
        assert "Your guess: 3▌" in terminal.press("3")
        assert "  1  attention" in terminal.press("\r")
        assert "Your guess: 2▌" in terminal.press("2")
        assert "$ forge naive Once 12 --only run" in terminal.press("\r")
        terminal.press_until("You said 3")
        terminal.press_until("You said 2")
        assert "Your guess" not in terminal.press_until("Predict", "b")


def test_again_with_other_options_and_a_command_of_ones_own(naive):
    with reading(*naive, quits="\x04") as terminal:
        terminal.press_until("[a]gain")
        terminal.send("a")
        terminal.wait_for("again: ")
        command = " ".join(("forge naive x 3 --only run", *naive[3:]))
        assert "$ forge naive x 3 --only run -m" in terminal.press("\x7f" * 500 + command + "\r")
        terminal.send(":")
        terminal.wait_for(": forge ")
        terminal.send("--version\r")
        assert "forge 0." in terminal.wait_for("Any key returns")
        assert "[a]gain" in terminal.press("x")


def test_the_output_of_a_command_of_ones_own_waits_after_each_screen(naive):
    with reading(*naive) as terminal:
        terminal.send(":")
        terminal.wait_for(": forge ")
        terminal.send("glossary\r")
        assert "vocabulary:" in terminal.wait_for("any key: more") and "swiglu" not in terminal.page
        terminal.send(" ")
        terminal.wait_for("seed:")
        terminal.send("q")
        terminal.wait_for("Any key returns")
        assert "programmatic" not in terminal.page and "[q]uit" in terminal.press("x")
        terminal.send(":")
        terminal.wait_for(": forge ")
        terminal.send("?prefill\r")
        assert "over the tokens of a prompt" in terminal.wait_for("Any key returns")
        terminal.press("x")


def test_keys_that_were_typed_before_a_run_ended_do_nothing(naive):
    with reading(*naive) as terminal:
        to_the_second_prediction(terminal)
        terminal.press("n")
        assert "Where does the time of a" in terminal.press("n")
        terminal.press("n")
        terminal.send("n")
        terminal.wait_for("$ forge naive")
        terminal.send("qqqZZZ")
        terminal.wait_for("[a]gain")
        assert "ZZZ" not in terminal.written
        assert "[q]uit" in terminal.press("n")


def test_a_typo_in_again_keeps_the_chapter_and_what_was_measured(naive):
    with reading(*naive) as terminal:
        terminal.press_until("[a]gain")
        terminal.send("a")
        terminal.wait_for("again: ")
        terminal.send(" --wrongg\r")
        assert "No such option: --wrongg" in terminal.wait_for("Any key returns")
        assert "$ forge naive Once 12 --only run" in terminal.press("x")


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (40, 120), (12, 50)])
def test_a_page_fits_the_terminal_whatever_its_size_becomes(naive, rows, columns):
    with reading(*naive, rows=24, columns=100) as terminal:
        terminal.resize(rows, columns)
        page = terminal.press("n")
        lines = page.strip("\n").split("\n")
        assert len(lines) <= rows and max(map(len, lines)) <= columns
        assert len(lines[0]) == columns


@pytest.mark.parametrize("where", ["[q]uit", "Your guess: ▌"])
def test_ctrl_c_leaves_the_terminal_sane(naive, where):
    with Terminal(*naive) as terminal:
        terminal.wait_for("[q]uit")
        terminal.press_until(where)
        terminal.interrupt()
        assert terminal.finish() == 130 and terminal.is_sane()
        assert "Traceback" not in terminal.written


@pytest.mark.slow
def test_the_reader_is_brought_back_to_the_page_that_was_left(naive, state_home):
    with Terminal(*naive) as terminal:
        terminal.wait_for("[q]uit")
        terminal.press("n")
        terminal.send("q")
        terminal.finish()
    with Terminal("next") as terminal:
        page = terminal.wait_for("[q]uit")
        assert " 2 / " in page and "From text to numbers" in page
        terminal.send("q")
        assert terminal.finish() == 0
    with Terminal(*naive) as terminal:
        assert "You left this chapter on page 2 of" in terminal.wait_for("[q]uit")
        terminal.send("q")
        assert terminal.finish() == 0
    with Terminal("chapters") as terminal:
        assert terminal.finish() == 0 and "page 2 of" in terminal.page


@pytest.mark.slow
def test_a_servers_steps_are_shown_while_its_clients_are_there():
    with Terminal("serving", "--only", "run", "-m", "hash", "-n", "3", "--every", "100") as terminal:
        assert "running" in terminal.wait_for("Who runs, who waits, and why?")
        assert "reads" in terminal.wait_for("✓ identical")
        assert terminal.finish() == 0 and terminal.is_sane()


def test_no_colour(naive):
    with Terminal(*naive, NO_COLOR="1") as terminal:
        terminal.wait_for("[q]uit")
        terminal.press_until("[a]gain")
        terminal.send("q")
        assert terminal.finish() == 0
        assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38;5;\d+)m", terminal.written)


def test_a_terminal_that_cannot_move_its_cursor_gets_pages_one_after_another(naive):
    with Terminal(*naive, TERM="dumb") as terminal:
        terminal.wait_for("[q]uit")
        terminal.send("\n")
        terminal.wait_for(" 2 / ")
        terminal.send("next\n")
        terminal.wait_for(" 3 / ")
        terminal.send("q\n")
        assert terminal.finish() == 0 and terminal.is_sane()
        assert "\x1b" not in terminal.written and terminal.written.count("── 1 · ") == 3


def test_no_pause_runs_straight_through_on_a_terminal_and_finishes_the_chapter(naive, state_home):
    with Terminal(*naive, "--no-pause") as terminal:
        assert terminal.finish() == 0 and terminal.is_sane()
        assert "References" in terminal.written and "[q]uit" not in terminal.written
        assert "forge next goes on with chapter 2, forge kv-cache." in terminal.written
    assert load_progress().finished == {"naive"}


def test_without_a_terminal_to_read_keys_from_it_does_not_wait(naive):
    process = start(*naive, env=environment(**os.environ))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == b"" and b"\x1b" not in out and b"References" in out
