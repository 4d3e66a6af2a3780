"""A whole cluster on a real Ray: one server with two engines, with the hash model, on this machine.

A test run kills an engine under load, with `FORGE_ALL_TESTS=1` every part of the cluster; `FORGE_KILLS` says how many
times.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge import LLM, SamplingParams
from tests.cli.conftest import start
from tests.server.conftest import Server
from tests.small_models import write_small_qwen3
from tests.waiting import until

pytest.importorskip("ray", reason="Ray Serve is not installed: pip install 'ray[serve]'")

ALL = bool(os.environ.get("FORGE_ALL_TESTS"))
KILLS = int(os.environ.get("FORGE_KILLS", "1"))
long = pytest.mark.skipif(not ALL, reason="it takes a minute: run with FORGE_ALL_TESTS=1")
BEGINNING = "Once upon a time there was a fox who lived by the old mill. "
STREAMS = 4
TOKENS = 1500


def cluster(*args: str, **options: Any) -> Server:
    return Server("--model", "hash", "--threads", "1", *args, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = cluster("--replicas", "2", "--ray-address", "local", "--name", "tested")
    yield found
    found.stop()
    assert until(lambda: not children(found.process.pid), 30), "processes are left behind"


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    found = [int(child) for text in texts for child in text.split()]
    return found + [below for child in found for below in children(child)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


PARTS = {
    "engine": "forge.cluster.replica_engine",
    "replica's actor": "ray::ServeReplica",
    "controller": "ray::ServeController",
    "keeper": "forge.cluster.keeper",
    "raylet": "/raylet/raylet ",
    "GCS": "/gcs_server ",
}
LONGEST_PAUSE = 5.0
"""Seconds that a stream may stand still, whatever is killed."""


def pids(server: Server, part: str) -> list[int]:
    """The processes of a part. A `prefill engine` is one whose actor has the title of that application."""
    if part not in PARTS:
        actors = [pid for pid in pids(server, "replica's actor") if (":prefills" in command(pid)) == ("pre" in part)]
        return [pid for actor in actors for pid in children(actor) if PARTS["engine"] in command(pid)]
    return [pid for pid in children(server.process.pid) if PARTS[part] in command(pid)]


def is_whole(server: Server, engines: int = 2) -> bool:
    """All engines can be reached, and are those that Ray runs now; and all of Ray's own parts run."""
    found = {part: len(pids(server, part)) for part in PARTS}
    ray = {"controller": 1, "keeper": 1, "raylet": 1, "GCS": 1}
    parts = {"engine": engines, "replica's actor": engines} | ray
    return found == parts and server.metric("forge:replicas_reachable") == engines


def completion(server: Server, prompt: str, **options) -> tuple[int, dict]:
    body = {"model": "hash", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
    return server.request("/v1/completions", body)


def events(server: Server, prompt: str, headers: dict[str, str] | None = None, **options) -> Iterator[str]:
    """What a stream sends."""
    body = {"model": "hash", "prompt": prompt, "stream": True, "temperature": 0, "ignore_eos": True, **options}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"} | (headers or {}),
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()


def text_of(chunks: list[str]) -> str:
    assert chunks[-1] == "[DONE]", chunks[-1]
    return "".join(choice["text"] for chunk in chunks[:-1] for choice in json.loads(chunk)["choices"])


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM("hash", kv="prefix", threads=1)


def said(alone: LLM, prompt: str, tokens: int, **params) -> str:
    return alone.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True, **params))[0].outputs[0].text


def route(server: Server, request_id: str) -> dict:
    return server.request(f"/debug/requests/{request_id}")[1]["route"]


