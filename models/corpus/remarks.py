"""What one can say about a story in a sentence: questions with their answers, all true of its world."""

from __future__ import annotations

from random import Random

from . import phrases as say
from .records import FIELDS, record
from .stories import Story, article, capital

Remark = tuple[str, str]

# What the second character is to the hero, by plot; a plot without an entry does not tell of it.
FRIENDS = {
    "quest": "a friend of {hero}",
    "rescue": "the best friend of {hero}",
    "borrow": "a friend of {hero}",
    "contest": "the one who wanted to beat {hero}",
    "wish": "a friend of {hero}",
    "fear": "a friend of {hero}",
    "visitor": "the stranger at the door",
}
SUMMARIES = {
    "lost": {"happy": "{hero} lost {thing} and found it again", "sad": "{hero} lost {thing} and never found it again"},
    "quest": {"happy": "{hero} found {thing} for {friend}", "sad": "{hero} looked for {thing} for {friend}, but found only {other}"},
    "rescue": {"happy": "{hero} looked for {friend} and brought {friend} home", "sad": "{hero} looked for {friend}, but {friend} was gone"},
    "borrow": {"happy": "{hero} broke the {noun} of {friend}, told the truth and was forgiven", "sad": "{hero} broke the {noun} of {friend}, and the friendship with it"},
    "contest": {"happy": "{hero} won {thing} in a contest", "sad": "{friend} won {thing}, and {hero} got only {other}"},
    "wish": {"happy": "{hero} found a magic {noun} and made a wish for {friend}", "sad": "{hero} found a magic {noun} and wished for gold"},
    "fear": {"happy": "{hero} was afraid, but came to help {friend}", "sad": "{hero} was too afraid to help {friend}"},
    "visitor": {"happy": "{hero} let {friend} in and was given the {noun}", "sad": "{hero} shut the door on {friend}"},
}


def remarks_about(story: Story, rng: Random) -> list[Remark]:
    """Every question that has an answer in this story, each in one of its forms."""
    world = story.world
    hero, friend, helper = world.hero, world.friend, world.helper
    slots = {
        "hero": hero.called,
        "friend": friend.called,
        "noun": world.thing.noun,
        "thing": article(f"{world.thing_adjective} {world.thing.noun}") if world.plot != "rescue" else article(world.thing.noun),
        "other": article(f"{world.other_adjective} {world.other.noun}"),
    }
    remarks = [
        (rng.choice(("How does it end?", "How does the story end?", "Is it a happy story?")), f"It has a {world.ending} ending."),
        (rng.choice(("Where does it happen?", "Which place is in the story?", "Where are we in the story?")), f"The place in the story is the {world.place.noun}."),
        (rng.choice((f"Who helped {hero.called}?", "Who was the helper?", f"Did somebody help {hero.called}?")), f"{capital(article(helper.kind))} helped {hero.called}."),
        (rng.choice(("What is the story about?", "Tell me in one sentence what happened.", "What happened, in short?")), capital(SUMMARIES[world.plot][world.ending].format(**slots)) + "."),
        (rng.choice(("What does the story teach us?", "What is the moral of the story?", "What can we learn from it?")), say.MORALS[world.plot][world.ending]),
        (f"I like {hero.called}.", f"I like {hero.called} too."),
        ("Write the story's record as JSON.", record(story, FIELDS)),
    ]
    if hero.name:
        remarks.append((rng.choice((f"Who is {hero.name}?", f"What is {hero.name}?", f"Tell me who {hero.name} is.")), f"{hero.name} is {article(hero.kind)} and the hero of the story."))
    else:
        remarks.append((rng.choice(("Who is the hero?", "Who is the story about?", "Whose story is it?")), f"The hero of the story is {hero.called}."))
    if world.plot in FRIENDS:
        answer = f"{friend.called} is {article(friend.kind)} and {FRIENDS[world.plot].format(hero=hero.called)}."
        remarks.append((rng.choice((f"Who is {friend.called}?", f"And who is {friend.called}?", f"What is {friend.called}?")), answer))
    return remarks
