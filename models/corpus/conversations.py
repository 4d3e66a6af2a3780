"""ChatML conversations: requests for stories, questions about them, and a little small talk.

A conversation is a list of (role, content) pairs. `render` writes it in the ChatML form that the chat template of the models gives.
"""

from __future__ import annotations

import re
from random import Random

from . import phrases as say
from .facts import facts_and_questions
from .questions import Question, ask
from .remarks import remarks_about
from .stories import Story, article, draw_world, tell

Message = tuple[str, str]

SYSTEMS = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell short stories and answer questions about them.",
    "Answer with one word.",
    "You are a kind storyteller who loves animals.",
)
REQUESTS = (
    "Tell me a story.",
    "Tell me a story, please.",
    "Please tell me a short story.",
    "Can you tell me a story?",
    "Write a short story.",
    "I cannot sleep. Tell me a story.",
    "Once more, a story, please!",
)
TOPIC_REQUESTS = (
    "Tell me a story about {topic}.",
    "Tell me a story about {topic}.",
    "Tell me a story about {topic}, please.",
    "Tell me a {ending} story about {topic}.",
    "Please tell me a short story about {topic}.",
    "Write a short story about {topic}.",
    "Can you tell me a story about {topic}?",
    "I would like to hear a story about {topic}.",
    "Do you know a story about {topic}?",
    "Write a story called \"{title}\".",
)
ONE_WORD = ("", " Answer with one word.", " Answer in one word.", " One word only.")
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hello", "Hi!", "Hi there", "Good morning!"), ("Hello! Would you like to hear a story?", "Hello, dear reader! Shall I tell you a story?", "Hello! I know a great many stories. Who should it be about?")),
    (("Who are you?", "What are you?", "What is your name?"), ("I am Tales, a very small storyteller.", "My name is Tales. I am small, but I know many stories.")),
    (("What can you do?", "How can you help me?"), ("I can tell stories and answer questions about them.", "I tell short stories. Ask me for one about a fox, a lantern or the sea!")),
    (("How are you?", "How are you today?"), ("I am well, thank you. A story would make the day even better!", "Very well, thank you. And you?")),
)
THANKS = ("Thank you!", "Thanks!", "That was lovely.", "What a nice story!", "I liked that.", "Thank you very much.")
WELCOME = ("You are welcome! Would you like another one?", "I am glad that you liked it.", "You are very welcome.", "Thank you for listening!")
AGAIN = ("Another one, please!", "Tell me another story.", "One more story, please.", "And now another one?")
SAME_HERO = ("Tell me another story about {hero}.", "What did {hero} do next? Tell me another story.", "I would like to hear more about {hero}.", "And another one about {hero}, please!")
MORAL = ("What does the story teach us?", "What is the moral of the story?", "What can we learn from it?")


def render(messages: list[Message]) -> str:
    """The ChatML text of a conversation, without a generation prompt."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def _system(rng: Random, probability: float) -> list[Message]:
    return [("system", rng.choice(SYSTEMS))] if rng.random() < probability else []


def _request(story: Story, rng: Random) -> str:
    """A request that the story answers."""
    world = story.world
    hero = world.hero
    topics = [
        f"{article(hero.kind)} and {article(world.thing.noun)}",
        f"{article(hero.kind)} and {article(world.thing.noun)}",
        article(hero.kind),
        story.hero[0].lower() + story.hero[1:],
        story.hero[0].lower() + story.hero[1:],
        article(f"{world.thing_adjective} {world.thing.noun}"),
        f"{article(hero.kind)} and {article(world.friend.kind)}",
        f"the {world.place.noun}",
        story.theme[0].lower() + story.theme[1:],
        f"{article(hero.kind)} and {story.theme[0].lower() + story.theme[1:]}",
    ]
    if hero.name:
        topics += [hero.name, f"{hero.name} the {hero.kind}", f"{story.hero[0].lower() + story.hero[1:]} named {hero.name}"]
    if rng.random() < 0.15:
        return rng.choice(REQUESTS)
    return rng.choice(TOPIC_REQUESTS).format(topic=rng.choice(topics), ending=world.ending, title=story.title)


def _told(rng: Random, detail: float) -> Story:
    return tell(draw_world(rng), rng, detail)


def _answer_text(story: Story, rng: Random) -> str:
    """The story as an assistant gives it: sometimes under its title."""
    return f"{story.title}\n\n{story.text}" if rng.random() < 0.2 else story.text


def _questions(story: Story, rng: Random, count: int) -> list[Question]:
    """Different questions about one story."""
    asked: dict[str, Question] = {}
    while len(asked) < count:
        question = ask(story, rng)
        asked[question.text] = question
    return list(asked.values())


def _question_turns(story: Story, rng: Random, count: int) -> list[Message]:
    suffix = rng.choice(ONE_WORD)
    turns: list[Message] = []
    for question in _questions(story, rng, count):
        turns += [("user", question.text + suffix), ("assistant", question.answer)]
    return turns


def story_chat(rng: Random) -> str:
    """A conversation around one or two stories told on request."""
    messages = _system(rng, 0.25)
    if rng.random() < 0.2:
        said, replies = rng.choice(SMALL_TALK)
        messages += [("user", rng.choice(said)), ("assistant", rng.choice(replies))]
    story = _told(rng, rng.uniform(0.4, 1.0))
    messages += [("user", _request(story, rng)), ("assistant", _answer_text(story, rng))]
    if rng.random() < 0.4:
        messages += _question_turns(story, rng, rng.randint(1, 4))
    if rng.random() < 0.2:
        messages += [("user", rng.choice(MORAL)), ("assistant", say.MORALS[story.world.plot][story.world.ending])]
    if rng.random() < 0.2:
        messages += [("user", rng.choice(THANKS)), ("assistant", rng.choice(WELCOME))]
    if rng.random() < 0.15:
        another = _told(rng, 0.6)
        messages += [("user", rng.choice(AGAIN)), ("assistant", another.text)]
    return render(messages)


def subject_chat(rng: Random) -> str:
    """A story told on request and then a talk of six turns and more about it: every turn is about this story, or its hero's next one."""
    messages = _system(rng, 0.25)
    if rng.random() < 0.3:
        said, replies = rng.choice(SMALL_TALK)
        messages += [("user", rng.choice(said)), ("assistant", rng.choice(replies))]
    story = _told(rng, rng.uniform(0.3, 0.8))
    messages += [("user", _request(story, rng)), ("assistant", _answer_text(story, rng))]
    messages += _talk(story, rng, rng.randint(3, 6))
    if rng.random() < 0.4:
        hero = story.world.hero
        again = tell(draw_world(rng, hero), rng, 0.4)
        messages += [("user", rng.choice(SAME_HERO).format(hero=hero.called)), ("assistant", again.text)]
        messages += _talk(again, rng, rng.randint(2, 4))
    if rng.random() < 0.5:
        messages += [("user", rng.choice(THANKS)), ("assistant", rng.choice(WELCOME))]
    return render(messages)


