"""Where the chapters are: `chapters/` of a checkout, or the package data of an installation. And the list of them, with
how far the reader has come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from forge.book.chapter import Chapter, parse_chapter
from forge.book.progress import Progress
from forge.errors import UsageError
from forge.views.palette import ACCENT, GOOD, QUIET
from forge.views.screen import Part, Table, question


@dataclass(frozen=True)
class Entry:
    """One chapter, whose text is read on first use."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.stem.partition("_")[0])

    @property
    def command(self) -> str:
        """The command that opens it: `02_kv_cache.md` → `kv-cache`."""
        return self.path.stem.partition("_")[2].replace("_", "-")

    @cached_property
    def chapter(self) -> Chapter:
        """The parsed chapter. Raises `ChapterError` if its text is not well formed."""
        return parse_chapter(self.path.read_text(encoding="utf-8"), self.path.name)


def chapters_folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / "chapters"
    return installed if installed.is_dir() else package.parent / "chapters"


def entries() -> tuple[Entry, ...]:
    """List all chapters, in order."""
    return tuple(Entry(path) for path in sorted(chapters_folder().glob("[0-9][0-9]_*.md")))


def find(name: str) -> Entry:
    """Return the chapter with this number or command. Raises `UsageError` if there is none."""
    every = entries()
    for entry in every:
        if name in (str(entry.number), entry.path.stem.partition("_")[0], entry.command):
            return entry
    if not every:
        raise UsageError(f"{chapters_folder()}: the chapters are missing")
    close = get_close_matches(name, [entry.command for entry in every], n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise UsageError(f"there is no chapter {name}; there are {every[0].number} to {every[-1].number}{hint}")


def next_entry(every: Sequence[Entry], progress: Progress) -> Entry | None:
    """Return the chapter to go on with: the one left in the middle, else the first unfinished one after it, else the
    first unfinished one at all; None when all are finished."""
    commands = [entry.command for entry in every]
    last = commands.index(progress.last) if progress.last in commands else -1
    if last >= 0 and progress.last in progress.pages:
        return every[last]
    unfinished = [entry for entry in (*every[last + 1 :], *every) if entry.command not in progress.finished]
    return unfinished[0] if unfinished else None


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
    """The reader has read it to its end at least once."""

    @property
    def mark(self) -> str:
        return "✓" if self.finished else ""

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


def chapters_screen(lines: Sequence[ChapterLine]) -> Iterator[Part]:
    yield from question(QUESTION)
    rows = [(str(line.number), line.mark, f"forge {line.command}", line.title, line.state) for line in lines]
    yield Table(("",) * 5, rows, names=0, lefts=(1, 2, 3, 4), styles={1: GOOD, 2: ACCENT, 4: QUIET}, wraps=(3,))
    finished = sum(line.finished for line in lines)
    yield from (None, f"{finished} of {len(lines)} finished. forge next goes on where you stopped.")
