"""The grammar of tool calls as Qwen3 writes them (Hermes's format): JSON between `<tool_call>` and `</tool_call>`.

Where a call must come, the output is one or more calls. Where one may come, the output is text in which `<tool_call>`
begins a call, so that the text stays free and a call once begun is whole; or it is JSON by a schema instead of text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

BEGIN, END, NEWLINE = "<tool_call>", "</tool_call>", "\n"
Callable = tuple[str, Mapping[str, Any]]
"""A function's name, and the schema of its arguments."""

_FORM = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}
"""The form of JSON: one space after a colon and a comma, as everywhere (`compiler`)."""


def tool_call_grammar(
    functions: Sequence[Callable], *, required: bool, parallel: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """Return a Lark grammar of tool calls. required: at least one call, and nothing but calls. parallel: more than one
    may come. answer: the schema of what comes where no call does; None for any text."""
    rules = [f"call_{index}: {_call(*function)}" for index, function in enumerate(functions)]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    calls = f"{_text(BEGIN)} call" + (f" ({_text(NEWLINE + BEGIN)} call)*" if parallel else "")
    if required:
        rules.append(f"start: {calls}")
    elif answer is not None:
        rules += [f"start: answer | {calls}", f"answer: {_json(answer)}"]
    else:
        rules += [f"start: {'(begin call)* TEXT' if parallel else 'begin call | TEXT'}"]
        rules += [f"begin[lazy]: TEXT {_text(BEGIN)}", r"TEXT: /(.|\n)*/"]
    return "%llguidance {}\n" + "\n".join(rules)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    """Return the rules of what follows `<tool_call>`."""
    head = f'\n{{"name": "{name}", "arguments": '
    return f"{_text(head)} {_json(schema)} {_text('}' + NEWLINE + END)}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, **_FORM}, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
