"""Stories: a world is drawn first, then a plot tells it, and what was told can be asked about.

`draw_world` makes every decision that matters to the plot (who, where, with what, and how it ends), so that no sentence chosen later
can contradict another one. `tell` turns a world into text. A `Story` carries both: the text, and the world as the facts for questions.
All randomness comes from the `random.Random` that is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from . import phrases as say
from .lexicon import (
    ANIMAL_NAMES,
    BOY_NAMES,
    FEMALE_ONLY,
    GIRL_NAMES,
    HERO_ANIMALS,
    HERO_PEOPLE,
    KINDS,
    MALE_ONLY,
    OBSTACLES,
    PLACES,
    SEASONS,
    SIZES,
    SOLUTIONS,
    THINGS,
    TRAITS,
    UNBREAKABLE,
    WEATHER,
    Place,
    Thing,
)

PLOTS = ("lost", "quest", "rescue", "borrow", "contest", "wish", "fear", "visitor")
HAPPY, SAD = "happy", "sad"
SHE = {"he": "she", "him": "her", "his": "her", "hers": "hers", "himself": "herself"}
HE = {"he": "he", "him": "him", "his": "his", "hers": "his", "himself": "himself"}


@dataclass(frozen=True)
class Character:
    """Somebody in a story. `name` is None for one who is only called by kind ("the fox")."""

    kind: str
    name: str | None
    female: bool
    size: str
    trait: str

    @property
    def label(self) -> str:
        """The one word that answers "who is it?"."""
        return self.name or self.kind

    @property
    def called(self) -> str:
        """How sentences refer to the character."""
        return self.name or f"the {self.kind}"


@dataclass(frozen=True)
class World:
    """Everything that a plot decides. `thing` is what the story is about; `other` is the second object that it mentions."""

    plot: str
    ending: str
    hero: Character
    friend: Character
    helper: Character
    place: Place
    obstacle: str
    thing: Thing
    thing_adjective: str
    other: Thing
    other_adjective: str
    season: str

    @property
    def gained(self) -> str:
        """The object that the hero ends up with, or used, borrowed or won."""
        takes_other = self.ending == SAD and self.plot in ("lost", "quest", "contest", "visitor")
        return self.other.noun if takes_other else self.thing.noun

    @property
    def not_gained(self) -> str:
        return self.thing.noun if self.gained == self.other.noun else self.other.noun


@dataclass(frozen=True)
class Story:
    """A told world. `theme` says in a few words what it is about, `hero` how it introduces its hero ("a shy little fox")."""

    world: World
    title: str
    theme: str
    hero: str
    text: str


def draw_character(rng: Random, kinds: Sequence[str], taken: set[str], named: float) -> Character:
    """Draw a character whose kind and name are not in `taken`; both are added to it."""
    kind = rng.choice([noun for noun in kinds if noun not in taken])
    female = kind in FEMALE_ONLY or (kind not in MALE_ONLY and rng.random() < 0.5)
    name = None
    if kind in ("girl", "boy") or rng.random() < named:
        if KINDS[kind].is_animal or kind in ("robot", "fairy", "elf", "ghost"):
            names: Sequence[str] = ANIMAL_NAMES
        else:
            names = GIRL_NAMES if female else BOY_NAMES
        name = rng.choice([candidate for candidate in names if candidate not in taken])
        taken.add(name)
    taken.add(kind)
    return Character(kind, name, female, rng.choice(sizes_of(kind)), rng.choice(list(TRAITS)))


def sizes_of(kind: str) -> list[str]:
    """The sizes that suit a kind: no old girls, and no tiny giants."""
    unfit = {"giant": ("little", "small", "tiny")} | dict.fromkeys(("girl", "boy", "prince", "princess"), ("old", "tall"))
    return [size for size in SIZES if size not in unfit.get(kind, ())]


def draw_world(rng: Random, hero: Character | None = None) -> World:
    """Draw a consistent world, with the given hero if there is one."""
    taken: set[str] = {hero.kind, hero.label} if hero else set()
    if not hero:
        hero = draw_character(rng, HERO_ANIMALS if rng.random() < 0.55 else HERO_PEOPLE, taken, named=0.7)
    friend = draw_character(rng, list(KINDS), taken, named=1.0)
    place = rng.choice(list(PLACES.values()))
    obstacle = rng.choice(place.obstacles)
    abilities = {ability for kind, ability in SOLUTIONS if kind == obstacle}
    helper = draw_character(rng, [noun for noun, kind in KINDS.items() if kind.ability in abilities and noun not in ("girl", "boy")], taken, 0.0)
    plot = rng.choice(PLOTS)
    candidates = [t for t in THINGS.values() if plot != "borrow" or t.noun not in UNBREAKABLE]
    main = rng.choice(candidates)
    other = rng.choice([candidate for candidate in THINGS.values() if candidate is not main])
    return World(
        plot=plot,
        ending=HAPPY if rng.random() < 0.6 else SAD,
        hero=hero,
        friend=friend,
        helper=helper,
        place=place,
        obstacle=obstacle,
        thing=main,
        thing_adjective=rng.choice(main.adjectives),
        other=other,
        other_adjective=rng.choice(other.adjectives),
        season=rng.choice(SEASONS),
    )


def article(phrase: str) -> str:
    """The phrase with its indefinite article."""
    return ("an " if phrase[0].lower() in "aeiou" and not phrase.startswith(("uni", "one")) else "a ") + phrase


def capital(sentence: str) -> str:
    """The sentence with its first letter, and the first letter after an end of sentence, in upper case."""
    sentence = re.sub(r'^("?)([a-z])', lambda m: m[1] + m[2].upper(), sentence)
    return re.sub(r'([.!?]"? "?)([a-z])', lambda m: m[1] + m[2].upper() if _ends_sentence(m[1]) else m[0], sentence)


def _ends_sentence(mark: str) -> bool:
    """Whether what follows `mark` starts a sentence. After '!" ' or '?" ' a speaker may follow, in lower case."""
    return not mark.startswith(('!" ', '?" ')) or mark.endswith('"')


class Narrator:
    """Fills the slots of phrases for one world, choosing among paraphrases with its own generator."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.slots: dict[str, str | Callable[[], str]] = {}
        self._add_characters()
        self._add_scene()

    def _add_characters(self) -> None:
        world = self.world
        for prefix, who in (("", world.hero), ("f", world.helper), ("g", world.friend)):
            for slot, word in (SHE if who.female else HE).items():
                self.slots[prefix + slot] = word
                self.slots[(prefix + slot).capitalize()] = word.capitalize()
        hero = world.hero
        named = f" named {hero.name}" if hero.name else ""
        size = hero.size if hero.size in ("little", "young", "old") else "little"
        size = size if size in sizes_of(hero.kind) else "young"
        sized = self.rng.choice((f"{hero.trait} {size} {hero.kind}", f"{hero.trait} {hero.kind}", f"{hero.size} {hero.kind}"))
        self.slots |= {
            "H": self._hero,
            "Hs": lambda: self._hero() + "'s",
            "name": hero.called,
            "kind": hero.kind,
            "trait": hero.trait,
            "trait_line": self.rng.choice(TRAITS[hero.trait]),
            "intro": article(sized) + named,
            "bare_intro": article(sized),
            "intro_cap": capital(article(sized) + named),
            "home": (home := self.rng.choice(KINDS[hero.kind].homes)),
            "home_cap": capital(home),
            "F": world.helper.called,
            "aF": article(f"{world.helper.size} {world.helper.kind}"),
            "helper": world.helper.kind,
            "G": world.friend.called,
            "Gs": world.friend.called + "'s",
            "gintro": article(f"{world.friend.size} {world.friend.kind}"),
            "gintro_cap": capital(article(f"{world.friend.size} {world.friend.kind}")),
            "gtrouble": self.rng.choice(say.GTROUBLE),
        }

    def _add_scene(self) -> None:
        world, rng = self.world, self.rng
        spot = rng.choice(world.place.spots)
        scene, attempt, finish = say.CONTESTS[contest := rng.choice(list(say.CONTESTS))]
        self.slots |= {
            "O": world.thing.noun,
            "bigO": f"{world.thing_adjective} {world.thing.noun}",
            "aO": article(f"{world.thing_adjective} {world.thing.noun}"),
            "treasured": world.thing.treasured,
            "image": world.thing.image,
            "D": world.other.noun,
            "aD": article(f"{world.other_adjective} {world.other.noun}"),
            "at": world.place.at,
            "to": world.place.to,
            "place": world.place.noun,
            "sense": rng.choice(world.place.senses),
            "spot": spot,
            "spot_cap": spot.capitalize(),
            "B": rng.choice(OBSTACLES[world.obstacle]),
            "solution": rng.choice(SOLUTIONS[world.obstacle, KINDS[world.helper.kind].ability]),
            "season": world.season,
            "season_cap": world.season.capitalize(),
            "aO_cap": capital(article(world.thing.noun)),
            "weather": rng.choice(WEATHER[world.season]),
            "fear": rng.choice(say.FEARS),
            "contest": contest,
            "contest_scene": scene,
            "contest_scene_low": scene[0].lower() + scene[1:],
            "contest_try": attempt,
            "contest_end": finish,
        }

    def _hero(self) -> str:
        """The hero by name, or now and then by kind."""
        hero = self.world.hero
        if hero.name and self.rng.random() < 0.12:
            return self.rng.choice((f"the {hero.kind}", f"the {hero.trait} {hero.kind}"))
        return hero.called

    def fill(self, phrase: str) -> str:
        """Replace slots until none is left (a slot may hold another slot), and set capital letters."""
        while "{" in phrase:
            phrase = re.sub(r"\{(\w+)\}", self._slot, phrase)
        return capital(phrase)

    def _slot(self, match: re.Match[str]) -> str:
        value = self.slots[match[1]]
        return value() if callable(value) else value

    def pick(self, bank: Sequence[str]) -> str:
        """One filled phrase of a bank."""
        return self.fill(self.rng.choice(bank))

    def maybe(self, bank: Sequence[str], probability: float) -> list[str]:
        """One filled phrase, or nothing."""
        return [self.pick(bank)] if self.rng.random() < probability else []


