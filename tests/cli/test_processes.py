"""What only a process of its own shows: pipes that close, Ctrl-C, a real terminal."""

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.book.terminal import Terminal
from tests.cli.conftest import ROOT, environment, start
from tests.small_models import write_small_qwen3
from tests.waiting import PATIENCE

LONG = "400"


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> tuple[str, ...]:
    """The options that run a model that needs some milliseconds per token, so that there is a middle to interrupt."""
    path = tmp_path_factory.mktemp("models") / "slow.gguf"
    write_small_qwen3(path, hidden_size=256, num_layers=6, intermediate_size=512)
    return ("-m", str(path), "--device", "reference")


def test_a_closed_pipe_is_no_error(small):
    process = start("generate", "Once", LONG, *small, "--ignore-eos")
    first = process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.wait(PATIENCE)
    assert first.startswith(b"forward   1")
    assert err == b"" and process.returncode == 141


def test_a_pipe_closed_before_anything_is_written(small):
    reading, writing = os.pipe()
    os.close(reading)
    process = start("generate", "Once", "2", *small, "--json", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=PATIENCE)
    assert err == b"" and process.returncode == 141


@pytest.mark.parametrize("args", [("--help",), ("generate", "--help")])
def test_help_that_was_not_read_to_its_end_is_a_success(args):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*args, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=PATIENCE)
    assert err == b"" and process.returncode == 0


@pytest.mark.parametrize(
    ("redirection", "args", "status", "expected"),
    [
        (">&-", ("generate", "Once", "2"), 0, b""),
        pytest.param("<&-", ("generate", "-", "2"), 2, b"prompt is empty", marks=pytest.mark.slow),
        ("<&-", ("chat",), 0, b""),
        pytest.param("2>&-", ("generate", "Once", "2", "--kv", "no"), 2, b"", marks=pytest.mark.slow),
    ],
)
def test_a_standard_stream_that_is_closed_leads_to_nothing(small, redirection, args, status, expected):
    line = shlex.join([sys.executable, "-m", "forge", *args, *small])
    found = subprocess.run(["bash", "-c", f"{line} {redirection}"], capture_output=True, env=environment(), cwd=ROOT)
    assert found.returncode == status and expected in found.stderr and found.stderr.count(b"\n") == bool(expected)
    assert b"forge:" not in found.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a file that is always full")
@pytest.mark.parametrize("args", [("generate", "Once", "2"), ("generate", "Once", "2", "--json"), ("chapters",)])
def test_output_that_finds_no_room_is_said_in_a_line(small, args):
    with open("/dev/full", "wb") as full:
        process = start(*args, *(small if args[0] == "generate" else ()), stdout=full)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and err == b"forge: cannot write: No space left on device\n"


def test_ctrl_c_keeps_what_was_generated(slow):
    process = start("generate", "Once", LONG, *slow, "--ignore-eos")
    for _ in range(3):
        assert process.stdout.readline().startswith(b"forward")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and err == b""
    assert b"abort" in out and b"tokens computed" in out and b"per forward ms" in out


INTERRUPTED_AFTER_THREE_STEPS = """
import signal, sys
from forge.cli.main import run
from forge.engine.engine import Engine

step, calls = Engine.step, iter(range(1000))

def interrupted(self):
    if next(calls) == 3:
        signal.raise_signal(signal.SIGINT)
    return step(self)

Engine.step = interrupted
run()
"""


def test_ctrl_c_leaves_valid_json(slow):
    command = [
        sys.executable,
        "-c",
        INTERRUPTED_AFTER_THREE_STEPS,
        "generate",
        "Once",
        LONG,
        *slow,
        "--ignore-eos",
        "--json",
    ]
    found = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment(), cwd=ROOT)
    assert (found.returncode, found.stderr) == (130, b"")
    run = json.loads(found.stdout)
    assert run["finish_reason"] == "abort" and len(run["forwards"]) == len(run["token_ids"]) >= 3


