"""`/v1/messages` by Anthropic's client, unmodified: text, blocks, events, tools, thinking, counts."""

import asyncio
import json

import anthropic
import jsonschema
import pytest
from pydantic import BaseModel

from tests.server.test_tools import END_OF_THINKING, MESSAGES, THINK, TOOLS, WEATHER


def drawn(seed: int) -> dict:
    """What the client has no parameters for."""
    return {"seed": seed, "temperature": 1}


HI = [{"role": "user", "content": "Hi"}]
ASKED = {"model": "small", "messages": HI, "max_tokens": 9, "extra_body": drawn(1)}
OURS = [
    {"name": "weather", "description": "The weather.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
CALLING = {
    "model": "small",
    "messages": MESSAGES,
    "max_tokens": 300,
    "tools": OURS,
    "tool_choice": {"type": "any"},
}
SPOKEN = [THINK, *map(str, b"QR"), END_OF_THINKING, *map(str, b"XYZ")]
"""Tokens that a greedy model says in this order, each likelier than the next and none twice."""
SAYING = {
    "logit_bias": {token: 100 - 12 * place for place, token in enumerate(SPOKEN)},
    "repetition_penalty": 100,
    "temperature": 0,
}


@pytest.fixture
def claude(roomy_server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=roomy_server.url, api_key="none", max_retries=0)


def test_an_answer_is_that_of_the_chat(claude, roomy_client):
    asked = {"model": "small", "max_tokens": 9, "temperature": 1, "seed": 1}
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    chat = roomy_client.chat.completions.create(
        **asked, messages=[{"role": "system", "content": "Be brief."}, *HI], **thinks
    )
    message = claude.messages.create(**ASKED, system="Be brief.")
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == chat.choices[0].message.content
    assert message.stop_reason == "max_tokens" and message.id.startswith("msg_") and message.model == "small"
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens and usage.output_tokens == 9


def test_a_stream_has_the_official_events_and_the_whole_answer(claude):
    whole = claude.messages.create(**ASKED)
    with claude.messages.stream(**ASKED) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type != "text"]
    deltas = kinds.count("content_block_delta")
    expected = ["message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop"]
    assert kinds == [*expected, "message_delta", "message_stop"] and deltas > 1
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_message_and_is_named(claude, stream):
    bias = {str(byte): 100 - 12 * place for place, byte in enumerate(b"XYZ")}
    asked = {"model": "small", "messages": [{"role": "user", "content": "1"}], "max_tokens": 9}
    asked |= {
        "stop_sequences": ["q", "Z"],
        "extra_body": {"logit_bias": bias, "repetition_penalty": 100, "temperature": 0},
    }
    if stream:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**asked)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("XY", "stop_sequence", "Z")


def check_calls(message) -> list:
    calls = [block for block in message.content if block.type == "tool_use"]
    schemas = {tool["name"]: tool["input_schema"] for tool in OURS}
    for call in calls:
        jsonschema.validate(call.input, schemas[call.name])
    assert calls and message.stop_reason == "tool_use"
    return calls


@pytest.mark.parametrize("seed", range(3))
def test_tools_are_called_by_their_schemas(claude, seed):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    check_calls(claude.messages.create(**CALLING | {"tool_choice": choice}, extra_body=drawn(seed)))


def test_the_input_of_a_tool_is_streamed_piece_by_piece(claude):
    choice = {"type": "tool", "name": "weather"}
    with claude.messages.stream(**CALLING | {"tool_choice": choice}, extra_body=drawn(2)) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (call,) = check_calls(message)
    assert len(pieces) > 3 and call.name == "weather"
    whole = claude.messages.create(**CALLING | {"tool_choice": choice}, extra_body=drawn(2))
    assert whole.content[0].input == call.input


def test_a_call_that_is_cut_has_the_input_so_far(claude):
    choice = {"type": "tool", "name": "weather"}
    message = claude.messages.create(**CALLING | {"tool_choice": choice, "max_tokens": 62}, extra_body=drawn(2))
    (call,) = message.content
    assert message.stop_reason == "max_tokens" and call.name == "weather" and call.input
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(call.input, OURS[0]["input_schema"])