def tell(world: World, rng: Random, detail: float = 0.8) -> Story:
    """Tell a world. `detail` is the chance that each sentence which the plot can do without is told."""
    narrator = Narrator(world, rng)
    beginning = [*opening(narrator), *narrator.maybe(say.TRAIT_LINES, detail * 0.8)]
    paragraphs = [beginning, *_PLOT_TELLERS[world.plot](narrator, detail), closing(narrator, detail)]
    separator = rng.choice(("\n\n", "\n\n", " "))
    text = separator.join(" ".join(sentences) for sentences in paragraphs if sentences)
    return Story(world, title(narrator), narrator.pick(say.THEMES[world.plot]), narrator.fill("{bare_intro}"), text)


def opening(narrator: Narrator) -> list[str]:
    """The first sentence or two; a fairy-tale opening more often than any other."""
    hero, roll = narrator.world.hero, narrator.rng.random()
    if roll < 0.12:
        return [narrator.pick(say.SETTINGS), narrator.pick(say.SETTING_OPENINGS)]
    if roll < 0.36:
        return [narrator.pick(say.OPENINGS[:5])]
    if roll < 0.78:
        return [narrator.pick(say.OPENINGS)]
    return [narrator.pick(say.NAMED_OPENINGS if hero.name else say.KIND_OPENINGS)]


