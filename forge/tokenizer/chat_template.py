"""Conversations to prompts: the file's Jinja template in a sandbox, or Qwen3's behaviour when the file has none.

A template comes with an untrusted model file. It runs in Jinja's immutable sandbox (`template_sandbox`), with the
settings, functions and `tojson` that Hugging Face's `apply_chat_template` gives it, and within bounds of work and size.
Whatever goes wrong becomes one line of `ChatTemplateError`. `jinja2`, 40 ms to import, is imported when the first
template is compiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, UsageError

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
