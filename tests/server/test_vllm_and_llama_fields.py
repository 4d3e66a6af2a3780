"""Fields that vLLM's and llama-server's clients send beyond OpenAI's, over HTTP."""

import json
import re

import numpy as np
import pytest

from forge import LLM, SamplingParams
from tests.server.test_structured import RECORD, SCHEMA
from tests.server.test_tools import TOOLS

HI = [{"role": "user", "content": "Hi"}]


def ok(server, path: str, body: dict) -> dict:
    status, found = server.request(path, body)
    assert status == 200, found
    return found


def refused(server, path: str, body: dict) -> dict:
    status, found = server.request(path, body)
    assert status == 400, found
    return found["error"]


# Tokens


def test_the_tools_of_a_conversation_are_counted(roomy_server):
    body = {"messages": HI, "tools": TOOLS}
    counted = ok(roomy_server, "/tokenize", body)["count"]
    used = ok(roomy_server, "/v1/chat/completions", body | {"max_tokens": 1})["usage"]["prompt_tokens"]
    assert counted == used > ok(roomy_server, "/tokenize", {"messages": HI})["count"]


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [*HI, {"role": "assistant", "content": "So"}], "continue_final_message": True}
        | {"add_generation_prompt": False},
    ],
)
def test_a_conversation_is_counted_as_the_chat_renders_it(server, more):
    body = {"messages": HI} | more
    used = ok(server, "/v1/chat/completions", body | {"max_tokens": 1})["usage"]["prompt_tokens"]
    assert used == ok(server, "/tokenize", body)["count"] != ok(server, "/tokenize", {"messages": HI})["count"]


def test_tokens_come_with_their_texts(server):
    found = ok(server, "/tokenize", {"prompt": "aé", "return_token_strs": True})
    assert found["tokens"] == [97, 195, 169] and found["token_strs"] == ["a", "\\xc3", "\\xa9"]
    pieces = ok(server, "/tokenize", {"content": "aé", "with_pieces": True})["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]


# A prompt that is too long


def test_a_prompt_is_cut_on_the_left_or_where_it_is_asked(server):
    def prompt_of(**asked) -> list[int]:
        body = {"prompt": "abcdef", "max_tokens": 1, "return_token_ids": True} | asked
        return ok(server, "/v1/completions", body)["choices"][0]["prompt_token_ids"]

    assert bytes(prompt_of(truncate_prompt_tokens=2)) == b"ef"
    assert bytes(prompt_of(truncate_prompt_tokens=2, truncation_side="right")) == b"ab"
    assert bytes(prompt_of(prompt=list(b"abc"), truncate_prompt_tokens=2)) == b"bc"
    assert bytes(prompt_of(truncate_prompt_tokens=9)) == b"abcdef"
    longest = server.request("/v1/models/small")[1]["max_model_len"]
    assert len(prompt_of(prompt="a" * 3_000_000, truncate_prompt_tokens=-1, max_tokens=7)) == longest - 7
    assert refused(server, "/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0})["param"]


def test_what_is_echoed_is_what_was_kept(server):
    body = {"prompt": "abcdef", "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 3, "logprobs": 1}
    choice = ok(server, "/v1/completions", body)["choices"][0]
    assert choice["text"].startswith("def") and choice["logprobs"]["tokens"][:3] == ["d", "e", "f"]


def test_a_conversation_is_cut_as_a_prompt_is(server):
    body = {"messages": HI, "max_tokens": 1, "return_token_ids": True}
    whole = ok(server, "/v1/chat/completions", body)["prompt_token_ids"]
    kept = ok(server, "/v1/chat/completions", body | {"truncate_prompt_tokens": 8})["prompt_token_ids"]
    assert kept == whole[-8:]


def test_a_text_to_embed_is_cut(server, model_path):
    found = ok(server, "/v1/embeddings", {"input": "abcdef", "truncate_prompt_tokens": 2})
    assert found["usage"]["prompt_tokens"] == 2
    expected = LLM(model_path, kv="prefix").embed(["ef"])[0]
    assert np.array_equal(np.array(found["data"][0]["embedding"], np.float32), expected)
    assert ok(server, "/classify", {"input": "a" * 9, "labels": ["x", "y"], "truncate_prompt_tokens": 2})["data"]


# Words and tokens


@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_and_allowed_tokens_are_the_engines(client, alone, stream):
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 5}
    extra = {"bad_words": ["a", "bc"], "allowed_token_ids": list(b"abcdef")}
    expected = alone.generate("xyz", SamplingParams(**params, **extra))[0].outputs[0].text
    asked = {"model": "small", "prompt": "xyz", **params, "extra_body": extra}
    if stream:
        text = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    else:
        text = client.completions.create(**asked).choices[0].text
    assert text == expected and set(text) == set("bcdef") and "bc" not in text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 1000}, "bad_words"),
        ({"stop": ["x"] * 1000}, "stop"),
    ],
)
def test_a_filter_without_a_meaning_is_refused_by_name(server, body, param):
    assert refused(server, "/v1/completions", {"prompt": "x"} | body)["param"] == param


