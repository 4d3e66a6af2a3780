"""How much work compiling a grammar may be, estimated from its text in far less than that takes.

Only an order follows from it: which of the grammars that wait is compiled next. A grammar that is taken for less than
it is loses its slice of the processor like any other (`sandbox_process`).
"""

import json
import math
import re
from typing import Any

from forge.engine.structured_output import StructuredOutput

_MAX_CHARS = 8 << 10
"""Longer texts are estimated by their length: 2 ms at most go into an estimate."""
_UNBOUNDED = 1 << 64
_RULE = re.compile(r"^[ \t]*[?!]?([\w.-]+)[ \t]*:(?::=)?", re.MULTILINE)
"""The beginning of a rule in Lark or GBNF, with its name."""
_NAME = re.compile(r"[\w.-]+")
_REPETITION = re.compile(r"(\()|(\))|(?:\{(?:\d*,)?|~ ?(?:\d+\.\.)?)(\d{1,9})(?:\}|\b)")
"""A bracket, or how often what precedes it may come, in a regular expression, GBNF or Lark."""
_DIVISOR = re.compile(r'"multipleOf": ?(\d{1,9})')


def estimate(structured: StructuredOutput) -> int:
    """Return the text's length, or that of what it stands for if that is more: definitions copied in wherever they are
    used, repetitions written out, and the states that divisors need together. An ordinary schema has some hundreds."""
    source = str(getattr(structured, structured.kind))
    if len(source) > _MAX_CHARS or structured.kind == "choice":
        return len(source)
    try:
        expanded = _schema_size(json.loads(source)) if structured.kind == "json" else _rules_size(source)
    except (ValueError, RecursionError):
        return _UNBOUNDED
    divisors = math.lcm(*(int(number) or 1 for number in _DIVISOR.findall(source)))
    return len(source) + expanded + _repetitions(source) + divisors


def _schema_size(schema: Any) -> int:
    """Count the nodes of a schema, with a copy for every reference that is joined with another schema: by `allOf`, or
    by keywords beside it. Of equal names the last counts, and a reference to what it is a part of counts nothing."""
    named: dict[str, Any] = {}
    sizes: dict[tuple[str, bool], int] = {}

    def collect(node: Any) -> None:
        for name, child in _children(node):
            named[name] = child
            collect(child)

    def size(node: Any, joined: bool) -> int:
        reference = node.get("$ref") if isinstance(node, dict) else None
        total = 1
        if isinstance(reference, str) and (joined or len(node) > 1):
            total += size_of(reference.rpartition("/")[2], joined)
        return total + sum(size(child, joined or name == "allOf") for name, child in _children(node))

    def size_of(name: str, joined: bool) -> int:
        if (name, joined) not in sizes:
            sizes[name, joined] = 0
            sizes[name, joined] = size(named.get(name), joined)
        return sizes[name, joined]

    collect(schema)
    return size(schema, False)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    return [(str(index), child) for index, child in enumerate(node)] if isinstance(node, list) else []


def _rules_size(source: str) -> int:
    """Count the words of a grammar with every rule's name replaced by a copy of the rule."""
    _, *parts = _RULE.split(source)
    bodies = dict(zip(parts[::2], map(_NAME.findall, parts[1::2]), strict=True))
    sizes: dict[str, int] = {}

    def size_of(name: str) -> int:
        if name not in sizes:
            sizes[name] = 0
            sizes[name] = 1 + sum(size_of(word) if word in bodies else 1 for word in bodies[name])
        return sizes[name]

    return max(map(size_of, bodies), default=0)


def _repetitions(source: str) -> int:
    """Return the greatest product of nested repetitions, added up over neighbours."""
    totals, group = [0], 1
    for opening, closing, count in _REPETITION.findall(source):
        if opening:
            totals.append(0)
        elif closing and len(totals) > 1:
            group = 1 + totals.pop()
            totals[-1] += group
        elif count:
            totals[-1] += group * int(count)
            group = 1
    return sum(totals)