def test_a_prompt_goes_where_its_beginning_is_cached_and_why(server):
    assert until(lambda: is_whole(server), 60)
    first = completion(server, BEGINNING)[1]
    time.sleep(0.3)  # the event that the blocks are there
    again = completion(server, BEGINNING + "Every evening")[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    decision = route(server, again["id"])
    assert (decision["why"], decision["router"]) == ("prefix", "prefix")
    assert decision["replica"] == route(server, first["id"])["replica"] == decision["holder"]
    others = [completion(server, f"{number}" * 80)[1]["id"] for number in range(6)]
    assert len({route(server, other)["replica"] for other in others}) == 2


def test_answers_are_those_of_one_engine_streamed_or_not(server, alone):
    wanted = said(alone, "A mill", 40)
    assert completion(server, "A mill", max_tokens=40)[1]["choices"][0]["text"] == wanted
    assert text_of(list(events(server, "A mill", max_tokens=40))) == wanted


def test_a_stored_response_goes_on_where_its_cache_is(server):
    asked = {"max_output_tokens": 60, "ignore_eos": True}
    last = server.request("/v1/responses", asked | {"input": BEGINNING})[1]
    for turn in range(3):
        time.sleep(0.3)  # the event that the blocks are there
        body = asked | {"input": f"Turn {turn}", "previous_response_id": last["id"]}
        status, following = server.request("/v1/responses", body)
        assert status == 200 and route(server, following["id"])["replica"] == route(server, last["id"])["replica"]
        computed = (last["usage"]["total_tokens"] - 1) // 16 * 16
        assert following["usage"]["input_tokens_details"]["cached_tokens"] == computed
        last = following
    assert server.request(f"/v1/responses/{last['id']}")[1] == last


def test_messages_filters_and_ids_are_answered_as_by_one_engine(server):
    from forge import LLM, SamplingParams

    filters = {"bad_words": ["a", "bc"], "allowed_token_ids": [*b"abcdef"]}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, **filters)
    expected = LLM("hash", kv="prefix", threads=1).generate(["A mill"], params)[0].outputs[0].text
    status, found = completion(server, "A mill", max_tokens=20, **filters, request_id="mill")
    assert status == 200 and found["choices"][0]["text"] == expected and found["id"] == "cmpl-mill"
    status, message = server.request("/v1/messages", {"messages": [{"role": "user", "content": "A"}], "max_tokens": 5})
    assert status == 200 and message["usage"]["output_tokens"] == 5


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


def test_metrics_have_a_label_for_each_replica_that_runs_and_for_no_other(server):
    text = server.request("/metrics")[1]
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    names = [line.partition('replica="')[2].partition('"')[0] for line in lines]
    assert len(set(names)) == 2 and all(names)
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
    routes = [route for step in seen for route in step.get("routes", [])]
    assert routes and all(route["router"] == "prefix" for route in routes)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("part", PARTS)
def test_every_stream_goes_on_token_for_token_whatever_is_killed(server, alone, part: str, sign: signal.Signals):
    if sign == signal.SIGSTOP and part != "engine":
        pytest.skip("what stands still beside the engines is not noticed by requests")
    if not ALL and (part, sign) != ("engine", signal.SIGKILL):
        pytest.skip("a minute for each part: run with FORGE_ALL_TESTS=1")
    kill_again_and_again(server, alone, part, sign, engines=2)


@long
@pytest.mark.parametrize("part", ["prefill engine", "decode engine"])
def test_every_stream_goes_on_token_for_token_where_prefill_is_apart(alone, part: str):
    server = cluster("--prefill-replicas", "2", "--decode-replicas", "2", "--ray-address", "local", "--name", "apart")
    try:
        kill_again_and_again(server, alone, part, signal.SIGKILL, engines=4)
    finally:
        server.stop()


def kill_again_and_again(server: Server, alone: LLM, part: str, sign: signal.Signals, engines: int) -> None:
    """`KILLS` times: one process of a part gets a signal while streams and requests without one are under way. Clients
    stream again and again until the part has come back."""
    pauses, killed = [], 0
    back, begun = threading.Event(), threading.Semaphore(0)

    def is_back() -> bool:
        return is_whole(server, engines) and killed not in pids(server, part)

    def stream(prompt: str, wanted: str) -> float:
        longest = 0.0
        while not longest or not back.is_set():
            came, chunks = [time.monotonic()], []
            for chunk in events(server, prompt, max_tokens=TOKENS):
                chunks.append(chunk)
                came.append(time.monotonic())
                if len(chunks) == 2:
                    begun.release()
            assert text_of(chunks) == wanted
            longest = max(longest, *[later - before for before, later in pairwise(came)])
        return longest

    assert until(is_back, 90)
    for round_ in range(KILLS):
        prompts = [f"{part} {sign} {round_} {number} " * (1 + 20 * (engines > 2)) for number in range(STREAMS)]
        texts = [said(alone, prompt, TOKENS) for prompt in prompts]
        back.clear()
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(2 * STREAMS) as pool:
            streams = [pool.submit(stream, *asked) for asked in zip(prompts, texts, strict=True)]
            wholes = [pool.submit(completion, server, f"whole {prompt}", max_tokens=TOKENS) for prompt in prompts]
            if part != "prefill engine":  # that one has done its part when a stream begins
                assert begun.acquire(timeout=20)
            killed = pids(server, part)[0]
            os.kill(killed, sign)
            came_back = until(is_back, 90)
            back.set()
            assert came_back, "it did not come back"
            pauses += [one.result(120) for one in streams]
            for prompt, whole in zip(prompts, wholes, strict=True):
                status, body = whole.result(120)
                assert status == 200 and body["choices"][0]["text"] == said(alone, f"whole {prompt}", TOKENS)
    assert until(server.is_idle, 20), "blocks are still held"
    check_pauses(f"{part} {sign.name}", pauses)


