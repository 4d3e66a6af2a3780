"""Does a story stay with its own names, objects and places? Counted by the lexicon of the corpus.

A *mention* is a name, a kind of character, an object, or a phrase that belongs to a place ("by the river", "among the reeds"). Stories of
the corpus have two names, two objects, one place, and kinds that come with "a" (or, the hero's, first of all). A mention is *right* if
it is of one of these: an object that becomes another one under way is a third object, a rabbit that becomes a fox is a kind that was
never introduced. What sentences say in passing ("as red as an apple") is taken out first. On the stories of the corpus itself all
mentions but a few in a thousand must be right; `tests/models` holds it there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from .corpus import lexicon, phrases
from .corpus.lexicon import ANIMAL_NAMES, BOY_NAMES, GIRL_NAMES, KINDS, PLACES, THINGS

NAMES = frozenset((*GIRL_NAMES, *BOY_NAMES, *ANIMAL_NAMES))
NAMES_PER_STORY, OBJECTS_PER_STORY = 2, 2
_SLOT = re.compile(r"\{\w+\}")
_WORD = re.compile(r"[A-Za-z]+")


@dataclass
class Mentions:
    """Right ones and all, by "name", "kind", "object" and "place", and an example of each wrong one."""

    right: Counter[str]
    total: Counter[str]
    wrong: list[str]

    @property
    def share(self) -> float:
        return sum(self.right.values()) / max(1, sum(self.total.values()))


def _strings(value: object) -> Iterable[str]:
    """Every text in a table of phrases."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _strings(entry)


@cache
def in_passing() -> re.Pattern[str]:
    """Matches every piece of text between the slots of a sentence that has a noun of the lexicon in it: figures of speech, homes.

    A piece starts and ends with a word of its own, so that a slot beside it stays whole.
    """
    tables = [
        value for name, value in vars(phrases).items() if name.isupper() and name != "TITLES" and name != "THEMES"
    ]
    tables += [lexicon.TRAITS, lexicon.OBSTACLES, lexicon.SOLUTIONS, lexicon.WEATHER]
    texts = [*_strings(tables), *phrases.CONTESTS]
    texts += [text for kind in KINDS.values() for text in kind.homes]
    texts += [thing.treasured for thing in THINGS.values()]
    pieces = [piece for text in texts for piece in _SLOT.split(text)]
    for thing in THINGS.values():  # of the image of an object, all but the object itself
        pieces += [piece for part in _SLOT.split(thing.image) for piece in re.split(rf"\b[Tt]he {thing.noun}\b", part)]
    nouns = {*KINDS, *THINGS, *PLACES, *(name.lower() for name in NAMES)}
    words = {piece.strip(" .,!?\"'"): {word.lower() for word in _WORD.findall(piece)} for piece in pieces}
    pieces = [piece for piece, found in words.items() if found & nouns and len(found) > 1]
    longest_first = sorted(pieces, key=len, reverse=True)
    return re.compile("|".join(rf"(?<!\w){re.escape(piece)}(?!\w)" for piece in longest_first), re.IGNORECASE)


@cache
def place_phrases() -> tuple[re.Pattern[str], dict[str, frozenset[str]]]:
    """A pattern for every phrase that belongs to places, and which places each may mean."""
    owners: dict[str, set[str]] = {}
    for place in PLACES.values():
        for text in (place.at, place.to, *place.senses, *place.spots, f"the {place.noun}"):
            for piece in _SLOT.split(text):
                if len(piece.split()) > 1:
                    owners.setdefault(piece.strip().lower(), set()).add(place.noun)
    longest_first = sorted(owners, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in longest_first), re.IGNORECASE)
    return pattern, {text: frozenset(places) for text, places in owners.items()}


class _Reader:
    def __init__(self) -> None:
        self.found = Mentions(Counter(), Counter(), [])
        self.names: list[str] = []
        self.kinds: set[str] = set()
        self.objects: list[str] = []
        self.place: frozenset[str] | None = None

    def count(self, kind: str, mention: str, right: bool) -> None:
        self.found.total[kind] += 1
        self.found.right[kind] += right
        if not right:
            self.found.wrong.append(f"{kind}: {mention}")

    def see_place(self, mention: str, places: frozenset[str]) -> None:
        if self.place is None:
            self.place = places
        self.count("place", mention, bool(both := self.place & places))
        self.place = both or self.place

    def see_name(self, name: str) -> None:
        if name not in self.names and len(self.names) < NAMES_PER_STORY:
            self.names.append(name)
        self.count("name", name, name in self.names)

    def see_kind(self, kind: str, before: list[str]) -> None:
        """`before`: the words to its left, the nearest first. "A sleepy little fox", "Hazel the fox"."""
        if not self.kinds or {"a", "an"} & {*before[:4]} or (before[1:2] and before[1].capitalize() in NAMES):
            self.kinds.add(kind)
        self.count("kind", kind, kind in self.kinds)

    def see_object(self, noun: str) -> None:
        if noun not in self.objects and len(self.objects) < OBJECTS_PER_STORY:
            self.objects.append(noun)
        self.count("object", noun, noun in self.objects)


def mentions(story: str) -> Mentions:
    """Count the mentions of one story."""
    reader = _Reader()
    text = in_passing().sub(lambda match: " , ", story)
    pattern, owners = place_phrases()
    pieces, end = [], 0
    for match in pattern.finditer(text):  # places first, since their phrases have objects and kinds in them
        reader.see_place(match[0], owners[match[0].lower()])
        pieces += [text[end : match.start()], " , "]
        end = match.end()
    text = "".join([*pieces, text[end:]])
    words = [word.removesuffix("'s") for word in re.findall(r"[A-Za-z]+(?:'s)?|[^\sA-Za-z]", text)]
    for index, word in enumerate(words):
        if word in NAMES:
            reader.see_name(word)
        elif word.lower() in KINDS:
            reader.see_kind(word.lower(), [left.lower() for left in words[max(0, index - 4) : index]][::-1])
        elif word.lower() in THINGS and not {*words[index + 1 : index + 2]} & {*THINGS}:  # "a pearl button" is a button
            reader.see_object(word.lower())
    return reader.found


def consistency(stories: Iterable[str]) -> Mentions:
    """All mentions of all stories together."""
    whole = Mentions(Counter(), Counter(), [])
    for story in stories:
        one = mentions(story)
        whole.right += one.right
        whole.total += one.total
        whole.wrong += one.wrong
    return whole
