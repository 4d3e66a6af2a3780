"""Decision questions about a story: each has a one-word answer that is one token of the vocabulary.

The answers follow from the world, never from the text, so they are right by construction. `LABELS` lists every possible
answer by kind of question; the tokenizer is checked against it. The last phrasing of every bank is never used in training:
`Phrasing(rng, held_out=True)` asks with it, to measure whether a question is understood or only recognized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from .lexicon import ANIMAL_NAMES, BOY_NAMES, GIRL_NAMES, KINDS, PLACES, THINGS
from .stories import HAPPY, SAD, Character, Story, World, article, capital

YES, NO = "yes", "no"
LABELS: dict[str, tuple[str, ...]] = {
    "ending": (HAPPY, SAD),
    "hero": (*GIRL_NAMES, *BOY_NAMES, *ANIMAL_NAMES, *KINDS),
    "object": tuple(THINGS),
    "place": tuple(PLACES),
    "helper": tuple(KINDS),
    "yes_no": (YES, NO),
}


@dataclass(frozen=True)
class Question:
    """A question, the options that it offers, and the right one."""

    kind: str
    text: str
    options: tuple[str, ...]
    answer: str


class Phrasing:
    """Chooses how to ask about a text: in one of the phrasings of training, or in the one that is held out."""

    def __init__(self, rng: Random, text: str, held_out: bool = False) -> None:
        self.rng, self.held_out = rng, held_out
        self.words = frozenset(re.findall(r"\w+", text.lower()))

    def pick(self, *bank: str) -> str:
        """One of the bank but its last, or its last."""
        return bank[-1] if self.held_out else self.rng.choice(bank[:-1])

    def absent(self, nouns: Iterable[str]) -> str:
        """A noun that the text does not have, not even in a figure of speech."""
        return self.rng.choice([noun for noun in nouns if noun not in self.words])


def ask_ending(world: World, phrasing: Phrasing) -> Question:
    text = phrasing.pick(
        "Does the story have a happy or a sad ending?",
        "Is the ending happy or sad?",
        "How does the story end, happy or sad?",
        "Did the story end in a happy or a sad way?",
        "Happy or sad: how does it end?",
        "Does it end happily or sadly?",
        "Is this a happy or a sad story?",
        "What is the ending like, happy or sad?",
        "Would you call the ending happy or sad?",
        "Is the end of the story a happy or a sad one?",
    )
    return Question("ending", text, (HAPPY, SAD), world.ending)


def ask_hero(world: World, phrasing: Phrasing) -> Question:
    options = _shuffled((world.hero.label, world.friend.label), phrasing.rng)
    first, second = (world.hero.called if label == world.hero.label else world.friend.called for label in options)
    text = phrasing.pick(
        "Who is the hero of the story?",
        "Who is the story about?",
        "What is the hero called?",
        f"Who is the hero, {first} or {second}?",
        f"Who is the main character, {first} or {second}?",
        "Who is the main character?",
        "Name the hero of the story.",
        "Whose story is it?",
        f"{capital(first)} or {second}: who is the hero?",
        f"Is the story about {first} or {second}?",
        f"Whose story is it, {possessive(first)} or {possessive(second)}?",
        f"Is the hero of the story {first} or {second}?",
    )
    return Question("hero", text, options, world.hero.label)


_OBJECT_VERBS = {
    "lost": ("did {hero} find in the end", "did {hero} find at last"),
    "quest": ("did {hero} find", "did {hero} find in the end"),
    "rescue": ("did {hero} take along", "was taken along"),
    "borrow": ("did {hero} borrow", "was broken"),
    "contest": ("did {hero} get in the end", "did {hero} win"),
    "wish": ("was magic", "could talk"),
    "fear": ("did {hero} get as a gift", "was the gift for {hero}"),
    "visitor": ("did {hero} get in the end", "was left for {hero}"),
}


def ask_object(world: World, phrasing: Phrasing) -> Question:
    rng = phrasing.rng
    options = _shuffled((world.gained, world.not_gained), rng)
    verb = rng.choice(_OBJECT_VERBS[world.plot]).format(hero=world.hero.called)
    text = phrasing.pick(
        "Which {verb}, the {a} or the {b}?",
        "Which of the two {verb}: the {a} or the {b}?",
        "The {a} or the {b}: which {verb}?",
        "Tell me which {verb}, the {a} or the {b}.",
        "What {verb}, the {a} or the {b}?",
        "Here are two things, the {a} and the {b}. Which one {verb}?",
        "Was it the {a} or the {b}: which {verb}?",
        "One of them, the {a} or the {b}: which one {verb}?",
        "There are the {a} and the {b}. Which {verb}?",
    )
    return Question("object", text.format(verb=verb, a=options[0], b=options[1]), options, world.gained)


def ask_place(world: World, phrasing: Phrasing) -> Question:
    wrong = phrasing.absent(PLACES)
    options = _shuffled((world.place.noun, wrong), phrasing.rng)
    text = phrasing.pick(
        f"Where did it happen, {PLACES[options[0]].at} or {PLACES[options[1]].at}?",
        f"Which place is in the story, the {options[0]} or the {options[1]}?",
        f"Does the story mention the {options[0]} or the {options[1]}?",
        f"Where are we in the story, {PLACES[options[0]].at} or {PLACES[options[1]].at}?",
        f"{capital(PLACES[options[0]].at)} or {PLACES[options[1]].at}: where did it happen?",
        f"Is the {options[0]} in the story, or the {options[1]}?",
        f"Name the place, the {options[0]} or the {options[1]}.",
        f"Which of the two places is in the story: the {options[0]} or the {options[1]}?",
        f"The {options[0]} or the {options[1]}: which place is in the story?",
    )
    return Question("place", text, options, world.place.noun)


def ask_helper(world: World, phrasing: Phrasing) -> Question:
    right, hero = world.helper.kind, world.hero.called
    options = _shuffled((right, phrasing.absent(KINDS)), phrasing.rng)
    text = phrasing.pick(
        f"Who helped {hero}, the {options[0]} or the {options[1]}?",
        f"Who gave {hero} help or advice, the {options[0]} or the {options[1]}?",
        f"Who helped {hero}?",
        f"Who was the helper, the {options[0]} or the {options[1]}?",
        f"The {options[0]} or the {options[1]}: who helped {hero}?",
        f"Which of them helped {hero}, the {options[0]} or the {options[1]}?",
        f"Did {hero} get help from the {options[0]} or from the {options[1]}?",
        "Name the helper.",
        f"Was the helper the {options[0]} or the {options[1]}?",
        f"Was it the {options[0]} or the {options[1]} who helped {hero}?",
    )
    return Question("helper", text, options, right)


def ask_yes_no(world: World, phrasing: Phrasing) -> Question:
    """A claim about any fact of the world: from the first sentence, the middle or the end. As often true as not."""
    rng = phrasing.rng
    truth = rng.random() < 0.5
    claims = [claim for claim in _CLAIMS if claim is not _claim_friend or world.plot != "lost"]
    return Question("yes_no", rng.choice(claims)(world, phrasing, truth), (YES, NO), YES if truth else NO)


def _claim_ending(world: World, phrasing: Phrasing, truth: bool) -> str:
    ending = world.ending if truth else _other(world.ending, (HAPPY, SAD), phrasing.rng)
    return phrasing.pick(
        f"Does the story have a {ending} ending?",
        f"Is the ending {ending}?",
        f"Is it a {ending} story?",
        f"Is the end of the story {ending}?",
        f"Would you call it a {ending} story?",
        f"Does it end in a {ending} way?",
    )


def _claim_hero(world: World, phrasing: Phrasing, truth: bool) -> str:
    who = world.hero.called if truth else world.friend.called
    return phrasing.pick(f"Is {who} the hero of the story?", f"Is the story about {who}?", f"Is {who} the main character?", f"Is it {possessive(who)} story?", f"Is the main character {who}?", f"Is the hero {who}?")


def _claim_kind(world: World, phrasing: Phrasing, truth: bool) -> str:
    """About the hero, introduced at the beginning; of a hero without a name, the kind is what the question is about."""
    if not world.hero.name:
        return _claim_hero(world, phrasing, truth)
    return _kind(world.hero, truth, _wrong_kind(world, world.hero, phrasing), phrasing)


def _claim_friend(world: World, phrasing: Phrasing, truth: bool) -> str:
    return _kind(world.friend, truth, _wrong_kind(world, world.friend, phrasing), phrasing)


def _kind(who: Character, truth: bool, wrong: str, phrasing: Phrasing) -> str:
    noun = article(who.kind if truth else wrong)
    return phrasing.pick(f"Is {who.name} {noun}?", f"Was {who.name} {noun}?", f"{who.name} is {noun}. Is that right?", f"Does the story say that {who.name} is {noun}?", f"Is it true that {who.name} is {noun}?")


def _wrong_kind(world: World, who: Character, phrasing: Phrasing) -> str:
    """The kind of another character of the story, or of none."""
    others = [c.kind for c in (world.hero, world.friend, world.helper) if c is not who]
    return phrasing.rng.choice(others) if phrasing.rng.random() < 0.6 else phrasing.absent(KINDS)


def _claim_place(world: World, phrasing: Phrasing, truth: bool) -> str:
    noun = world.place.noun if truth else phrasing.absent(PLACES)
    return phrasing.pick(f"Is the {noun} in the story?", f"Is there {article(noun)} in the story?", f"Does it happen {PLACES[noun].at}?", f"Are we {PLACES[noun].at} in the story?", f"Does the story mention the {noun}?")


def _claim_mention(world: World, phrasing: Phrasing, truth: bool) -> str:
    """About an object: the easiest claim, since a false one names an object that the story does not have."""
    noun = phrasing.rng.choice((world.gained, world.not_gained))
    if not truth:
        noun = phrasing.absent(THINGS)
    return phrasing.pick(f"Is there {article(noun)} in the story?", f"Is the {noun} in the story?", f"Does the story mention {article(noun)}?", f"Is there any {noun} in the story?", f"Does the story have {article(noun)} in it?")


def _claim_helper(world: World, phrasing: Phrasing, truth: bool) -> str:
    """A false claim names the kind of another character, or of none."""
    rng, hero = phrasing.rng, world.hero.called
    friend = [world.friend.kind] if world.plot != "lost" else []
    noun = world.helper.kind if truth else rng.choice(friend) if friend and rng.random() < 0.4 else phrasing.absent(KINDS)
    return phrasing.pick(f"Did the {noun} help {hero}?", f"Was the {noun} the helper?", f"Did {hero} get help from the {noun}?", f"Is the {noun} the one who helped {hero}?", f"Was it the {noun} who helped {hero}?")


# By plot, what the gained object is said to be; each in the phrasings of training and, last, the one that is held out.
_CLAIM_VERBS = {
    plot: (*phrasings, f"Was it the {{noun}} that {done}?")
    for plot, done, phrasings in (
        ("lost", "{hero} found", ("Did {hero} find the {noun}?", "Was the {noun} found by {hero}?", "{hero} found the {noun}. Is that right?")),
        ("quest", "{hero} found", ("Did {hero} find the {noun}?", "Was the {noun} found by {hero}?", "{hero} found the {noun}. Is that right?")),
        ("rescue", "{hero} took along", ("Did {hero} take the {noun} along?", "Was the {noun} taken along?", "{hero} took the {noun} along. Is that right?")),
        ("borrow", "{hero} borrowed", ("Did {hero} borrow the {noun}?", "Was the {noun} borrowed?", "Did the {noun} break?")),
        ("contest", "{hero} got", ("Did {hero} get the {noun}?", "Was the {noun} for {hero} in the end?", "{hero} got the {noun}. Is that right?")),
        ("wish", "was magic", ("Was the {noun} magic?", "Did the {noun} talk?", "Could the {noun} talk?")),
        ("fear", "{hero} was given", ("Was the {noun} the gift for {hero}?", "Did {hero} get the {noun} as a gift?", "Was the {noun} given to {hero}?")),
        ("visitor", "{hero} was left with", ("Did the stranger leave the {noun} for {hero}?", "Did {hero} get the {noun}?", "Was the {noun} left behind?")),
    )
}


def _claim_object(world: World, phrasing: Phrasing, truth: bool) -> str:
    noun = world.gained if truth else world.not_gained
    return capital(phrasing.pick(*_CLAIM_VERBS[world.plot]).format(hero=world.hero.called, noun=noun))


_CLAIMS: tuple[Callable[[World, Phrasing, bool], str], ...] = (
    _claim_ending,
    _claim_hero,
    _claim_kind,
    _claim_friend,
    _claim_place,
    _claim_mention,
    _claim_helper,
    _claim_object,
    _claim_object,
)
ASKERS: dict[str, Callable[[World, Phrasing], Question]] = {
    "ending": ask_ending,
    "hero": ask_hero,
    "object": ask_object,
    "place": ask_place,
    "helper": ask_helper,
    "yes_no": ask_yes_no,
}
# Harder kinds are asked more often.
_WEIGHTS = {"ending": 1.0, "hero": 1.0, "object": 2.0, "place": 0.7, "helper": 1.0, "yes_no": 4.0}


def ask(story: Story, rng: Random, kind: str | None = None, held_out: bool = False) -> Question:
    """A question about the story, of the given kind or of any; `held_out` asks in a phrasing that training never has."""
    chosen = kind or rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    return ASKERS[chosen](story.world, Phrasing(rng, story.text, held_out))


def possessive(who: str) -> str:
    return f"{who}'s"


def _shuffled(options: tuple[str, str], rng: Random) -> tuple[str, str]:
    return options if rng.random() < 0.5 else (options[1], options[0])


def _other(noun: str, nouns: tuple[str, ...], rng: Random) -> str:
    return rng.choice([candidate for candidate in nouns if candidate != noun])
