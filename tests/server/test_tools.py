"""`tools` and `tool_choice`: OpenAI's client, unmodified, on a model of random weights that is told of tools."""

import json
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import FIRST_TAG, TAGS

MESSAGES = [{"role": "user", "content": "Where is the fox?"}]
ASKED = {"model": "small", "messages": MESSAGES, "temperature": 1, "max_tokens": 300}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "day": {"enum": ["today", "tomorrow"]}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": None}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
THINK, END_OF_THINKING, CALL = (str(FIRST_TAG + TAGS.index(tag)) for tag in ("<think>", "</think>", "<tool_call>"))

NEWLINE, NO_CALL = str(ord("\n")), {CALL: -100, str(ord("<")): -100}

STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


class Weather(BaseModel):
    """The weather of a place."""

    city: str = Field(max_length=4)
    day: Literal["today", "tomorrow"]


def check(calls) -> None:
    assert calls
    for call in calls:
        schema = SCHEMAS[call.function.name] or {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_keeps_to_a_tools_schema(roomy_client, seed):
    choice = roomy_client.chat.completions.create(**ASKED, seed=seed, tools=TOOLS, tool_choice="required").choices[0]
    assert choice.finish_reason in ("tool_calls", "length")
    complete = choice.message.tool_calls if choice.finish_reason == "tool_calls" else choice.message.tool_calls[:-1]
    check(complete)
    assert choice.message.content is None


def test_one_call_comes_where_parallel_ones_are_not_wanted(roomy_client):
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 4}
    for choice in roomy_client.chat.completions.create(**asked).choices:
        check(choice.message.tool_calls)
        assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"


def test_several_calls_come_where_they_are_wanted(roomy_client):
    """The newline between two calls is made likelier than the end."""
    asked = ASKED | {"tools": TOOLS[1:], "tool_choice": "required", "logit_bias": {NEWLINE: 100}}
    choice = roomy_client.chat.completions.create(**asked).choices[0]
    assert len(choice.message.tool_calls) > 1 and len({call.id for call in choice.message.tool_calls}) > 1


def test_a_named_tool_is_called_once(roomy_client):
    named = {"type": "function", "function": {"name": "now"}}
    choice = roomy_client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=named).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.message.tool_calls[0].function.arguments == "{}"
    assert choice.message.tool_calls[0].type == "function"


def test_a_streams_pieces_are_the_whole_call(roomy_client):
    asked = ASKED | {"seed": 7, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2}
    whole = roomy_client.chat.completions.create(**asked)
    calls: dict[int, list[str]] = {}
    reasons = {}
    for chunk in roomy_client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        for piece in choice.delta.tool_calls or ():
            assert piece.index == 0 and len(choice.delta.tool_calls) == 1
            if piece.id is not None:
                assert choice.index not in calls and piece.type == "function"
                calls[choice.index] = [piece.function.name]
            calls[choice.index].append(piece.function.arguments)
        assert not choice.delta.content
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        name, *arguments = calls[choice.index]
        function = choice.message.tool_calls[0].function
        assert (name, "".join(arguments)) == (function.name, function.arguments) and len(arguments) > 1
    assert set(reasons.values()) == {"tool_calls"}


def test_openais_parse_gives_pydantic_arguments(roomy_client):
    asked = ASKED | {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    call = roomy_client.chat.completions.parse(**asked).choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Weather)
    with roomy_client.chat.completions.stream(**asked, seed=2) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    kinds = {event.type for event in events}
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert isinstance(streamed.function.parsed_arguments, Weather) and streamed.id is not None
    assert "".join(pieces) == streamed.function.arguments
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@pytest.mark.parametrize("max_tokens", [3, 12, 25])
@pytest.mark.parametrize("stream", [False, True])
def test_the_beginning_of_a_call_that_is_cut_is_no_content(roomy_server, max_tokens, stream):
    """Before its name is certain, in a chat and in a response."""
    asked = {"seed": 1, "temperature": 1, "tool_choice": "required", "stream": stream}
    status, found = roomy_server.request(
        "/v1/chat/completions", asked | {"messages": MESSAGES, "tools": TOOLS, "max_tokens": max_tokens}
    )
    if stream:
        chunks = [json.loads(line[6:]) for line in found.splitlines() if line.startswith("data: {")]
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        said, reason = found["choices"][0]["message"]["content"], found["choices"][0]["finish_reason"]
    assert (status, said, reason) == (200, "", "length")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    status, found = roomy_server.request(
        "/v1/responses", asked | {"input": "x", "tools": tools, "max_output_tokens": max_tokens}
    )
    if stream:
        assert "output_text" not in found
        found = json.loads(found.rstrip().splitlines()[-1][6:])["response"]
    assert found["status"] == "incomplete" and found["output"] == []


