"""The consoles that views draw on: where colour, width and the closed pipe are decided, once.

Nothing printed through here is read as markup, so brackets in a prompt stay brackets.
"""

import sys
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class ClosedPipe(Exception):
    """The reader of the output has gone (`forge … | head -1`). Not an error: there is nothing left to say."""


class ForgeConsole(Console):
    """A console that reports a closed pipe as `ClosedPipe`, instead of ending the process from inside a view."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:  # older releases of rich let it through; newer ones call `on_broken_pipe`
            raise ClosedPipe from None

    def on_broken_pipe(self) -> None:
        raise ClosedPipe


def open_console(file: IO[str] | None = None, width: int | None = None) -> ForgeConsole:
    """A console on `file`, by default standard output as it is now. `width` is for tests and pictures."""
    return ForgeConsole(
        file=file or sys.stdout, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False
    )


def open_error_console() -> ForgeConsole:
    """A console on standard error, for what must not end up in a pipe: progress and trouble."""
    return open_console(sys.stderr)


def can_redraw(console: Console) -> bool:
    """Whether a live view has a terminal under it that can move its cursor."""
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


def print_table(console: Console, table: Table) -> None:
    """Print `table` without the spaces that would pad each of its lines to the full width."""
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments), no_wrap=True)
        line.rstrip()
        console.print(line)