def title(narrator: Narrator) -> str:
    """A title in one of the usual shapes."""
    world = narrator.world
    hero, thing, friend, place = world.hero, world.thing.noun, world.friend, world.place.noun
    shapes = [
        f"The {hero.kind} and the {thing}",
        f"The {hero.kind} and the {thing}",
        f"The {hero.kind} and the {world.helper.kind}",
        f"The {hero.kind} and the {friend.kind}",
        f"The {hero.kind} and the {place}",
        f"The {hero.trait} {hero.kind}",
        f"The {world.thing_adjective} {thing}",
        f"{capital(hero.called)} and the {thing}",
        f"{capital(hero.called)} and {friend.called}",
        f"{capital(hero.called)} and the {world.thing_adjective} {thing}",
        f"{capital(hero.called)}'s {thing}",
    ]
    by_plot = [narrator.fill(shape) for shape in say.TITLES[world.plot]]
    chosen = narrator.rng.choice(shapes if narrator.rng.random() < 0.7 else by_plot)
    if narrator.rng.random() < 0.4:
        return " ".join(word if word in ("and", "the", "at", "a", "for", "in", "who", "was", "is") else capital(word) for word in chosen.split())
    return chosen


def journey(narrator: Narrator, detail: float, decoy: bool) -> list[str]:
    """The hero travels and is stopped by the obstacle of the place."""
    return [
        narrator.pick(say.TRAVEL),
        *narrator.maybe(say.SENSES, detail),
        *(narrator.maybe(say.DECOY_SEEN, 1.0) if decoy else []),
        narrator.pick(say.OBSTACLE),
        *narrator.maybe(say.DESPAIR, detail * 0.8),
    ]


def help_arrives(narrator: Narrator, detail: float) -> list[str]:
    """The helper comes and overcomes the obstacle."""
    return [
        narrator.pick(say.HELPER),
        *narrator.maybe(say.ASK, detail * 0.7),
        narrator.pick(say.SOLVE),
        *narrator.maybe(say.THANKS, detail * 0.7),
    ]


def outcome(narrator: Narrator, happy: Sequence[str], sad: Sequence[str]) -> list[str]:
    """What the plot comes to, by the ending of its world."""
    return [narrator.pick(happy if narrator.world.ending == HAPPY else sad)]


