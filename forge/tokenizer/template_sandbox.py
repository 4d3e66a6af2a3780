"""Jinja for chat templates: Hugging Face's dialect, sandboxed and bounded.

The sandbox of Jinja keeps a template from reaching Python's objects; it does not keep it from running or growing
without end. Jinja has no `while`, so endless work is nested loops and recursion, and endless growth is text or lists
that multiply step by step. Each is charged to a `Budget`: loops by their length before they start, calls, filters,
operators and literals by the size of what they return, printed values by theirs; and what can multiply its inputs'
sizes is estimated first.

This file imports jinja2; only `chat_template` imports it, when there is a template to compile.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from math import prod
from types import CodeType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Loop iterations, calls and list entries of one rendering."""

MAX_CHARS = 32_000_000
"""Characters that one rendering may print or build on the way."""

MAX_NUMBER = 1_000_000
"""Greatest count or width that an operator, method or filter takes."""

_COUNTING = frozenset(
    ("*", "**", "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "truncate", "batch", "slice")
)
"""Operators, methods and filters that take a number as a count or a width."""

_FORMATTING = frozenset(("%", "format", "format_map"))
_UNBOUNDED_WIDTH = re.compile(r"\d{7}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
"""A width of seven digits, or one that is taken from the arguments."""

_MULTIPLYING = _FORMATTING | {
    "*",
    "replace",
    "join",
    "expandtabs",
    "translate",
    "indent",
    "wordwrap",
    "urlize",
    "xmlattr",
}
"""Operations whose result can be as large as the product of their inputs' sizes."""

_CALL_STEPS = 4
"""A call takes as long as several turns of a loop."""

_CHARGED_LOOP = "forge: charged loop"
_CHARGED_VALUE = "forge: charged value"
"""Filters that templates cannot name, put around loops and literals when a template is compiled."""


class TemplateBoundsExceeded(Exception):
    """One rendering has used up its steps or characters."""


class Budget:
    """The budget of one rendering. Every method raises `TemplateBoundsExceeded` when too much was spent."""

    def __init__(self) -> None:
        self._steps = 0
        self._chars = 0

    def spend(self, *, steps: int = 0, chars: int = 0) -> None:
        self._steps += steps
        self._chars += chars
        if self._steps > MAX_STEPS:
            raise TemplateBoundsExceeded(f"stopped after {MAX_STEPS} steps; it loops too long")
        if self._chars > MAX_CHARS:
            raise TemplateBoundsExceeded(f"stopped after {MAX_CHARS} characters; it writes too much")

    def charged(self, value: Any) -> Any:
        """Charge for `value` and return it: by its length if it is text and by all that it holds if it is a
        container."""
        self.spend(steps=1)
        pending = [value]
        while pending:
            node = pending.pop()
            if isinstance(node, str):
                self.spend(chars=len(node))
            elif isinstance(node, (list, tuple)):
                self.spend(steps=len(node))
                pending.extend(node)
            elif isinstance(node, Mapping):
                self.spend(steps=len(node))
                pending.extend(node.values())
        return value

    def charged_loop(self, iterable: Any, chars_each: int) -> Any:
        """Charge `iterable` for a loop whose body holds `chars_each` characters of fixed text."""
        if isinstance(iterable, (str, list, tuple, dict, range)):
            self.spend(steps=len(iterable), chars=len(iterable) * chars_each)
            return iterable
        return self._charged_items(iterable, chars_each)

    def check_product(self, name: str, inputs: Sequence[Any]) -> None:
        """Refuse a call whose result could be beyond all bounds: large counts, large widths, multiplied sizes.

        `name` is an operator, method or filter, `inputs` what it works on and its arguments.
        """
        counts = [abs(value) for value in inputs if name in _COUNTING and isinstance(value, (int, float))]
        if any(count > MAX_NUMBER for count in counts):
            raise TemplateBoundsExceeded(f"{name} is given {max(counts):.3g}, over the limit of {MAX_NUMBER}")
        if name in _FORMATTING and isinstance(inputs[0], str) and _UNBOUNDED_WIDTH.search(inputs[0]):
            raise TemplateBoundsExceeded(f"{name} is given a width that has no bound")
        sizes = [_size(value) for value in inputs] + [int(count) for count in counts if count == count]
        if name in _MULTIPLYING and prod(max(1, size) for size in sizes) > MAX_CHARS:
            raise TemplateBoundsExceeded(f"{name} could write more than {MAX_CHARS} characters")

    def _charged_items(self, iterable: Iterable[Any], chars_each: int) -> Iterator[Any]:
        for item in iterable:
            self.spend(steps=1, chars=chars_each)
            yield item


def compile_template(source: str) -> CodeType:
    """Compile a template. Raises `jinja2.TemplateError` for what is none."""
    return ChatEnvironment(Budget()).compile(source)


def render_template(code: CodeType, context: Mapping[str, Any]) -> str:
    """Render a template. Raises whatever the template raises, and `TemplateBoundsExceeded`."""
    environment = ChatEnvironment(Budget())
    template = Template.from_code(environment, code, environment.globals)
    return "".join(template.generate(context))


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One rendering's Jinja: trimmed blocks, loop controls, and the functions that Hugging Face defines."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing of a template is evaluated before it is rendered
            extensions=[loopcontrols],
            finalize=budget.charged,
        )
        self._budget = budget
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(name, function, budget) for name, function in self.filters.items()}
        self.filters[_CHARGED_LOOP] = budget.charged_loop
        self.filters[_CHARGED_VALUE] = budget.charged

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(__obj, "__name__", type(__obj).__name__)
        receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps str.format
        __self._budget.check_product(name, (receiver, *args, *kwargs.values()))
        __self._budget.spend(steps=_CALL_STEPS)
        return __self._budget.charged(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.check_product(operator, (left, right))
        if operator == "**" and abs(right) > 64:
            raise TemplateBoundsExceeded(f"raises to the power of {right}, over the limit of 64")
        return self._budget.charged(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        charged: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        return charged


class _Charging(NodeTransformer):
    """Puts the charging filters around every loop's iterable, every `~` and every literal container."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        chars_each = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _CHARGED_LOOP, nodes.Const(chars_each))
        return node

    def visit_Concat(self, node: nodes.Concat | nodes.List | nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), _CHARGED_VALUE)

    visit_List = visit_Dict = visit_Concat

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _CHARGED_VALUE) if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _bounded_filter(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    @wraps(function)  # keeps Jinja's marks of what a filter wants passed to it
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget.check_product(name, (*args, *kwargs.values()))
        return budget.charged(function(*args, **kwargs))

    return bounded


def _size(value: Any) -> int:
    """Count the characters of text and of the texts in a list, or the entries of another container."""
    if isinstance(value, (list, tuple)):
        return len(value) + sum(len(entry) for entry in value if isinstance(entry, str))
    return len(value) if isinstance(value, (str, dict, range)) else 1


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Write JSON as Hugging Face does: plain, neither HTML-escaped nor in ASCII."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
