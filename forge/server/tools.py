"""Tool calls: what a body says of them, the form that they put on the answer, and how they are read from its text.

A call is text, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which the model's chat template has asked for.
With `tool_choice` `required` or a name the answer is nothing but calls, by their schemas. With `auto` it is free, and
what looks like a call but is none stays text; a tool with `strict`, and `parallel_tool_calls: false`, make a grammar
that leaves the text free and keeps a call once begun to its form.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar.tool_calls import BEGIN, END, tool_call_grammar
from forge.server.errors import ApiError
from forge.server.reasoning import partial_tag
from forge.server.schema import ChatRequest, Conversation, Function, NamedTool

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)
"""The beginning of a call, up to its arguments."""
_ANYTHING = {"type": "object"}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, and how they may be used."""

    functions: tuple[Function, ...]
    """The functions that may be called."""
    is_required: bool
    is_parallel: bool
    """Whether more than one call may come."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def constrains(self) -> bool:
        """Return whether the calls need a grammar."""
        return self.is_required or not self.is_parallel or any(function.strict for function in self.functions)

    def schema_of(self, function: Function) -> Mapping[str, Any]:
        """Return the schema that a function's arguments must keep to: any object, unless its own is enforced."""
        if not (self.is_required or function.strict):
            return _ANYTHING
        return arguments_schema(function)

    def structured(self, answer: Mapping[str, Any] | None) -> StructuredOutput:
        """Return the form of the answer. answer: the schema of an answer without calls, if it has one. Raises
        `ApiError`."""
        callables = [(function.name, self.schema_of(function)) for function in self.functions]
        how = {"required": self.is_required, "parallel": self.is_parallel}
        try:
            return StructuredOutput(grammar=tool_call_grammar(callables, **how, answer=answer))
        except (UsageError, ValueError, RecursionError) as error:
            raise ApiError(str(error), param="tools") from None

    def schemas(self) -> Iterator[tuple[str, StructuredOutput]]:
        """Return for every function whose schema counts its name and the schema alone, so that a wrong one can be
        named."""
        for function in self.functions:
            if function.parameters is not None and (self.is_required or function.strict):
                yield function.name, StructuredOutput(json=arguments_schema(function))


