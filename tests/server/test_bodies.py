"""What is no sound request: always 4xx in OpenAI's shape, never 5xx, never a word about the machine."""

import pytest

BAD = {
    "not JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
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
    "options without a stream": b'{"prompt": "x", "stream_options": 3}',
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/v1/embeddings"])
@pytest.mark.parametrize("name", ["not JSON", "a list", "no UTF-8", "deep", "NaN", "half a surrogate pair"])
def test_no_endpoint_fails_on_a_bad_body(server, path, name):
    status, found = server.request(path, BAD[name])
    assert status == 400 and found["error"]["message"]


def test_unknown_places_and_methods_have_the_same_shape(server):
    for path, body, expected in (("/nowhere", None, 404), ("/v1/completions", None, 405), ("/health", {}, 405)):
        status, found = server.request(path, body)
        assert status == expected and found["error"]["message"]
    assert server.request("/debug/requests/none")[0] == 404
    assert server.request("/detokenize", {"tokens": [10**9]})[0] == 400


def test_a_parameter_nobody_knows_is_ignored(server):
    assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 1, "user": "me", "zzz": {}})[0] == 200
