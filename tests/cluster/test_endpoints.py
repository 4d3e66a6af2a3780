"""Every endpoint of a front answers as one engine's server does, also when the engine that computes it dies."""

import asyncio
import json
import os
import re
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge import LLM
from forge.cluster.client import ClusterClient
from forge.server.app import create_app
from forge.server.engine_process import ready_message
from forge.server.settings import Settings
from tests.cluster.local_engines import LocalEngine, front_of, in_a_loop
from tests.server.conftest import Server
from tests.waiting import eventually, until

MODEL = "tales"
"""Which has hidden states, for embeddings, and words for the reranker."""

TEXT = "Once upon a time there was a fox who lived by the old mill. "
TOKENS = {"max_tokens": 40, "ignore_eos": True}
SAMPLED = TOKENS | {"temperature": 0.8, "seed": 7}
MESSAGES = {"messages": [{"role": "user", "content": TEXT}]}
RESPONSE = {"input": TEXT, "max_output_tokens": 40, "ignore_eos": True, "temperature": 0}
STREAM = {"stream": True}

REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"prompt": TEXT, "n": 2, "logprobs": 2} | SAMPLED),
    ("GET", "/debug/requests/{request}", None),
    ("POST", "/v1/completions", {"prompt": [TEXT, "A hen"]} | SAMPLED | STREAM),
    ("POST", "/v1/chat/completions", MESSAGES | {"logprobs": True, "top_logprobs": 2} | SAMPLED),
    ("POST", "/v1/chat/completions", MESSAGES | SAMPLED | STREAM),
    ("POST", "/generate", {"prompt": TEXT} | SAMPLED),
    ("POST", "/generate", {"prompt": TEXT} | SAMPLED | STREAM),
    ("POST", "/v1/messages", MESSAGES | TOKENS | {"temperature": 0}),
    ("POST", "/v1/messages", MESSAGES | TOKENS | {"temperature": 0} | STREAM),
    ("POST", "/v1/messages/count_tokens", MESSAGES),
    ("POST", "/v1/responses", RESPONSE | STREAM),
    ("POST", "/v1/responses", RESPONSE),
    ("POST", "/v1/responses/input_tokens", {"input": TEXT}),
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}/input_items", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("POST", "/v1/embeddings", {"input": [TEXT, "A hen"]}),
    ("POST", "/v1/rerank", {"query": "a mill", "documents": [TEXT, "A hen"]}),
    ("POST", "/v1/score", {"text_1": TEXT, "text_2": ["A hen", "a mill"]}),
    ("POST", "/classify", {"input": [TEXT, "A hen"], "labels": ["x", "y"]}),
    ("POST", "/tokenize", {"prompt": TEXT}),
    ("POST", "/detokenize", {"tokens": list(b"A hen")}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/served", None),
    ("GET", "/version", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/metrics", None),
]
"""In order: one that begins with a request or a response asks for that of a request above it."""
ELSEWHERE = {("GET", "/debug/steps")}
"""Its answer has no end: `test_serve` and `test_client` read it."""

_OWN = {"id", "created", "created_at", "completed_at", "first_id", "last_id", "item_id", "response_id"}
_OWN |= {"system_fingerprint", "cached_tokens", "cache_read_input_tokens", "usage", "metrics", "timings", "why", "step"}
_OWN |= {"time_to_first_token_ms", "end_to_end_ms", "milliseconds"}
"""Names of what every answer has of its own, or what depends on a cache or a clock."""
_WRITTEN = ("text", "content", "delta", "token_ids", "finish_reason", "stop_reason", "partial_json")


def note_ids(path: str, answer: str, ids: dict[str, str]) -> None:
    """Keep the ids that later requests ask for."""
    for start, name in (("/v1/completions", "request"), ("/v1/responses", "response")):
        if path == start and answer.startswith("{"):
            ids[name] = json.loads(answer)["id"]


def essence(path: str, answer: str) -> Any:
    """Return what one engine and many answer alike."""
    if path == "/metrics":
        families = {line for line in answer.splitlines() if line.startswith("# TYPE")}
        return {line for line in families if "cluster" not in line and " forge:re" not in line}
    if path.startswith("/debug/requests"):
        timeline = json.loads(answer)
        return sorted(timeline.keys() - {"route"}), [len(sample["tokens"]) for sample in timeline["samples"]]
    if answer.startswith("{"):
        return _without_own(json.loads(answer))
    written: dict[str, list[str]] = defaultdict(list)
    for line in answer.splitlines():
        if line.startswith("data: {"):
            _collect(json.loads(line[6:]), written, "")
    return {name: "".join(parts) for name, parts in written.items()}


def _without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_own(part) for name, part in value.items() if name not in _OWN}
    return [_without_own(part) for part in value] if isinstance(value, list) else value


def _collect(value: Any, written: dict[str, Any], choice: str) -> None:
    """Join the pieces of a stream, whichever events they came in."""
    if isinstance(value, list):
        for part in value:
            _collect(part, written, choice)
    elif isinstance(value, dict):
        choice = str(value.get("index", choice))
        for name, part in value.items():
            if name in _WRITTEN and part is not None and not isinstance(part, dict):
                written[f"{choice} {name}"] += part if isinstance(part, str) else list(map(str, part))
            elif name not in _OWN:
                _collect(part, written, choice)


