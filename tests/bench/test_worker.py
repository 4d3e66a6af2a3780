"""The conversation with a process, and its end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from forge.bench.process import BenchProcess, Launch, PeerMissing, ProcessFailed
from forge.bench.worker import MOST_STEPS, Missing, peak_memory, respond, take_turn
from forge.errors import UsageError
from tests.bench.stubs import StubLaunch
from tests.cli.conftest import ROOT, environment


class Adds:
    def add(self, a, b):
        return {"sum": a + b}

    def refuse(self):
        raise Missing("not\ninstalled")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('{"do": "add", "a": 1, "b": 2}', {"ok": {"sum": 3}}),
        ('{"do": "refuse"}', {"missing": "not installed"}),
        ('{"do": "add", "a": 1}', "error"),
        ('{"do": "unknown"}', "error"),
        ("no JSON", "error"),
    ],
)
def test_every_line_is_answered(line, answer):
    found = respond(Adds(), line)
    if answer == "error":
        assert list(found) == ["error"] and "\n" not in found["error"]
    else:
        assert found == answer


def test_a_turn_has_enough_steps_and_enough_time():
    calls = []

    def step():
        calls.append(None)
        return 0.25

    assert take_turn(step, min_steps=3, min_seconds=0.1, expected=1.0) == [0.25] * 3
    assert len(calls) == 3
    assert len(take_turn(step, min_steps=1, min_seconds=2.0, expected=1.0)) == 8
    calls.clear()
    assert len(take_turn(step, min_steps=2, min_seconds=0.0, expected=0.1)) == 2
    assert len(calls) == 3, "a short step is done once untimed, to wake up"


def test_a_turn_of_steps_that_take_no_time_ends():
    assert len(take_turn(lambda: 0.0, min_steps=1, min_seconds=1.0, expected=1.0)) == MOST_STEPS


def test_peak_memory_is_what_this_process_has_at_least():
    assert peak_memory() > 5_000_000


def test_round_trip_through_a_process():
    with BenchProcess(StubLaunch()) as stub:
        assert stub.ask("echo", text="Grüße", numbers=[1, 2.5, None]) == {"text": "Grüße", "numbers": [1, 2.5, None]}
        with pytest.raises(ProcessFailed, match=r"^stub, fail: ValueError: two lines$"):
            stub.ask("fail")
        with pytest.raises(PeerMissing, match=r"^no such library$"):
            stub.ask("absent")
        os.kill(stub.pid, signal.SIGINT)  # Ctrl-C is the parent's
        assert stub.ask("echo") == {}
        with pytest.raises(ProcessFailed) as caught:
            stub.ask("die")
    assert str(caught.value) == "stub ended during 'die': fatal: out of luck (exit status 3)"


def test_closing_ends_a_busy_worker_and_the_program_that_it_runs():
    with BenchProcess(StubLaunch()) as stub:
        program = stub.ask("start")["pid"]
        stub._process.stdin.write(json.dumps({"do": "sleep"}) + "\n")
        stub._process.stdin.flush()
    assert stub._process.returncode is not None
    assert has_ended(program)


def test_a_worker_ends_with_its_parent_even_while_busy():
    code = (
        "import time\nfrom forge.bench.process import BenchProcess\nfrom tests.bench.stubs import StubLaunch\n"
        "stub = BenchProcess(StubLaunch())\nprint(stub.pid, stub.ask('start')['pid'], flush=True)\nstub.ask('sleep')\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    worker, program = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    assert has_ended(worker), "the worker outlived its parent"
    assert has_ended(program), "the worker's program outlived it"


class BareLaunch(Launch):
    """Starts a worker without PYTHONPATH and without installed packages."""

    def command(self) -> list[str]:
        python, *arguments = super().command()
        return [python, "-IS", *arguments]


@pytest.mark.parametrize("peer", ["llama_cpp", "llama_binary", "openvino", "transformers"])
def test_a_peers_worker_runs_in_an_interpreter_without_forge(peer):
    fields = {"model": "m.gguf", "device": "cpu", "threads": 1, "max_model_len": 9, "scratch": "."}
    with BenchProcess(BareLaunch(peer, f"{peer}_worker")) as process, pytest.raises(PeerMissing, match=r"pip|build"):
        process.ask("load", **fields)


def has_ended(pid: int) -> bool:
    """Wait until a process has ended; one that does not is killed."""
    for _ in range(300):
        if not is_running(pid):
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:  # a zombie that no parent waits for has ended too
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interpreter_that_is_none_is_a_users_mistake():
    with pytest.raises(UsageError, match="no/such/python: No such file"):
        BenchProcess(Launch("llama.cpp", "llama_cpp_worker", "no/such/python"))
