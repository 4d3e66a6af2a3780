"""A chapter on a terminal, page by page: a key goes on, back, runs an experiment again, or asks for a command line.

A page is a step of the chapter; one that is higher than the screen is shown in several. Everything on a page is drawn
anew whenever it is shown, from what was measured, so a terminal may change its size at any time. Where the cursor
cannot be moved pages follow one another like lines.

The output of a command that the reader types comes a screen at a time (`PagedOutput`). That stands in place of standard
output, so that streamed text, colours and live views stay as they are.
"""

import hashlib
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from forge import __version__
from forge.book.catalog import Entry
from forge.book.chapter import Block, Predict, Run, Source, Step
from forge.book.drawing import draw_block, draw_command, draw_step, draw_title, lines_of
from forge.book.progress import Progress, note_answers, save_progress
from forge.book.session import Session, parse_guess
from forge.errors import ForgeError
from forge.views.keys import BACK_KEYS, EOF, NEXT_KEYS, Keys, open_keys, read_line
from forge.views.palette import ACCENT, QUIET, TITLE, TROUBLE
from forge.views.terminal import can_redraw, print_hanging
from forge.views.text import one_line

AROUND = 4
"""Lines of a screen that are not a page's own: the title, the keys and two empty ones."""
LEAST = 4
MOST_CUT = 4
"""Source loses up to so many lines if it then fits below the text that leads to it."""
_QUIT = (EOF, "q")
_HELP = ("?", "h")
_KEYS = (
    ("n, Enter, Space, →", "the next page, or the rest of this one"),
    ("b, Backspace, ←", "back"),
    ("0 to 9, then Enter", "your answer, on a page that asks"),
    ("a", "run the page's experiment again; its command line can be edited"),
    (": COMMAND", "run a forge command, as in a shell"),
    (":?WORD", "look a word or a symbol of a screen up in the glossary"),
    ("q, Ctrl-D", "quit; forge next goes on at this page"),
)
_PASSES = "No answer yet: the same key again goes on without one."
MORE = "-- any key: more   q: no more --"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x1b\x07]*(?:\x1b\\|\x07)")
_MOVES = re.compile(r"\x1b\[\d*(?:;\d*)?[ABCDHJf]|\x1b\[\?1049")

RunLine = Callable[[str], int]
"""Runs a command line as a shell would, printing what it prints; returns its exit status."""


