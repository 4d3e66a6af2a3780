"""Short documents: a few plain facts, then questions about them. They teach to find a fact, to bind it to its owner and to compare.

In a story of three hundred tokens a yes-or-no question gives one bit, and a network answers all of them with a coin for millions of
tokens. Here the same comparison comes every dozen tokens. A false claim is a true one with one word replaced: by the same sort of word
from another fact (which only binding tells apart) or by a word that no fact has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .lexicon import ANIMAL_NAMES, BOY_NAMES, GIRL_NAMES, KINDS, PLACES, THINGS
from .questions import NO, YES, Question

NAMES = (*GIRL_NAMES, *BOY_NAMES, *ANIMAL_NAMES)


@dataclass(frozen=True)
class Relation:
    """One sort of fact: sentences that state it, claims and choices about it; {a} is who, {b} what is true of them.

    A choice asks for b and offers {first} and {second}.
    """

    values: tuple[str, ...]
    facts: tuple[str, ...]
    claims: tuple[str, ...]
    choices: tuple[str, ...]
    shown: Callable[[str], str] = lambda value: value


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


RELATIONS = {
    "object": Relation(
        tuple(THINGS),
        ("{a} has the {b}.", "{a} found the {b}.", "The {b} belongs to {a}.", "{a} carried the {b}."),
        ("Does {a} have the {b}?", "Is the {b} with {a}?"),
        ("Which does {a} have, the {first} or the {second}?",),
    ),
    "place": Relation(
        tuple(PLACES),
        ("{a} is {at}.", "{a} went {to}.", "{a} sat {at} and sang."),
        ("Is {a} {at}?", "Is {a} now {at}?"),
        ("Where is {a}, {first} or {second}?",),
        lambda noun: PLACES[noun].at,
    ),
    "helper": Relation(
        tuple(KINDS),
        ("The {b} helped {a}.", "{a} was helped by the {b}.", "Along came {ab} and helped {a}."),
        ("Did the {b} help {a}?", "Was it the {b} who helped {a}?"),
        ("Who helped {a}, the {first} or the {second}?",),
    ),
    "kind": Relation(
        tuple(KINDS),
        ("{a} is {ab}.", "{a} was {ab}.", "{a} the {b} smiled."),
        ("Is {a} {ab}?", "Is it true that {a} is {ab}?"),
        ("What is {a}, {first} or {second}?",),
        _article,
    ),
    "ending": Relation(
        ("happy", "sad"),
        ("{a} is {b}.", "In the end {a} was {b}.", "All day {a} was {b}."),
        ("Is {a} {b}?", "Was {a} {b}?"),
        ("Is {a} {first} or {second}?",),
    ),
}


@dataclass(frozen=True)
class Fact:
    """`who` stands in `relation` to `value`."""

    who: str
    relation: str
    value: str

    def say(self, pattern: str, **more: str) -> str:
        place = PLACES.get(self.value)
        slots = {"a": self.who, "b": self.value, "ab": _article(self.value)} | more
        return pattern.format(**slots, **({"at": place.at, "to": place.to} if place else {}))


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """Facts of one or two relations about different characters, so that most claims have a rival in the text."""
    relations = rng.sample(list(RELATIONS), 1 if rng.random() < 0.6 else 2)
    names = rng.sample(NAMES, count)
    facts = []
    for name in names:
        relation = rng.choice(relations)
        taken = {fact.value for fact in facts if fact.relation == relation}
        values = RELATIONS[relation].values
        free = [value for value in values if value not in taken] or list(values)
        facts.append(Fact(name, relation, rng.choice(free)))
    return facts


def _wrong_value(fact: Fact, facts: list[Fact], rng: Random) -> str:
    """A value that is not true of the fact's owner: of another fact more often than of none."""
    rivals = [other.value for other in facts if other.relation == fact.relation and other.value != fact.value]
    if rivals and rng.random() < 0.7:
        return rng.choice(rivals)
    return rng.choice([value for value in RELATIONS[fact.relation].values if value != fact.value])


def ask_claim(facts: list[Fact], rng: Random) -> Question:
    """A yes-or-no question; each answer is as likely as the other."""
    fact, truth = rng.choice(facts), rng.random() < 0.5
    claimed = fact if truth else Fact(fact.who, fact.relation, _wrong_value(fact, facts, rng))
    return Question("yes_no", claimed.say(rng.choice(RELATIONS[fact.relation].claims)), (YES, NO), YES if truth else NO)


def ask_mention(facts: list[Fact], rng: Random) -> Question:
    """A yes-or-no question that only asks whether a word was there: the easiest comparison of all."""
    fact, truth = rng.choice([fact for fact in facts if fact.relation != "ending"] or facts), rng.random() < 0.5
    told = {other.value for other in facts} | {other.who for other in facts}
    if fact.relation == "ending" or rng.random() < 0.3:
        word, pattern = fact.who if truth else rng.choice([name for name in NAMES if name not in told]), "Is {} in the story?"
    else:
        absent = [value for value in RELATIONS[fact.relation].values if value not in told]
        word, pattern = fact.value if truth else rng.choice(absent), "Is the {} in the story?"
    return Question("yes_no", pattern.format(word), (YES, NO), YES if truth else NO)


def ask_choice(facts: list[Fact], rng: Random) -> Question:
    """A question with two options, of which the facts say one."""
    fact = rng.choice(facts)
    relation = RELATIONS[fact.relation]
    options = [fact.value, _wrong_value(fact, facts, rng)]
    rng.shuffle(options)
    first, second = map(relation.shown, options)
    text = fact.say(rng.choice(relation.choices), first=first, second=second)
    return Question(fact.relation, text, (options[0], options[1]), fact.value)


def facts_and_questions(rng: Random) -> tuple[str, list[Question]]:
    """One to five facts as a text, and several questions about them, most of them to be answered with yes or no."""
    facts = draw_facts(rng, rng.choice((1, 1, 2, 2, 3, 4, 5)))
    text = " ".join(fact.say(rng.choice(RELATIONS[fact.relation].facts)) for fact in facts)
    askers = rng.choices((ask_claim, ask_mention, ask_choice), weights=(0.55, 0.2, 0.25), k=rng.randint(3, 6))
    asked = {question.text: question for question in (asker(facts, rng) for asker in askers)}
    return text, list(asked.values())
