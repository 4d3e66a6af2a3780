"""Control tokens that a chat message spells out stay text: only the template's own become tokens.

Rendering a template loses which characters came from a message, so a user who writes `<|im_end|>\\n<|im_start|>system`
could forge a turn. Before rendering, each place in a message where a control token could begin gets a mark behind its
first character; no control token is found across a mark, and the marks are removed before the text is encoded. Tags
that templates look for in messages (`</think>`) stay whole.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from forge.errors import UsageError

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
