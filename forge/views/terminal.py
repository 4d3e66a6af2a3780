"""The consoles that views draw on: where colour, width and the closed pipe are decided, once.

Nothing printed through here is read as markup, so brackets in a prompt stay brackets.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forge.views.palette import QUIET, TITLE


class ClosedPipe(Exception):
    """The reader of the output has gone (`forge … | head -1`). Not an error: there is nothing left to say."""


class ForgeConsole(Console):
    """A console that reports a closed pipe as `ClosedPipe`, instead of ending the process from inside a view. Nothing
    that it prints is read as markup."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:  # older releases of rich let it through; newer ones call `on_broken_pipe`
            raise ClosedPipe from None

    def on_broken_pipe(self) -> None:
        raise ClosedPipe


def open_console(file: IO[str] | None = None, width: int | None = None) -> ForgeConsole:
    """Return a console on `file`, by default standard output as it is now. `width` is for tests and pictures."""
    return ForgeConsole(file=file or sys.stdout, width=width)


def open_error_console() -> ForgeConsole:
    """Return a console on standard error, for what must not end up in a pipe: progress and trouble."""
    return open_console(sys.stderr)


def can_redraw(console: Console) -> bool:
    """Return whether a live view has a terminal under it that can move its cursor."""
    return console.is_terminal and console.file.isatty() and not console.is_dumb_terminal


def print_hanging(console: Console, text: Text, indent: int, most: int | None = None) -> None:
    """Print `text` wrapped at the console's width, or at `most` columns, what does not fit on its first line set in."""
    width = min(console.width, most or console.width)
    room = max(1, width - indent)
    first, *_ = text.wrap(console, width) or [Text()]
    rest = text[len(first.plain) :]
    first.rstrip()
    console.print(first)
    while rest.plain.startswith(" "):
        rest = rest[1:]
    for line in rest.wrap(console, room) if rest else ():
        line.rstrip()
        console.print(Text.assemble(" " * indent, line))


def heading(left: str, style: str, rights: Iterable[str], width: int) -> Text:
    """Return a line with `left` and, in grey at its end, the first of `rights` that has room beside it, if one has."""
    for right in rights:
        if len(left) + 2 + len(right) <= width:
            return Text.assemble((left, style), (f"{right:>{width - len(left)}}", QUIET), no_wrap=True)
    return Text(left, style)


def cut(line: Text, width: int) -> Text:
    """Cut a line at `width` columns, where an ellipsis stands for the rest, and return it."""
    line.truncate(width, overflow="ellipsis")
    return line


def new_table() -> Table:
    """Return a table with a rule under its headings."""
    return Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)


def unpadded(console: Console, renderable: RenderableType, width: int | None = None) -> Iterator[Text]:
    """Yield the lines of a table or a text without the spaces that would pad each of them to the full width."""
    options = console.options.update(width=width) if width else console.options
    for segments in console.render_lines(renderable, options, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments), no_wrap=True)
        line.rstrip()
        yield line
