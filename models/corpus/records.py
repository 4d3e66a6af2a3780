"""Records: a story's hero, place, object and ending as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from .stories import Story, draw_world, tell

FIELDS = ("hero", "place", "object", "ending")
REQUESTS = (
    "Write the story's record as JSON with these fields: {fields}.",
    "Give {fields} of the story as JSON.",
    "Record as JSON: {fields}.",
    "Write a JSON object with {fields}.",
)


def record(story: Story, fields: Sequence[str]) -> str:
    """JSON of the given fields, in their order; each value is one word. "mood" is the ending under another name."""
    world = story.world
    values = {"hero": world.hero.label, "place": world.place.noun, "object": world.thing.noun, "ending": world.ending, "mood": world.ending, "helper": world.helper.kind}
    return json.dumps({field: values[field] for field in fields})


def draw_fields(rng: Random) -> tuple[str, ...]:
    """The four usual fields half of the time, else some fields in any order."""
    if rng.random() < 0.5:
        return FIELDS
    return tuple(rng.sample(("hero", "place", "object", rng.choice(("ending", "mood")), "helper"), rng.randint(2, 4)))


def listed(fields: Sequence[str]) -> str:
    """The fields as a sentence names them."""
    return f"{', '.join(fields[:-1])} and {fields[-1]}"


def record_chat(rng: Random) -> str:
    """A story given by the user, its record asked for once or twice; sometimes the story and its record as running text."""
    story = tell(draw_world(rng), rng, rng.uniform(0.0, 0.7))
    if rng.random() < 0.15:
        return f"{story.text}\n\n{record(story, FIELDS)}"
    turns = []
    for body in (f"{story.text}\n\n", *("",) * rng.randint(0, 2)):
        fields = draw_fields(rng)
        asked = rng.choice(REQUESTS).format(fields=listed(fields)) if fields != FIELDS or rng.random() < 0.6 else "Write the story's record as JSON."
        turns.append(f"<|im_start|>user\n{body}{asked}<|im_end|>\n<|im_start|>assistant\n{record(story, fields)}<|im_end|>\n")
    return "".join(turns)
