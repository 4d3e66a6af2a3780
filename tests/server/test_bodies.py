"""What is no sound request: always 4xx in OpenAI's shape, never 5xx, never a word about the machine."""

import re
import socket
import urllib.request

import pytest

from tests.server.conftest import request_bytes
from tests.waiting import PATIENCE

BAD = {
    "not JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a surrogate pair in a salt": b'{"prompt": "x", "cache_salt": "\\ud800"}',
    "half a surrogate pair in a stop string": b'{"prompt": "x", "stop": ["\\uDC00"]}',
    "half a surrogate pair in an unknown field": b'{"prompt": "x", "zzz": {"\\ud800": 1}}',
    "deep": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "top_p": Infinity}',
    "minus Infinity": b'{"prompt": "x", "presence_penalty": -Infinity}',
    "1e999": b'{"prompt": "x", "temperature": 1e999}',
    "NaN in a bias": b'{"prompt": "x", "logit_bias": {"1": NaN}}',
    "an endless integer": b'{"prompt": "x", "max_tokens": ' + b"9" * 4000 + b"}",
    "an endless seed": b'{"prompt": "x", "seed": ' + b"9" * 4301 + b"}",
    "a negative token": b'{"prompt": [1, -1]}',
    "a token that is none": b'{"prompt": [99999999999999999999]}',
    "a truth as token": b'{"prompt": [true]}',
    "a fraction as token": b'{"prompt": [1.5]}',
    "mixed prompts": b'{"prompt": [1, "a"]}',
    "no prompt": b'{"prompt": []}',
    "an empty prompt among others": b'{"prompt": ["a", ""]}',
    "nested too deep": b'{"prompt": [[[1]]]}',
    "text as number": b'{"prompt": "x", "max_tokens": "5"}',
    "truth as number": b'{"prompt": "x", "max_tokens": true}',
    "too many prompts": b'{"prompt": [' + b'"x",' * 500 + b'"x"]}',
    "a long stop": b'{"prompt": "x", "stop": "' + b"s" * 5000 + b'"}',
    "options of a wrong type": b'{"prompt": "x", "stream": true, "stream_options": 3}',
    "options without a stream": b'{"prompt": "x", "stream_options": {"include_usage": true}}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_400_with_a_message(server, name):
    status, found = server.request("/v1/completions", BAD[name])
    assert status == 400, found
    error = found["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    for word in ("Traceback", ".py", "/", "0x"):
        assert word not in error["message"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deep", "it is nested too deeply"),
        ("half a surrogate pair", "an escape in it is half of a surrogate pair"),
        ("NaN", "expected value at line 1 column 32"),
        ("an endless seed", "number out of range"),
    ],
)
def test_what_is_no_json_is_said_with_its_place(server, name, words):
    _, found = server.request("/v1/completions", BAD[name])
    assert found["error"]["message"].startswith(f"the body is not JSON: {words}")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/v1/embeddings"])
@pytest.mark.parametrize("name", ["not JSON", "a list", "no UTF-8", "deep", "NaN", "half a surrogate pair"])
def test_no_endpoint_fails_on_a_bad_body(server, path, name):
    status, found = server.request(path, BAD[name])
    assert status == 400 and found["error"]["message"]


@pytest.mark.parametrize(
    "path, words",
    [
        ("/v1/chat/completion", "there is no /v1/chat/completion here; there is /v1/chat/completions"),
        ("/v1/embedding", "there is /v1/embeddings"),
        ("/", "there is /v1/completions, /v1/chat/completions, "),
    ],
)
def test_a_place_that_is_not_there_is_answered_with_those_nearest_to_it(server, path, words):
    status, answer = server.request(path, {})
    assert status == 404 and words in answer["error"]["message"]


def test_a_method_that_a_place_does_not_take_is_answered_with_the_one_that_it_takes(server):
    assert server.request("/v1/completions")[1]["error"]["message"] == "/v1/completions takes POST, not GET"