def check_pauses(fault: str, pauses: list[float]) -> None:
    """pauses: of each stream, the longest time between two events, in seconds."""
    pauses.sort()
    p50, p99 = (pauses[int(quantile * len(pauses))] for quantile in (0.5, 0.99))
    print(f"{fault}, {KILLS} times: longest pauses p50 {p50:.2f} s, p99 {p99:.2f} s, {pauses[-1]:.2f} s")
    assert pauses[-1] < LONGEST_PAUSE


def test_another_server_runs_beside_it_and_its_name_cannot_be_taken(server, alone):
    taken = start("serve", "--model", "hash", "--port", "0", "--replicas", "1", "--name", "tested", text=True)
    _, message = taken.communicate(timeout=60)
    assert taken.returncode == 2 and "--attach tested shares its engines, --name names another" in message
    assert completion(server, "A mill")[1]["choices"][0]["text"] == said(alone, "A mill", 8)


def test_another_front_shares_the_engines(server, alone):
    assert until(lambda: is_whole(server), 90)
    other = Server("--attach", "tested")
    try:
        assert until(lambda: other.metric("forge:replicas_reachable") == 2, 60)
        first = completion(server, BEGINNING * 2)[1]
        assert until(lambda: route(other, completion(other, BEGINNING * 2 + "Every")[1]["id"])["why"] == "prefix", 20)
        assert completion(other, "A mill")[1]["choices"][0]["text"] == said(alone, "A mill", 8)
    finally:
        other.stop()
    assert completion(server, BEGINNING * 2)[1]["choices"] == first["choices"], "a front that leaves ends nothing"


