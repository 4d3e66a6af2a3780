"""`/v1/messages`, Anthropic's form of a chat: a body becomes a chat's, and the chat's chunks become blocks and events.

A whole message is made of the same blocks as a streamed one. Thinking is off unless `thinking` turns it on; its budget
is not a limit of its own, as thinking counts towards `max_tokens`.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import from_json

from forge.engine.outputs import RequestOutput
from forge.server.errors import ApiError, error_object, named_as
from forge.server.requests import chat_from, text_parts
from forge.server.responses import ChatShape, EventWriter, usage_object
from forge.server.schema import MAX_ITEMS, MAX_TOOLS, Body, ChatRequest, ReasoningEffort, RequestBody, Texts, harmless
from forge.server.service import Service
from forge.server.streaming import named_event

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "chat_template_kwargs": "thinking",
}
"""A chat's parameters by their names here."""
_NOT_HERE = harmless(
    {
        """
            stop max_completion_tokens response_format stream_options chat_template_kwargs reasoning_effort request_id
            top_logprobs prompt_logprobs parallel_tool_calls continue_final_message add_generation_prompt
        """: (),
        "logprobs return_token_ids timings_per_token": (False,),
        "n": (1,),
        "service_tier": ("auto", "standard_only"),
    }
)
"""A chat's parameters that have another name here, or no place in a message; with the values that ask for nothing."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Choice = Literal["auto", "any", "tool", "none"]
Content = str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(Body, extra="forbid"):
    """A tool that the client runs. The two last are hints: prompts are cached and input is streamed in any case."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Body):
    """Whether a tool must be used, and which."""

    type: Choice
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks; `adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Body, populate_by_name=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body, extra="forbid"):
    """The form of the answer, and an effort, which changes nothing."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountRequest(RequestBody):
    """The body of `/v1/messages/count_tokens`. What else it has is the chat's: `temperature`, `top_k` and so on."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: Texts | None = None
    stream: bool | None = None


def chat_request(body: CountRequest) -> ChatRequest:
    """Translate the body to a chat. Raises `ApiError`."""
    system = [{"role": "system", "content": _text_parts(body.system)}] if body.system else []
    chat: dict[str, Any] = {"messages": [*system, *_messages(body.messages)], **_tool_choice(body.tool_choice)}
    chat["tools"] = [_tool(tool) for tool in body.tools or ()] or None
    if body.messages[-1].role == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.thinking is None or body.thinking.type != "adaptive":
        enabled = body.thinking is not None and body.thinking.type == "enabled"
        chat["chat_template_kwargs"] = {"enable_thinking": enabled}
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"schema": body.output_config.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        chat |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
    return chat_from(body, _NOT_HERE, chat)


def _messages(turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Turn a turn's blocks into messages: each result of a tool becomes its own message."""
    for turn in turns:
        blocks = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
        if turn.role == "assistant":
            yield _answer(blocks)
            continue
        texts: list[dict[str, Any]] = []
        for block in blocks:
            if turn.role == "user" and block.get("type") == "tool_result":
                if texts:
                    yield {"role": turn.role, "content": _text_parts(texts)}
                    texts = []
                content = _text_parts(block.get("content") or "")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            else:
                texts.append(block)
        if texts:
            yield {"role": turn.role, "content": _text_parts(texts)}


def _answer(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn an earlier answer into a message."""
    answer: dict[str, Any] = {"role": "assistant"}
    thoughts = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    if thoughts:
        answer["reasoning_content"] = "".join(thought for thought in thoughts if isinstance(thought, str))
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    if calls:
        functions = [{"name": call.get("name"), "arguments": call.get("input")} for call in calls]
        heads = [{"id": call.get("id"), "type": "function"} for call in calls]
        answer["tool_calls"] = [head | {"function": call} for head, call in zip(heads, functions, strict=True)]
    texts = [block for block in blocks if block.get("type") not in ("thinking", "tool_use")]
    return answer | ({"content": _text_parts(texts)} if texts else {})


def _text_parts(content: Any) -> Any:
    return text_parts(content, ("text",), "messages", "blocks of type {} are not supported here")


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    parallel = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}[choice.type], **parallel}


class MessageWriter(EventWriter):
    """Writes one message."""

    def __init__(self, is_short: bool, shape: ChatShape):
        """is_short: the context has less room than `max_tokens`."""
        super().__init__(shape)
        self._reasons = _STOP_REASONS | ({"length": "model_context_window_exceeded"} if is_short else {})
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        """The arguments of the last block, if it uses a tool."""
        self._open = ""
        """The type of the last block, while it grows."""
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def begin(self) -> bytes:
        usage = {"input_tokens": len(self._shape.prompts[0].token_ids), "output_tokens": 0}
        return _event("message_start", message=self._message(usage))

    def finish(self, outputs: Sequence[RequestOutput]) -> bytes:
        end = _event("message_delta", delta=self._end, usage=_usage(outputs))
        return b"".join(self._close()) + end + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return named_event("error", error_object(error))

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._message(_usage(outputs))

    def _message(self, usage: dict[str, int]) -> dict[str, Any]:
        shape = self._shape
        head = {"id": shape.request_id, "type": "message", "role": "assistant", "model": shape.model}
        return {**head, "content": self._blocks, **self._end, "usage": usage}

    def _take(self, choice: Mapping[str, Any]) -> None:
        if choice["finish_reason"] is not None:
            self._end["stop_reason"] = self._reasons.get(choice["finish_reason"], choice["finish_reason"])
        if choice["finish_reason"] == "stop" and isinstance(choice.get("stop_reason"), str):
            self._end |= {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        name, extra = ("thinking", {"signature": ""}) if kind == "reasoning" else ("text", {})
        if self._open != name:
            yield from self._begin({"type": name, name: "", **extra})
        self._blocks[-1][name] += text
        yield self._delta({"type": f"{name}_delta", name: text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        function = call["function"]
        if "id" in call:
            yield from self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        if function["arguments"]:
            self._arguments += function["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open, self._arguments = block["type"], ""
        self._blocks.append(block)
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """Close the open block: it is complete, or all that there will be."""
        if not self._open:
            return
        if self._open == "tool_use":
            self._blocks[-1]["input"] = _object_of(self._arguments)
        self._open = ""
        yield _event("content_block_stop", index=len(self._blocks) - 1)


def _object_of(arguments: str) -> Any:
    """Parse JSON that may have been cut off, as far as it goes."""
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return {}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    usage = usage_object(outputs)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def add_messages(app: FastAPI, service: Service, streamed: dict[int | str, dict[str, Any]]) -> None:
    """Add the endpoints of Anthropic's Messages API. streamed: how an endpoint that may stream is described."""

    @app.post("/v1/messages", responses=streamed)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation with a message of blocks."""
        with named_as(_NAMES):
            chat = chat_request(body)
            prompt = await service.reader.chat_prompt(chat)
            room = service.ready.max_model_len - len(prompt.token_ids)
            is_short = body.max_tokens > room  # of this API's clients each gives a number, whatever the context is
            chat.max_tokens = None if is_short else body.max_tokens
            shape = await service.begin_chat(f"msg_{secrets.token_hex(12)}", chat, request, prompt)
        return await service.respond(MessageWriter(is_short, shape), request)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """Count the tokens of the conversation."""
        with named_as(_NAMES):
            prompt = await service.reader.chat_prompt(chat_request(body))
        return {"input_tokens": len(prompt.token_ids)}
