"""The list of chapters, with how far the reader has come."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.book.catalog import Entry
from forge.book.progress import Progress
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE
from forge.views.terminal import print_table

QUESTION = "What is there to read?"


@dataclass(frozen=True)
class ChapterLine:
    """One line of the list of chapters."""

    number: int
    command: str
    title: str
    pages: int
    page: int | None
    """The page on which it was left, counted from 1; None where it was not begun, or read to its end since."""
    finished: bool
    """It has been read to its end, ever."""

    @property
    def state(self) -> str:
        if self.page is not None:
            return f"page {self.page} of {self.pages}"
        return "finished" if self.finished else ""


def chapter_lines(entries: Sequence[Entry], progress: Progress) -> list[ChapterLine]:
    lines = []
    for entry in entries:
        page = progress.pages.get(entry.command)
        lines.append(
            ChapterLine(
                entry.number,
                entry.command,
                entry.chapter.title,
                len(entry.chapter.steps()),
                None if page is None else page + 1,
                entry.command in progress.finished,
            )
        )
    return lines


def print_chapters(console: Console, lines: Sequence[ChapterLine]) -> None:
    console.print(Text(QUESTION, TITLE))
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False)
    for justify in ("right", "left", "left", "left", "left"):
        table.add_column(justify=justify)
    for line in lines:
        mark = Text("✓" if line.finished else "", GOOD)
        command = Text(f"forge {line.command}", ACCENT, no_wrap=True)
        table.add_row(str(line.number), mark, command, Text(line.title), Text(line.state, QUIET, no_wrap=True))
    print_table(console, table)
    finished = sum(line.finished for line in lines)
    console.print()
    console.print(Text(f"{finished} of {len(lines)} finished. forge next goes on where you stopped.", QUIET))