CLIENTS = [
    (path, body, by_request)
    for path, body in (
        ("/v1/completions", {"prompt": "A hen"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A hen"}]}),
    )
    for by_request in (False, True)
]
"""What clients of a front ask for, and whether they go on with the id of their request or of the last event."""


def test_clients_of_a_front_that_is_killed_go_on_at_another_and_no_token_is_missing_or_comes_twice(server):
    assert until(lambda: is_whole(server), 90)
    pauses: list[float] = []
    with ThreadPoolExecutor(1) as starting, ThreadPoolExecutor(len(CLIENTS)) as pool:
        coming = starting.submit(Server, "--attach", "tested")
        for round_ in range(KILLS):
            front = coming.result()
            if round_ < KILLS - 1:
                coming = starting.submit(Server, "--attach", "tested")
            assert until(lambda front=front: front.metric("forge:replicas_reachable") == 2, 60)
            begun = threading.Semaphore(0)
            sampled = {"temperature": 0.8, "max_tokens": 2 * TOKENS, "ignore_eos": True}
            bodies = [body | sampled for _, body, _ in CLIENTS]
            reading = [
                pool.submit(read_at_both, front, server, path, body, by_request, begun)
                for (path, _, by_request), body in zip(CLIENTS, bodies, strict=True)
            ]
            assert all(begun.acquire(timeout=60) for _ in reading)
            os.kill(front.process.pid, signal.SIGKILL)
            texts, seeds, found = zip(*[client.result(120) for client in reading], strict=True)
            paths = [path for path, _, _ in CLIENTS]
            bodies = [body | {"seed": seed} for body, seed in zip(bodies, seeds, strict=True)]
            for text, (_, whole) in zip(texts, pool.map(server.request, paths, bodies), strict=True):
                (choice,) = whole["choices"]
                assert text == (choice.get("text") or choice["message"]["content"])
            pauses += [pause for pause in found if pause is not None]
    assert len(pauses) >= KILLS
    check_pauses("front SIGKILL", pauses)


def read_at_both(
    first: Server, second: Server, path: str, body: dict, by_request: bool, begun: threading.Semaphore
) -> tuple[str, int, float | None]:
    """Read a stream at one front until that is killed, and the rest at another. Return the text, its seed and the
    longest time between two events, or None for one that ended before. begun: is released when the first tokens have
    come."""
    text = request_id = event_id = ""
    moments, ids = [time.monotonic()], 0
    for at in (first, second):
        seen, headers = text, {"content-type": "application/json"}
        if at is second:
            headers["last-event-id"] = request_id if by_request else event_id
            text = "" if by_request else text
        request = urllib.request.Request(at.url + path, json.dumps(body | {"stream": True}).encode(), headers)
        with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    moments.append(time.monotonic())
                    chunk = json.loads(line[6:])
                    request_id = chunk["id"]
                    for choice in chunk["choices"]:
                        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                elif line.startswith(b"id: "):
                    event_id, ids = line[4:].decode().strip(), ids + 1
                    if ids == 3:
                        begun.release()
                elif line.startswith(b"data: [DONE]"):
                    assert text.startswith(seen)
                    pause = max(later - before for before, later in pairwise(moments))
                    return text, int(event_id.split(":")[1], 16), pause if at is second else None
    raise AssertionError(f"the stream was lost after {len(text)} characters")


def change(name: str, *options: str) -> tuple[int, str]:
    """The exit status of `forge engines`, and its complaint."""
    process = start("engines", name, *options, text=True)
    _, message = process.communicate(timeout=120)
    return process.returncode, message


@long
def test_engines_come_and_go_and_a_model_that_does_not_fit_is_refused_while_streams_run(server, alone, tmp_path):
    assert until(lambda: is_whole(server), 90)
    stop, prompts = threading.Event(), [f"a stream {number}" for number in range(STREAMS)]

    def ask(prompt: str) -> int:
        wanted, rounds = said(alone, prompt, TOKENS), 0
        while not stop.is_set():
            assert text_of(list(events(server, prompt, max_tokens=TOKENS))) == wanted
            rounds += 1
        return rounds

    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(ask, prompt) for prompt in prompts]
        try:
            for number in (3, 2):
                assert change("tested", "--replicas", str(number)) == (0, "")
                assert until(lambda number=number: server.metric("forge:replicas_reachable") == number, 60)
            status, message = change("tested", "--model", str(write_small_qwen3(tmp_path / "small.gguf")))
            assert status == 1 and "the new model has another tokenizer and another context" in message
            assert until(lambda: is_whole(server), 60)
        finally:
            stop.set()
        assert all(one.result(120) for one in asked)


@long
def test_an_update_to_another_file_fails_no_request_and_mixes_no_answer(tmp_path):
    paths = [str(write_small_qwen3(tmp_path / f"{seed}.gguf", seed=seed)) for seed in (1, 2)]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    models = [LLM(path, threads=1) for path in paths]
    wanted = [llm.generate(["a mill"], params)[0].outputs[0].text for llm in models]
    assert wanted[0] != wanted[1]
    options = ("--threads", "1", "--served-model-name", "hash", "--replicas", "1", "--ray-address", "local")
    server = Server("--model", paths[0], *options, "--name", "updated")
    try:
        stop, answers = threading.Event(), []

        def ask() -> None:
            while not stop.is_set():
                answers.append(text_of(list(events(server, "a mill", max_tokens=60))))

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask) for _ in range(2)]
            try:
                assert change("updated", "--model", paths[1]) == (0, "")
                assert until(lambda: completion(server, "a mill", max_tokens=60)[1]["choices"][0]["text"] == wanted[1])
            finally:
                stop.set()
            [one.result(60) for one in asked]
        assert set(answers) == set(wanted)
    finally:
        server.stop()


def test_prefill_apart_and_sigterm(alone):
    server = cluster("--prefill-replicas", "1", "--decode-replicas", "1", "--ray-address", "local")
    try:
        prompts = [BEGINNING * 3, "a", "An owl"]
        found = [completion(server, prompt, max_tokens=40)[1] for prompt in prompts]
        assert [one["choices"][0]["text"] for one in found] == [said(alone, prompt, 40) for prompt in prompts]
        timeline = server.request(f"/debug/requests/{found[0]['id']}")[1]
        assert "handed over by another engine" in json.dumps(timeline)
        assert until(server.is_idle, 10)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(completion, server, "a long one", max_tokens=800)
            assert until(lambda: server.metric("vllm:num_requests_running") == 1)
            left = children(server.process.pid)
            assert server.stop() == 0
            assert answer.result()[0] == 200
    finally:
        server.stop()
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 30), "processes are left behind"


