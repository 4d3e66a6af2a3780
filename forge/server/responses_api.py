"""`/v1/responses`, stateless: a body becomes a chat's, and the chat's chunks become the items and events of a response.

Nothing is stored, so the conversation comes with every request, and what refers to an earlier response is refused by
name. A whole response is made of the same events as a streamed one.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.engine_client import Delta
from forge.server.errors import ApiError, to_api_error, validation_error
from forge.server.responses import ChatShape, usage_object
from forge.server.schema import MAX_ITEMS, MAX_TOOLS, Body, ChatRequest
from forge.server.strict_json import to_json

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "chat_template_kwargs": "reasoning",
}
"""A chat's parameters by their names here."""
_STATEFUL = {"previous_response_id": None, "conversation": None, "prompt": None, "store": False, "background": False}
"""Parameters that need stored responses, with the value that asks for nothing."""
_REFUSED = {"truncation": "disabled", "n": 1, "top_logprobs": 0, "logprobs": False}
_OF_A_CHAT = ("messages", "max_tokens", "max_completion_tokens", "response_format", "stream_options")
_TEXT_PARTS = ("input_text", "output_text", "text")
_HARMLESS_INCLUDE = "reasoning.encrypted_content"
"""What stateless clients ask for; there is none, and they go on without."""


class TextOptions(Body):
    """The form of the answer, as OpenAI's `text`."""

    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    """OpenAI's `reasoning`: an effort of `none` turns thinking off, any other leaves it to the model."""

    effort: str | None = None


