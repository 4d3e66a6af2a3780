"""Step by step through a run, forwards and backwards: the same for a run on its way and for a recorded one.

The reader stands at a step. Going on past the last one that there is asks for another (of the engine, or of a file);
going back looks at those that were. While it runs by itself any key stops it.
"""

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from forge.errors import UsageError
from forge.trace.records import StepRecord
from forge.views.history import History
from forge.views.keys import BACK_KEYS, EOF, NEXT_KEYS, RESIZE, TIMEOUT, Keys, is_listening, open_keys
from forge.views.palette import ACCENT, QUIET
from forge.views.scheduler import scheduler_lines
from forge.views.screen import draw
from forge.views.terminal import can_redraw

_QUIT = ("q", "escape", EOF)
_GOALS: dict[str, Callable[[StepRecord], bool]] = {
    "p": lambda record: bool(record.preempted),
    "a": lambda record: bool(record.admitted),
    "f": lambda record: bool(record.finished),
    "r": lambda record: False,
}
"""Key → whether a step is where running by itself ends."""
_FRAME_SECONDS = 0.1
_LISTEN_SECONDS = 0.2


def require_terminal(console: Console) -> None:
    """Raise `UsageError` where no key can be pressed or nothing can be drawn."""
    if not (is_listening() and can_redraw(console)):
        raise UsageError("--step needs a terminal to draw on and to read keys from; --trace records a run for later")


class Stepper:
    """Shows steps of a history and reads keys. Used as a context manager, which puts the terminal in order again."""

    def __init__(self, console: Console, history: History):
        self._console, self._history = console, history
        self._keys: Keys = open_keys(console)
        self._at = -1
        """The step that is shown, by its index."""
        self._goal: Callable[[StepRecord], bool] | None = None
        """While it runs by itself: where that ends."""
        self._next_frame = 0.0

    def __enter__(self) -> "Stepper":
        self._keys.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._keys.__exit__(*exception)
        if len(self._history):
            self._console.print()

    def asks_for_another(self, interrupted: Callable[[], bool]) -> bool:
        """Show the step that the history ends with, and return whether the reader wants another.

        `interrupted` is called now and then; once it is true the answer is no.
        """
        if interrupted():
            return False
        self._at = len(self._history) - 1
        return (self._goal is not None and self._goes_by_itself()) or self._converse(interrupted, at_end=False)

    def ended(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Let the reader look around until they have had enough. There will be no further step."""
        self._goal = None
        if len(self._history):
            self._converse(interrupted, at_end=True)

    def walk(self) -> None:
        """Show a run that is over, from its first step on."""
        self._at = 0
        self.ended()

    def _goes_by_itself(self) -> bool:
        """Return whether to go on without asking; draws now and then, and stops at the goal or at a key."""
        assert self._goal is not None
        if self._goal(self._history.records[self._at]):
            self._goal = None
            return False
        now = time.monotonic()
        if now >= self._next_frame:
            self._draw(at_end=False)
            self._next_frame = time.monotonic() + _FRAME_SECONDS
            if self._keys.single and self._keys.read_key(0) not in (TIMEOUT, RESIZE):
                self._goal = None
                return False
        return True

    def _converse(self, interrupted: Callable[[], bool], at_end: bool) -> bool:
        """Show a step and do what keys say, until the reader wants a step that is not there (true), or no more."""
        self._draw(at_end)
        while True:
            if interrupted():
                return False
            key = self._keys.read_key(_LISTEN_SECONDS)
            if key == TIMEOUT:
                continue
            if key in _QUIT:
                return False
            if key in BACK_KEYS or key == "home":
                self._at = 0 if key == "home" else max(0, self._at - 1)
            elif key == "end":
                self._at = len(self._history) - 1
            elif key in NEXT_KEYS:
                if self._at == len(self._history) - 1:
                    if not at_end:
                        return True
                else:
                    self._at += 1
            elif key in _GOALS and self._runs_on(_GOALS[key], at_end):
                return True
            self._draw(at_end)

    def _runs_on(self, goal: Callable[[StepRecord], bool], at_end: bool) -> bool:
        """Go to the next of the present steps that is the goal; return whether to go on with new ones."""
        records = self._history.records
        reached = next((index for index in range(self._at + 1, len(records)) if goal(records[index])), None)
        self._at = len(records) - 1 if reached is None else reached
        if reached is None and not at_end:
            self._goal = goal
            return True
        return False

    def _draw(self, at_end: bool) -> None:
        width, height = self._console.size
        self._console.clear()
        draw(self._console, scheduler_lines(self._history, self._at, width, height - 2))
        self._console.print(self._key_line(width, at_end), end="")

    def _key_line(self, width: int, at_end: bool) -> Text:
        last = len(self._history) - 1
        place = f"{self._at + 1}/{last + 1}"
        if self._goal is not None:
            return Text(f"{place}  any key stops it", QUIET)
        if at_end and self._at == last:
            place += " (the end)"
        room = width - 1 - len(place) - 2
        names = next((names for names in _KEY_NAMES if len(names) <= room), _KEY_NAMES[-1])
        line = Text.assemble((f"{place}  ", QUIET), (names, QUIET))
        line.highlight_regex(r"\[.\]", ACCENT)
        return line


_KEY_NAMES = (
    "[n]ext  [b]ack  [r]un  to next [p]reemption / [a]dmission / [f]inish  [q]uit",
    "[n]ext [b]ack [r]un to [p]reempt [a]dmit [f]inish [q]uit",
    "[n] [b] [r] [p] [a] [f] [q]",
)
"""The last line of a screen, in the longest form that fits."""