def _talk(story: Story, rng: Random, count: int) -> list[Message]:
    """Turns about a story: sentences, one-word answers, its record."""
    remarks = rng.sample(topics := remarks_about(story, rng), min(count, len(topics)))
    turns: list[Message] = []
    for asked, answer in remarks:
        if rng.random() < 0.3:
            turns += _question_turns(story, rng, 1)
        turns += [("user", asked), ("assistant", answer)]
    return turns


def question_chat(rng: Random) -> str:
    """A story given by the user, and several questions about it as short turns."""
    story = _told(rng, rng.uniform(0.0, 0.7))
    body = f"{story.title}\n\n{story.text}" if rng.random() < 0.3 else story.text
    suffix = rng.choice(ONE_WORD)
    first, *rest = _questions(story, rng, rng.randint(5, 12))
    return render([*_system(rng, 0.25), ("user", pose(body, first, suffix, rng)), ("assistant", first.answer), *_as_turns(rest, suffix)])


def pose(body: str, question: Question, suffix: str, rng: Random) -> str:
    """The user's message that gives a story and asks the first question."""
    text = question.text + suffix
    return rng.choice(
        (
            f"{body}\n\n{text}",
            f"{body}\n\nQuestion: {text}",
            f"Read this story.\n\n{body}\n\n{text}",
            f"Story: {body}\n\nQuestion: {text}",
            f"Here is a story.\n\n{body}\n\n{text}",
        )
    )


def _as_turns(questions: list[Question], suffix: str) -> list[Message]:
    return [turn for question in questions for turn in (("user", question.text + suffix), ("assistant", question.answer))]


def plain_story(rng: Random) -> str:
    """A story as running text: under a title, without one, or from somewhere in its middle."""
    story = _told(rng, rng.uniform(0.5, 1.0))
    roll = rng.random()
    if roll < 0.45:
        return f"{story.title}{rng.choice((chr(10), chr(10) * 2, chr(10) * 2))}{story.text}"
    return story.text if roll < 0.85 else from_the_middle(story.text, rng)


def from_the_middle(text: str, rng: Random) -> str:
    """The text without its beginning, cut at a sentence or inside one, so that a prompt may start anywhere in a story."""
    if rng.random() < 0.6:
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])|\n\n", text)
        return " ".join(sentences[rng.randrange(1, max(2, len(sentences) // 2)) :])
    words = text.split(" ")
    return " ".join(words[rng.randrange(1, max(2, len(words) * 2 // 3)) :]).lstrip()


def fact_chat(rng: Random) -> str:
    """A few plain facts given by the user, and several questions about them as short turns."""
    body, (first, *rest) = facts_and_questions(rng)
    suffix = rng.choice(("", *ONE_WORD))
    return render([("user", pose(body, first, suffix, rng)), ("assistant", first.answer), *_as_turns(rest, suffix)])


def question_prompt(rng: Random, kind: str, held_out: bool = False) -> tuple[str, Question]:
    """One decision as a server gets it: a story and one question of the given kind, up to the answer's place."""
    story = _told(rng, rng.uniform(0.0, 0.7))
    question = ask(story, rng, kind, held_out)
    message = pose(story.text, question, rng.choice(ONE_WORD), rng)
    return render([("user", message)]) + "<|im_start|>assistant\n", question
