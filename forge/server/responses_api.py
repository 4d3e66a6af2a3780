"""`/v1/responses`: a body becomes a chat's, and the chat's chunks become the items and events of a response.

A response is stored unless the client says otherwise (`response_store`), so that the next one continues from it: its
prompt begins with the tokens of the last, as they were generated, and finds their keys and values in the cache.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from forge.engine.outputs import RequestOutput
from forge.grammar.thinking import CLOSE
from forge.server.engine_client import Prompt
from forge.server.errors import ApiError, named_as
from forge.server.exchange import current_exchange
from forge.server.requests import chat_from, text_parts, thinking_of
from forge.server.response_store import ResponseKey, ResponseStore, StoredResponse, continued_prompt
from forge.server.responses import ChatShape, EventWriter, usage_object
from forge.server.schema import ChatRequest, ResponsesRequest, harmless
from forge.server.service import Service
from forge.server.streaming import named_event
from forge.server.strict_json import JsonAnswer, to_json
from forge.server.structured import shown_tools
from forge.views.json_output import picked

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""A chat's parameters by their names here."""
_NOT_HERE = harmless(
    {
        "messages max_tokens max_completion_tokens response_format prompt request_id prompt_logprobs": (),
        "logprobs return_token_ids timings_per_token": (False,),
        "n": (1,),
    }
)
"""A chat's parameters that have another name here, or no place in a response; with the values that ask for nothing."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
"""The second is what stateless clients ask for; there is none, and they go on without."""


class Conversation:
    """The items that a response answers."""

    def __init__(self, body: ResponsesRequest, previous: StoredResponse | None):
        self.previous = previous
        new = (
            [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        )
        self.new = [{"id": new_id("item"), **item} for item in new]
        self.items = [*(previous.conversation() if previous is not None else ()), *self.new]


def chat_request(body: ResponsesRequest, items: list[dict[str, Any]]) -> ChatRequest:
    """Translate the body to a chat: items is the whole conversation. Raises `ApiError`."""
    for name in body.include or ():
        if name not in _INCLUDES:
            raise ApiError(f"include: {name[:60]} is not supported by this server", param="include")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {"stream": body.stream, "max_completion_tokens": body.max_output_tokens}
    chat["messages"] = [*instructions, *_messages(items)]
    chat |= {"tools": _tools(body), "tool_choice": _tool_choice(body), "response_format": _response_format(body)}
    if body.top_logprobs is not None or _LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    return chat_from(body, _NOT_HERE, chat)


def _messages(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the turns of a conversation. Reasoning and calls belong to the answer that they stand beside."""
    answer: dict[str, Any] = {}
    for item in items:
        kind = item.get("type") or "message"
        is_part = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        joins = kind == "function_call" or (kind == "message" and set(answer) == {"reasoning_content"})
        if answer and not (is_part and joins):
            yield {"role": "assistant", **answer}
            answer = {}
        if is_part:
            _extend(answer, kind, item)
        elif kind == "message":
            yield {"role": item.get("role"), "content": _parts(item.get("content"))}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))}
        else:
            raise ApiError(f"input: items of type {str(kind)[:40]} are not supported", param="input")
    if answer:
        yield {"role": "assistant", **answer}


