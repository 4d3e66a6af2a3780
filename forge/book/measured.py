"""Expressions over what runs have measured: `{{climb.late_ms:ms}}` in a text, `climb.late_ms > 2` in a condition.

A run directive has a name, and the facts of its report are that name's attributes, exactly as `--json` prints them.
Expressions are a part of Python's: comparisons, arithmetic, comprehensions and the functions of `FUNCTIONS`. Anything
else is refused before it is evaluated.
"""

import ast
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from statistics import median
from types import CodeType
from typing import Any

from forge.views.formatting import NOTHING, formatted

_CALLABLE: tuple[Any, ...] = (abs, all, any, len, max, median, min, range, round, sorted, sum, zip)
FUNCTIONS = {function.__name__: function for function in _CALLABLE}
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.boolop, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop,
    ast.Call, ast.Name, ast.expr_context, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.List, ast.Tuple,
    ast.GeneratorExp, ast.ListComp, ast.comprehension, ast.IfExp,
)  # fmt: skip

_PLACEHOLDER = re.compile(r"\{\{(?P<expression>.+?)(?::(?P<format>[^:{}\[\]\"']+))?\}\}", re.DOTALL)


class Unmeasured(Exception):
    """An expression refers to something that no run has measured, or cannot be computed."""


Path = tuple[str | int, ...]
Touch = Callable[[Path, Any], Any]
"""Called with the place of a single value and the value; returns what is read instead of it."""


class Facts:
    """A JSON object whose entries are attributes, in nested objects too."""

    def __init__(self, entries: Mapping[str, Any], path: Path = (), touch: Touch | None = None):
        self._entries, self._path, self._touch = entries, path, touch

    def __getattr__(self, name: str) -> Any:
        entries = self.__dict__.get("_entries", {})
        if name not in entries:
            raise AttributeError(f"nothing called {name} was measured; there are {', '.join(sorted(entries))}")
        return _readable(entries[name], (*self._path, name), self._touch)


def evaluate(expression: str, measured: Mapping[str, Any], touch: Touch | None = None) -> Any:
    """Evaluate `expression`; `measured` maps each run's name to its facts.

    Raises `Unmeasured` for a run that has not happened, a figure that it does not have, or one that this run is too
    short to have; `SyntaxError` for what is no expression (`check_expression`).
    """
    names = {name: _readable(facts, (name,), touch) for name, facts in measured.items()}
    try:
        return eval(_compiled(expression), {"__builtins__": FUNCTIONS, **names})
    except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        raise Unmeasured(f"{expression}: {error}") from None


def check_expression(expression: str) -> ast.Expression:
    """Parse an expression. Raises `SyntaxError` unless it consists of comparisons, arithmetic and `FUNCTIONS` alone."""
    tree = ast.parse(expression.strip(), mode="eval")
    for node in ast.walk(tree):
        is_called = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS)
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if not isinstance(node, _ALLOWED) or isinstance(node, ast.Pow) or is_called or is_private:
            raise SyntaxError("not allowed", ("", 1, 1, expression))
    return tree


@lru_cache(1024)
def _compiled(expression: str) -> CodeType:
    return compile(check_expression(expression), "<chapter>", "eval")


def names_in(expression: str) -> set[str]:
    """Return the names that `expression` refers to, except functions and its own variables."""
    names = [node for node in ast.walk(check_expression(expression)) if isinstance(node, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return {name.id for name in names} - bound - set(FUNCTIONS)


def fill(text: str, measured: Mapping[str, Any], touch: Touch | None = None) -> str:
    """Replace every `{{expression:format}}` in `text` by its value, or by `–` if it has none."""

    def figure(match: re.Match) -> str:
        try:
            return formatted(evaluate(match["expression"], measured, touch), match["format"] or "")
        except (Unmeasured, TypeError, ValueError):  # the latter two for a value that has no such format
            return NOTHING

    return _PLACEHOLDER.sub(figure, text)


def expressions_in(text: str) -> list[str]:
    """List the expressions of all placeholders in `text`, in order."""
    return [match["expression"] for match in _PLACEHOLDER.finditer(text)]


def _readable(value: Any, path: Path, touch: Touch | None) -> Any:
    if isinstance(value, Mapping):
        return Facts(value, path, touch)
    if isinstance(value, list | tuple):
        return [_readable(entry, (*path, index), touch) for index, entry in enumerate(value)]
    return value if touch is None else touch(path, value)
