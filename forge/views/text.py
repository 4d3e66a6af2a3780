"""Text that came out of a model or a file, made fit for a terminal.

A generated token or a string in a GGUF file may hold anything: escape sequences that repaint the screen, characters
that turn the line around. Whatever a view prints that forge did not write itself passes through here first.
"""

import re

from rich.cells import cell_len

# C0 without tab and newline, DEL and C1, the bidirectional overrides, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST_NAME = 24
_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}


def neutralise(text: str) -> str:
    """Replace every control character in `text` but newline and tab by a visible sign: ESC becomes ␛."""
    return _UNSAFE.sub(lambda match: _visible(match[0]), text)


def quoted(text: str) -> str:
    """Put `text` in double quotes on one line, as it is shown for a single token."""
    return f'"{neutralise("".join(_ESCAPED.get(character, character) for character in text))}"'


def one_line(text: str) -> str:
    """Neutralise `text` and turn each run of white space into one space: for a cell of a table."""
    return " ".join(neutralise(text).split())


def tail(text: str, limit: int) -> str:
    """Return the last `limit` characters, cut at a word where one begins nearby and marked with an ellipsis if cut."""
    if len(text) <= limit:
        return text
    kept = text[-limit:]
    space = kept.find(" ", 0, limit // 3)
    return "…" + kept[max(space, 0) :]


def short_name(name: str) -> str:
    """Return a side's name, short enough to stand in a picture: of a path, its end."""
    line = one_line(name)
    return line if len(line) <= _LONGEST_NAME else "…" + line[-_LONGEST_NAME + 1 :]


class WordWrap:
    """Breaks a text that comes in pieces at spaces, so that no word is cut at the edge of a screen `width` wide.
    Without a width nothing is broken and nothing held back.

    The last word is held back until it is known to be whole; `flush` gives it out.
    """

    def __init__(self, width: int | None):
        self._width = width
        self._column = 0
        self._pending = ""

    def feed(self, text: str) -> str:
        """Return what can be shown now that `text` has come."""
        if self._width is None:
            return text
        *whole, self._pending = re.split(r"(?<=\s)(?=\S)", self._pending + text)
        return "".join(map(self._place, whole))

    def flush(self) -> str:
        """Return what is left. The next text begins a new line of its own."""
        rest, self._pending = self._place(self._pending), ""
        self._column = 0
        return rest

    def _place(self, word: str) -> str:
        """Put `word`, with the white space after it, on this line or on the next."""
        too_wide = self._width is not None and self._column + cell_len(word.rstrip()) > self._width
        before = "\n" if self._column and too_wide else ""
        line = word.rpartition("\n")[2]
        self._column = cell_len(line) + (self._column if not before and "\n" not in word else 0)
        return before + word


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
