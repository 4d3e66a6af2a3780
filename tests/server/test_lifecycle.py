"""Servers that end: told to, in the middle of their work, or without their engine."""

import json
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request

import openai
import pytest

from tests.server.conftest import Server, request_bytes
from tests.waiting import PATIENCE, until

LONG = {"prompt": "x", "max_tokens": 3500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory, alone) -> str:
    """A model that can go on for as long as a test needs to interrupt it."""
    from tests.small_models import write_small_qwen3

    path = tmp_path_factory.mktemp("served") / "long.gguf"
    return str(write_small_qwen3(path, max_position_embeddings=4096, num_layers=6, hidden_size=128))


def begin_stream(server: Server, body=LONG) -> socket.socket:
    """A stream that has begun."""
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.settimeout(PATIENCE)
    raw.sendall(request_bytes("/v1/completions", body | {"stream": True}))
    data = b""
    while b"data: " not in data:
        data += raw.recv(65536)
    return raw


def rest(raw: socket.socket) -> str:
    data = b""
    while piece := raw.recv(65536):
        data += piece
    raw.close()
    return data.decode()


def test_sigterm_lets_a_stream_finish_and_refuses_new_work(long_model):
    server = Server("-m", long_model, "--grace", "1000", "--header-timeout", "1000")
    idle = socket.create_connection(("127.0.0.1", server.port))
    raw = begin_stream(server)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)  # so that the stream does not end before the refusal
    server.process.send_signal(signal.SIGTERM)
    assert until(lambda: any("draining 1: " in line for line in server.log))
    idle.sendall(request_bytes("/v1/completions", LONG))
    refused = rest(idle)
    os.kill(engine, signal.SIGCONT)
    text = rest(raw)
    assert "data: [DONE]" in text and '"finish_reason":"length"' in text and "error" not in text
    assert server.process.wait(PATIENCE) == 0
    assert refused.startswith("HTTP/1.1 503") and "shutting_down" in refused


@pytest.mark.slow
def test_a_subscriber_does_not_hold_up_the_end(long_model):
    server = Server("-m", long_model)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /debug/steps HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGTERM)
        assert "[DONE]" in rest(raw)
    assert server.stop() == 0
    assert not [line for line in server.log if "ERROR" in line]


@pytest.mark.slow
def test_after_the_grace_time_a_stream_ends_with_an_error(long_model):
    server = Server("-m", long_model, "--grace", "0.1")
    raw = begin_stream(server, LONG | {"n": 4, "temperature": 1})
    server.process.send_signal(signal.SIGTERM)
    text = rest(raw)
    assert server.process.wait(PATIENCE) == 0
    assert '"code":"shutting_down"' in text and text.rstrip().endswith("0") and "data: [DONE]" in text
    assert not [line for line in server.log if "Traceback" in line]


