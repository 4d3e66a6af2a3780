"""From a chat's chunks to the items and events of `/v1/responses`."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.grammar.thinking import CLOSE
from forge.server.errors import ApiError
from forge.server.responses import ChatShape, EventWriter, usage_object
from forge.server.schema import ResponsesRequest
from forge.server.streaming import named_event


class ResponseWriter(EventWriter):
    """Writes one response."""

    def __init__(
        self,
        body: ResponsesRequest,
        params: SamplingParams,
        shape: ChatShape,
        keep: Callable[[Sequence[RequestOutput], dict[str, Any]], None],
    ):
        """keep: called with the outputs and the response when it has ended."""
        super().__init__(shape)
        self._body, self._params, self._keep = body, params, keep
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
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._shape.model,
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
