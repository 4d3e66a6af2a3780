"""Decision questions about a story: each has a one-word answer that is one token of the vocabulary.

The answers follow from the world, never from the text, so they are right by construction. `LABELS` lists every possible
answer by kind of question; the tokenizer is checked against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .lexicon import ANIMAL_NAMES, BOY_NAMES, GIRL_NAMES, KINDS, PLACES, THINGS
from .stories import HAPPY, SAD, World

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


def ask_ending(world: World, rng: Random) -> Question:
    text = rng.choice(
        (
            "Does the story have a happy or a sad ending?",
            "Is the ending happy or sad?",
            "How does the story end, happy or sad?",
            "Did the story end in a happy or a sad way?",
        )
    )
    return Question("ending", text, (HAPPY, SAD), world.ending)


def ask_hero(world: World, rng: Random) -> Question:
    options = _shuffled((world.hero.label, world.friend.label), rng)
    first, second = (world.hero.called if label == world.hero.label else world.friend.called for label in options)
    text = rng.choice(
        (
            "Who is the hero of the story?",
            "Who is the story about?",
            "What is the hero called?",
            f"Who is the hero, {first} or {second}?",
            f"Who is the main character, {first} or {second}?",
        )
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


def ask_object(world: World, rng: Random) -> Question:
    options = _shuffled((world.gained, world.not_gained), rng)
    verb = rng.choice(_OBJECT_VERBS[world.plot]).format(hero=world.hero.called)
    text = rng.choice(("Which {verb}, the {a} or the {b}?", "Which of the two {verb}: the {a} or the {b}?")).format(
        verb=verb, a=options[0], b=options[1]
    )
    return Question("object", text, options, world.gained)


def ask_place(world: World, rng: Random) -> Question:
    wrong = rng.choice([noun for noun in PLACES if noun != world.place.noun])
    options = _shuffled((world.place.noun, wrong), rng)
    text = rng.choice(
        (
            f"Where did it happen, {PLACES[options[0]].at} or {PLACES[options[1]].at}?",
            f"Which place is in the story, the {options[0]} or the {options[1]}?",
        )
    )
    return Question("place", text, options, world.place.noun)


def ask_helper(world: World, rng: Random) -> Question:
    right = world.helper.kind
    wrong = rng.choice([noun for noun in KINDS if noun not in (right, world.hero.kind, world.friend.kind)])
    options = _shuffled((right, wrong), rng)
    text = rng.choice(
        (
            f"Who helped {world.hero.called}, the {options[0]} or the {options[1]}?",
            f"Who gave {world.hero.called} help or advice, the {options[0]} or the {options[1]}?",
            f"Who helped {world.hero.called}?",
            f"Who was the helper, the {options[0]} or the {options[1]}?",
        )
    )
    return Question("helper", text, options, right)


def ask_yes_no(world: World, rng: Random) -> Question:
    truth = rng.random() < 0.5
    text = rng.choice(_CLAIMS)(world, rng, truth)
    return Question("yes_no", text, (YES, NO), YES if truth else NO)


def _claim_ending(world: World, rng: Random, truth: bool) -> str:
    ending = world.ending if truth else _other(world.ending, (HAPPY, SAD), rng)
    return rng.choice((f"Does the story have a {ending} ending?", f"Is the ending {ending}?"))


def _claim_hero(world: World, rng: Random, truth: bool) -> str:
    who = world.hero.called if truth else world.friend.called
    return rng.choice((f"Is {who} the hero of the story?", f"Is the story about {who}?"))


def _claim_place(world: World, rng: Random, truth: bool) -> str:
    noun = world.place.noun if truth else _other(world.place.noun, tuple(PLACES), rng)
    return rng.choice((f"Is the {noun} in the story?", f"Is there a {noun} in the story?"))


def _claim_helper(world: World, rng: Random, truth: bool) -> str:
    kind = world.helper.kind
    noun = kind if truth else rng.choice([n for n in KINDS if n not in (kind, world.hero.kind, world.friend.kind)])
    return f"Did the {noun} help {world.hero.called}?"


_CLAIM_VERBS = {
    "lost": "Did {hero} find the {noun}?",
    "quest": "Did {hero} find the {noun}?",
    "rescue": "Did {hero} take the {noun} along?",
    "borrow": "Did {hero} borrow the {noun}?",
    "contest": "Did {hero} get the {noun}?",
    "wish": "Was the {noun} magic?",
    "fear": "Was the {noun} the gift for {hero}?",
    "visitor": "Did the stranger leave the {noun} for {hero}?",
}


def _claim_object(world: World, rng: Random, truth: bool) -> str:
    noun = world.gained if truth else world.not_gained
    return _CLAIM_VERBS[world.plot].format(hero=world.hero.called, noun=noun)


_CLAIMS: tuple[Callable[[World, Random, bool], str], ...] = (_claim_ending, _claim_hero, _claim_place, _claim_helper, _claim_object, _claim_object)
ASKERS: dict[str, Callable[[World, Random], Question]] = {
    "ending": ask_ending,
    "hero": ask_hero,
    "object": ask_object,
    "place": ask_place,
    "helper": ask_helper,
    "yes_no": ask_yes_no,
}
# Harder kinds are asked more often.
_WEIGHTS = {"ending": 1.0, "hero": 1.0, "object": 2.0, "place": 0.7, "helper": 1.0, "yes_no": 2.5}


def ask(world: World, rng: Random, kind: str | None = None) -> Question:
    """A question about the world, of the given kind or of any."""
    chosen = kind or rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    return ASKERS[chosen](world, rng)


def _shuffled(options: tuple[str, str], rng: Random) -> tuple[str, str]:
    return options if rng.random() < 0.5 else (options[1], options[0])


def _other(noun: str, nouns: tuple[str, ...], rng: Random) -> str:
    return rng.choice([candidate for candidate in nouns if candidate != noun])
