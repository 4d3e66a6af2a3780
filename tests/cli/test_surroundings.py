"""Narrow terminals, sizes that are none, missing files: what is shown and how the command ends."""

import resource
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from forge.views.comparison import Margin, _margin_line

MISSING = "/nowhere/x"


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("size", ["0", "00", "-5", "wide", ""])
def test_a_size_that_is_none_is_ignored(forge, monkeypatch, name, size):
    monkeypatch.setenv(name, size)
    assert "naive" in forge("chapters").out


@pytest.mark.parametrize(
    "line",
    [
        f"generate -m {MISSING}.gguf Once",
        f"generate --speculate draft --draft {MISSING}.gguf Once",
        f"generate --grammar {MISSING} Once",
        f"generate --json-schema {MISSING} Once",
        f"generate -m hash --trace {MISSING} Once",
        f"compare --kv off vs on --prompts {MISSING}",
        f"embed --file {MISSING}",
        f"classify --labels a,b --file {MISSING}",
        f"rerank --query fox {MISSING}",
        f"replay {MISSING}",
        "replay .",
        f"trace export {MISSING} --perfetto",
        f"trace-scheduler -m hash -n 1 --max-tokens 1 --no-lines --svg {MISSING}",
        f"models inspect {MISSING}.gguf",
        f"models synth qwen3-0.6b --layers 1 --vocab 400 --out {MISSING}",
        f"bench tokenizer {MISSING}.json",
        f"bench quality --text {MISSING}",
        f"build check 4 --folder {MISSING}",
        f"kernels --model {MISSING}.gguf",
        f"speculation --draft {MISSING}.gguf",
    ],
)
def test_a_path_that_is_not_there_is_a_wrong_argument_in_every_command(forge, line):
    found = forge(*line.split())
    assert found.status == 2 and found.err.splitlines()[-1].startswith("forge: ") and found.out == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("option", ["--svg", "--trace"])
def test_a_full_disk_is_no_wrong_argument(forge, option):
    line = ("trace-scheduler", "-m", "hash", "-n", "1", "--max-tokens", "1", "--no-lines", option, "/dev/full")
    found = forge(*line)
    assert found.status == 1 and found.err.splitlines()[-1].endswith("No space left on device")


def test_the_doctor_sees_that_compiled_code_has_no_room(forge, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "kernels  " in forge("doctor").out and "compiled at each start" not in forge("doctor").out
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        found = forge("doctor", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.status == 1 and "the kernels are compiled at each start" in found.out and "make room" in found.out


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_closing_table_of_a_run_has_all_its_columns(forge, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = forge("trace-scheduler", "-m", "hash", "-n", "3", "--max-tokens", "4", "--no-lines").out
    lines = out.splitlines()
    (heading,) = [number for number, line in enumerate(lines) if line.split()[1:] == ["p50", "p90", "p99", "max"]]
    rows = lines[heading + 2 : heading + 6]
    assert [len(row.split()) >= 5 for row in rows] == [True] * 4, "each row is one line with four figures"
    assert max(map(len, lines[heading : heading + 6])) <= columns


def test_how_far_two_tokens_are_apart_is_no_negative_number():
    class Named:
        def __init__(self, name):
            self.name = name

    drawn = _margin_line(Margin((4, 5), (0.198, -0.198), None), [Named("0"), Named("1")])
    assert (
        drawn.plain == "  the two tokens' logits are apart by 0.198 on either side; on 1 the less likely one was drawn"
    )


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(forge, monkeypatch):
    def load(*args):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("forge.server.serving.ProcessClient", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = forge("serve", "-m", "hash", "--port", str(taken.getsockname()[1]))
    assert found.status == 2 and "Address already in use" in found.err.splitlines()[-1]


def test_watching_says_so_before_the_first_step(forge):
    class Idle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Idle) as server:
        threading.Thread(target=server.handle_request).start()
        watched = forge("watch", f"http://127.0.0.1:{server.server_port}")
    assert watched.status == 0 and watched.err.endswith("Ctrl-C ends the watching\n") and watched.err.count("\n") == 1