def test_auto_leaves_the_text_free(roomy_client):
    """Random weights never call anything: the answer is that to the same prompt without a grammar."""
    choice = roomy_client.chat.completions.create(**ASKED | {"max_tokens": 20}, tools=TOOLS, seed=1).choices[0]
    assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason != "tool_calls"


def test_auto_with_strict_tools_keeps_a_call_once_begun_to_its_schema(roomy_client):
    asked = ASKED | {"tools": STRICT, "parallel_tool_calls": False, "logit_bias": {CALL: 100, THINK: -100}}
    choice = roomy_client.chat.completions.create(**asked).choices[0]
    check(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    free = roomy_client.chat.completions.create(**asked | {"logit_bias": NO_CALL, "max_tokens": 30})
    assert free.choices[0].message.content and not free.choices[0].message.tool_calls


def test_auto_beside_a_response_format_is_one_or_the_other(roomy_client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["fox", "hare"]}}}
    asked = ASKED | {"tools": STRICT, "response_format": form}
    said = roomy_client.chat.completions.create(**asked, logit_bias=NO_CALL).choices[0]
    assert said.message.content in ('"fox"', '"hare"') and said.finish_reason == "stop"
    called = roomy_client.chat.completions.create(**asked, logit_bias={CALL: 100}, parallel_tool_calls=False).choices[0]
    check(called.message.tool_calls)


def test_none_calls_nothing_and_lists_no_tools(roomy_client):
    plain = roomy_client.chat.completions.create(**ASKED | {"max_tokens": 5})
    found = roomy_client.chat.completions.create(**ASKED | {"max_tokens": 5}, tools=TOOLS, tool_choice="none")
    assert found.usage.prompt_tokens == plain.usage.prompt_tokens and not found.choices[0].message.tool_calls


def test_thinking_stays_outside_the_call(roomy_client):
    bias = {THINK: 100, END_OF_THINKING: 3}
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": bias}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    choices = roomy_client.chat.completions.create(**asked, extra_body=thinking, n=4).choices
    for choice in choices:
        check(choice.message.tool_calls)
        assert choice.message.content is None
    assert any(getattr(choice.message, "reasoning_content", None) for choice in choices)


def test_the_conversation_goes_on_with_what_a_tool_said(roomy_server, roomy_client):
    first = roomy_client.chat.completions.create(**ASKED, tools=TOOLS[1:], tool_choice="required")
    answer = first.choices[0].message.to_dict() | {"tool_calls": [first.choices[0].message.tool_calls[0].to_dict()]}
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "noon <|im_end|>"}
    asked = ASKED | {"messages": [*MESSAGES, answer, result], "max_tokens": 3, "extra_body": {"return_token_ids": True}}
    found = roomy_client.chat.completions.create(**asked, tools=TOOLS[1:])
    prompt = roomy_server.request("/detokenize", {"tokens": found.prompt_token_ids})[1]["prompt"]
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n' in prompt
    assert "<tool_response>\nnoon <|im_end|>\n</tool_response><|im_end|>\n" in prompt
    assert prompt.startswith("<|im_start|>system\n# Tools\n") and found.prompt_token_ids.count(268) == 4


def tool(**function) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}], "tool_choice": "required"}


BAD = {
    "no function": ({"tools": [{"type": "function"}]}, "tools"),
    "another type": ({"tools": [{"type": "web_search"}]}, "tools"),
    "a wrong name": (tool(name="a b"), "tools"),
    "twice": ({"tools": TOOLS[1:] * 2}, "tools: now is there twice"),
    "too many": ({"tools": [TOOLS[1]] * 200}, "tools"),
    "no schema": (tool(parameters=[]), "tools"),
    "no object": (tool(parameters={"type": "array"}), "must be of type object"),
    "not supported": (tool(parameters={"properties": {"a": {"uniqueItems": True}}}), "f: the JSON schema is refused"),
    "a wrong pattern": (tool(parameters={"properties": {"a": {"pattern": "(", "type": "string"}}}), "f: "),
    "large": (tool(parameters={"enum": ["x" * 70_000]}), "context length"),
    "deep": (tool(parameters=json.loads('{"items":' * 400 + "{}" + "}" * 400)), "nested too deeply"),
    "unknown choice": ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    "not among them": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "'f', which is not in tools",
    ),
    "none there": ({"tool_choice": "required"}, "there are no tools"),
    "two forms": ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "not both"),
    "functions": ({"functions": [{"name": "f"}]}, "functions is not supported"),
    "a call without a name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}]},
        "messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_tools_that_are_wrong_are_400_in_one_line(roomy_server, name):
    asked, said = BAD[name]
    status, found = roomy_server.request("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3} | asked)
    message = found["error"]["message"]
    assert status == 400 and said in message and "\n" not in message and len(message) < 500
    assert found["error"]["param"] in (*asked, "messages") or name == "deep"  # which no JSON is read to