def test_unknown_places_and_methods_have_the_same_shape(server):
    for path, body, expected in (("/nowhere", None, 404), ("/v1/completions", None, 405), ("/health", {}, 405)):
        status, found = server.request(path, body)
        assert status == expected and found["error"]["message"]
    assert server.request("/debug/requests/none")[0] == 404
    assert server.request("/detokenize", {"tokens": [10**9]})[0] == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_does_not_say_it_is_json_is_415(server, kind):
    status, found = server.request("/v1/completions", {"prompt": "x"}, {"content-type": kind})
    assert status == 415 and "application/json" in found["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_every_way_to_say_json_is_understood(server, kind):
    assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"content-type": kind})[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_more_tokens_than_fit_behind_the_prompt_are_refused_and_by_default_as_many_come_as_fit(server, path):
    longest = server.request("/v1/models/small")[1]["max_model_len"]
    prompt = [97] * (longest - 5)
    for asked, expected in ((5, 200), (6, 400)):
        status, found = server.request(path, {"prompt": prompt, "max_tokens": asked, "ignore_eos": True})
        assert status == expected
    assert found["error"]["param"] == "max_tokens" and found["error"]["code"] == "context_length_exceeded"
    assert all(str(number) in found["error"]["message"] for number in (6, 5, longest, longest - 5))
    assert f"this model's maximum context length is {longest} tokens" in found["error"]["message"]
    status, found = server.request(path, {"prompt": prompt, "ignore_eos": True})
    assert status == 200 and found["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "path, name, body",
    [
        ("/v1/completions", "prompt", {}),
        ("/generate", "prompt", {}),
        ("/v1/embeddings", "input", {}),
        ("/v1/score", "text_1", {"text_2": "a"}),
        ("/v1/chat/completions", "messages", {}),
    ],
)
@pytest.mark.parametrize("letters", [3000, 1_000_000], ids=["tokens", "characters"])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(server, path, name, body, letters):
    text = "a" * letters
    asked = {name: [{"role": "user", "content": text}] if name == "messages" else text} | body
    status, found = server.request(path, asked)
    assert status == 400 and found["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 640 tokens" in found["error"]["message"]


def test_a_pair_of_texts_that_is_too_long_together_is_refused_in_those_words(server):
    status, found = server.request("/v1/score", {"text_1": "a" * 600, "text_2": "a" * 600})
    assert status == 400 and found["error"]["param"] == "text_2" and found["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 640 tokens" in found["error"]["message"]


def test_chat_answers_as_long_as_fits_and_refuses_more(server):
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "temperature": 0}
    longest = server.request("/v1/models/small")[1]["max_model_len"]
    usage = server.request("/v1/chat/completions", chat)[1]["usage"]
    assert usage["total_tokens"] == longest
    for name in ("max_tokens", "max_completion_tokens"):
        status, found = server.request("/v1/chat/completions", chat | {name: longest})
        assert status == 400 and found["error"]["param"] == name


def test_a_chat_does_not_echo(server):
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert server.request("/v1/chat/completions", asked | {"echo": False})[0] == 200
    assert server.request("/v1/chat/completions", asked | {"echo": True})[1]["error"]["param"] == "echo"


@pytest.mark.parametrize(
    "param, asked",
    [
        ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}),
        ("prompt_logprobs", {"prompt_logprobs": 2, "stream": True}),
        ("prompt_logprobs", {"prompt_logprobs": 2, "echo": True, "logprobs": 3}),
        ("prompt_logprobs", {"prompt_logprobs": 99}),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(server, param, asked):
    status, found = server.request("/v1/completions", {"prompt": "x"} | asked)
    assert status == 400 and found["error"]["param"] == param


def test_more_prompts_than_the_queue_has_room_for_are_never_worth_another_try(server):
    labels = [f"label {number}" for number in range(100)]
    status, found = server.request("/classify", {"input": ["x"] * 128, "labels": labels})
    assert status == 400 and "12800" in found["error"]["message"]


def test_head_is_get_without_a_body(server):
    request = urllib.request.Request(server.url + "/health", method="HEAD")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.status == 200 and answer.headers["content-length"] == "15" and answer.read() == b""


def raw(server, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(PATIENCE)
        found = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65536):
                found += piece
        except ConnectionError:
            pass
    return found


def test_an_offer_of_another_protocol_is_not_taken_up(server):
    """As Java's client begins."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    body = request_bytes("/v1/completions", {"prompt": "x", "max_tokens": 2})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(body.replace(b"connection: close\r\n", offer))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"x-long: " + b"a" * 200_000, b"x: y\r\n" * 20_000], ids=["long", "many"])
def test_a_head_without_an_end_is_hung_up_on(server, line):
    found = raw(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + line)
    assert not found or found.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert server.request("/health")[0] == 200


def test_a_head_that_is_too_large_is_refused_though_it_comes_whole(server):
    for size, expected in ((60_000, b"HTTP/1.1 200"), (70_000, b"HTTP/1.1 431")):
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-long: " + b"a" * size
        assert raw(server, head + b"\r\n\r\n").startswith(expected)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_closes_its_sending_half_gets_its_answer(server, stream):
    asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(request_bytes("/v1/completions", asked).replace(b"connection: close\r\n", b""))
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    assert b"HTTP/1.1 200" in found and b'"finish_reason":"length"' in found


def test_a_client_that_closes_before_its_body_is_sent_is_hung_up_on(server):
    body = request_bytes("/v1/completions", {"prompt": "x"})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(body[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


HOSTS = {"localhost": 200, "localhost:99": 200, "127.0.0.1": 200, "[::1]:80": 200, "evil.example": 403, "a:b:c": 403}


@pytest.mark.parametrize("host", HOSTS)
def test_a_page_whose_name_resolves_to_this_machine_is_refused(server, host):
    """DNS rebinding: a browser sends the page's own name."""
    status, found = server.request("/v1/models", headers={"host": host})
    assert status == HOSTS[host]
    if status == 403:
        assert found["error"]["code"] == "host_not_allowed" and "--allowed-host" in found["error"]["message"]
    assert server.request("/health", headers={"host": host})[0] == 200


def test_requests_that_come_at_once_are_answered_in_order(server):
    bodies = [{"prompt": "x", "max_tokens": tokens, "ignore_eos": True} for tokens in (3, 1, 2)]
    asked = [request_bytes("/v1/completions", body).replace(b"connection: close\r\n", b"") for body in bodies[:-1]]
    found = raw(server, b"".join([*asked, request_bytes("/v1/completions", bodies[-1])]))
    assert re.findall(rb'"completion_tokens":(\d)', found) == [b"3", b"1", b"2"]