def ask(url: str, method: str, path: str, body: Any) -> httpx.Response:
    data = None if body is None else json.dumps(body).encode()
    with httpx.Client(base_url=url, headers={"content-type": "application/json"}, timeout=60) as client:
        return client.request(method, path, content=data)


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """What the server of one engine answers."""
    server = Server("--model", MODEL, "--threads", "1", "--served-model-name", "served")
    found, ids = list[Any](), dict[str, str]()
    try:
        for method, path, body in REQUESTS:
            answer = ask(server.url, method, path.format(**ids), body)
            assert answer.status_code == 200, answer.text
            note_ids(path, answer.text, ids)
            found.append(essence(path, answer.text))
    finally:
        server.stop()
    return found


def test_every_endpoint_is_in_the_table():
    ready = ready_message(LLM("hash"))
    paths = create_app(ClusterClient(b"", ready), ready, Settings()).openapi()["paths"]
    there = {(method.upper(), path) for path, methods in paths.items() for method in methods} - ELSEWHERE
    asked = {(method, path.replace("}", "_id}").replace("served", "{name}")) for method, path, _ in REQUESTS}
    assert asked == there and len(paths) == 23


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_endpoint_answers_as_one_engine_does_also_across_a_kill(answers, kills: bool):
    @in_a_loop
    async def run() -> None:
        engines, killed, ids = {name: LocalEngine(MODEL) for name in "ab"}, list[str](), dict[str, str]()
        async with front_of(*engines.values()) as front:
            app = create_app(front, ready_message(engines["a"].llm), Settings(model_names=("served",)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                for (method, path, body), wanted in zip(REQUESTS, answers, strict=True):
                    asking = asyncio.create_task(client.request(method, path.format(**ids), json=body))
                    if kills:
                        for engine in engines.values():
                            engine.hold_after(10 if "max" in str(body) else 0)
                        held = await first_held(engines, asking)
                        if held is not None:
                            killed.append(path)
                            engines.pop(held).kill()
                            front.leave(held)
                            new = f"c{len(killed)}"
                            engines[new] = LocalEngine(MODEL)
                            front.join(new, "engines", engines[new].address)
                        for engine in engines.values():
                            engine.go_on()
                    answer = await asking
                    assert answer.status_code == 200, (path, answer.text)
                    note_ids(path, answer.text, ids)
                    assert essence(path, answer.text) == wanted, path
                    await eventually(lambda: len(front._links) == 2)
        for engine in engines.values():
            engine.kill()
        assert len(set(killed)) == (9 if kills else 0), killed

    run()


def test_the_access_log_counts_the_tokens_of_a_stream_that_was_resumed(caplog):
    caplog.set_level("INFO", "forge.access")

    @in_a_loop
    async def run() -> None:
        engine, body = LocalEngine(MODEL), {"prompt": TEXT} | SAMPLED | STREAM
        async with front_of(engine) as front:
            app = create_app(front, ready_message(engine.llm), Settings(model_names=("served",), access_log="json"))
            transport = httpx.ASGITransport(app.state.exchanges)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                whole = await client.post("/v1/completions", json=body)
                event_id = re.findall("^id: (.*)$", whole.text, re.MULTILINE)[0]
                rest = await client.post("/v1/completions", json=body, headers={"last-event-id": event_id})
                assert 0 < rest.text.count("data: {") < whole.text.count("data: {")
        engine.kill()

    run()
    first, second = map(json.loads, caplog.messages)
    for name in ("prompt_tokens", "output_tokens", "finish"):
        assert first[name] == second[name] != 0, name
    assert first["output_tokens"] == 40


async def first_held(engines: dict[str, LocalEngine], asking: asyncio.Task[Any]) -> str | None:
    """Wait for an engine that is held in the middle of a request, or for an answer that needs none."""
    await eventually(lambda: asking.done() or any(engine.is_held for engine in engines.values()))
    return None if asking.done() else next(name for name, engine in engines.items() if engine.is_held)


@pytest.mark.skipif(not os.environ.get("FORGE_ALL_TESTS"), reason="it takes a minute: run with FORGE_ALL_TESTS=1")
@pytest.mark.parametrize("kills", [False, True])
def test_every_endpoint_on_ray_answers_as_one_engine_does_also_across_a_kill(answers, kills: bool):
    from tests.cluster.test_serve import is_whole, pids  # skips this where Ray is not installed

    options = ("--replicas", "2", "--ray-address", "local", "--served-model-name", "served")
    server, ids = Server("--model", MODEL, "--threads", "1", *options), dict[str, str]()
    try:
        with ThreadPoolExecutor(1) as pool:
            for (method, path, body), wanted in zip(REQUESTS, answers, strict=True):
                assert until(lambda: is_whole(server), 90)
                engines = pids(server, "engine")
                before = list(map(cpu_ticks, engines))
                asking = pool.submit(ask, server.url, method, path.format(**ids), body)
                if kills and "max" in str(body):
                    used = [0]
                    while not asking.done() and max(used) < 3:  # its engine has not computed for a few steps
                        used = [cpu_ticks(engine) - ticks for engine, ticks in zip(engines, before, strict=True)]
                    os.kill(engines[used.index(max(used))], signal.SIGKILL)
                answer = asking.result(60)
                assert answer.status_code == 200, (path, answer.text)
                note_ids(path, answer.text, ids)
                assert essence(path, answer.text) == wanted, path
        resumed = server.metric("forge:requests_resumed_total")
        assert resumed >= 5 if kills else resumed == 0
    finally:
        server.stop()


def cpu_ticks(pid: int) -> int:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
