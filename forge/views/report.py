"""What a command found, as one value: facts for programs and a drawing of the same for people.

A command that returns a `Report` prints nothing of its own. Its caller decides what becomes of it: the command
line draws it or writes its facts as JSON, a chapter does the one and reads the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from forge.views.json_output import to_json


@dataclass(frozen=True)
class Report:
    """A command's result: for JSON, for the screen, and as an exit status."""

    facts: Mapping[str, Any]
    """The facts that `--json` prints, and that a chapter's text may name. Nothing in them is rounded."""
    draw: Callable[[Console], None]
    """Draws it at the width that the console has now; may be called again at another."""
    status: int = 0
    """The exit status."""

    def as_json(self) -> "Report":
        """Return the same findings, drawn as one JSON object."""
        return Report(self.facts, lambda console: console.print(to_json(self.facts), soft_wrap=True), self.status)
