"""Expressions over what runs have measured: `{{climb.late_ms:ms}}` in a text, `climb.late_ms > 2` in a check.

A run directive has a name, and the facts of its report are that name's attributes, exactly as `--json` prints them.
Expressions are Python's, with a handful of functions and nothing else in reach. They come from the chapters, which are
part of this package and trusted like its code.
"""

import ast
import re
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from forge.views import figures

FUNCTIONS = {
    "abs": abs,
    "all": all,
    "any": any,
    "len": len,
    "max": max,
    "median": median,
    "min": min,
    "range": range,
    "round": round,
    "sorted": sorted,
    "sum": sum,
    "zip": zip,
}
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "count": figures.count,
    "ms": figures.ms,
    "percent": figures.percent,
    "rate": figures.rate,
    "size": figures.size,
    "times": figures.times,
}
"""The formats that have a name; any other is Python's own, such as `.2f`."""

_PLACEHOLDER = re.compile(r"\{\{(?P<expression>.+?)(?::(?P<format>[^:{}\[\]\"']+))?\}\}", re.DOTALL)


class Unmeasured(Exception):
    """An expression asks for what no run has measured, or not in a way that it can be worked out."""


class Facts:
    """A JSON object whose entries are read as attributes, objects inside it too."""

    def __init__(self, entries: Mapping[str, Any]):
        self._entries = entries

    def __getattr__(self, name: str) -> Any:
        entries = self.__dict__.get("_entries", {})
        if name not in entries:
            raise AttributeError(f"nothing called {name} was measured; there are {', '.join(sorted(entries))}")
        return _readable(entries[name])


def evaluate(expression: str, measured: Mapping[str, Mapping[str, Any]]) -> Any:
    """The value of `expression`; `measured` has the facts of each run by its name.

    Raises `Unmeasured` for a run that has not happened, a figure that it does not have, or one that this run is too
    short to have.
    """
    names = {name: Facts(facts) for name, facts in measured.items()}
    try:
        return eval(expression, {"__builtins__": FUNCTIONS, **names})
    except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        raise Unmeasured(f"{expression}: {error}") from None


def names_in(expression: str) -> set[str]:
    """The names that `expression` asks for, functions and its own variables excluded."""
    nodes = list(ast.walk(ast.parse(expression.strip(), mode="eval")))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return {name.id for name in names} - own - set(FUNCTIONS)


def fill(text: str, measured: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with every `{{expression:format}}` worked out; `–` where that cannot be done."""

    def figure(match: re.Match) -> str:
        try:
            return formatted(evaluate(match["expression"], measured), match["format"])
        except Unmeasured:
            return figures.NOTHING

    return _PLACEHOLDER.sub(figure, text)


def expressions_in(text: str) -> list[str]:
    """The expressions of all placeholders in `text`, in order."""
    return [match["expression"] for match in _PLACEHOLDER.finditer(text)]


def formatted(value: Any, form: str | None) -> str:
    """`value` as `form` says: the name of one of `FORMATS`, or a format specification of Python's."""
    if value is None:
        return figures.NOTHING
    if form is not None and form in FORMATS:
        return FORMATS[form](value)
    try:
        return format(value, form or "")
    except (TypeError, ValueError) as error:
        raise Unmeasured(f"{value!r} has no format {form!r}: {error}") from None


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Facts(value)
    if isinstance(value, list | tuple):
        return [_readable(entry) for entry in value]
    return value
