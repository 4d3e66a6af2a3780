"""Replicas on a real Ray: one server for all of these tests, with the hash model, on this machine.

`FORGE_KILLS` says how many replicas are killed; the issue's bar is 50, a test run kills two.
"""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.conftest import start
from tests.server.conftest import Server, until

pytest.importorskip("ray", reason="Ray Serve is not installed: pip install 'ray[serve]'")

KILLS = int(os.environ.get("FORGE_KILLS", "2"))
BEGINNING = "Once upon a time there was a fox who lived by the old mill. "


def cluster(*args: str) -> Server:
    return Server("--model", "hash", "--ray-address", "local", "--threads", "1", *args)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = cluster("--replicas", "2")
    yield found
    found.stop()
    assert until(lambda: not children(found.process.pid), 30), "processes are left behind"


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    own = [int(child) for text in texts for child in text.split()]
    return own + [below for child in own for below in children(child)]


def replica_pids(server: Server) -> list[int]:
    def title(pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    return [pid for pid in children(server.process.pid) if title(pid).startswith(b"ray::ServeReplica:forge-engines")]


def completion(server: Server, prompt: str, **options) -> tuple[int, dict]:
    body = {"model": "hash", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
    return server.request("/v1/completions", body)


def events(server: Server, prompt: str, **options) -> Iterator[str]:
    """What a stream sends."""
    body = {"model": "hash", "prompt": prompt, "stream": True, "temperature": 0, "ignore_eos": True, **options}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()


def num_answering(server: Server) -> int:
    """To how many replicas requests go that come at once."""
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(completion, server, f"{time.monotonic()} who?", max_tokens=200) for _ in range(4)]
    return len({route(server, one.result()[1]["id"])["replica"] for one in asked})


def route(server: Server, request_id: str) -> dict:
    return server.request(f"/debug/requests/{request_id}")[1]["route"]


def test_a_prompt_goes_where_its_beginning_is_cached_and_why(server):
    first = completion(server, BEGINNING)[1]
    time.sleep(0.3)  # the event that the blocks are there
    again = completion(server, BEGINNING + "Every evening")[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    decision = route(server, again["id"])
    assert (decision["why"], decision["router"]) == ("prefix", "prefix")
    assert decision["replica"] == route(server, first["id"])["replica"] == decision["holder"]
    others = [completion(server, f"{number}" * 80)[1]["id"] for number in range(6)]
    assert len({route(server, other)["replica"] for other in others}) == 2


def test_answers_are_those_of_one_engine_streamed_or_not(server):
    from forge import LLM, SamplingParams

    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    wanted = LLM("hash", kv="prefix", threads=1).generate(["A mill"], params)[0].outputs[0].text
    assert completion(server, "A mill", max_tokens=40)[1]["choices"][0]["text"] == wanted
    chunks = [json.loads(chunk) for chunk in events(server, "A mill", max_tokens=40) if chunk != "[DONE]"]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == wanted


def test_limits_and_mistakes_are_answered_as_by_one_server(server):
    assert completion(server, "a", max_tokens=10**6)[0] == 400
    assert server.request("/v1/completions", {"model": "none", "prompt": "a"})[0] == 404
    assert server.request("/v1/completions", {"prompt": "a", "temperature": -1})[0] == 400
    status, found = completion(server, "a", n=2, max_tokens=3)
    assert status == 200 and len(found["choices"]) == 2
    status, found = server.request("/classify", {"input": ["a", "b"], "labels": ["x", "y"]})
    assert status == 200 and len(found["data"]) == 2


def test_a_client_that_leaves_ends_its_request(server):
    stream = events(server, "a long one", max_tokens=4000)
    next(stream)
    assert until(lambda: server.metric("vllm:num_requests_running") == 1)
    stream.close()
    assert until(server.is_idle, 10)


def server_replicas(server: Server) -> list[str]:
    text = server.request("/metrics")[1]
    running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return [line.partition('replica="')[2].partition('"')[0] for line in running]


def test_metrics_have_a_label_for_the_replica(server):
    text = server.request("/metrics")[1]
    assert len(set(server_replicas(server))) == len(server_replicas(server)) >= 2
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1


def test_steps_of_all_replicas_can_be_watched(server):
    seen, ready = [], threading.Event()

    def watch() -> None:
        with urllib.request.urlopen(f"{server.url}/debug/steps", timeout=60) as answer:
            ready.set()
            for line in answer:
                if line.startswith(b"data: {"):
                    seen.append(json.loads(line[6:]))
                if len(seen) == 8:
                    break

    threading.Thread(target=watch, daemon=True).start()
    ready.wait(10)
    for number in range(4):
        completion(server, f"{number}" * 50, max_tokens=4)
    assert until(lambda: len(seen) == 8, 10)
    assert {step["replica"] for step in seen} <= set(server_replicas(server))
    routes = [route for step in seen for route in step.get("routes", [])]
    assert routes and all(route["router"] == "prefix" for route in routes)


def test_each_request_ends_once_when_replicas_are_killed(server):
    """Streams that have begun end with an error that says why; what has sent nothing is answered by another."""
    told = 0
    for round_ in range(KILLS):
        assert until(lambda: len(replica_pids(server)) == 2 and num_answering(server) == 2, 60), "it did not come back"

        def stream(number: int, round_: int = round_) -> str:
            sent = list(events(server, f"{round_} {number} a", max_tokens=3000))
            errors = [json.loads(one)["error"]["message"] for one in sent if one.startswith('{"error"')]
            assert len(errors) <= 1 and sent[-1] == "[DONE]"
            return errors[0] if errors else "answered"

        def whole(number: int, round_: int = round_) -> str:
            status, found = completion(server, f"{round_} {number} b", max_tokens=3000)
            return "answered" if status == 200 else str(found)

        with ThreadPoolExecutor(12) as pool:
            streams = [pool.submit(stream, number) for number in range(6)]
            answers = [pool.submit(whole, number) for number in range(6)]
            assert until(lambda: server.metric("vllm:num_requests_running") >= 8, 20)
            victim = replica_pids(server)[round_ % 2]
            os.kill(victim, signal.SIGKILL)
            ends = [one.result(120) for one in streams]
            assert {one.result(120) for one in answers} == {"answered"}
        died = [end for end in ends if end != "answered"]
        assert all("died while it was answering: send the request again" in end for end in died), died
        told += len(died)
        assert until(server.is_idle, 20), "blocks are still held"
    assert told, "no stream ran where a replica died"


def test_sigterm_lets_requests_finish_and_leaves_nothing_behind():
    server = cluster("--replicas", "1", "--router", "p2c")
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(completion, server, "a long one", max_tokens=800)
            assert until(lambda: server.metric("vllm:num_requests_running") == 1)
            left = children(server.process.pid)
            assert server.stop() == 0
            assert answer.result()[0] == 200
    finally:
        server.stop()
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 30), "processes are left behind"


def test_prefill_apart_gives_the_same_answers():
    server = cluster("--prefill-replicas", "1", "--decode-replicas", "1")
    try:
        from forge import LLM, SamplingParams

        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        prompts = [BEGINNING * 3, "a", "An owl"]
        wanted = [one.outputs[0].text for one in LLM("hash", kv="prefix", threads=1).generate(prompts, params)]
        found = [completion(server, prompt, max_tokens=40)[1] for prompt in prompts]
        assert [one["choices"][0]["text"] for one in found] == wanted
        timeline = server.request(f"/debug/requests/{found[0]['id']}")[1]
        assert "handed over by another engine" in json.dumps(timeline)
        assert until(server.is_idle, 10)
    finally:
        server.stop()


long = pytest.mark.skipif(KILLS < 3, reason="it would take these tests beyond two minutes: run with FORGE_KILLS=50")


@long
def test_serve_adds_a_replica_when_requests_pile_up():
    server = cluster("--replicas", "1", "--max-replicas", "2", "--target-requests", "1")
    try:
        stop = threading.Event()

        def ask(number: int) -> None:
            while not stop.is_set():
                assert completion(server, f"{number} a", max_tokens=600)[0] == 200

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, number) for number in range(6)]
            try:
                assert until(lambda: len(replica_pids(server)) == 2, 90)
            finally:
                stop.set()
            [one.result(60) for one in asked]
    finally:
        server.stop()


@long
def test_a_model_that_does_not_load_is_one_line():
    options = ("--replicas", "1", "--ray-address", "local", "--max-model-len", "1000000")
    process = start("serve", "--model", "hash", "--port", "0", *options, text=True)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2 and "--max-model-len 1000000 is more than" in said
    assert "Traceback" not in said and "closed" not in said