@long
def test_serve_adds_a_replica_when_requests_pile_up():
    server = cluster(
        *("--replicas", "1", "--max-replicas", "2", "--target-requests", "1", "--ray-address", "local"),
        *("--upscale-delay", "1"),
    )
    try:
        stop = threading.Event()

        def ask(number: int) -> None:
            while not stop.is_set():
                assert completion(server, f"{number} a", max_tokens=600)[0] == 200

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, number) for number in range(6)]
            try:
                assert until(lambda: server.metric("forge:replicas_reachable") == 2, 90)
            finally:
                stop.set()
            [one.result(60) for one in asked]
    finally:
        server.stop()


NODE_IP = "127.0.0.2"
"""Of this machine alone. For 127.0.0.1 Ray takes the machine's address, at which these nodes do not listen."""


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A Ray of two nodes on this machine, each with room for one engine and one GPU that is only said to be there."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "num_gpus": 1, "node_ip_address": NODE_IP}
    found = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
    found.add_node(**size)
    yield found
    found.shutdown()


def environments(actor: str) -> list[list[str]]:
    """Return what stood in the environment of each process of an actor when it began. There is one at least."""
    found = subprocess.run(["pgrep", "-f", f"^ray::{actor}"], stdout=subprocess.PIPE, text=True, check=True)
    return [Path(f"/proc/{process}/environ").read_text().split("\0") for process in found.stdout.split()]


@long
def test_engines_are_on_two_nodes_and_every_stream_goes_on_when_one_node_dies(nodes, alone):
    variable = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S=0.2"
    environment = os.environ | dict([variable.split("=")])
    server = cluster("--replicas", "2", "--ray-address", nodes.address, "--name", "nodes", env=environment)
    try:
        assert until(lambda: server.metric("forge:replicas_reachable") == 2, 60)
        assert all(variable in environ for environ in environments("ServeReplica:nodes"))
        assert any(variable in environ for environ in environments("ServeController")), "there may be other servers'"
        (second,) = nodes.worker_nodes
        with ThreadPoolExecutor(STREAMS) as pool:
            prompts = [f"a node {number}" for number in range(STREAMS)]
            ask = lambda prompt: text_of(list(events(server, prompt, max_tokens=TOKENS)))  # noqa: E731
            streams = [pool.submit(ask, prompt) for prompt in prompts]
            assert until(lambda: server.metric("vllm:num_requests_running") == STREAMS, 20)
            nodes.remove_node(second, allow_graceful=False)
            assert [stream.result(60) for stream in streams] == [said(alone, prompt, TOKENS) for prompt in prompts]
        assert until(lambda: server.metric("forge:replicas_reachable") == 1, 60), "the other node has no room"
        nodes.add_node(num_cpus=1, num_gpus=1, node_ip_address=NODE_IP)
        assert until(lambda: server.metric("forge:replicas_reachable") == 2, 90)
    finally:
        server.stop()


PLACED = """
import sys, warnings
warnings.simplefilter("ignore")
import ray
from forge.cluster.keeper import Keeper
from forge.cluster.control import Deployment
from forge.cluster.options import ClusterOptions

options = {"threads": 1, "kv": "prefix", "device": "cuda"}
plan = Deployment("gpus", "hash", options, ClusterOptions(replicas=3), address=sys.argv[1])
wanted = Keeper(None, plan)._application("engines")._bound_deployment.ray_actor_options
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote
class Engine:
    def place(self):
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

engines = [Engine.options(**wanted).remote() for _ in range(3)]
placed, waiting = ray.wait([engine.place.remote() for engine in engines], num_returns=3, timeout=10)
print(len({node for node, _ in ray.get(placed)}), [len(gpus) for _, gpus in ray.get(placed)], len(waiting))
"""


@long
def test_an_engine_takes_one_gpu_of_its_node_and_a_third_one_waits(nodes):
    command_line = [sys.executable, "-c", PLACED, nodes.address]
    result = subprocess.run(command_line, capture_output=True, text=True, timeout=120)
    assert result.stdout.split("\n")[-2] == "2 [1, 1] 1", result.stderr[-1000:]


@long
def test_a_model_that_does_not_load_is_one_line():
    options = ("--replicas", "1", "--ray-address", "local", "--max-model-len", "1000000")
    process = start("serve", "--model", "hash", "--port", "0", *options, text=True)
    _, message = process.communicate(timeout=120)
    assert process.returncode == 2 and "--max-model-len 1000000 is more than" in message
    assert "Traceback" not in message and "closed" not in message
