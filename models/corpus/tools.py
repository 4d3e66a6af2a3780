"""Conversations with tools, in the form that Qwen3's chat template gives them: a call, its result, and a sentence about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from .lexicon import ANIMAL_NAMES, BOY_NAMES, GIRL_NAMES, KINDS, PLACES, THINGS
from .stories import article, draw_world, tell

NAMES = (*GIRL_NAMES, *BOY_NAMES, *ANIMAL_NAMES)
BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@dataclass(frozen=True)
class Tool:
    """A function: its one argument, the field of its result, what it is asked for with, and how its result is told."""

    name: str
    argument: str
    result: str
    descriptions: tuple[str, ...]
    requests: tuple[str, ...]
    answers: tuple[str, ...]

    def signature(self, description: str) -> str:
        """As the template shows it to the model: one line of JSON."""
        parameters = {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}
        function = {"name": self.name, "description": description, "parameters": parameters}
        return json.dumps({"type": "function", "function": function})


TOOLS = (
    Tool(
        "find_object", "place", "object",
        ("Find the object that lies at a place.", "Look for an object at a place.", "Which object is at this place?"),
        ("What is {at}?", "What can you find {at}?", "Look {at}, please.", "Is there something {at}?", "Find the object {at}."),
        ("There is {a_object} {at}.", "I found {a_object} {at}."),
    ),
    Tool(
        "find_place", "object", "place",
        ("Find the place where an object lies.", "Where is this object?", "Look for the place of an object."),
        ("Where is the {object}?", "Find the {object}, please.", "Where can I find the {object}?", "Who knows where the {object} is?"),
        ("The {object} is {at}.", "You will find the {object} {at}."),
    ),
    Tool(
        "find_helper", "name", "helper",
        ("Find who helped a hero.", "Who is the helper of this hero?"),
        ("Who helped {name}?", "Find the helper of {name}.", "Who is the helper of {name}?"),
        ("{A_helper} helped {name}.", "It was {a_helper} who helped {name}."),
    ),
)  # fmt: skip


def system(tools: tuple[Tool, ...], rng: Random) -> str:
    """The system message that offers the tools."""
    lines = "".join("\n" + tool.signature(rng.choice(tool.descriptions)) for tool in tools)
    return f"<|im_start|>system\n{BEFORE_TOOLS}{lines}{AFTER_TOOLS}<|im_end|>\n"


def exchange(tool: Tool, rng: Random) -> str:
    """A request, the call that it needs, the result and the answer."""
    place, noun, helper = rng.choice(list(PLACES.values())), rng.choice(list(THINGS)), rng.choice(list(KINDS))
    values = {"place": place.noun, "object": noun, "name": rng.choice(NAMES), "helper": helper}
    slots = values | {"at": place.at, "a_object": article(noun), "a_helper": article(helper), "A_helper": article(helper).capitalize()}
    call = json.dumps({"name": tool.name, "arguments": {tool.argument: values[tool.argument]}})
    result = json.dumps({tool.result: values[tool.result]})
    return (
        f"<|im_start|>user\n{rng.choice(tool.requests).format(**slots)}<|im_end|>\n"
        f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{rng.choice(tool.answers).format(**slots)}<|im_end|>\n"
    )


def tool_chat(rng: Random) -> str:
    """One to three exchanges with some of the tools on offer; now and then a request that needs none."""
    tools = tuple(rng.sample(TOOLS, rng.choice((1, 1, 2, 3))))
    parts = [system(tools, rng)]
    for _ in range(rng.randint(1, 3)):
        parts.append(exchange(rng.choice(tools), rng))
    if rng.random() < 0.2:
        story = tell(draw_world(rng), rng, 0.3)
        parts.append(f"<|im_start|>user\nTell me a story about {article(story.world.hero.kind)}.<|im_end|>\n<|im_start|>assistant\n{story.text}<|im_end|>\n")
    return "".join(parts)