def test_a_dead_engine_ends_what_runs_and_the_server_with_one_line(long_model):
    server = Server("-m", long_model)
    raw = begin_stream(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert '"code":"engine_dead"' in rest(raw)
    assert server.process.wait(PATIENCE) == 1
    assert until(lambda: any("died" in line for line in server.log))
    assert len([line for line in server.log if "died (signal 9)" in line]) == 1
    assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.slow
def test_a_dead_engine_is_started_again_where_asked_and_its_requests_count_as_errors(long_model):
    server = Server("-m", long_model, "--on-engine-death", "restart")
    raw = begin_stream(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert '"code":"engine_dead"' in rest(raw)
    status, found = server.request("/health")
    assert status == 503 and found["error"]["code"] == "engine_dead"
    status, found = server.request("/v1/completions", {"prompt": "x"})
    assert status == 503 and found["error"]["code"] == "engine_dead"
    assert server.is_idle()
    assert 'finished_reason="error"} 1' in server.request("/metrics")[1]
    assert until(lambda: server.request("/health")[0] == 200)
    assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert until(lambda: server.request("/health")[0] == 503) and until(lambda: server.request("/health")[0] == 200)
    assert server.stop() == 0
    assert len([line for line in server.log if "died (signal 9)" in line]) == 2


@pytest.mark.slow
def test_an_engine_that_does_not_load_again_ends_the_server(tmp_path, alone):
    from tests.small_models import write_small_qwen3

    path = write_small_qwen3(tmp_path / "gone.gguf")
    server = Server("-m", str(path), "--on-engine-death", "restart")
    path.unlink()
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.process.wait(PATIENCE) == 1
    assert until(lambda: any("does not start again" in line for line in server.log))


def test_an_engine_whose_server_was_killed_ends(long_model):
    server = Server("-m", long_model)
    begin_stream(server)
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()

    def is_gone() -> bool:
        try:
            with open(f"/proc/{engine}/stat") as file:
                return file.read().rsplit(")")[1].split()[0] == "Z"
        except OSError:
            return True

    assert until(is_gone)


def code_of(answer: tuple[int, dict]) -> tuple[int, str | None]:
    status, body = answer
    return status, body["error"]["code"] if "error" in body else None


def test_a_full_queue_is_alive_and_not_ready(long_model):
    server = Server("-m", long_model, "--max-queue", "2", "--max-num-seqs", "1")
    assert server.request("/ready")[0] == 200
    raws = [begin_stream(server)]
    raws.append(socket.create_connection(("127.0.0.1", server.port)))
    raws[1].sendall(request_bytes("/v1/completions", LONG))
    assert until(lambda: code_of(server.request("/ready")) == (503, "queue_full"))
    assert server.request("/health")[0] == 200
    for raw in raws:
        raw.close()
    assert until(lambda: server.request("/ready")[0] == 200)
    assert server.stop() == 0


@pytest.mark.slow
def test_a_server_that_closes_is_alive_and_not_ready(long_model):
    server = Server("-m", long_model)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    raw = begin_stream(server, LONG | {"n": 4, "temperature": 1})
    server.process.send_signal(signal.SIGTERM)
    assert until(lambda: any("draining 1: " in line for line in server.log))
    answers = []
    for probe, path in zip(idle, ("/health", "/ready"), strict=True):
        probe.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answers.append(rest(probe))
    assert answers[0].startswith("HTTP/1.1 200") and answers[1].startswith("HTTP/1.1 503")
    server.process.send_signal(signal.SIGTERM)  # a second one does not wait
    assert '"code":"shutting_down"' in rest(raw)
    assert server.process.wait(PATIENCE) == 0


def test_a_step_that_does_not_end_is_neither_alive_nor_ready(long_model):
    server = Server("-m", long_model, "--step-timeout", "0.3")
    assert server.request("/health")[0] == 200
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        assert until(lambda: code_of(server.request("/health")) == (503, "engine_hung"))
        assert code_of(server.request("/ready")) == (503, "engine_hung")
    finally:
        os.kill(engine, signal.SIGCONT)
    assert until(lambda: server.request("/health")[0] == 200)
    assert server.stop() == 0


STUCK = """
import sys, time
from forge.cli.main import main
from forge.tokenizer import Tokenizer
if __name__ == "__main__":
    Tokenizer.encode_chat = lambda *arguments, **options: time.sleep(1000)
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "grace",
    [pytest.param(0.2, id="after the grace time", marks=pytest.mark.slow), pytest.param(60.0, id="at a second signal")],
)
def test_sigterm_ends_a_server_whose_thread_is_stuck_and_dumps_nothing(long_model, tmp_path, grace):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    server = Server("-m", long_model, "--grace", str(grace), script=script)
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.settimeout(PATIENCE)
    raw.sendall(request_bytes("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}))
    assert until(lambda: "http_requests_in_progress 2" in server.request("/metrics")[1])
    server.process.send_signal(signal.SIGTERM)
    if grace > 1:
        assert until(lambda: any("draining 1: " in line for line in server.log))
        server.process.send_signal(signal.SIGTERM)
    answer = rest(raw)
    assert answer.startswith("HTTP/1.1 503") and "shutting_down" in answer
    assert server.process.wait(PATIENCE) == 0
    assert any("have not ended: they are aborted" in line for line in server.log)
    assert not [line for line in server.log if "Traceback" in line or "ERROR" in line]


@pytest.mark.slow
def test_clients_survive_a_restart_under_load(long_model):
    """Whatever a client gets while the server goes is an answer, an error that it understands, or a closed door."""
    server = Server("-m", long_model, "--grace", "0.2")
    port, stop, odd, good = server.port, threading.Event(), [], []

    def work():
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=PATIENCE)
        while not stop.is_set():
            try:
                found = client.completions.create(model="long", prompt="x", max_tokens=20, temperature=0)
                good.append(found.choices[0].text)
            except (openai.APIConnectionError, openai.InternalServerError):
                time.sleep(0.02)
            except Exception as error:
                odd.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert until(lambda: len(good) > 20)
    assert server.stop() == 0
    before = len(good)
    server = Server("-m", long_model, "--port", str(port))
    assert until(lambda: len(good) > before + 20)
    stop.set()
    for worker in workers:
        worker.join(PATIENCE)
    assert not odd and len(set(good)) == 1
    assert server.stop() == 0


def test_a_bad_model_or_address_is_one_line(forge, long_model):
    found = forge("serve", "-m", "no/such.gguf", "--port", "0")
    assert found.status == 2 and found.err.startswith("forge: no/such.gguf") and found.err.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = forge("serve", "-m", long_model, "--port", str(taken.getsockname()[1]))
    assert found.status == 2 and "cannot listen" in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    "given, variable, expected",
    [
        ((None, None), None, ("127.0.0.1", 8080)),
        ((None, None), "0.0.0.0:99", ("0.0.0.0", 99)),
        ((None, None), ":99", ("127.0.0.1", 99)),
        ((None, None), "[::1]:99", ("::1", 99)),
        ((None, 7), "0.0.0.0:99", ("127.0.0.1", 7)),
        (("h", None), "0.0.0.0:99", ("h", 8080)),
    ],
)
def test_the_variable_counts_where_no_address_was_given(given, variable, expected):
    from forge.cli.serve import address

    assert address(*given, variable) == expected


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_there_cannot_be_is_refused(port):
    from forge.cli.serve import address
    from forge.errors import UsageError

    with pytest.raises(UsageError, match=f"--port is a number from 0 to 65535, and not {port}"):
        address(None, port, None)


@pytest.mark.parametrize("variable", ["nowhere", "h:x", "h:99999", "h:-1"])
def test_a_variable_that_is_no_address_is_refused(variable):
    from forge.cli.serve import address
    from forge.errors import UsageError

    with pytest.raises(UsageError, match="FORGE_ADDR"):
        address(None, None, variable)


def test_two_servers_that_bind_one_port_at_once_are_told_apart_when_they_listen():
    from forge.errors import UsageError
    from forge.server.serving import listen, start_listening
    from forge.server.settings import Settings

    with listen(Settings(port=0)) as first:
        settings = Settings(port=first.getsockname()[1])
        with listen(settings) as second:
            start_listening(first, settings, 10)
            with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{settings.port}"):
                start_listening(second, settings, 10)


OUT_OF_BOUNDS = {
    "--log-interval": ("-3", "nan"),
    "--max-queue": ("0", "-1"),
    "--max-body-bytes": ("-5", "0"),
    "--max-stored-bytes": ("-1",),
    "--header-timeout": ("0", "inf"),
    "--grace": ("-1", "nan"),
    "--stall-timeout": ("-1", "0"),
}


@pytest.mark.parametrize("option, value", [(name, value) for name, values in OUT_OF_BOUNDS.items() for value in values])
def test_a_limit_that_has_no_meaning_is_one_line(forge, option, value):
    found = forge("serve", "-m", "no/such.gguf", "--port", "0", option, value)
    assert found.status == 2 and found.err.count("\n") == 1
    assert f"{option} must be" in found.err and f"not {value}" in found.err


@pytest.mark.slow
def test_without_files_to_spare_connections_are_refused_in_a_few_lines(long_model):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    server = Server("-m", long_model, preexec_fn=limit)
    raws = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    waiting, answers = set(raws), []

    def are_refused() -> bool:
        for raw in select.select(waiting, [], [], 0)[0]:
            waiting.remove(raw)
            answers.append(raw.recv(100))
        return len(answers) > 100

    assert until(are_refused)
    told = [answer for answer in answers if answer]  # a connection may be closed before its answer is out
    assert told and all(answer.startswith(b"HTTP/1.1 503") for answer in told)
    for raw in raws:
        raw.close()
    assert until(lambda: server.request("/health")[0] == 200)
    assert 1 <= len([line for line in server.log if "connections are open" in line]) < 20
    assert len(server.log) < 30 and not [line for line in server.log if "Traceback" in line]
    assert server.stop() == 0


@pytest.mark.slow
def test_three_hundred_connections_at_once_wait_for_no_second_try(long_model):
    """The system queues them, though the server takes few of them in a turn: it is stopped here, and takes none."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    server = Server("-m", long_model, preexec_fn=limit)
    server.process.send_signal(signal.SIGSTOP)
    raws = [socket.socket() for _ in range(300)]
    for raw in raws:
        raw.setblocking(False)
        raw.connect_ex(("127.0.0.1", server.port))
    connected = until(lambda: len(select.select([], raws, [], 0)[1]) == 300)
    server.process.send_signal(signal.SIGCONT)
    assert connected
    for raw in raws:
        raw.close()
    assert server.stop() == 0


def test_a_server_of_full_connections_answers_probes_and_nothing_else(long_model):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    server = Server("-m", long_model, "--header-timeout", "1000", preexec_fn=limit)
    raws = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(112)]
    assert until(lambda: code_of(server.request("/ready")) == (503, "connections_full"))
    assert server.request("/health")[0] == 200 and server.request("/metrics")[0] == 200
    assert server.metric("http_connections_refused_total") == 0
    assert server.request("/v1/models")[0] == 503
    assert server.metric("http_connections_refused_total") == 1
    for raw in raws:
        raw.close()
    assert until(lambda: server.request("/ready")[0] == 200) and server.request("/v1/models")[0] == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_https_is_served_with_a_certificate_and_a_wrong_one_is_one_line(forge, long_model, tmp_path):
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    try:
        subprocess.run([*command, "-subj", "/CN=localhost"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    server = Server("-m", long_model, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    assert server.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=certificate)
    trusting.check_hostname = False
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "ignore_eos": True, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE, context=trusting) as answer:
        assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert server.stop() == 0
    assert not [line for line in server.log if "ERROR" in line]
    found = forge("serve", "-m", long_model, "--port", "0", "--ssl-certfile", key, "--ssl-keyfile", key)
    assert found.status == 2 and "--ssl-certfile" in found.err and found.err.count("\n") == 1
    found = forge("serve", "-m", long_model, "--port", "0", "--ssl-certfile", certificate)
    assert found.status == 2 and "go together" in found.err and found.err.count("\n") == 1


def test_a_public_address_without_a_key_warns(caplog):
    from forge.server.serving import listen
    from forge.server.settings import Settings

    listen(Settings("0.0.0.0", 0)).close()
    assert "--api-key" in caplog.text
    caplog.clear()
    listen(Settings("0.0.0.0", 0, "key")).close()
    listen(Settings("127.0.0.1", 0)).close()
    assert not caplog.text


@pytest.mark.slow
def test_live_prints_every_step(long_model):
    from tests.cli.conftest import start

    process = start("serve", "--port", "0", "-m", long_model, "--live", stdout=subprocess.PIPE, text=True)
    url = next(line for line in process.stderr if "served at" in line).split()[-1]
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(request_bytes("/v1/completions", {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}))
        assert json.loads(rest(raw).partition("\r\n\r\n")[2])["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert [line.split()[1] for line in out.splitlines()] == ["1", "2", "3"]
    assert "prefill" in out and "decode 1" in out


@pytest.mark.slow
def test_watch_shows_the_steps_of_a_server_elsewhere(long_model):
    from tests.cli.conftest import environment, start

    server = Server("-m", long_model)
    proxy = environment(http_proxy="http://127.0.0.1:1", no_proxy="")  # a proxy's 127.0.0.1 would be another machine
    watching = start("watch", server.url, stdout=subprocess.PIPE, text=True, env=proxy)
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(iter(watching.stdout.readline, "")), daemon=True)
    reading.start()

    def is_seen() -> bool:
        server.request("/v1/completions", {"prompt": "abc", "max_tokens": 3, "ignore_eos": True})
        return len(lines) >= 3

    assert until(is_seen)
    assert server.stop() == 0
    reading.join(PATIENCE)
    watching.wait(PATIENCE)
    assert any("prefill" in line for line in lines) and any("decode 1" in line for line in lines)


def test_watching_nobody_is_one_line(forge):
    found = forge("watch", "http://127.0.0.1:1")
    assert found.status == 2 and "shows no steps" in found.err and found.err.count("\n") == 1


def ask_much(server: Server) -> socket.socket:
    """A question that takes longer than a test should."""
    texts = [f"{number} " + "x" * 3000 for number in range(128)]
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.settimeout(PATIENCE)
    raw.sendall(request_bytes("/v1/embeddings", {"input": texts}))
    assert until(lambda: server.metric("vllm:num_requests_waiting") > 50)
    return raw


@pytest.mark.slow
def test_after_the_grace_time_a_question_ends_with_an_error(long_model):
    server = Server("-m", long_model, "--grace", "0.1")
    raw = ask_much(server)
    server.process.send_signal(signal.SIGTERM)
    text = rest(raw)
    assert text.startswith("HTTP/1.1 503") and '"code":"shutting_down"' in text and "retry-after" in text
    assert server.process.wait(PATIENCE) == 0
    assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.slow
def test_a_dead_engine_answers_its_questions(long_model):
    server = Server("-m", long_model)
    raw = ask_much(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert '"code":"engine_dead"' in rest(raw)
    assert server.process.wait(PATIENCE) == 1
