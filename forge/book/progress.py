"""How far a reader has come: which chapters were finished, where the last one was left, and what its runs found.

One small JSON file in the user's state folder (`$XDG_STATE_HOME/forge`, by default `~/.local/state/forge`). It is a
convenience: one that cannot be read counts as empty, one that cannot be written is not written.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.views.json_output import to_json


@dataclass
class Progress:
    """A reader's progress; chapters are named by their command."""

    pages: dict[str, int] = field(default_factory=dict)
    """The page on which a chapter was left, counted from 0."""
    finished: set[str] = field(default_factory=set)
    last: str | None = None
    """The chapter that was read last."""
    review: dict[str, str] = field(default_factory=dict)
    """Questions that were answered wrong, and the day from which on they are asked again (`forge.book.review`)."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """State of the last chapter, if it was left in the middle: `Session.saved`, and what identifies its text."""

    def reach(self, command: str, page: int, num_pages: int) -> None:
        """Note that the reader is on this page. The last page finishes the chapter, which then begins anew when it is
        opened."""
        self.last = command
        if page >= num_pages - 1:
            self.finished.add(command)
            self.pages.pop(command, None)
            self.session = {}
        else:
            self.pages[command] = page


def state_file(name: str = "chapters.json") -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    folder = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    return folder / "forge" / name


def write_state(name: str, state: Mapping[str, Any]) -> None:
    """Replace the file of that name in the state folder, or leave it where it cannot be written."""
    with suppress(OSError, RuntimeError):  # the latter where there is no home
        path = state_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(to_json(state), encoding="utf-8")
        written.replace(path)


def load_progress() -> Progress:
    try:
        saved = json.loads(state_file().read_text(encoding="utf-8"))
        pages = {str(command): int(page) for command, page in saved["pages"].items()}
        last = saved["last"]
        session = dict(saved.get("session", {}))
        review = {str(key): str(day) for key, day in saved.get("review", {}).items()}
        return Progress(pages, set(map(str, saved["finished"])), None if last is None else str(last), review, session)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return Progress()


def save_progress(progress: Progress) -> None:
    write_state("chapters.json", vars(progress) | {"finished": sorted(progress.finished)})
