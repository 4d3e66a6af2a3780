"""`/v1/responses` by OpenAI's client, unmodified: text, items, events, tools, forms."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import FIRST_TAG
from tests.server.test_tools import END_OF_THINKING, STRICT, THINK, TOOLS, Weather

ASKED = {"model": "small", "input": "Where is the fox?", "max_output_tokens": 300, "temperature": 1}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ONE_CALL = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}


class Hero(BaseModel):
    name: str = Field(max_length=6)
    mood: Literal["happy", "sad"]


def test_an_answer_is_that_of_the_chat(roomy_client):
    asked = {"model": "small", "temperature": 1, "extra_body": {"seed": 1}}
    chat = roomy_client.chat.completions.create(
        **asked, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], max_tokens=9
    )
    found = roomy_client.responses.create(**asked, instructions="Be brief.", input="Hi", max_output_tokens=9)
    assert found.output_text == chat.choices[0].message.content
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == chat.usage.prompt_tokens and found.usage.output_tokens == 9
    assert found.id.startswith("resp_") and found.store is True and found.output[0].status == "incomplete"


def test_a_stream_has_the_official_events_in_order(roomy_client):
    asked = {"model": "small", "input": "Hi", "max_output_tokens": 9, "extra_body": {"seed": 1}}
    whole = roomy_client.responses.create(**asked)
    events = list(roomy_client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:] == ["output_text.delta"] * len(deltas) + [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text and len(deltas) > 1
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens and events[0].response.output == []


def test_a_stream_ends_without_a_mark(roomy_server):
    body = {"input": "Hi", "max_output_tokens": 3, "stream": True}
    _, text = roomy_server.request("/v1/responses", body)
    assert "[DONE]" not in text and text.count("event: response.") == text.count("data: {") > 5


def test_parse_gives_pydantic_objects_of_a_form(roomy_client):
    assert isinstance(roomy_client.responses.parse(**ASKED, text_format=Hero).output_parsed, Hero)
    with roomy_client.responses.stream(**ASKED, text_format=Hero) as stream:
        assert "response.completed" in {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Hero)


def test_parse_gives_pydantic_arguments_of_a_call(roomy_client):
    asked = ASKED | {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    asked["tools"] = [{"type": "function", **asked["tools"][0]["function"]}]
    asked["parallel_tool_calls"] = False
    found = roomy_client.responses.parse(**asked)
    (call,) = found.output
    assert call.type == "function_call" and isinstance(Weather(**json.loads(call.arguments)), Weather)
    events = list(roomy_client.responses.create(**asked, stream=True))
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done.arguments == events[-1].response.output[0].arguments and len(deltas) > 1


def test_the_conversation_goes_on_with_the_items(roomy_server, roomy_client):
    first = roomy_client.responses.create(**ASKED, **ONE_CALL)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    conversation = [{"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}, call.to_dict(), result]
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "There."}]}
    conversation += [answer, {"role": "user", "content": "Why?"}]
    chat = [
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": "Why?"},
    ]
    found = roomy_client.responses.create(model="small", input=conversation, tools=FLAT, max_output_tokens=2)
    same = roomy_client.chat.completions.create(model="small", messages=chat, tools=TOOLS, max_tokens=2)
    assert found.usage.input_tokens == same.usage.prompt_tokens


def test_reasoning_is_an_item_of_its_own_and_may_come_back(roomy_client):
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "seed": 4}
    extra["logit_bias"] = {THINK: 100, END_OF_THINKING: 3}
    found = roomy_client.responses.create(**ASKED, **ONE_CALL, extra_body=extra)
    reasoning, call = found.output
    assert (reasoning.type, call.type) == ("reasoning", "function_call") and reasoning.content[0].text
    events = list(roomy_client.responses.create(**ASKED, **ONE_CALL, extra_body=extra, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == reasoning.content[0].text
    items = [{"role": "user", "content": "x"}, reasoning.to_dict(), call.to_dict()]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    with_it = roomy_client.responses.create(model="small", input=items, max_output_tokens=1)
    without = roomy_client.responses.create(model="small", input=[items[0], *items[2:]], max_output_tokens=1)
    assert with_it.usage.input_tokens > without.usage.input_tokens + len(reasoning.content[0].text) // 2


REFUSED = {
    "conversation": "conv_1",
    "background": True,
    "prompt": {"id": "p"},
    "truncation": "auto",
    "include": ["file_search_call.results"],
    "max_tool_calls": 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_by_name(roomy_client, name):
    with pytest.raises(openai.BadRequestError, match=f"{name}.* is not supported") as found:
        roomy_client.responses.create(**ASKED, **{name: REFUSED[name]})
    assert found.value.param == name


WRONG = {
    "no input": ({"input": []}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    "an item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    "a role": ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
    "a call without a name": ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input"),
    "too many tokens": ({"max_output_tokens": 100_000}, "max_output_tokens"),
    "a built-in tool": ({"tools": [{"type": "web_search"}]}, "tools"),
    "a tool's schema": ({"tools": [{**STRICT[0], "type": "function", "name": "x y"}]}, "tools"),
    "a form": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    "a form's keyword": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array", "uniqueItems": True}}}},
        "text",
    ),
    "a temperature": ({"temperature": -1}, "temperature"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_400_and_names_the_parameter(roomy_server, name, stream):
    asked, param = WRONG[name]
    status, found = roomy_server.request("/v1/responses", {"input": "Hi", "stream": stream} | asked)
    assert status == 400 and found["error"]["param"] == param and "\n" not in found["error"]["message"]
    assert "messages" not in found["error"]["message"] and "response_format" not in found["error"]["message"]


def test_the_tags_are_where_the_model_has_them():
    assert [str(FIRST_TAG), str(FIRST_TAG + 1)] == [THINK, END_OF_THINKING]