def test_more_than_four_stop_strings_are_taken(server):
    stops = [*"stuvwxyz", "a"]
    body = {"prompt": "0", "max_tokens": 5, "logit_bias": {"97": 100}, "stop": stops}
    choice = ok(server, "/v1/completions", body)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("", "a")


# Forms


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_schema_is_kept_wherever_llama_servers_clients_put_it(server, form):
    body = {"messages": HI, "temperature": 1, "seed": 2, "max_tokens": 60} | form
    answer = ok(server, "/v1/chat/completions", body)["choices"][0]
    assert RECORD.fullmatch(answer["message"]["content"]) and answer["finish_reason"] == "stop"


def test_a_grammar_at_the_top_is_that_of_structured_outputs(server):
    body = {"prompt": "x", "temperature": 1, "seed": 2}
    grammar = 'root ::= "yes" | "no"'
    choices = [
        ok(server, "/v1/completions", body | form)["choices"]
        for form in ({"grammar": grammar}, {"structured_outputs": {"grammar": grammar}})
    ]
    assert choices[0] == choices[1] and re.fullmatch("yes|no", choices[0][0]["text"])
    assert ok(server, "/generate", body | {"grammar": grammar})["choices"][0]["text"] == choices[0][0]["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema"),
        ({"grammar": 'root ::= "a"', "tools": TOOLS}, "grammar"),
    ],
)
def test_a_form_that_is_wrong_or_one_of_two_names_its_parameter(roomy_server, body, param):
    assert refused(roomy_server, "/v1/chat/completions", {"messages": HI} | body)["param"] == param


# The rest


TIMES = {f"{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_timings_come_with_each_chunk_and_with_a_whole_answer(server, path):
    body = {"prompt": "some text"} if path == "/v1/completions" else {"messages": HI}
    body |= {"max_tokens": 6, "ignore_eos": True, "timings_per_token": True}
    found = ok(server, path, body)
    times, usage = found["timings"], found["usage"]
    assert set(times) == TIMES | {"cache_n"} and times["predicted_n"] == 6
    assert times["prompt_n"] + times["cache_n"] == usage["prompt_tokens"]
    assert times["predicted_ms"] == pytest.approx(6 * times["predicted_per_token_ms"]) and times["prompt_ms"] > 0
    text = ok(server, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 3
    assert all(set(chunk["timings"]) >= TIMES for chunk in chunks) and "cache_n" in chunks[-1]["timings"]
    assert "timings" not in ok(server, path, body | {"timings_per_token": False})


def test_an_effort_of_none_turns_thinking_off(server):
    body = {"messages": HI, "max_tokens": 1}
    counts = [
        ok(server, "/v1/chat/completions", body | more)["usage"]["prompt_tokens"]
        for more in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}, {})
    ]
    assert counts[0] == counts[1] > counts[2]


def test_the_id_that_a_client_gives_is_in_the_answers(server):
    completion = ok(server, "/v1/completions", {"prompt": "x", "max_tokens": 2, "request_id": "mine.1"})
    assert completion["id"] == "cmpl-mine.1"
    assert ok(server, "/debug/requests/cmpl-mine.1", None)["request_id"] == "cmpl-mine.1"
    assert ok(server, "/v1/completions", {"prompt": "x", "max_tokens": 2, "request_id": "mine.1"})["id"]
    assert ok(server, "/v1/embeddings", {"input": "x", "request_id": "e"})["id"] == "embd-e"
    assert refused(server, "/v1/completions", {"prompt": "x", "request_id": "a/b"})["param"] == "request_id"


def test_the_id_of_a_request_that_runs_is_refused(server, client):
    extra = {"ignore_eos": True, "request_id": "twice"}
    asked = {"model": "small", "prompt": "x", "max_tokens": 600}
    with client.completions.create(**asked, extra_body=extra, stream=True) as stream:
        next(iter(stream))
        error = refused(server, "/v1/completions", asked | extra)
    assert error["param"] == "request_id" and "runs already" in error["message"]
