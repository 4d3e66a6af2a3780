"""The one error of a GGUF file that cannot be used, and the making printable of what such a file says.

A `GGUFError` names the file, the field and the byte where the file went wrong. Everything in it that came out of the
file went through `printable` first: a hostile name can neither write terminal escapes nor fill the screen.
"""

from pathlib import Path

from forge.errors import ForgeError

MAX_PRINTED_CHARACTERS = 64
WHOLE_FILE = "file"
"""The `field` of an error that is not about a place in the file: it is missing, empty, a directory."""


class GGUFError(ForgeError):
    """A GGUF file that is missing, malformed, or of a kind that forge does not run.

    `path` is the file, `field` what in it is wrong (`metadata count`, `tensor 'blk.0.attn_q.weight' offset`), `offset`
    the byte at which that field begins, or None where no position applies (a tensor that is not there).
    """

    def __init__(self, path: Path | str, field: str, problem: str, offset: int | None = None):
        self.path = Path(path)
        self.field = field
        self.offset = offset
        self.problem = problem
        where = "" if offset is None else f"at byte {offset}, "
        what = "" if field == WHOLE_FILE else f"{field}: "
        super().__init__(f"{_printable_path(path)}: {where}{what}{problem}")


def printable(text: str | bytes) -> str:
    """`text` quoted on one line, cut to `MAX_PRINTED_CHARACTERS`, with everything that is not printable escaped."""
    shown = repr(text[:MAX_PRINTED_CHARACTERS])
    return shown if len(text) <= MAX_PRINTED_CHARACTERS else f"{shown}... ({len(text)} long)"


def _printable_path(path: Path | str) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)
