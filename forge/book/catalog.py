"""Where the chapters are: `chapters/` of a checkout, or the package data of an installation. And the list of them, with
how far the reader has come."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.book.chapter import Chapter, parse_chapter
from forge.errors import UsageError
from forge.views.palette import ACCENT, GOOD, QUIET
from forge.views.screen import Part, Table, question

if TYPE_CHECKING:
    from forge.book.progress import Progress


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


def next_entry(every: Sequence[Entry], progress: "Progress") -> Entry | None:
    """Return the chapter to go on with: the one left in the middle, else the first unfinished one after it, else the
    first unfinished one at all; None when all are finished."""
    commands = [entry.command for entry in every]
    last = commands.index(progress.last) if progress.last in commands else -1
    if last >= 0 and progress.last in progress.pages:
        return every[last]
    unfinished = [entry for entry in (*every[last + 1 :], *every) if entry.command not in progress.finished]
    return unfinished[0] if unfinished else None


QUESTION = "What is there to read?"


def chapter_objects(entries: Sequence[Entry], progress: "Progress") -> list[dict[str, Any]]:
    """Return the list of chapters as facts. page: the page on which it was left, counted from 1; None where it was not
    begun, or read to its end since. finished: the reader has read it to its end at least once."""
    return [
        {
            "number": entry.number,
            "command": entry.command,
            "title": entry.chapter.title,
            "pages": len(entry.chapter.steps()),
            "page": progress.pages[entry.command] + 1 if entry.command in progress.pages else None,
            "finished": entry.command in progress.finished,
        }
        for entry in entries
    ]


def chapters_screen(chapters: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    yield from question(QUESTION)
    shown = {"mark": lambda finished: "✓" if finished else "", "state": _state}
    columns = (": {number}", ": {finished:mark}", ": forge {command}", ": {title}", ": {:state}")
    styles = {1: GOOD, 2: ACCENT, 4: QUIET}
    yield Table.of(chapters, *columns, formats=shown, names=0, lefts=(1, 2, 3, 4), styles=styles, wraps=(3,))
    finished = sum(chapter["finished"] for chapter in chapters)
    yield from (None, f"{finished} of {len(chapters)} finished. forge next goes on where you stopped.")


def _state(chapter: Mapping[str, Any]) -> str:
    if chapter["page"] is not None:
        return f"page {chapter['page']} of {chapter['pages']}"
    return "finished" if chapter["finished"] else ""
