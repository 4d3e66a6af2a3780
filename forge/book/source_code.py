"""A function or class of the engine as it stands in its file, by dotted name, with the lines that matter marked.

The file is parsed and not imported, so showing a kernel compiles nothing. Lines are found by what they contain and
never by number: a chapter whose source has changed under it fails loudly instead of pointing at the wrong line.
"""

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge.errors import ForgeError
from forge.views.formatting import plural

PACKAGE = Path(__file__).resolve().parents[1]

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SourceError(ForgeError):
    """A chapter refers to source that does not exist (any more)."""


@dataclass(frozen=True)
class Span:
    """Lines of a definition: from the next line that contains `start` to the next that contains `stop`."""

    start: str | None = None
    stop: str | None = None
    omitted: str = ""
    """A few words about what is left out before it."""


@dataclass(frozen=True)
class Excerpt:
    """Lines of a definition, and an elision where some are left out."""

    path: str
    """Path from the folder that holds the package: `forge/model/qwen3.py`."""
    name: str
    """Qualified name in its file: `Qwen3.forward_pass`."""
    first_line: int
    """Number of its first line in the file."""
    lines: tuple[str, ...]
    """Its lines without the indentation that they share."""
    lit: frozenset[int]
    """Indices of the lines that matter."""
    elided: frozenset[int] = frozenset()
    """Indices of the lines that stand for others: `… the checks`."""

    def shortened(self, most: int) -> "Excerpt":
        """Keep about `most` lines: the first, the highlighted ones and those around them. Elisions replace the rest."""
        matter = {0, *self.lit, *self.elided}
        by_distance = sorted(
            range(len(self.lines)), key=lambda index: min(abs(index - kept_index) for kept_index in matter)
        )
        kept = {*matter, *by_distance[:most]}
        shown = _Shown()
        for index, line in enumerate(self.lines):
            if index in kept:
                shown.add(line, index in self.lit, index in self.elided)
            elif index - 1 in kept:
                end = next((after for after in range(index, len(self.lines)) if after in kept), len(self.lines))
                shown.elide(self.lines[index:end])
        return replace(self, lines=tuple(shown.lines), lit=frozenset(shown.lit), elided=frozenset(shown.elided))


class _Shown:
    """An excerpt under construction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lit: set[int] = set()
        self.elided: set[int] = set()

    def add(self, line: str, is_lit: bool = False, is_elided: bool = False) -> None:
        self.lit |= {len(self.lines)} if is_lit else set()
        self.elided |= {len(self.lines)} if is_elided else set()
        self.lines.append(line)

    def elide(self, lines: Sequence[str], words: str = "") -> None:
        """Replace `lines` by one line: `… the checks`, or their number."""
        written = [line for line in lines if line.strip()]
        if written:
            indent = " " * (len(written[0]) - len(written[0].lstrip()))
            self.add(f"{indent}… {words or plural(len(written), 'line')}", is_elided=True)


def excerpt(dotted: str, light: Sequence[str] = (), spans: Sequence[Span] = (Span(),), omitted: str = "") -> Excerpt:
    """Return the definition that `dotted` names, or `spans` of it, with the first paragraph of its docstring.

    omitted: in a few words, what is left out after the last span. Raises `SourceError` if there is no such definition,
    or one of the patterns is in no line of it.
    """
    path, qualified = _locate(dotted)
    text = path.read_text(encoding="utf-8")
    node = _definition(ast.parse(text), qualified, dotted)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    details = _details(node, lines, first)
    shown, at = _Shown(), 0
    begins: int | None = None
    for span in spans:
        begin = _containing(lines, span.start, dotted, at)[0] if span.start else at
        end = _containing(lines, span.stop, dotted, begin)[0] if span.stop else len(lines) - 1
        begins = begin if begins is None else begins
        shown.elide(lines[at:begin], span.omitted)
        for index in range(begin, end + 1):
            if index not in details:
                shown.add(lines[index])
            elif index == details.start:
                shown.elide([lines[detail] for detail in details])
        at = end + 1
    shown.elide(lines[at:], omitted)
    dedented = textwrap.dedent("\n".join(shown.lines)).split("\n")
    lit = {index for pattern in light for index in _containing(dedented, pattern, dotted, line="line that is shown")}
    return Excerpt(
        path=str(path.relative_to(PACKAGE.parent)),
        name=".".join(qualified),
        first_line=first + (begins or 0),
        lines=tuple(dedented),
        lit=frozenset(lit),
        elided=frozenset(shown.elided),
    )


def _details(node: _Definition, lines: Sequence[str], first: int) -> range:
    """Return the range of the docstring's lines from its second paragraph on, without its closing quotes."""
    begin = node.body[0]
    if ast.get_docstring(node) is None or begin.end_lineno is None:
        return range(0)
    docstring = range(begin.lineno - first, begin.end_lineno - first)
    blank = next((index for index in docstring if not lines[index].strip()), docstring.stop)
    return range(blank, docstring.stop)


def _locate(dotted: str) -> tuple[Path, list[str]]:
    """Split `dotted` into the file of its longest module and the rest of the name."""
    package, *parts = dotted.split(".")
    if package != PACKAGE.name:
        raise SourceError(f"{dotted}: only source of the package {PACKAGE.name} can be shown")
    for count in range(len(parts) - 1, 0, -1):
        path = PACKAGE.joinpath(*parts[:count]).with_suffix(".py")
        if path.is_file():
            return path, parts[count:]
    raise SourceError(f"{dotted}: there is no such module")


def _definition(tree: ast.Module, qualified: Sequence[str], dotted: str) -> _Definition:
    """Find a definition by its qualified name, which has at least one part (`_locate`)."""
    body = tree.body
    for name in qualified:
        inside = [child for child in body if isinstance(child, _Definition) and child.name == name]
        if not inside:
            raise SourceError(f"{dotted}: there is no function or class {name}")
        node = inside[-1]
        body = node.body
    return node


def _containing(lines: Sequence[str], pattern: str, dotted: str, begin: int = 0, line: str = "line") -> list[int]:
    """Return the indices of the lines from `begin` on that contain `pattern`. line: what an error calls one."""
    indices = [index for index in range(begin, len(lines)) if pattern in lines[index]]
    if not indices:
        raise SourceError(f"{dotted}: no {line} contains {pattern!r}")
    return indices