class Pager:
    """Shows a chapter page by page, and waits for a key between pages."""

    def __init__(self, console: Console, entry: Entry, session: Session, progress: Progress, run_line: RunLine):
        self._console = console
        self._entry = entry
        self._session = session
        self._progress = progress
        self._run_line = run_line
        self._steps = session.steps()
        self._page = 0
        self._screen = 0
        self._typed = ""
        """What the reader has typed of an answer so far."""
        self._objection = ""
        self._passed = False
        """The reader has asked to go on without an answer, and was asked back."""
        self._redraws = can_redraw(console)

    def read(self, page: int = 0) -> int:
        """Show pages from `page` on until the reader quits. Returns the exit status."""
        self._page = min(page, len(self._steps) - 1)
        with open_keys(self._console) as keys:
            while True:
                self._catch_up(keys)
                self._save()
                screens = self._screens()
                self._screen = min(self._screen, len(screens) - 1)
                self._show(screens)
                try:
                    goes_on = self._go_on(keys, len(screens))
                except BaseException:
                    self._leave_line()
                    raise
                if not goes_on:
                    self._leave_line()
                    return 0

    def choose_page(self, left: int) -> int | None:
        """Ask a reader who left this chapter on page `left`, counted from 0, where to begin: there (the runs are taken
        over), on the first page (0), or not at all (None)."""
        with open_keys(self._console) as keys:
            self._clear()
            draw_title(self._console, self._entry.number, self._session.chapter.title)
            self._console.print(f"\nYou left this chapter on page {left + 1} of {len(self._steps)}.\n", highlight=False)
            choices = (("[n]", " goes on there"), ("[b]", " begins on page 1"), ("[q]", "uit"))
            self._console.print(_keys_and_names(choices))
            while True:
                key = keys.read_key()
                if key in NEXT_KEYS:
                    self.resume()
                    return left
                if key in BACK_KEYS:
                    return 0
                if key in _QUIT:
                    return None

    def _save(self) -> None:
        note_answers(self._progress, self._entry, self._session.guesses, date.today())
        self._progress.session = {"of": self._identity, **self._session.saved()}
        self._progress.reach(self._entry.command, self._page, len(self._steps))
        save_progress(self._progress)

    @property
    def _identity(self) -> str:
        """A digest of the chapter's text and the version of forge."""
        return f"{__version__} {hashlib.sha256(self._entry.path.read_bytes()).hexdigest()[:16]}"

    def resume(self) -> None:
        """Take over the results of the previous session, if it was of this text and this version, with the options that
        the reader gives now or none."""
        saved = self._progress.session
        typed = {run.command: command for run, command in self._session.commands.items()}
        is_same = self._progress.last == self._entry.command and saved.get("of") == self._identity
        if is_same and (not typed or typed == saved.get("typed")):
            with suppress(LookupError, TypeError, ValueError, AttributeError, ForgeError):
                self._session.restore(saved)
        self._steps = self._session.steps()

    @property
    def _step(self) -> Step:
        return self._steps[self._page]

    def _runs(self) -> list[Run]:
        runs = (block for block in self._step if isinstance(block, Run))
        return [run for run in runs if not self._session.leaves_out(run)]

    def _catch_up(self, keys: Keys) -> None:
        """Run every experiment that this page needs and that has not run."""
        for run in self._session.unperformed(self._steps[: self._page + 1]):
            self._perform(keys, run)

    def _perform(self, keys: Keys, run: Run) -> None:
        self._clear()
        self._draw_title()
        draw_command(self._console, self._session.command(run))
        self._console.print()
        with keys.muted():
            report = self._session.perform(run)
        self._session.drawn[run] = tuple(lines_of(self._console, report.draw))

    # Showing

    def _screens(self) -> list[list[str]]:
        """Split the page's lines into screens."""
        if not self._redraws:
            return [lines_of(self._console, lambda console: draw_step(console, self._step, self._session))]
        height = max(LEAST, self._console.height - AROUND)
        paragraphs: list[list[str]] = []
        for block in self._step:
            lines = self._lines(block, height)
            if isinstance(block, Source):
                room = height - len(on_screens(paragraphs, height)[-1]) - 1
                if 0 < len(lines) - room <= MOST_CUT and room > height // 2:
                    lines = self._lines(block, room)
                paragraphs.append(lines)
            else:
                paragraphs += split_paragraphs(lines)
        return on_screens(paragraphs, height)

    def _lines(self, block: Block, height: int) -> list[str]:
        return lines_of(self._console, lambda console: draw_block(console, block, self._session, height))

    def _show(self, screens: Sequence[Sequence[str]]) -> None:
        self._clear()
        self._draw_title()
        for line in screens[self._screen]:
            self._console.out(line, highlight=False)
        self._console.print()
        more = self._screen < len(screens) - 1
        last_line = self._prompt() if self._asks() and not more else self._key_line(more)
        self._console.print(last_line, end="" if self._redraws else "\n")

    def _leave_line(self) -> None:
        """Move from the end of a page's last line to the line below."""
        if self._redraws:
            self._console.print()

    def _draw_title(self) -> None:
        place = f"{self._page + 1} / {len(self._steps)}"
        draw_title(self._console, self._entry.number, self._session.chapter.title, place)
        self._console.print()

    def _clear(self) -> None:
        if self._redraws:
            self._console.clear()
        else:
            self._console.print()

    def _prompt(self) -> Text:
        """Return the last line of a page that asks, with the answer typed so far."""
        keys = [("[Enter]", " answers")] if self._typed else [("[n]", "o answer"), ("[b]", "ack")]
        before = Text(f"{self._objection} ", TROUBLE) if self._objection else _keys_and_names(keys).append("  ")
        return Text.assemble(before, ("Your guess: ", TITLE), self._typed, "▌" if self._redraws else "")

    def _key_line(self, more: bool) -> Text:
        last = self._page == len(self._steps) - 1 and not more
        on = ("[n]", "ext (more)" if more else " ends the chapter" if last else "ext")
        keys = [on, ("[b]", "ack"), ("[:]", " command"), ("[:?WORD]", " glossary"), ("[?]", " keys"), ("[q]", "uit")]
        if self._runs():
            keys.insert(2, ("[a]", "gain"))
        if self._console.is_dumb_terminal:  # its keys are read by lines
            keys.append(("Enter", " ends each"))
        long = _keys_and_names(keys)
        if long.cell_len <= self._console.width:
            return long
        return _keys_and_names([(key, name.split(" ")[0]) for key, name in keys], " ")

    # Going on

    def _asks(self) -> bool:
        """True if the page ends with an unanswered question."""
        return isinstance(self._step[-1], Predict) and self._step[-1] not in self._session.guesses

    def _go_on(self, keys: Keys, num_screens: int) -> bool:
        """Obey the reader's key. Returns False to stop."""
        key = keys.read_key() if keys.single or not self._asks() else self._read_answer()
        if self._asks() and self._screen == num_screens - 1 and self._types(key):
            return True
        if key in _HELP:
            self._help(keys)
        if key in NEXT_KEYS:
            return self._forward(num_screens)
        if key in BACK_KEYS:
            self._back()
        elif key == "a" and self._runs():
            self._again(keys, self._runs()[0])
        elif key == ":":
            self._shell_line(keys)
        return key not in _QUIT

    def _forward(self, num_screens: int) -> bool:
        if self._screen < num_screens - 1:
            self._screen += 1
        elif self._page < len(self._steps) - 1:
            self._page, self._screen = self._page + 1, 0
        else:
            return False
        return True

    def _back(self) -> None:
        self._typed = ""
        if self._screen:
            self._screen -= 1
        elif self._page:
            self._page -= 1
            self._screen = len(self._screens()) - 1

    def _read_answer(self) -> str:
        """Read a line where single keys cannot be read: return its key, or `enter` after an answer was noted."""
        line = read_line("")
        if line is None:
            return EOF
        if len(line.strip()) == 1 and not line.strip().isdigit():
            return line.strip()
        self._typed = line.strip()
        return "enter"

    def _types(self, key: str) -> bool:
        """Take `key` as part of the answer to the page's question if it can be: a digit begins one, Enter ends it. A
        key that would go on without an answer is asked back once."""
        predict = self._step[-1]
        assert isinstance(predict, Predict), "only a page that asks takes an answer"
        passes, self._passed, self._objection = self._passed, False, ""
        if key == "enter" and self._typed:
            self._answer(predict)
        elif key == "backspace" and self._typed:
            self._typed = self._typed[:-1]
        elif key == "escape":
            self._typed = ""
        elif len(key) == 1 and (self._typed or key.isdigit() or key in "-."):
            self._typed += key
        elif key == "space" and self._typed:
            self._typed += " "
        elif key in NEXT_KEYS and not passes:
            self._passed, self._objection = True, _PASSES
        else:
            return False
        return True

    def _answer(self, predict: Predict) -> None:
        """Note the typed answer as the guess and go on; if it is not valid, say what would be."""
        try:
            self._session.guesses[predict] = parse_guess(predict, self._typed)
            self._page, self._screen = min(self._page + 1, len(self._steps) - 1), 0
        except ForgeError as error:
            self._objection = f"That should be {error}."
        self._typed = ""

    def _again(self, keys: Keys, run: Run) -> None:
        """Run the page's experiment again with options that the reader types."""
        before = self._session.command(run)
        self._leave_line()
        try:
            with keys.paused():
                typed = read_line("again: ", before)
        except KeyboardInterrupt:
            return
        if not typed or not typed.strip():
            return
        self._session.commands[run] = typed.strip()
        try:
            self._perform(keys, run)
        except ForgeError as error:
            self._session.commands[run] = before
            self._console.print(Text(one_line(str(error)), TROUBLE))
            self._wait_to_return(keys)
        self._screen = 0

    def _shell_line(self, keys: Keys) -> None:
        """Run a command of the reader's as their shell would; `?TERM` looks up a term."""
        self._leave_line()
        with keys.paused():
            try:
                line = read_line(": forge ")
            except KeyboardInterrupt:
                return
            if line and line.strip():
                self._console.print()
                with suppress(EnoughRead), paged_output(self._console):
                    self._run_line(_glossary_line(line) or line)
        if line and line.strip():
            self._wait_to_return(keys)

    def _help(self, keys: Keys) -> None:
        """Show every key and what it does, until the next key."""
        self._clear()
        self._draw_title()
        width = max(len(name) for name, _ in _KEYS) + 2
        for name, meaning in _KEYS:
            print_hanging(self._console, Text.assemble((name.ljust(width), ACCENT), meaning), width)
        self._wait_to_return(keys)

    def _wait_to_return(self, keys: Keys) -> None:
        self._console.print(Text("\nAny key returns to the chapter.", QUIET))
        keys.read_key()


