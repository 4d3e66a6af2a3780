"""From a chat's chunks to the items and events of `/v1/responses`. A whole response is made of the same events."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.server.engine_client import Delta
from forge.server.errors import to_api_error
from forge.server.reasoning import CLOSE
from forge.server.responses import ChatShape, usage_object
from forge.server.schema import ResponsesRequest
from forge.server.strict_json import to_json


class ResponseWriter:
    """Turns a chat's chunks into the events of one response, and into the whole response."""

    def __init__(self, request_id: str, model: str, body: ResponsesRequest, params: SamplingParams, shape: ChatShape):
        self.request_id, self._model, self._body, self._params, self._shape = request_id, model, body, params, shape
        self._created = int(time.time())
        self._logprobs: list[dict[str, Any]] = []
        """Log probabilities of tokens whose text has not come yet."""
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """Items of the output; the last may still grow."""
        self._open = ""
        """The type of the last item while it grows: reasoning, message, function_call."""

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def push(self, delta: Delta) -> Iterator[bytes]:
        for chunk in self._shape.delta(delta):
            fields, logprobs = chunk["choices"][0]["delta"], chunk["choices"][0]["logprobs"]
            self._logprobs += logprobs["content"] if logprobs is not None else ()
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
        code = "server_error" if shown.status >= 500 else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": str(shown)}}
        return self._event("response.failed", response=response)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response in one piece."""
        sample = outputs[0].outputs[0]
        logprobs = [entry for entry in sample.logprobs or () if entry is not None]
        delta = Delta(0, sample.text, list(sample.token_ids), logprobs, sample.finish_reason, sample.stop_reason)
        for _ in (*self.push(delta), *self.finish(outputs)):
            pass
        return self.response(outputs)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response when it has ended."""
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
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store,
            "temperature": self._params.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "top_logprobs": body.top_logprobs or 0,
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
        """Add reasoning, or more of the message."""
        name = "output_text" if kind == "message" else "reasoning_text"
        if self._open != kind:
            if kind == "message":
                self._logprobs = _after_thinking(self._logprobs, self._logprobs)
            yield from self._close()
            begun: dict[str, Any] = {"type": name, "text": ""}
            if kind == "message":
                item: dict[str, Any] = {"id": new_id("msg"), "type": "message", "role": "assistant"}
                begun |= {"annotations": [], "logprobs": []}
            else:
                item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            yield self._add(kind, item | {"content": []})
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=begun)
            self._items[-1]["content"].append(begun)
        part: dict[str, Any] = self._items[-1]["content"][0]
        logprobs: dict[str, Any] = {}
        part["text"] += text
        if kind == "message":
            logprobs = {"logprobs": self._logprobs}
            part["logprobs"] += self._logprobs
            self._logprobs = []
        else:
            self._logprobs = _after_thinking(self._logprobs, [])
        yield self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **logprobs)

    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        """Begin a call, or add to the last one's arguments."""
        self._logprobs = []
        function = call["function"]
        if "id" in call:
            yield from self._close()
            item = {"id": new_id("fc"), "type": "function_call", "call_id": call["id"], "name": function["name"]}
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
            logprobs = {"logprobs": part["logprobs"]} if kind == "message" else {}
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
