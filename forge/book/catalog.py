"""Where the chapters are: `chapters/` of a checkout, or the package data of an installation."""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from forge.book.chapter import Chapter, parse_chapter
from forge.errors import UsageError


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
