"""Conversations to prompts: the file's Jinja template in a sandbox, or Qwen3's behaviour when the file has none.

A template comes with an untrusted model file. It runs in Jinja's immutable sandbox (`template_sandbox`), with the
settings, functions and `tojson` that Hugging Face's `apply_chat_template` gives it, and within bounds of work and size.
Whatever goes wrong becomes one line of `ChatTemplateError`. `jinja2`, 40 ms to import, is imported when the first
template is compiled.

Control tokens that a chat message spells out stay text: only the template's own become tokens.

Rendering a template loses which characters came from a message, so a user who writes `<|im_end|>\n<|im_start|>system`
could forge a turn. Before rendering, each place in a message where a control token could begin gets a mark behind its
first character; no control token is found across a mark, and the marks are removed before the text is encoded. Tags
that templates look for in messages (`</think>`) stay whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, UsageError

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode's noncharacters, which are for internal use such as this."""


def beginnings(control_tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for the first character of a control token, and the same character elsewhere but in a tag: a
    template may remove what follows it. None without control tokens."""
    tokens = [token for token in control_tokens if len(token) > 1]
    if not tokens:
        return None
    first = "|".join(sorted({re.escape(token[0]) for token in tokens}))
    rest = "|".join(sorted(re.escape(token[1:]) for token in tokens))
    return re.compile(rf"(?:{first})(?:(?={rest})|(?!/?\w+>))")


def choose_mark(messages: Any) -> str:
    """Return a mark that is nowhere in `messages`. Raises `UsageError` if they have them all."""
    used = set().union(*(set(text).intersection(MARKS) for text in _strings(messages) if not text.isascii()))
    free = next((mark for mark in MARKS if mark not in used), None)
    if free is None:
        raise UsageError("the messages have all of Unicode's noncharacters in them (U+FDD0 to U+FDEF): remove one")
    return free


def marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Put `mark` behind every match in the strings of `value`, names too, however deep in lists and mappings."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group() + mark, value)
    if isinstance(value, Mapping):
        return {marked(name, pattern, mark): marked(item, pattern, mark) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [marked(item, pattern, mark) for item in value]
    return value


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _strings(item)


MAX_TEMPLATE_CHARS = 200_000
"""Qwen3's template has about 4,000."""

QWEN3_CHAT_TEMPLATE = Path(__file__).with_name("qwen3_chat_template.jinja").read_text(encoding="utf-8")
"""Renders turns and tools as Qwen3's published template does."""


class ChatTemplateError(ForgeError):
    """A model file's chat template is malformed, fails on these messages, or runs past its bounds."""


class ChatTemplate:
    """A compiled template. `variables` are always defined in it, such as `eos_token`.

    Raises `ChatTemplateError` when `source` is too long or not Jinja. May be rendered from several threads."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"chat template: {len(source)} characters, over the limit of {MAX_TEMPLATE_CHARS}")
        self._variables = dict(variables)
        self.has_tools = "tools" in source
        """Whether it shows the model the tools that it may call."""
        with _one_line_errors():
            from forge.tokenizer.template_sandbox import compile_template

            self._code = compile_template(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render the prompt. Raises `UsageError` for bad messages and `ChatTemplateError` for what the template
        does."""
        from forge.tokenizer.template_sandbox import render_template

        context = {"tools": None, **self._variables, **variables, "messages": _checked(messages)}
        with _one_line_errors():
            return render_template(self._code, context)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a foreign program: whatever it raises is its own failure
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ChatTemplateError(f"chat template: {reason[:300]}") from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy `messages`, joining content given as a list of text parts to one string."""
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


def up_to_content(rendered: str, message: Mapping[str, Any]) -> str:
    """Return the rendered prompt up to the end of its last message's content, as Hugging Face's
    `continue_final_message` has it. Raises `UsageError` if the template shows that content otherwise, or it is
    empty."""
    content = _checked([message])[0]["content"] or ""
    place = rendered.rfind(content.strip())
    if not content.strip() or place < 0:
        raise UsageError("the last message cannot be continued: it is empty, or the chat template changes it")
    kept = content.lstrip()
    return rendered[:place] + (kept if rendered.startswith(kept, place) else content.strip())


def _text_part(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise UsageError(f"message {number}: only text parts are supported")