def _extend(answer: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Make an item part of an answer."""
    if kind == "message":
        answer["content"] = _parts(item.get("content"))
    elif kind == "reasoning":
        content = item.get("content")
        parts = content if isinstance(content, list) else ()
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        answer["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        answer.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )


def _parts(content: Any) -> Any:
    return text_parts(content, _TEXT_PARTS, "input", "parts of type {} are not supported, only text")


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    functions = []
    for tool in body.tools or ():
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:40]
            raise ApiError(f"tools: {kind} is not supported, only functions are", param="tools")
        fields = tool.keys() & {"name", "description", "parameters", "strict"}
        functions.append({"type": "function", "function": {name: tool[name] for name in fields}})
    return functions or None


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


class ResponseWriter(EventWriter):
    """Writes one response."""

    def __init__(
        self,
        body: ResponsesRequest,
        shape: ChatShape,
        keep: Callable[[Sequence[RequestOutput], dict[str, Any]], None],
    ):
        """keep: called with the outputs and the response when it has ended."""
        super().__init__(shape)
        self._body, self._keep = body, keep
        self._created = int(time.time())
        self._logprobs: list[dict[str, Any]] = []
        """Log probabilities of tokens whose text has not come yet."""
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """Items of the output; the last may still grow."""
        self._open = ""
        """What the last item holds while it grows: reasoning, content, function_call."""

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=self._response("in_progress")) for kind in kinds])

    def finish(self, outputs: Sequence[RequestOutput]) -> bytes:
        response = self.answer(outputs)
        items = b"".join(self._close(response["status"]))
        return items + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": str(error)}}
        return self._event("response.failed", response=response)

    def _on_end(self, outputs: Sequence[RequestOutput]) -> None:
        self._keep(outputs, self.answer(outputs))

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
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
            "id": self._shape.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **picked(body, "instructions", "max_output_tokens", "previous_response_id", "store"),
            "metadata": body.metadata or {},
            "model": self._shape.model,
            "output": self._items,
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "temperature": self.generation.params.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "top_logprobs": body.top_logprobs or 0,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self.generation.params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(kind, data)

    def _take(self, choice: Mapping[str, Any]) -> None:
        self._logprobs += choice["logprobs"]["content"] if choice["logprobs"] is not None else ()

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        is_content = kind == "content"
        if self._open != kind:
            if is_content:
                self._logprobs = _after_thinking(self._logprobs, self._logprobs)
                item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
                part = {"type": "reasoning_text", "text": ""}
            yield from self._begin(kind, item)
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=part)
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        told = {"logprobs": self._logprobs} if is_content else {}
        if is_content:
            part["logprobs"] += self._logprobs
        self._logprobs = [] if is_content else _after_thinking(self._logprobs, [])
        yield self._event(f"response.{part['type']}.delta", **self._place(), content_index=0, delta=text, **told)

    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        self._logprobs = []
        function = call["function"]
        if "id" in call:
            item = {"id": new_id("fc"), "type": "function_call", "call_id": call["id"], "name": function["name"]}
            yield from self._begin("function_call", item | {"arguments": ""})
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            kind = "response.function_call_arguments.delta"
            yield self._event(kind, **self._place(), delta=function["arguments"])

    def _begin(self, kind: str, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = kind
        self._items.append(item | {"status": "in_progress"})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """Close the open item: it is complete, or all that there will be."""
        if not self._open:
            return
        item, kind, self._open = self._items[-1], self._open, ""
        item["status"] = status
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            name = part["type"]
            logprobs = {"logprobs": part["logprobs"]} if kind == "content" else {}
            yield self._event(f"response.{name}.done", **self._place(), content_index=0, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _after_thinking(logprobs: list[dict[str, Any]], without: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what follows the end of the thinking; `without` if there is no such end."""
    text = ""
    for index, entry in enumerate(logprobs, 1):
        text += entry["token"]
        if CLOSE in text:
            return logprobs[index:]
    return without


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def add_responses(app: FastAPI, service: Service, streamed: dict[int | str, dict[str, Any]]) -> None:
    """Add the endpoints of OpenAI's Responses API. streamed: how an endpoint that may stream is described."""
    store = ResponseStore(service.limits.max_stored_bytes)

    @app.post("/v1/responses", responses=streamed)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation with a list of items, and store the answer unless `store` is false."""
        with named_as(_NAMES):
            writer = await _begin(service, store, body, request)
        return await service.respond(writer, request)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        """Count the tokens of the conversation."""
        with named_as(_NAMES):
            prompt = await _prompt(service, body, *read(store, body))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}

    @app.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise ApiError("stream is not supported for a stored response", param="stream")
        return JsonAnswer(store.get(owned(response_id)).body)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        store.delete(owned(response_id))
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str, limit: int = 20, order: Literal["asc", "desc"] = "desc", after: str | None = None
    ) -> dict[str, Any]:
        """Return the items that a stored response answers, the last first."""
        stored = store.get(owned(response_id))
        items = stored.conversation()[: stored.num_input_items]
        items = items if order == "asc" else items[::-1]
        begin = next((place for place, item in enumerate(items, 1) if item["id"] == after), 0)
        page = items[begin : begin + max(1, min(limit, 100))]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": begin + len(page) < len(items)}


def owned(response_id: str) -> ResponseKey:
    """Return the key under which a response is stored: a client whose key has a name finds those of this name only."""
    exchange = current_exchange()
    return ResponseKey(None if exchange is None else exchange.key, response_id)


def read(store: ResponseStore, body: ResponsesRequest) -> tuple[Conversation, ChatRequest]:
    """Return the conversation that a body continues, and the chat request that answers it. Decides whether the answer
    is stored. Raises `ApiError`."""
    if body.store and not store.stores:
        raise ApiError(
            "store: this server stores no responses (it was started with --max-stored-bytes 0)", param="store"
        )
    body.store = store.stores if body.store is None else body.store
    previous = None if body.previous_response_id is None else store.get(owned(body.previous_response_id), 400)
    conversation = Conversation(body, previous)
    return conversation, chat_request(body, conversation.items)


async def _prompt(service: Service, body: ResponsesRequest, conversation: Conversation, chat: ChatRequest) -> Prompt:
    """Return the prompt: the last response's tokens and the new turns, if the conversation begins as that prompt did;
    otherwise the whole conversation is tokenized anew."""
    previous, reader = conversation.previous, service.reader
    token_ids = None if previous is None or previous.setting != _setting(body, chat) else previous.token_ids
    if token_ids is not None and chat.truncate_prompt_tokens is None:
        prompt = await continued_prompt(reader, token_ids.tolist(), chat, list(_messages(conversation.new)))
        if prompt is not None:
            return prompt
    return await reader.chat_prompt(chat)


def _setting(body: ResponsesRequest, chat: ChatRequest) -> bytes:
    return to_json([body.instructions or "", shown_tools(chat), thinking_of(chat), bool(chat.add_special_tokens)])


async def _begin(service: Service, store: ResponseStore, body: ResponsesRequest, request: Request) -> ResponseWriter:
    """Submit the chat. Raises `ApiError`."""
    conversation, chat = read(store, body)
    prompt = await _prompt(service, body, conversation, chat)
    request_id = new_id("resp")
    shape = await service.begin_chat(request_id, chat, request, prompt)
    stored_as = owned(request_id)

    def keep(outputs: Sequence[RequestOutput], response: dict[str, Any]) -> None:
        if not body.store:
            return
        sample = outputs[0].outputs[0]
        ends_plainly = sample.finish_reason == "length" or sample.stop_reason in service.tokenizer.eos_token_ids
        token_ids = np.array([*prompt.token_ids, *sample.token_ids], np.int32) if ends_plainly else None
        items, setting = to_json([*conversation.items, *response["output"]]), _setting(body, chat)
        stored = StoredResponse(to_json(response), items, len(conversation.items), setting, token_ids)
        store.put(stored_as, stored)

    return ResponseWriter(body, shape, keep)
