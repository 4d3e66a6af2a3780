"""`response_format` and `structured_outputs`: OpenAI's and vLLM's clients, unmodified, on a model of random weights."""

import json
import re
import threading
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

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
    assert answer.message.content.startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


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


def test_a_hostile_grammar_holds_no_other_request_up(server, client):
    """While it is compiled, and refused, others are answered."""
    hostile = {"structured_outputs": {"regex": "((a{900}){900}){9}"}, "max_tokens": 3, "prompt": "x"}
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(server.request("/v1/completions", hostile)[0]))
    thread.start()
    answered = 0
    while thread.is_alive():
        client.completions.create(model="small", prompt="x", max_tokens=2)
        answered += 1
    assert statuses == [400] and answered > 1


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
