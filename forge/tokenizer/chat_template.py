"""Conversations to prompts: the file's Jinja template in a sandbox, or Qwen3's behaviour when the file has none.

A template comes with a model file, from anybody. It runs in Jinja's immutable sandbox, with the settings, functions and
`tojson` that Hugging Face's `apply_chat_template` gives it, and under a `_Budget`: Jinja has no `while`, so what could
run for ever is nested loops, recursion and text that doubles, and each of them is charged before or as it happens.
Whatever goes wrong becomes one line of `ChatTemplateError`. `jinja2` is imported when the first template is compiled.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from forge.errors import ForgeError, UsageError

MAX_STEPS = 1_000_000
"""Loop iterations and calls of one rendering."""

MAX_CHARS = 32_000_000
"""Characters that one rendering may output or build on the way."""

MAX_TEMPLATE_CHARS = 200_000
"""Qwen3's template has about 4,000."""

_MAX_NUMBER = 1_000_000
"""Greatest number that a filter, method or repetition takes: widths, counts, indentations."""

QWEN3_CHAT_TEMPLATE = """\
{#- One turn per message. Earlier answers lose their thinking; answers since the last question keep it. -#}
{%- set turns = namespace(question=messages | length - 1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' and message.content is string -%}
        {%- set from_tool = message.content.startswith('<tool_response>') -%}
        {%- if not (from_tool and message.content.endswith('</tool_response>')) -%}
            {%- set turns.question = loop.index0 -%}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {{- raise_exception('the built-in template has no tools; use a model file with its own template') -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set text = message.content if message.content is string else '' -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception('the built-in template has no role ' ~ message.role) -}}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- set thinking = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set thinking = message.reasoning_content -%}
        {%- elif '</think>' in text -%}
            {%- set thinking = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1] -%}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- if loop.index0 > turns.question and (loop.last or thinking) -%}
            {%- set text = '<think>\\n' ~ thinking.strip('\\n') ~ '\\n</think>\\n\\n' ~ text.lstrip('\\n') -%}
        {%- endif -%}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
"""Renders system, user and assistant turns as Qwen3's published template does; tools need the file's own."""


class ChatTemplateError(ForgeError):
    """A model file's chat template is malformed, fails on these messages, or runs past its bounds."""


class ChatTemplate:
    """A compiled template. `variables` are always defined in it: `bos_token`, `eos_token`.

    Raises `ChatTemplateError` when `source` is too long or not Jinja."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"chat template: {len(source)} characters, over the limit of {MAX_TEMPLATE_CHARS}")
        self._variables = dict(variables)
        self._compile = _compiler(source)
        self._compile(_Budget())

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt. Raises `UsageError` for messages that are none, `ChatTemplateError` for what the template does."""
        budget = _Budget()
        template = self._compile(budget)
        context = {"tools": None, **self._variables, **variables, "messages": _checked(messages)}
        return _guarded(lambda: "".join(budget.charged_output(template.generate(context))))


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of `messages`, content given as a list of text parts joined to one string."""
    if not messages:
        raise UsageError("no messages: a chat prompt needs at least one")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {number} needs a role that is a string, such as 'user'")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = "".join(_text_part(part, number) for part in content)
        elif content is not None and not isinstance(content, str):
            raise UsageError(f"message {number}: content is {type(content).__name__}, not text")
        checked.append({**message, "content": content})
    return checked


def _text_part(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise UsageError(f"message {number}: only text parts are supported")


class _Budget:
    """What one rendering may still spend. Raises `ChatTemplateError` when it is used up."""

    def __init__(self) -> None:
        self._steps = 0
        self._chars = 0

    def spend(self, steps: int = 0, chars: int = 0) -> None:
        self._steps += steps
        self._chars += chars
        if self._steps > MAX_STEPS:
            raise ChatTemplateError(f"chat template: stopped after {MAX_STEPS} steps; it loops too long")
        if self._chars > MAX_CHARS:
            raise ChatTemplateError(f"chat template: stopped after {MAX_CHARS} characters; it writes too much")

    def charged(self, value: Any) -> Any:
        """`value`, paid for by its size."""
        if isinstance(value, str):
            self.spend(steps=1, chars=len(value))
        elif isinstance(value, (list, tuple, dict, range)):
            self.spend(steps=1 + len(value))
        else:
            self.spend(steps=1)
        return value

    def charged_loop(self, iterable: Iterable[Any], chars_each: int) -> Iterable[Any]:
        """`iterable` for a loop whose body holds `chars_each` characters of fixed text."""
        if isinstance(iterable, (str, list, tuple, dict, range)):
            self.spend(steps=len(iterable), chars=len(iterable) * chars_each)
            return iterable
        return self._charged_items(iterable, chars_each)

    def charged_output(self, chunks: Iterable[str]) -> Iterator[str]:
        for chunk in chunks:
            self.spend(chars=len(chunk))
            yield chunk

    def _charged_items(self, iterable: Iterable[Any], chars_each: int) -> Iterator[Any]:
        for item in iterable:
            self.spend(steps=1, chars=chars_each)
            yield item


def _guarded[T](action: Callable[[], T]) -> T: ...