class ResponsesRequest(Body):
    """The body of `/v1/responses`. What else it has is the chat's: `temperature`, `top_k`, `seed` and so on."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    stream: bool | None = None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The chat that answers it. Raises `ApiError`."""
    extra = body.model_extra or {}
    for name, harmless in _STATEFUL.items():
        if extra.get(name) not in (None, harmless):
            raise ApiError(
                f"{name} is not supported: this server stores no responses; send the conversation in input",
                param=name,
                code="unsupported_parameter",
            )
    refused = [name for name, harmless in _REFUSED.items() if extra.get(name) not in (None, harmless)]
    if refused or any(one != _HARMLESS_INCLUDE for one in body.include or ()):
        name = refused[0] if refused else "include"
        raise ApiError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    own = {*_STATEFUL, *_REFUSED, *_OF_A_CHAT}
    chat: dict[str, Any] = {name: value for name, value in extra.items() if name not in own}
    chat |= {"model": body.model, "stream": body.stream, "max_completion_tokens": body.max_output_tokens}
    chat |= {"messages": list(_messages(body)), "tools": _tools(body), "tool_choice": _tool_choice(body)}
    chat["response_format"] = _response_format(body)
    if body.reasoning is not None and body.reasoning.effort == "none":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        with own_names():
            raise validation_error([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


@contextmanager
def own_names() -> Iterator[None]:
    """An error about a chat's parameter names the one that it comes from."""
    try:
        yield
    except ApiError as error:
        name = _NAMES.get(error.param or "")
        if name is None:
            raise
        message = str(error).replace(error.param or "", name)
        raise ApiError(message, error.status, param=name, code=error.code) from None


def _messages(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """The turns of a conversation. Reasoning and calls belong to the answer that they stand beside."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    answer: dict[str, Any] = {}
    for item in body.input:
        kind = item.get("type") or "message"
        if kind == "reasoning" or kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            if answer and (kind == "reasoning" or (kind == "message" and set(answer) != {"reasoning_content"})):
                yield {"role": "assistant", **answer}
                answer = {}
            _extend(answer, kind, item)
            continue
        if answer:
            yield {"role": "assistant", **answer}
            answer = {}
        if kind == "message":
            yield {"role": item.get("role"), "content": _parts(item.get("content"))}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))}
        else:
            raise ApiError(f"input: items of type {str(kind)[:40]} are not supported", param="input")
    if answer:
        yield {"role": "assistant", **answer}


def _extend(answer: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """An item becomes part of an answer."""
    if kind == "message":
        answer["content"] = _parts(item.get("content"))
    elif kind == "reasoning":
        texts = [part.get("text") for part in item.get("content") or () if isinstance(part, Mapping)]
        answer["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        answer.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )


def _parts(content: Any) -> Any:
    """A chat message's content."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS:
            raise ApiError(f"input: parts of type {str(kind)[:40]} are not supported, only text", param="input")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    for tool in body.tools or ():
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:40]
            raise ApiError(f"tools: {kind} is not supported, only functions are", param="tools")
    fields = ("name", "description", "parameters", "strict")
    found = [
        {"type": "function", "function": {name: tool[name] for name in fields if name in tool}}
        for tool in body.tools or ()
    ]
    return found or None


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


def _response_format(body: ResponsesRequest) -> Any:
    form = body.text.format if body.text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


class ResponseWriter:
    """From a chat's chunks to the events of one response, and the response that they add up to."""

    def __init__(self, request_id: str, model: str, body: ResponsesRequest, params: SamplingParams, shape: ChatShape):
        self._request_id, self._model, self._body, self._params, self._shape = request_id, model, body, params, shape
        self._created = int(time.time())
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """Of the output, the last of them perhaps still growing."""
        self._open = ""
        """What the last item is, while it grows: reasoning, message, function_call."""

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def push(self, delta: Delta) -> Iterator[bytes]:
        for chunk in self._shape.delta(delta):
            fields = chunk["choices"][0]["delta"]
            if "reasoning_content" in fields:
                yield from self._grow("reasoning", fields["reasoning_content"])
            if "content" in fields:
                yield from self._grow("message", fields["content"])
            for call in fields.get("tool_calls", ()):
                yield from self._call(call)

    def finish(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        is_cut = outputs[0].outputs[0].finish_reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        response = self.response(outputs)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: Exception) -> bytes:
        shown = to_api_error(error)
        response = self._response("failed") | {"error": {"code": "server_error", "message": str(shown)}}
        return self._event("response.failed", response=response)

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The whole response."""
        sample = outputs[0].outputs[0]
        delta = Delta(0, sample.text, sample.token_ids, [], sample.finish_reason, sample.stop_reason)
        for _ in (*self.push(delta), *self.finish(outputs)):
            pass
        return to_json(self.response(outputs))

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response when it has ended."""
        usage = usage_object(outputs)
        is_cut = outputs[0].outputs[0].finish_reason == "length"
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        body, extra = self._body, self._body.model_extra or {}
        return {
            "id": self._request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": extra.get("metadata") or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(data) + b"\n\n"

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        """More reasoning, or more of the message."""
        name = "output_text" if kind == "message" else "reasoning_text"
        if self._open != kind:
            yield from self._close()
            part: dict[str, Any] = {"type": name, "text": ""}
            if kind == "message":
                item = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
                part |= {"annotations": [], "logprobs": []}
            else:
                item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
            yield self._add(kind, item | {"content": []})
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=part)
            self._items[-1]["content"].append(part)
        self._items[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **logprobs)

    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        """A new call, or more of the last one's arguments."""
        function = call["function"]
        if "id" in call:
            yield from self._close()
            item = {"id": _new_id("fc"), "type": "function_call", "call_id": call["id"], "name": function["name"]}
            yield self._add("function_call", item | {"arguments": ""})
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, **self._place(), delta=function["arguments"])

    def _add(self, kind: str, item: dict[str, Any]) -> bytes:
        self._open = kind
        self._items.append(item | {"status": "in_progress"})
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """The item that grew is whole, or all that there is of it."""
        if not self._open:
            return
        item, kind, self._open = self._items[-1], self._open, ""
        item["status"] = status
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            name, logprobs = part["type"], {"logprobs": []} if kind == "message" else {}
            yield self._event(f"response.{name}.done", **self._place(), content_index=0, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