def tool_use(body: Any) -> ToolUse | None:
    """Return the tools of a body; None if no tool may be called. Raises `ApiError` for tools that are wrong or a choice
    that is not theirs."""
    if not isinstance(body, ChatRequest):
        return None
    choice = body.tool_choice
    if not body.tools:
        if choice == "required" or isinstance(choice, NamedTool):
            raise ApiError("tool_choice asks for a call and there are no tools: give tools", param="tool_choice")
        return None
    functions = [tool.function for tool in body.tools]
    _check(functions)
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise ApiError(f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice")
        return ToolUse(tuple(functions), True, False)
    return ToolUse(tuple(functions), choice == "required", body.parallel_tool_calls is not False)


def arguments_schema(function: Function) -> Mapping[str, Any]:
    """Return the schema of a function's arguments: always an object."""
    if function.parameters is None:
        return _NOTHING
    kind = function.parameters.get("type", "object")
    if kind != "object":
        raise ApiError(f"tools: the parameters of {function.name} must be of type object", param="tools")
    return {"type": "object", **function.parameters}


def shown_tools(body: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools as the chat template lists them."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in body.tools
    ]


def shown_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer as templates take it: its arguments an object, if they are one."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        arguments = _parsed(function["arguments"])
        function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    return {**call, "function": function}


def _check(functions: list[Function]) -> None:
    names: set[str] = set()
    for function in functions:
        if function.name in names:
            raise ApiError(f"tools: {function.name} is there twice", param="tools")
        names.add(function.name)
        arguments_schema(function)


class ToolCallSplitter:
    """Splits text, as it comes, into content and calls, in the pieces that OpenAI's deltas have.

    What may be the beginning of a tag is held back, and so is a call until its name is certain, so it does not matter
    how the text is cut. Blank space beside calls belongs to neither. A call of a function that is not there, or that is
    no JSON before its arguments, stays content.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._state = "text"
        self._held = ""
        self._space = ""
        """The blank space before the call that has begun."""
        self._at_start = False
        """No content has come after a call."""
        self.num_calls = 0
        self._depth, self._in_string, self._escaped = 0, False, False
        """State within the arguments."""

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the (content, entries of `tool_calls`) that `text` makes certain: one entry per call, as clients
        expect it of a chunk."""
        self._held += text
        content, calls = "", []
        while True:
            before = (self._state, len(self._held))
            if self._state == "text":
                content += self._text()
            elif self._state == "head":
                more, head_calls = self._head()
                content += more
                calls += head_calls
            elif self._state == "arguments":
                calls += self._arguments()
            else:
                self._tail()
            if before == (self._state, len(self._held)):
                return content, _joined(calls)

    def finish(self, is_cut: bool = False) -> str:
        """Return the content that was held back: nothing follows. is_cut: more would have followed, so that the
        beginning of a call is none."""
        held, self._held = self._held, ""
        if self._state == "head":
            return "" if is_cut else self._space + BEGIN + held
        if is_cut and (length := partial_tag(held, BEGIN)) > 1:
            held = held[:-length].rstrip()
        if self._state == "text" and (held.strip() or not self.num_calls):
            return self._content(held)
        return ""

    def _text(self) -> str:
        before, tag, after = self._held.partition(BEGIN)
        if tag:
            kept = before.rstrip()
            self._state, self._held, self._space = "head", after, before[len(kept) :]
            return self._content(kept)
        kept = before[: len(before) - partial_tag(before, BEGIN)].rstrip()
        self._held = before[len(kept) :]
        return self._content(kept)

    def _content(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text

    def _head(self) -> tuple[str, list[dict[str, Any]]]:
        """Read the name of a call, which comes first; a call in another order is read when it is whole."""
        begun = _HEAD.match(self._held)
        name = _parsed(begun[1]) if begun else None
        if begun and isinstance(name, str) and name in self._names:
            self._state, self._held = "arguments", self._held[begun.end() :]
            return "", [self._call(name, "")]
        inside, tag, after = self._held.partition(END)
        if not tag:
            return "", []
        self._state, self._held = "text", after
        call = _parsed(inside)
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(call, dict) and call.get("name") in self._names and isinstance(arguments, dict):
            return "", [self._call(call["name"], json.dumps(arguments, ensure_ascii=False))]
        return self._content(self._space + BEGIN + inside + END), []

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        self.num_calls += 1
        self._at_start = True
        head = {"index": self.num_calls - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {**head, "function": function}

    def _arguments(self) -> list[dict[str, Any]]:
        length = self._num_of_arguments()
        piece, self._held = self._held[:length], self._held[length:]
        return [{"index": self.num_calls - 1, "function": {"arguments": piece}}] if piece else []

    def _num_of_arguments(self) -> int:
        """Return how many of the characters held belong to the arguments. They end with their last brace, or where a
        `<` outside a string says that they are no JSON."""
        for index, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == "<":
                self._state, self._depth = "tail", 0
                return index
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._state = "tail"
                    return index + 1
        return len(self._held)

    def _tail(self) -> None:
        _, tag, after = self._held.partition(END)
        if tag:
            self._state, self._held = "text", after


def _joined(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the entries of one index: clients add up what chunks have, and not what one chunk has twice."""
    joined: list[dict[str, Any]] = []
    for entry in entries:
        if joined and joined[-1]["index"] == entry["index"]:
            joined[-1]["function"]["arguments"] += entry["function"]["arguments"]
        else:
            joined.append(entry)
    return joined


def split_tool_calls(text: str, names: Collection[str], is_cut: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Return the (content, tool calls) of a whole text. is_cut: as for `ToolCallSplitter.finish`."""
    splitter = ToolCallSplitter(names)
    content, entries = splitter.push(text)
    calls = [{name: value for name, value in entry.items() if name != "index"} for entry in entries]
    return content + splitter.finish(is_cut), calls


def _parsed(text: str) -> Any:
    """Parse JSON; return None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
