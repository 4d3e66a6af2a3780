"""Many clients: more than there is room for, slow ones, and ones that leave."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import urllib.error
import urllib.request

import openai
import pytest

from forge import SamplingParams
from tests.server.conftest import Server, post, request_bytes
from tests.waiting import PATIENCE, eventually, until


def test_a_thousand_requests_on_a_tiny_pool_say_what_each_says_alone(server, alone):
    rng = random.Random(0)
    prompts = [[rng.randrange(32, 127) for _ in range(rng.randrange(1, 90))] for _ in range(40)]
    params = [{"max_tokens": rng.randrange(1, 50), "temperature": 0.9, "seed": seed} for seed in range(40)]
    expected = [
        alone.generate([prompt], SamplingParams(**one))[0].outputs[0].text
        for prompt, one in zip(prompts, params, strict=True)
    ]
    before = server.metric("vllm:num_preemptions")

    async def all_at_once():
        asked = [{"prompt": prompts[i % 40], **params[i % 40]} for i in range(1000)]
        return await asyncio.gather(*(post(server.port, "/v1/completions", body) for body in asked))

    answers = asyncio.run(all_at_once())
    assert {status for status, _ in answers} == {200}
    assert [json.loads(body)["choices"][0]["text"] for _, body in answers] == [expected[i % 40] for i in range(1000)]
    assert server.metric("vllm:num_preemptions") > before, "the pool was never short"
    assert until(server.is_idle)


def test_two_hundred_clients_that_leave_in_the_middle_leave_nothing_behind(server):
    async def leave(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = {"prompt": f"client {number}", "max_tokens": 600, "stream": number % 4 != 0, "ignore_eos": True}
        writer.write(request_bytes("/v1/completions", body))
        if body["stream"]:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.01)
        writer.transport.abort()

    async def waves():
        for first in range(0, 200, 25):
            await asyncio.gather(*map(leave, range(first, first + 25)))

    asyncio.run(waves())
    assert until(server.is_idle)
    assert not [line for line in server.log if "Traceback" in line], "a client that leaves is no news"
    assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_closes_its_connection_is_aborted(server, stream):
    assert until(server.is_idle)
    aborted = 'finished_reason="abort"} '
    before = server.request("/metrics")[1].split(aborted)[1].split()[0]
    body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": stream, "n": 16}
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.sendall(request_bytes("/v1/completions", body))
    assert until(lambda: server.metric("vllm:num_requests_running"))
    raw.close()
    assert until(server.is_idle)
    assert int(server.request("/metrics")[1].split(aborted)[1].split()[0]) > int(before)


@pytest.fixture(scope="module")
def strict(model_path, alone):
    """A server with narrow limits."""
    limits = ("--stall-timeout", "0.5", "--header-timeout", "2", "--max-queue", "4", "--max-body-bytes", "20000")
    origin = ("--allow-origin", "http://app.example")
    one = Server("-m", model_path, "--num-blocks", "256", *limits, "--api-key", "geheim", *origin)
    yield one
    one.stop()


KEY = {"authorization": "Bearer geheim"}


def test_a_client_that_reads_nothing_is_given_up_and_holds_up_nobody(strict):
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", strict.port))
    body = {"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True, "logprobs": 20, "n": 16, "seed": 1}
    slow.sendall(
        request_bytes("/v1/completions", body).replace(
            b"host: localhost", b"host: localhost\r\nauthorization: Bearer geheim"
        )
    )
    running = "vllm:num_requests_running"
    assert until(lambda: strict.metric(running, KEY) > 0)
    status, _ = strict.request("/v1/completions", {"prompt": "y", "max_tokens": 2}, KEY)
    assert status == 200
    assert until(lambda: strict.metric(running, KEY) == 0)
    slow.close()
    assert not [line for line in strict.log if "Traceback" in line]


def test_slow_readers_get_everything_and_hold_up_nobody(server):
    asked = {"prompt": "slow", "max_tokens": 300, "ignore_eos": True, "seed": 3, "logprobs": 5}
    expected = server.request("/v1/completions", asked)[1]["choices"][0]

    async def read_slowly(answered: asyncio.Event) -> str:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", server.port))
        await loop.sock_sendall(raw, request_bytes("/v1/completions", asked | {"stream": True}))
        data = await loop.sock_recv(raw, 2048)
        await answered.wait()  # it leaves its stream unread until another client has its answer
        while piece := await loop.sock_recv(raw, 2048):
            data += piece
        raw.close()
        body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data[data.index(b"\r\n\r\n") + 2 :])
        events = [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]
        assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events if event["choices"]) == 300
        return "".join(event["choices"][0]["text"] for event in events)

    async def all_at_once() -> tuple[list[str], tuple[int, bytes]]:
        answered = asyncio.Event()
        slow = [asyncio.create_task(read_slowly(answered)) for _ in range(12)]
        quick = post(server.port, "/v1/completions", {"prompt": "x", "max_tokens": 2})
        quick = await asyncio.wait_for(quick, PATIENCE)
        answered.set()
        return await asyncio.gather(*slow), quick

    texts, (status, _) = asyncio.run(all_at_once())
    assert status == 200 and set(texts) == {expected["text"]}
    assert until(server.is_idle)


def test_a_full_queue_is_429_and_says_when_to_come_back(strict):
    async def crowd():
        async with openai.AsyncOpenAI(base_url=f"{strict.url}/v1", api_key="geheim", max_retries=0) as client:
            asked = [client.completions.create(model="small", prompt="x", max_tokens=3) for _ in range(12)]
            asked = [asyncio.create_task(answer) for answer in asked]
            await eventually(lambda: sum(answer.done() for answer in asked) == 8)
            os.kill(engine, signal.SIGCONT)
            return await asyncio.gather(*asked, return_exceptions=True)

    engine = strict.engine_pid()
    os.kill(engine, signal.SIGSTOP)  # so that no request ends before all have come
    try:
        answers = asyncio.run(crowd())
    finally:
        os.kill(engine, signal.SIGCONT)
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(refused) == 8 and sum(not isinstance(answer, Exception) for answer in answers) == 4
    assert refused[0].response.headers["retry-after"] == "1" and refused[0].code == "queue_full"


def test_the_key_guards_everything_but_health(strict):
    assert strict.request("/health")[0] == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/debug/requests/x", "/nowhere"):
        assert strict.request(path)[0] == 401
    for scheme in ("bearer", "BEARER"):
        assert strict.request("/v1/models", headers={"authorization": f"{scheme} geheim"})[0] == 200
    for key in ("", "Bearer", "Bearer gehei", "Bearer geheim2", "geheim", "Basic geheim"):
        assert strict.request("/v1/models", headers={"authorization": key})[0] == 401
    assert strict.request("/v1/models", headers=KEY)[0] == 200
    with pytest.raises(openai.AuthenticationError):
        strict.openai().models.list()


def test_a_large_body_is_413_whether_it_says_so_or_not(strict):
    body = {"prompt": "x" * 30_000}
    status, found = strict.request("/v1/completions", body, KEY)
    assert status == 413 and found["error"]["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", strict.port)) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer geheim\r\n"
        raw.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            raw.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        raw.sendall(b"0\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_client_that_sends_a_large_body_to_its_end_sees_the_413(server):
    """Two and a half million token ids, more than the buffers of both ends hold."""
    body = b'{"prompt":[1' + b",1" * 2_500_000 + b"]}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(30)
        raw.sendall(head.encode() + body)
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_far_beyond_the_limit_is_not_read_to_its_end(strict):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer geheim\r\n"
    for beginning in (b"content-length: 99999999\r\n\r\n", b"expect: 100-continue\r\ncontent-length: 30000\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", strict.port)) as raw:
            raw.settimeout(10)
            raw.sendall(head + beginning)
            assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_request_that_never_comes_is_hung_up_on(strict):
    address = ("127.0.0.1", strict.port)
    with socket.create_connection(address, PATIENCE) as half, socket.create_connection(address, PATIENCE) as silent:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        assert half.recv(1000) == b"" and silent.recv(1000) == b""


def test_an_allowed_origin_may_ask_first_and_others_may_not(strict):
    def preflight(origin: str) -> str | None:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        request = urllib.request.Request(strict.url + "/v1/completions", headers=headers, method="OPTIONS")
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.headers["access-control-allow-origin"]
        except urllib.error.HTTPError as error:
            return error.headers["access-control-allow-origin"]

    assert preflight("http://app.example") == "http://app.example"
    assert preflight("http://elsewhere.example") is None
    request = urllib.request.Request(strict.url + "/v1/models", headers=KEY | {"origin": "http://app.example"})
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["access-control-expose-headers"] == "x-request-id"


def test_there_is_no_cors_unless_asked_for(server):
    request = urllib.request.Request(server.url + "/health", headers={"origin": "http://elsewhere"})
    with urllib.request.urlopen(request) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