def closing(narrator: Narrator, detail: float) -> list[str]:
    """The last image, sentence and, sometimes, moral."""
    world, rng = narrator.world, narrator.rng
    happy = world.ending == HAPPY
    image = narrator.maybe(say.HAPPY_IMAGE, detail * 0.6) if happy and world.plot in ("lost", "quest", "contest", "visitor") else []
    moral = [say.MORALS[world.plot][world.ending]] if rng.random() < 0.25 else []
    return [*image, narrator.pick(say.HAPPY_END if happy else say.SAD_END), *moral]


Paragraphs = list[list[str]]


def tell_lost(narrator: Narrator, detail: float) -> Paragraphs:
    seen = narrator.world.ending == HAPPY
    return [
        [narrator.pick(say.LOST_OWN), narrator.pick(say.LOST_LOSE), *narrator.maybe(say.LOST_SEARCH, detail * 0.8), narrator.pick(say.LOST_RECALL)],
        journey(narrator, detail, decoy=seen),
        help_arrives(narrator, detail),
        outcome(narrator, say.LOST_HAPPY, say.LOST_SAD),
    ]


def tell_quest(narrator: Narrator, detail: float) -> Paragraphs:
    seen = narrator.world.ending == HAPPY
    return [
        [narrator.pick(say.QUEST_NEED), narrator.pick(say.QUEST_VOW), narrator.pick(say.QUEST_HINT)],
        journey(narrator, detail, decoy=seen),
        help_arrives(narrator, detail),
        outcome(narrator, say.QUEST_HAPPY, say.QUEST_SAD),
    ]


def tell_rescue(narrator: Narrator, detail: float) -> Paragraphs:
    return [
        [narrator.pick(say.RESCUE_MISSING), narrator.pick(say.RESCUE_CLUE), narrator.pick(say.RESCUE_TAKE)],
        journey(narrator, detail, decoy=False),
        help_arrives(narrator, detail),
        outcome(narrator, say.RESCUE_HAPPY, say.RESCUE_SAD),
    ]


def tell_borrow(narrator: Narrator, detail: float) -> Paragraphs:
    return [
        [narrator.pick(say.BORROW_LEND)],
        [narrator.pick(say.BORROW_BREAK), narrator.pick(say.BORROW_HIDE), *narrator.maybe(say.BORROW_GUILT, detail)],
        [narrator.pick(say.BORROW_ADVICE), narrator.pick(say.BORROW_CONFESS)],
        outcome(narrator, say.BORROW_HAPPY, say.BORROW_SAD),
    ]


def tell_contest(narrator: Narrator, detail: float) -> Paragraphs:
    return [
        [narrator.pick(say.CONTEST_NEWS), narrator.pick(say.CONTEST_RIVAL), *narrator.maybe(say.CONTEST_WISH, detail)],
        journey(narrator, detail, decoy=False),
        help_arrives(narrator, detail),
        [narrator.pick(say.CONTEST_DAY), *outcome(narrator, say.CONTEST_HAPPY, say.CONTEST_SAD)],
    ]


def tell_wish(narrator: Narrator, detail: float) -> Paragraphs:
    return [
        [narrator.pick(say.WISH_SETUP)],
        journey(narrator, detail, decoy=False),
        help_arrives(narrator, detail),
        [narrator.pick(say.WISH_FIND), narrator.pick(say.WISH_MAGIC)],
        [narrator.pick(say.WISH_FRIEND), *outcome(narrator, say.WISH_HAPPY, say.WISH_SAD)],
    ]


def tell_fear(narrator: Narrator, detail: float) -> Paragraphs:
    return [
        [narrator.pick(say.FEAR_OF), narrator.pick(say.FEAR_GIFT)],
        [narrator.pick(say.FEAR_CALL), narrator.pick(say.FEAR_GO)],
        journey(narrator, detail, decoy=False),
        help_arrives(narrator, detail),
        outcome(narrator, say.FEAR_HAPPY, say.FEAR_SAD),
    ]


def tell_visitor(narrator: Narrator, detail: float) -> Paragraphs:
    return [
        [narrator.pick(say.VISITOR_KNOCK), narrator.pick(say.VISITOR_BAG)],
        [*narrator.maybe(say.VISITOR_DOUBT, detail), narrator.pick(say.VISITOR_ADVICE)],
        outcome(narrator, say.VISITOR_HAPPY, say.VISITOR_SAD),
    ]


_PLOT_TELLERS: dict[str, Callable[[Narrator, float], Paragraphs]] = {
    "lost": tell_lost,
    "quest": tell_quest,
    "rescue": tell_rescue,
    "borrow": tell_borrow,
    "contest": tell_contest,
    "wish": tell_wish,
    "fear": tell_fear,
    "visitor": tell_visitor,
}
