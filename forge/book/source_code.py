"""A function or class of the engine as it stands in its file, by dotted name, with the lines that matter marked.

The file is parsed and not imported, so showing a kernel compiles nothing. Lines are found by what they contain and
never by number: a chapter whose source has changed under it fails loudly instead of pointing at the wrong line.
"""

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.errors import ForgeError

PACKAGE = Path(__file__).resolve().parents[1]

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SourceError(ForgeError):
    """A chapter asks for source that is not there (any more)."""


@dataclass(frozen=True)
class Excerpt:
    """Consecutive lines of a definition."""

    path: str
    """From the folder that holds the package: `forge/model/qwen3.py`."""
    name: str
    """In its file: `Qwen3.forward_pass`."""
    first_line: int
    """Its first line's number in the file."""
    lines: tuple[str, ...]
    """Without the indentation that they share."""
    lit: frozenset[int]
    """Indices of the lines that matter."""
    cut_before: bool = False
    """The definition begins earlier."""
    cut_after: bool = False
    """The definition goes on."""


def excerpt(dotted: str, light: Sequence[str] = (), start: str | None = None, stop: str | None = None) -> Excerpt:
    """The definition that `dotted` names, from the line that contains `start` to the next that contains `stop`.

    Raises `SourceError` if there is no such definition, or one of the patterns is in no line of it.
    """
    path, qualified = _locate(dotted)
    text = path.read_text(encoding="utf-8")
    node = _definition(ast.parse(text), qualified, dotted)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    begin = _find(lines, start, 0, dotted) if start else 0
    end = _find(lines, stop, begin, dotted) if stop else len(lines) - 1
    shown = textwrap.dedent("\n".join(lines[begin : end + 1])).split("\n")
    lit = {index for pattern in light for index in _containing(shown, pattern, dotted)}
    return Excerpt(
        path=str(path.relative_to(PACKAGE.parent)),
        name=".".join(qualified),
        first_line=first + begin,
        lines=tuple(shown),
        lit=frozenset(lit),
        cut_before=begin > 0,
        cut_after=end < len(lines) - 1,
    )


def _locate(dotted: str) -> tuple[Path, list[str]]:
    """The file of the longest module in `dotted`, and what is left of the name."""
    package, *parts = dotted.split(".")
    if package != PACKAGE.name:
        raise SourceError(f"{dotted}: only source of the package {PACKAGE.name} can be shown")
    for count in range(len(parts) - 1, 0, -1):
        path = PACKAGE.joinpath(*parts[:count]).with_suffix(".py")
        if path.is_file():
            return path, parts[count:]
    raise SourceError(f"{dotted}: there is no such module")


def _definition(tree: ast.Module, qualified: Sequence[str], dotted: str) -> _Definition:
    """`qualified` has at least one name (`_locate`)."""
    body = tree.body
    for name in qualified:
        inside = [child for child in body if isinstance(child, _Definition) and child.name == name]
        if not inside:
            raise SourceError(f"{dotted}: there is no function or class {name}")
        node = inside[-1]
        body = node.body
    return node


def _find(lines: Sequence[str], pattern: str, begin: int, dotted: str) -> int:
    found = [index for index in range(begin, len(lines)) if pattern in lines[index]]
    if not found:
        raise SourceError(f"{dotted}: no line contains {pattern!r}")
    return found[0]


def _containing(lines: Sequence[str], pattern: str, dotted: str) -> list[int]:
    found = [index for index, line in enumerate(lines) if pattern in line]
    if not found:
        raise SourceError(f"{dotted}: no line that is shown contains {pattern!r}")
    return found
