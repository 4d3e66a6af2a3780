"""Solutions of the exercises: a right one each, right ones in another style, and wrong ones.

`solutions/NAME.wrong` has the wrong ones as hunks of a diff: a line `## mistake -> rule`, then the lines of the right
solution that are replaced (`-`) and what stands in their place (`+`), with their indentation. `rule` is the one
that the check has to name. `solutions/NAME.right` has the right ones in the same form, after a line `## style`.
"""

import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from forge.exercises import ENTRIES, find_entry
from forge.exercises.child import check_here
from forge.exercises.session import Result

_FOLDER = Path(__file__).parent / "solutions"
SOLVED = [entry.name for entry in ENTRIES if (_FOLDER / f"{entry.name}.py").is_file()]


class Variant(NamedTuple):
    """A solution that differs from the right one."""

    name: str
    what: str
    rule: str | None
    """None: it is right too."""
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


def wrong_ones(name: str) -> list[Variant]:
    return _variants(name, "wrong")


def right_ones(name: str) -> list[Variant]:
    """In other styles."""
    return _variants(name, "right")


def _variants(name: str, kind: str) -> list[Variant]:
    text = (_FOLDER / f"{name}.{kind}").read_text(encoding="utf-8")
    return [_parsed(name, part) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]


def _parsed(name: str, text: str) -> Variant:
    title, *lines = text.rstrip("\n").split("\n")
    what, _, rule = title.partition(" -> ")
    signs = [(line[0], line[1:] + "\n") for line in lines if line.strip()]
    hunks: list[tuple[str, str]] = []
    for sign, run in groupby(signs, key=lambda one: one[0]):
        block = "".join(line for _, line in run)
        assert sign in "-+", f"{name}: {block}"
        if sign == "-":
            hunks.append(("\n" + block, "\n"))
        else:
            hunks[-1] = (hunks[-1][0], "\n" + block)
    return Variant(name, what, rule or None, tuple(hunks))


def checked(name: str, source: str, folder: Path) -> Result:
    """What the check says of this source."""
    entry = find_entry(name)
    path = folder / entry.file_name
    path.write_text(source, encoding="utf-8")
    return check_here(entry, path)
