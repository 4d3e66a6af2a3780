"""An answer's text told apart as it grows: thinking, content, tool calls.

It does not matter how the text is cut: what may be the beginning of a tag is held back.
"""

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

from forge.grammar.compiler import BEGIN_CALL, END_CALL
from forge.grammar.thinking import CLOSE, OPEN

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)
"""The beginning of a call, up to its arguments."""


class ReasoningSplitter:
    """Splits text, as it comes, into reasoning and answer, without the tags and the blank lines beside them.

    Only an answer that begins with `<think>` has reasoning; one whose prompt ended with the tag begins inside it. What
    may be the beginning of a tag is held back, so it does not matter how the text is cut.
    """

    def __init__(self, inside: bool = False):
        self._state = "reasoning" if inside else "undecided"
        self._held = ""
        self._at_start = True
        """Blank lines at the beginning of a part are left out."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, answer) that `text` makes certain."""
        self._held += text
        reasoning = ""
        if self._state == "undecided":
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._state, self._held = "reasoning", start[len(OPEN) :]
            elif OPEN.startswith(start):
                return "", ""
            else:
                self._state, self._at_start = "answer", False
        if self._state == "reasoning":
            before, tag, after = self._held.partition(CLOSE)
            if not tag:
                return self._reasoning_so_far(), ""
            reasoning = (before.lstrip("\n") if self._at_start else before).rstrip("\n")
            self._state, self._held, self._at_start = "answer", after, True
        return reasoning, self._answer_so_far()

    def finish(self) -> tuple[str, str]:
        """Return what was held back: nothing follows."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return held.lstrip("\n") if self._at_start else held, ""
        return "", held

    def _reasoning_so_far(self) -> str:
        if self._at_start:
            self._held = self._held.lstrip("\n")
        if not self._held:
            return ""
        length = len(self._held) - partial_tag(self._held, CLOSE)
        while length and self._held[length - 1] == "\n":  # they may stand before the closing tag
            length -= 1
        return self._release(length)

    def _answer_so_far(self) -> str:
        if self._at_start:
            self._held = self._held.lstrip("\n")
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._at_start = False
        return text


def partial_tag(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` with which the tag begins."""
    return next((length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length])), 0)


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
            return "" if is_cut else self._space + BEGIN_CALL + held
        if is_cut and (length := partial_tag(held, BEGIN_CALL)) > 1:
            held = held[:-length].rstrip()
        if self._state == "text" and (held.strip() or not self.num_calls):
            return self._content(held)
        return ""

    def _text(self) -> str:
        before, tag, after = self._held.partition(BEGIN_CALL)
        if tag:
            kept = before.rstrip()
            self._state, self._held, self._space = "head", after, before[len(kept) :]
            return self._content(kept)
        kept = before[: len(before) - partial_tag(before, BEGIN_CALL)].rstrip()
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
        name = parsed(begun[1]) if begun else None
        if begun and isinstance(name, str) and name in self._names:
            self._state, self._held = "arguments", self._held[begun.end() :]
            return "", [self._call(name, "")]
        inside, tag, after = self._held.partition(END_CALL)
        if not tag:
            return "", []
        self._state, self._held = "text", after
        call = parsed(inside)
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(call, dict) and call.get("name") in self._names and isinstance(arguments, dict):
            return "", [self._call(call["name"], json.dumps(arguments, ensure_ascii=False))]
        return self._content(self._space + BEGIN_CALL + inside + END_CALL), []

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
        _, tag, after = self._held.partition(END_CALL)
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


def parsed(text: str) -> Any:
    """Parse JSON; return None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
