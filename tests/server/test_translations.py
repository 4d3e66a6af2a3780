"""Any JSON in a body of `/v1/responses` or `/v1/messages` becomes a chat, or one error that names a parameter."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from forge.server.errors import ApiError
from forge.server.messages_api import MessagesRequest
from forge.server.messages_api import chat_request as chat_of_messages
from forge.server.response_store import ResponseStore
from forge.server.responses_api import ResponsesRequest, read
from forge.server.schema import ChatRequest

ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
    {"type": "function_call", "call_id": "1", "name": "x", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "x"},
    {"type": "thinking", "thinking": "x", "signature": ""},
    {"type": "tool_use", "id": "1", "name": "x", "input": {}},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
]
WRONG: list[Any] = [
    None,
    True,
    5,
    0.5,
    "",
    "x",
    [],
    [5],
    [[]],
    [{}],
    {},
    {"type": 5},
    {"type": {}},
    [{"type": "text", "text": 5}],
]


def chat_of_items(body: dict[str, Any]) -> ChatRequest:
    return read(ResponseStore(0), ResponsesRequest.model_validate(body))[1]


def chat_of_turns(body: dict[str, Any]) -> ChatRequest:
    return chat_of_messages(MessagesRequest.model_validate(body))


def check(translate: Callable[[dict[str, Any]], BaseModel], body: dict[str, Any]) -> None:
    try:
        assert isinstance(translate(body), ChatRequest)
    except ValidationError:
        pass  # 400 by the framework
    except ApiError as error:
        assert error.status == 400 and error.param and "\n" not in str(error)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item['type']} {item.get('role', '')}")
def test_an_item_with_a_wrong_field_is_a_mistake(item):
    for name, value in product(item, WRONG):
        check(chat_of_items, {"input": [item | {name: value}, {"role": "user", "content": "x"}]})


@pytest.mark.parametrize("name", ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include"])
def test_a_wrong_field_of_a_response_is_a_mistake(name):
    for value in (*WRONG, [{"type": "function", "name": 5}], {"format": 5}, {"format": {"type": "json_schema"}}):
        check(chat_of_items, {"input": "x", name: value})


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["type"])
def test_a_block_with_a_wrong_field_is_a_mistake(block, role):
    for name, value in product(block, WRONG):
        turn = {"role": role, "content": [block | {name: value}]}
        check(chat_of_turns, {"messages": [turn, {"role": "user", "content": "x"}], "max_tokens": 5})


@pytest.mark.parametrize("name", ["messages", "system", "tools", "tool_choice", "thinking", "output_config"])
def test_a_wrong_field_of_a_message_is_a_mistake(name):
    for value in (*WRONG, {"type": "tool"}, [{"name": "x", "input_schema": {"type": 5}}], {"format": {}}):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        check(chat_of_turns, body | {name: value})