def _keys_and_names(keys: Sequence[tuple[str, str]], between: str = "  ") -> Text:
    """Draw keys, each with what it does: `[n]ext  [b]ack`."""
    return Text(between).join(Text.assemble((key, ACCENT), (name, QUIET)) for key, name in keys)


def _glossary_line(line: str) -> str | None:
    """Translate `?TERM` or `forge ?TERM` into `glossary TERM`."""
    match = re.match(r"^\s*(?:forge\s+)?\?\s*(.*\S)\s*$", line)
    return None if match is None else shlex.join(["glossary", match[1]])


def split_paragraphs(lines: Sequence[str]) -> list[list[str]]:
    """Split `lines` at empty lines, except the one below a heading."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if _ESCAPES.sub("", line).strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            if _is_rule(paragraphs[-1][-1]):
                paragraphs[-1].append(line)
            else:
                paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


def on_screens(paragraphs: Sequence[Sequence[str]], most: int) -> list[list[str]]:
    """Fill screens of at most `most` lines with paragraphs, and split a paragraph only if it is higher than a
    screen."""
    screens: list[list[str]] = [[]]
    for paragraph in paragraphs:
        used = len(screens[-1]) + 1 if screens[-1] else 0
        if used and used + len(paragraph) > most and (len(paragraph) <= most or used > most // 2):
            screens.append([])
        elif used:
            screens[-1].append("")
        rest = list(paragraph)
        while rest:
            room = most - len(screens[-1])
            screens[-1] += rest[:room]
            rest = rest[room:]
            if rest:
                screens.append([])
    return screens


def _is_rule(line: str) -> bool:
    """True for the line below a heading."""
    plain = _ESCAPES.sub("", line).strip()
    return bool(plain) and set(plain) == {"─"}


class EnoughRead(KeyboardInterrupt):
    """Raised when the reader quits a command's output; the command ends as with Ctrl-C."""


