"""Solutions of the exercises: a right one each, and wrong ones that differ from it in one place.

`solutions/NAME.wrong` has the wrong ones as hunks of a diff: a line `## mistake -> rule`, then the lines of the right
solution that are replaced (`-`) and what stands in their place (`+`), with their indentation. `rule` is the one
that the check has to name.
"""

import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from forge.exercises import ENTRIES, find_entry
from forge.exercises.child import check_here
from forge.exercises.result import Result

_FOLDER = Path(__file__).parent / "solutions"
SOLVED = [entry.name for entry in ENTRIES if (_FOLDER / f"{entry.name}.py").is_file()]


class Wrong(NamedTuple):
    """One wrong solution."""

    name: str
    mistake: str
    rule: str
    hunks: tuple[tuple[str, str], ...]
    """What is replaced, and by what."""

    @property
    def source(self) -> str:
        source = right(self.name)
        for old, new in self.hunks:
            assert source.count(old) == 1, f"{old!r} is in the right solution {source.count(old)} times"
            source = source.replace(old, new)
        return source


def right(name: str) -> str:
    """The right solution's source."""
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")


def wrong_ones(name: str) -> list[Wrong]:
    text = (_FOLDER / f"{name}.wrong").read_text(encoding="utf-8")
    return [_parsed(name, part) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]


def _parsed(name: str, text: str) -> Wrong:
    title, *lines = text.rstrip("\n").split("\n")
    mistake, rule = title.split(" -> ")
    signs = [(line[0], line[1:] + "\n") for line in lines if line.strip()]
    hunks: list[tuple[str, str]] = []
    for sign, run in groupby(signs, key=lambda one: one[0]):
        block = "".join(line for _, line in run)
        assert sign in "-+", f"{name}.wrong: {block}"
        if sign == "-":
            hunks.append(("\n" + block, "\n"))
        else:
            hunks[-1] = (hunks[-1][0], "\n" + block)
    return Wrong(name, mistake, rule, tuple(hunks))


def checked(name: str, source: str, folder: Path) -> Result:
    """What the check says of this source."""
    entry = find_entry(name)
    path = folder / entry.file_name
    path.write_text(source, encoding="utf-8")
    return check_here(entry, path)
