"""A screen saved as a picture: what a terminal would show, as SVG."""

import io
import re
from collections.abc import Callable
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from forge.errors import file_error
from forge.views.history import History
from forge.views.run_summary import serving_screen
from forge.views.scheduler import scheduler_lines
from forge.views.screen import Part, draw
from forge.views.terminal import ForgeConsole

WIDTH = 96
_TITLE_WIDTH = 64
"""Characters of a title, at most: more would run into the buttons of the window."""
_HEIGHT = 32
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono"
)
"""rich's own, with the fonts that a reader has in place of one that a browser would have to fetch."""


def save_picture(path: Path, draw_on: Callable[[Console], None], title: str = "forge") -> None:
    """Save what a function draws on a console as a picture. Raises `ForgeError` if `path` cannot be written."""
    console = ForgeConsole(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    draw_on(console)
    title = title if len(title) <= _TITLE_WIDTH else f"{title[: _TITLE_WIDTH - 1]}…"
    try:
        console.save_svg(str(path), title=title, code_format=_FORMAT)
    except OSError as error:
        raise file_error(f"{path}: cannot write the picture", error) from None


def save_serving(path: Path, history: History) -> None:
    """Save a picture of the step in which most was decided, and under it the run's closing table.

    Raises `ForgeError` if `path` cannot be written.
    """
    parts = [busiest_step(history), None] if history.records else []
    parts += serving_screen(history, history.requests())
    save_picture(path, lambda console: draw(console, parts))


def busiest_step(history: History) -> Part:
    """Return the picture of the step in which most was decided."""
    busiest = max(range(len(history)), key=lambda index: _decisions(history, index))
    return lambda width: scheduler_lines(history, busiest, width, _HEIGHT)


def _decisions(history: History, index: int) -> tuple[int, int, int]:
    """Return how much there is to see in a step; the last steps of a run, in which the rest runs out, have little."""
    record = history.records[index]
    return len(record.preempted), len(record.admitted) + len(record.waiting), len(record.items)