class PagedOutput:
    """A text file that waits after `height` lines of `width` columns, and otherwise behaves as the file below it.

    A view that moves the cursor draws over itself and is not counted.
    """

    def __init__(self, file: IO[str], height: int, width: int, goes_on: Callable[[], bool]):
        """goes_on: waits for the reader and returns false if they quit, which raises `EnoughRead`."""
        self._file, self._height, self._width, self._goes_on = file, max(2, height), max(1, width), goes_on
        self._lines = self._column = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if _MOVES.search(text) or threading.current_thread() is not threading.main_thread():
            self._lines = 0
            return self._file.write(text)
        for line in text.splitlines(keepends=True):
            if self._lines >= self._height - 1:
                self._lines = self._column = 0
                self._file.flush()
                if not self._goes_on():
                    raise EnoughRead
            self._file.write(line)
            self._column += len(_ESCAPES.sub("", line).rstrip("\n"))
            if line.endswith("\n"):
                self._lines += max(1, -(-self._column // self._width))
                self._column = 0
        return len(text)


@contextmanager
def paged_output(console: Console) -> Iterator[None]:
    """Make standard output wait for a key after each screen while the context is open, if it is a terminal."""
    if not can_redraw(console):
        yield
        return

    def goes_on() -> bool:
        file.write(MORE)
        file.flush()
        with open_keys(console) as keys:
            key = keys.read_key()
        file.write("\r\x1b[2K")
        return key not in ("q", EOF)

    file = sys.stdout
    width, height = console.size
    sys.stdout = PagedOutput(file, height, width, goes_on)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout = file
