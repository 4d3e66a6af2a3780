"""Keys read from a pseudo-terminal of this process."""

import io
import os
import pty
import select
import signal
import termios
import threading

import pytest

from forge.views import keys as module
from forge.views.keys import EOF, RESIZE, TIMEOUT, Keys, TerminalKeys, open_keys
from tests.views.records import terminal
from tests.waiting import PATIENCE


@pytest.fixture
def ours():
    """Our end of a terminal; the keys are read from `ours.theirs`."""
    ends = Ends(*pty.openpty())
    yield ends
    os.close(ends.ours)
    os.close(ends.theirs)


class Ends:
    def __init__(self, ours: int, theirs: int):
        self.ours, self.theirs = ours, theirs

    def type(self, text: bytes) -> None:
        os.write(self.ours, text)

    def modes(self) -> list:
        return termios.tcgetattr(self.theirs)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (b"nbq", ["n", "b", "q"]),
        (b"\r\n \t\x7f\x08", ["enter", "enter", "space", "tab", "backspace", "backspace"]),
        (b"\x1b[A\x1b[B\x1b[C\x1b[D", ["up", "down", "right", "left"]),
        (b"\x1bOA\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[3~", ["up", "page-up", "page-down", "home", "end", "delete"]),
        (b"\x1b[1;5Cx", ["escape", "x"]),
        ("é→😀".encode(), ["é", "→", "😀"]),
        (b"\xffx", ["\ufffd", "x"]),
        (b"n\x04", ["n", EOF]),
    ],
)
def test_keys_have_names(ours, typed, expected):
    with TerminalKeys(ours.theirs) as keys:
        ours.type(typed)
        assert [keys.read_key(timeout=PATIENCE) for _ in expected] == expected


def test_escape_alone_is_a_key(ours):
    with TerminalKeys(ours.theirs) as keys:
        ours.type(b"\x1b")
        assert keys.read_key(timeout=PATIENCE) == "escape"
        ours.type(b"n")
        assert keys.read_key(timeout=PATIENCE) == "n"


def test_a_sequence_that_arrives_in_two_parts_is_one_key(ours, monkeypatch):
    monkeypatch.setattr("forge.views.keys._ESCAPE_SECONDS", PATIENCE)
    with TerminalKeys(ours.theirs) as keys:
        ours.type(b"\x1b")
        later = threading.Timer(0.01, lambda: ours.type(b"[A"))
        later.start()
        assert keys.read_key(timeout=PATIENCE) == "up"
        later.join()


def test_no_key_in_time(ours):
    with TerminalKeys(ours.theirs) as keys:
        assert keys.read_key(timeout=0) == TIMEOUT


def test_the_terminal_is_given_back_whatever_happens(ours):
    before = ours.modes()
    with pytest.raises(KeyboardInterrupt), TerminalKeys(ours.theirs):
        assert not ours.modes()[3] & (termios.ICANON | termios.ECHO)
        assert ours.modes()[3] & termios.ISIG
        raise KeyboardInterrupt
    assert ours.modes() == before


def test_the_terminal_is_as_before_while_keys_are_paused(ours):
    before = ours.modes()
    with TerminalKeys(ours.theirs) as keys:
        with keys.paused():
            assert ours.modes() == before
        assert ours.modes() != before


def test_what_was_typed_before_a_pause_ended_is_discarded(ours):
    with TerminalKeys(ours.theirs) as keys:
        ours.type(b"nbb")
        assert keys.read_key(timeout=PATIENCE) == "n"
        with keys.paused():
            ours.type(b"qq\n")
            assert select.select([ours.theirs], [], [], PATIENCE)[0]
        assert keys.read_key(timeout=0) == TIMEOUT
        ours.type(b"x")
        assert keys.read_key(timeout=PATIENCE) == "x"


def test_what_is_typed_while_muted_is_neither_echoed_nor_kept(ours):
    with TerminalKeys(ours.theirs) as keys:
        with keys.muted():
            ours.type(b"qq\n")
            assert select.select([ours.theirs], [], [], PATIENCE)[0]
            assert not select.select([ours.ours], [], [], 0.05)[0], "the terminal wrote what was typed"
        assert keys.read_key(timeout=0) == TIMEOUT


def test_lines_that_were_typed_before_a_pause_ended_are_discarded(ours, monkeypatch):
    with open(ours.theirs, closefd=False) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        keys = Keys()
        with keys.paused():
            ours.type(b"q\n")
            assert select.select([ours.theirs], [], [], PATIENCE)[0]
        ours.type(b"x\n")
        assert keys.read_key() == "x"


def test_another_size_is_a_key(ours):
    handler = signal.getsignal(signal.SIGWINCH)
    with TerminalKeys(ours.theirs) as keys:
        os.kill(os.getpid(), signal.SIGWINCH)
        os.kill(os.getpid(), signal.SIGWINCH)
        assert keys.read_key(timeout=PATIENCE) == RESIZE and keys.read_key(timeout=0) == TIMEOUT
    assert signal.getsignal(signal.SIGWINCH) == handler


def test_a_signal_just_before_the_wait_is_noticed_in_it(ours):
    """The system writes a byte for each signal, so that the wait sees one that came before it."""

    def woken_by() -> int:
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        return descriptor

    before = woken_by()
    with TerminalKeys(ours.theirs):
        assert woken_by() != before
    assert woken_by() == before


def test_a_signal_wakes_who_waits_for_a_key(ours):
    with TerminalKeys(ours.theirs) as keys:
        later = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGWINCH))
        later.start()
        assert keys.read_key(timeout=PATIENCE) == RESIZE
        later.join()


def test_coming_back_from_the_background_takes_the_terminal_again(ours):
    before = ours.modes()
    with TerminalKeys(ours.theirs) as keys:
        termios.tcsetattr(ours.theirs, termios.TCSANOW, before)  # as a shell does
        os.kill(os.getpid(), signal.SIGCONT)
        assert keys.read_key(timeout=PATIENCE) == RESIZE and ours.modes() != before


def test_ctrl_c_is_an_exception(ours):
    with TerminalKeys(ours.theirs) as keys:
        later = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            later.start()
            while True:
                keys.read_key(timeout=PATIENCE)
        later.join()


def test_a_closed_terminal_is_the_end():
    ours, theirs = pty.openpty()
    with TerminalKeys(theirs) as keys:
        os.close(ours)
        assert keys.read_key(timeout=PATIENCE) == EOF
    os.close(theirs)


def test_lines_stand_for_keys_where_single_ones_cannot_be_had(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("next\n\n b \n"))
    keys = open_keys(terminal(TERM="dumb"))
    assert type(keys) is Keys and not keys.single
    with keys:
        assert [keys.read_key() for _ in range(4)] == ["n", "enter", "b", EOF]
        with keys.paused():
            pass


def test_a_line_is_read_with_its_prompt(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a line\n"))
    assert module.read_line("prompt: ") == "a line" and module.read_line("prompt: ", "before") is None
    assert "prompt: " in capsys.readouterr().out
