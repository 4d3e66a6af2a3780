"""`response_format` and `structured_outputs`: OpenAI's and vLLM's clients, unmodified, on a model of random weights."""

import json
import re
import socket
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from pydantic_core import from_json

from tests.server.conftest import request_bytes
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "mood": {"enum": ["happy", "sad"]}},
    "required": ["age", "mood"],
    "additionalProperties": False,
}
RECORD = re.compile(r'\{"age": [1-9][0-9]?, "mood": "(happy|sad)"\}')


class Hero(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=1, le=99)
    mood: Literal["happy", "sad"]


def schema_format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "record", "strict": True, "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_openais_parse_gives_a_pydantic_object(client, temperature):
    asked = {"model": "small", "messages": MESSAGES, "temperature": temperature, "seed": 1}
    hero = client.chat.completions.parse(**asked, response_format=Hero).choices[0].message.parsed
    assert isinstance(hero, Hero)


def test_a_stream_is_the_same_text(client):
    asked = {"model": "small", "messages": MESSAGES, "temperature": 1, "seed": 3}
    whole = client.chat.completions.create(**asked, response_format=schema_format(SCHEMA)).choices[0]
    chunks = client.chat.completions.create(**asked, response_format=schema_format(SCHEMA), stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert RECORD.fullmatch(whole.message.content) and whole.finish_reason == "stop"
    assert "".join(parts) == whole.message.content and len(parts) > 5


def test_json_object_is_an_object(client):
    asked = {"model": "small", "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    answer = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
    assert isinstance(from_json(answer.message.content, allow_partial=answer.finish_reason == "length"), dict)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json": SCHEMA}, RECORD.pattern),
        ({"json": json.dumps(SCHEMA)}, RECORD.pattern),
        ({"regex": "[ab]{3,5}c"}, "[ab]{3,5}c"),
        ({"choice": ["happy", "sad"]}, "happy|sad"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_vllms_structured_outputs(server, path, form, text):
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Who?"}
    status, found = server.request(path, prompt | {"max_tokens": 60, "seed": 2, "structured_outputs": form})
    choice = found["choices"][0]
    said = choice["message"]["content"] if "chat" in path else choice["text"]
    assert status == 200 and re.fullmatch(text, said) and choice["finish_reason"] == "stop"


def test_an_answer_cut_inside_the_grammar_says_length(client):
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 5}
    answer = client.chat.completions.create(**asked, response_format=schema_format(SCHEMA)).choices[0]
    assert answer.finish_reason == "length"


BAD = {
    "not supported": ({"response_format": schema_format({"type": "array", "uniqueItems": True})}, "uniqueItems"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
    "unknown type": ({"response_format": {"type": "xml"}}, ""),
    "no regex": ({"structured_outputs": {"regex": "("}}, "regular expression is refused"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
    "none": ({"structured_outputs": {}}, "exactly one"),
    "unknown": ({"structured_outputs": {"structural_tag": "x"}}, ""),
    "hostile": ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "refused"),
    "large": ({"structured_outputs": {"choice": ["x" * 70_000]}}, "at most"),
    "both": ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "not both"),
    "no end": ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_form_that_is_wrong_is_400(server, name):
    asked, said = BAD[name]
    status, found = server.request("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3} | asked)
    assert status == 400 and said in found["error"]["message"]
    assert found["error"]["param"].split(".")[0] in asked


EXPLODING = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}
"""2.3 kB that stand for 2**30 schemas."""


def exploding(name: str = "x") -> dict:
    return {
        "type": "object",
        "$defs": EXPLODING | {"a30": {"const": name}},
        "properties": {"x": {"$ref": "#/$defs/a0"}},
    }


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "response_format": schema_format(exploding())},
            "response_format",
        ),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": exploding()}}, "structured_outputs"),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "tools": [
                    {"type": "function", "function": {"name": "find", "strict": True, "parameters": exploding()}}
                ],
            },
            "tools",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "r", "schema": exploding()}}},
            "text",
        ),
    ],
    ids=["chat", "completions", "strict tool", "responses"],
)
def test_a_schema_that_explodes_is_400_and_named(roomy_server, path, asked, param):
    status, found = roomy_server.request(path, asked | {"stream": True})
    assert status == 400 and found["error"]["param"] == param
    assert "the JSON schema is refused: it takes more than" in found["error"]["message"]
    assert ("find: " in found["error"]["message"]) == (param == "tools")