def test_ctrl_c_before_the_run_ends_quietly(forge, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("forge.cli.generate.create_llm", interrupted)
    found = forge("generate", "x")
    assert found.status == 130 and found.out == found.err == ""


def interrupted(code: str) -> tuple[int, bytes]:
    """Run Python code that prints a line and goes on; press Ctrl-C after the line. Exit status, standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=ROOT
    )
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


@pytest.mark.parametrize(
    ("module", "expected"), [("forge.experiments", -signal.SIGINT), ("forge.cli.generate", 130), ("forge.llm", 130)]
)
def test_ctrl_c_while_the_commands_are_loaded_is_no_traceback(module, expected):
    """The command line itself, the module of the command that is named, and what it needs to run."""
    status, err = interrupted(f"""
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("here", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = ["forge", "generate", "Once"]
from forge.__main__ import run
run()
""")
    assert status == expected and err == b""


def test_ctrl_c_in_a_callback_of_pythons_own_is_not_discarded():
    status, err = interrupted("""
import time
import forge.cli.main as main
class Finalized:
    def __del__(self):
        print("here", flush=True)
        time.sleep(60)
def parse_and_run(args):
    Finalized()
    time.sleep(60)
main.parse_and_run = parse_and_run
main.run()
""")
    assert status == 130 and err == b""


def test_a_process_in_the_background_goes_on_ignoring_ctrl_c():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import forge.cli.main as main, forge.__main__\n"
        "main.run = lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
        "forge.__main__.run()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), cwd=ROOT)
    assert found.stdout == b"True\n" and found.stderr == b""


def on_a_terminal(*args, interrupt_after: bytes | None = None, **variables) -> tuple[int, str]:
    """Run forge on a terminal of 80 x 24; press Ctrl-C once `interrupt_after` has been written."""
    ours, theirs = pty.openpty()
    extra = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | variables
    process = start(*args, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**extra))
    os.close(theirs)
    written, deadline = b"", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                written += os.read(ours, 65536)
            except OSError:  # Linux says EIO once the other side has closed
                break
        elif process.poll() is not None:
            break
        if interrupt_after and interrupt_after in written:
            process.send_signal(signal.SIGINT)
            interrupt_after = None
    status = process.wait(PATIENCE)
    os.close(ours)
    return status, written.decode()


def test_a_terminal_gets_the_live_view_and_its_cursor_back(small):
    status, out = on_a_terminal("generate", "Once upon a time", "12", *small, "--ignore-eos", "--kv", "on")
    assert status == 0
    assert "milliseconds per forward" in out and "█" in out
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l") >= 0


def test_ctrl_c_on_a_terminal_restores_it_and_prints_the_figures(slow):
    status, out = on_a_terminal("generate", "Once", LONG, *slow, "--ignore-eos", interrupt_after=b"tokens computed")
    assert status == 130
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l")
    assert "abort" in out.split("\x1b[?25h")[-1]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(small):
    status, out = on_a_terminal("generate", "Once", "3", *small, "--ignore-eos", TERM="dumb")
    assert status == 0 and "\x1b" not in out and "forward   1" in out


def test_no_color_is_honoured(small):
    status, out = on_a_terminal("compare", "--kv", "off", "vs", "on", "Once", "4", *small, NO_COLOR="1")
    assert status == 0 and "identical" in out
    assert "\x1b[36m" not in out and "\x1b[32m" not in out


def test_a_conversation_on_standard_input(tmp_path):
    model = str(write_chat_model(tmp_path))
    process = start("chat", "-m", model, "--device", "reference", "--max-tokens", "4", stdin=subprocess.PIPE)
    out, err = process.communicate(b"hello\nagain\n/reset\nhello\n/what\n/exit\nnever read\n", timeout=PATIENCE)
    text = out.decode()
    assert process.returncode == 0 and err == b""
    assert text.count("first token") == 3 and "you>" not in text
    figures = [line for line in text.splitlines() if "first token" in line]
    assert ", 0 held" in figures[0] and ", 0 held" not in figures[1] and ", 0 held" in figures[2]
    assert "forgotten" in text and "/reset" in text


def test_a_conversation_branches_on_standard_input(tmp_path):
    line = (
        "chat",
        "-m",
        str(write_chat_model(tmp_path)),
        "--device",
        "reference",
        "--max-tokens",
        "4",
        "--kv",
        "paged",
    )
    process = start(*line, stdin=subprocess.PIPE)
    out, err = process.communicate(b"/back\nhello\n/fork\nleft\n/back\nleft\n/exit\n", timeout=PATIENCE)
    text = out.decode()
    assert process.returncode == 0 and err == b""
    assert "mark one with /fork first" in text and "the fork shares all of its blocks" in text
    assert "back at place 1" in text and "<paged KV cache: " in text
    figures = [line for line in text.splitlines() if "first token" in line]
    assert figures[1].split(" · ")[0] == figures[2].split(" · ")[0] and ", 0 held" not in figures[2]


def press_ctrl_c(terminal: Terminal, until: Callable[[], bool]) -> None:
    """Ctrl-C, and again where nothing came of it within seconds: a signal between two keys may be lost to readline."""
    for _ in range(10):
        terminal.interrupt()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            terminal._read(0.1)
            if until():
                return


@pytest.mark.slow
def test_ctrl_c_clears_the_line_of_a_conversation_and_a_second_one_ends_it(tmp_path):
    line = ("chat", "-m", str(write_chat_model(tmp_path)), "--device", "reference", "--max-tokens", "4")
    with Terminal(*line) as terminal:
        for number, half in enumerate(("first half", "another half"), 1):
            terminal.wait_for("you> ", number)
            terminal.send(half)
            terminal.wait_for(half)
            press_ctrl_c(terminal, lambda number=number: terminal.page.count("line cleared") >= number)
        terminal.send("hello\r")
        terminal.wait_for("first token")
        terminal.wait_for("you> ", 4)
        press_ctrl_c(terminal, lambda: terminal.page.count("line cleared") >= 3)
        press_ctrl_c(terminal, lambda: terminal._process.poll() is not None)
        assert terminal.finish() == 130 and terminal.is_sane()


def write_chat_model(folder):
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return write_small_qwen3(folder / "chat.gguf", metadata={"tokenizer.chat_template": template})
