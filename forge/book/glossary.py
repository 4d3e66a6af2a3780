"""The glossary: every term that a chapter introduces and every symbol on a screen, looked up by name.

An entry is a list item of `chapters/reference/glossary.md` that begins with its names: `- **token, tokens**: A …`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rich.console import Console
from rich.text import Text

from forge.book.catalog import chapters_folder, entries
from forge.book.drawing import draw_prose
from forge.errors import UsageError
from forge.views.palette import QUIET, TITLE

_ITEM = re.compile(r"^- \*\*(?P<names>.+?)\*\*: (?P<text>.+?) *(?:\[(?P<chapter>\d+)\])?$")
_NAME = re.compile(r"`[^`]*`|[^,`]+")


@dataclass(frozen=True)
class Term:
    """One entry."""

    names: tuple[str, ...]
    text: str
    chapter: int | None = None
    """The number of the chapter that explains it."""


def load_glossary() -> tuple[Term, ...]:
    text = (chapters_folder() / "reference" / "glossary.md").read_text(encoding="utf-8")
    items = re.sub(r"\n  +", " ", text).splitlines()
    terms = []
    for match in filter(None, map(_ITEM.match, items)):
        names = tuple(name.strip().strip("`") for name in _NAME.findall(match["names"]) if name.strip())
        terms.append(Term(names, match["text"], int(match["chapter"]) if match["chapter"] else None))
    return tuple(terms)


def find_term(name: str, glossary: Sequence[Term]) -> Term:
    """Return the entry that has `name` among its names: in any case, singular or plural, with any number in a symbol.

    Raises `UsageError` with the nearest names if there is none.
    """
    plain = _plain(name)
    known = {_plain(spelling): term for term in reversed(glossary) for spelling in term.names}
    symbols = [
        (spelling, term) for term in glossary for spelling in term.names if not spelling.replace(" ", "").isalpha()
    ]
    known = {_plain(part): term for symbol, term in symbols for part in symbol.split()} | known
    for spelling in (plain, plain.removesuffix("s"), f"{plain}s", re.sub(r"\d+", "0", plain)):
        if spelling in known:
            return known[spelling]
    close = [candidate for candidate in known if plain in candidate.split()][:4] or get_close_matches(plain, known, n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else "; forge glossary lists all terms"
    raise UsageError(f"the glossary has no {name!r}{hint}")


def _plain(name: str) -> str:
    plain = " ".join(name.casefold().strip("`*").split()) if name.strip("`*") else name
    return re.sub(r"\d+(?=[*!])|(?<=\*)\d+", "0", plain)


def print_term(console: Console, term: Term) -> None:
    console.print(Text(", ".join(term.names), TITLE))
    draw_prose(console, term.text)
    for entry in entries():
        if entry.number == term.chapter:
            console.print(Text(f"Chapter {entry.number}, forge {entry.command}, explains it.", QUIET))


def print_glossary(console: Console, glossary: Sequence[Term]) -> None:
    for term in glossary:
        names = "**, **".join(name.replace("*", r"\*") for name in term.names)
        draw_prose(console, f"**{names}**: {term.text}")
