"""A screen saved as a picture: what a terminal would show, as SVG."""

import io
from pathlib import Path

from rich.console import Console

from forge.errors import ForgeError
from forge.views.history import History
from forge.views.scheduler import scheduler_lines
from forge.views.serving import print_serving

WIDTH = 96
_HEIGHT = 32


def save_serving(path: Path, history: History) -> None:
    """The picture of the step in which most was decided, and under it what the run came to.

    Raises `ForgeError` if `path` cannot be written.
    """
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor", highlight=False
    )
    if history.records:
        busiest = max(range(len(history)), key=lambda index: _decisions(history, index))
        for line in scheduler_lines(history, busiest, WIDTH, _HEIGHT):
            console.print(line)
        console.print()
    print_serving(console, history, history.lives())
    try:
        console.save_svg(str(path), title="forge")
    except OSError as error:
        raise ForgeError(f"{path}: cannot write the picture: {error.strerror or error}") from None


def _decisions(history: History, index: int) -> tuple[int, int, int]:
    """How much there is to see in a step; the last steps of a run, in which the rest runs out, have little."""
    record = history.records[index]
    return len(record.preempted), len(record.admitted) + len(record.waiting), len(record.items)