def test_exploding_grammars_fill_no_pool_and_end_with_their_clients(server):
    """More of them than the pool that long texts share has threads."""
    form = [{"structured_outputs": {"json": exploding(f"y{number}")}, "prompt": "x"} for number in range(20)]
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in form]
    for connection, body in zip(clients, form, strict=True):
        connection.sendall(request_bytes("/v1/completions", body))
    assert until(lambda: server.metric("forge:num_grammars_compiling") > 10)
    assert server.request("/detokenize", {"tokens": [65] * 10_000})[0] == 200
    sound = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": "sound"}}
    assert server.request("/v1/completions", sound)[1]["choices"][0]["text"] == "sound"
    assert server.metric("forge:num_grammars_compiling") > 5, "they did not wait for those"
    for connection in clients:
        connection.close()
    assert until(lambda: server.metric("forge:num_grammars_compiling") == 0, 1.0)


HARD_AT_RUN_TIME = {"regex": "a([ab]{0,99}a[ab]{0,50}){40,50}"}
"""It can be compiled; the first tokens are cheap, the fiftieth is not."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"])
def test_a_grammar_that_needs_too_much_work_at_run_time_is_the_requests_mistake(server, path):
    prompt = {"messages": MESSAGES} if "chat" in path else {"input": "x"} if "resp" in path else {"prompt": "x"}
    limit = {"max_output_tokens" if "resp" in path else "max_tokens": 200}
    asked = prompt | limit | {"seed": 1, "temperature": 1, "structured_outputs": HARD_AT_RUN_TIME}
    status, found = server.request(path, asked)
    assert status == 400 and "the grammar needs more work for one token" in found["error"]["message"]
    status, text = server.request(path, asked | {"stream": True})
    assert status == 200 and text.count("data:") > 20, "what came before is sent, and the grammar was compiled anew"
    assert "the grammar needs more work for one token" in text
    assert "server_error" not in text


def test_free_requests_say_the_same_beside_constrained_ones(client):
    asked = {"model": "small", "prompt": "abc", "max_tokens": 20, "temperature": 1, "seed": 5}
    alone = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(
        model="small",
        prompt="x",
        max_tokens=200,
        extra_body={"structured_outputs": {"regex": "[a-z]{150}"}},
        stream=True,
    )
    next(iter(stream))
    assert client.completions.create(**asked).choices[0].text == alone
    assert len("".join(chunk.choices[0].text for chunk in stream if chunk.choices)) > 100


def test_langchain_gives_structured_output(server):
    langchain = pytest.importorskip("langchain_openai", reason="needs LangChain: pip install langchain-openai")
    options = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "small", "max_retries": 0}
    chat = langchain.ChatOpenAI(**options, temperature=1)
    assert isinstance(chat.with_structured_output(Hero, method="json_schema").invoke("Who?"), Hero)


def test_an_unsupported_keyword_is_named_to_openais_client(client):
    schema = {"type": "object", "dependentRequired": {"a": ["b"]}}
    with pytest.raises(openai.BadRequestError, match="dependentRequired: not supported"):
        client.chat.completions.create(model="small", messages=MESSAGES, response_format=schema_format(schema))


def test_thinking_is_refused_where_the_model_has_no_tokens_for_it(server):
    asked = {"messages": MESSAGES, "max_tokens": 60, "structured_outputs": {"choice": ["yes", "no"]}}
    assert server.request("/v1/chat/completions", asked)[1]["choices"][0]["message"]["content"] in ("yes", "no")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    status, found = server.request("/v1/chat/completions", asked | thinking)
    assert status == 400 and "does not think" in found["error"]["message"]