def test_the_conversation_goes_on_with_the_blocks(claude, roomy_client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = claude.messages.create(**CALLING | {"tool_choice": choice}, extra_body=drawn(1))
    (call,) = check_calls(message)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    asked = {"model": "small", "tools": OURS}
    said = [*MESSAGES, {"role": "assistant", "content": message.content}]
    said.append({"role": "user", "content": [result, {"type": "text", "text": "And?"}]})
    counted = claude.messages.count_tokens(**asked, messages=said).input_tokens
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    chat = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    tools = [TOOLS[0], {"type": "function", "function": {"name": "now", "parameters": OURS[1]["input_schema"]}}]
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    same = roomy_client.chat.completions.create(model="small", messages=chat, tools=tools, max_tokens=1, **thinks)
    assert counted == same.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block_of_its_own_and_may_come_back(claude, stream):
    asked = {"model": "small", "messages": [{"role": "user", "content": "1"}], "max_tokens": 7}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": SAYING}
    if stream:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**asked)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "QR", "XYZ")
    said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": message.content}, *HI]
    assert claude.messages.count_tokens(model="small", messages=said).input_tokens > 10


def test_the_last_message_of_the_assistant_is_gone_on_with(claude, roomy_server):
    said = [*HI, {"role": "assistant", "content": "So it is"}]
    counted = claude.messages.count_tokens(model="small", messages=said).input_tokens
    body = {"messages": said, "continue_final_message": True, "add_generation_prompt": False}
    assert counted == roomy_server.request("/tokenize", body)[1]["count"]
    assert claude.messages.create(**ASKED | {"messages": said}).content[0].text


class Mood(BaseModel):
    happy: bool


def test_parse_gives_a_pydantic_object(claude):
    message = claude.messages.parse(**ASKED | {"max_tokens": 60}, output_format=Mood)
    assert isinstance(message.parsed_output, Mood) and message.stop_reason == "end_turn"


def test_the_asynchronous_client_works_too(roomy_server):
    async def answer() -> str:
        client = anthropic.AsyncAnthropic(base_url=roomy_server.url, api_key="none")
        async with client, client.messages.stream(**ASKED) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(answer())


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_context_has_room_for_are_as_many_as_fit(claude, server, stream):
    """Every body has `max_tokens`, whatever the context is."""
    body = {"messages": HI, "max_tokens": 64_000, "ignore_eos": True, "stream": stream}
    status, found = server.request("/v1/messages", body)
    assert status == 200
    if stream:
        (found,) = [json.loads(line[6:]) for line in found.splitlines() if '"type":"message_delta"' in line]
        assert found["delta"]["stop_reason"] == "model_context_window_exceeded"
        return
    usage = found["usage"]
    assert sum(usage.values()) == server.request("/v1/models/small")[1]["max_model_len"]
    assert found["stop_reason"] == "model_context_window_exceeded"


WRONG = {
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    "a tool of a service": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    "a tool that is not there": ({"tools": OURS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "too many stops": ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    "too long a conversation": ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    "a form": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
        "output_config",
    ),
    "another model": ({"model": "opus"}, "model"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_names_the_parameter_in_anthropics_shape(roomy_server, name, stream):
    changed, param = WRONG[name]
    body = {"model": "small", "messages": HI, "max_tokens": 5, "stream": stream} | changed
    status, found = roomy_server.request("/v1/messages", body)
    assert status == (404 if param == "model" else 400) and found["type"] == "error"
    assert found["error"]["param"] == param and "response_format" not in found["error"]["message"]


def test_the_client_raises_its_own_errors(claude):
    with pytest.raises(anthropic.BadRequestError, match="container is not supported"):
        claude.messages.create(**ASKED, container="x")
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        claude.messages.create(**ASKED | {"model": "opus"})
