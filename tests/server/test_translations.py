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


def is_refused(translate: Callable[[dict[str, Any]], BaseModel], body: dict[str, Any]) -> bool:
    """Whether a body is 400, by the framework or by the translation; else it is a chat."""
    try:
        assert isinstance(translate(body), ChatRequest)
    except ValidationError:
        return True
    except ApiError as error:
        assert error.status == 400 and error.param and "\n" not in str(error)
        return True
    return False


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item['type']} {item.get('role', '')}")
def test_an_item_with_a_wrong_field_is_a_mistake(item):
    bodies = [
        {"input": [item | {name: value}, {"role": "user", "content": "x"}]} for name, value in product(item, WRONG)
    ]
    assert sum(is_refused(chat_of_items, body) for body in bodies) > len(WRONG) // 2


@pytest.mark.parametrize("name", ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include"])
def test_a_wrong_field_of_a_response_is_a_mistake(name):
    values = (*WRONG, [{"type": "function", "name": 5}], {"format": 5}, {"format": {"type": "json_schema"}})
    assert sum(is_refused(chat_of_items, {"input": "x", name: value}) for value in values) > len(WRONG) // 2


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["type"])
def test_a_block_with_a_wrong_field_is_a_mistake(block, role):
    turns = [{"role": role, "content": [block | {name: value}]} for name, value in product(block, WRONG)]
    asked = [{"messages": [turn, {"role": "user", "content": "x"}], "max_tokens": 5} for turn in turns]
    assert sum(is_refused(chat_of_turns, body) for body in asked) > len(WRONG) // 2


@pytest.mark.parametrize("name", ["messages", "system", "tools", "tool_choice", "thinking", "output_config"])
def test_a_wrong_field_of_a_message_is_a_mistake(name):
    values = (*WRONG, {"type": "tool"}, [{"name": "x", "input_schema": {"type": 5}}], {"format": {}})
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    assert sum(is_refused(chat_of_turns, body | {name: value}) for value in values) > len(WRONG) // 2
