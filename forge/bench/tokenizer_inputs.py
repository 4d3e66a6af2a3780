"""The seventeen kinds of text that a tokenizer is measured on: from one word to 200,000 characters, prose, code, chats,
several scripts. Each has the length that its kind has in the tables of Prelude's tokenizer, on which this is modelled.
"""

import json
from pathlib import Path

from forge.workload.judging import held_out_stories
from forge.workload.requests import PASSAGE

_TEXTS = Path(__file__).with_name("tokenizer_texts.json")
"""What they are cut from, beside stories."""


def inputs() -> dict[str, str]:
    """Text by kind."""
    texts = json.loads(_TEXTS.read_text(encoding="utf-8"))
    chinese, code, mixed = (texts[name] for name in ("chinese", "code", "mixed"))
    stories = "\n\n".join(held_out_stories())
    turns = [(role, PASSAGE if text is None else text) for role, text in texts["turns"]]
    chat = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return {
        "tiny": "river",
        "short_english": "The ferry went out at dusk, and did not come back. "[:51],
        "short_chinese": _cut(chinese, 90),
        "medium_prose": _cut(PASSAGE + " ", 674),
        "code_snippet": _cut(code, 470),
        "mixed_multilingual": _cut(mixed, 641),
        "long_repeat": _cut("the quick brown fox jumps over the lazy dog, and ", 2025),
        "long_unique": _cut(stories, 4000),
        "very_long": _cut(stories, 8000),
        "chat_template": _cut(chat, 212),
        "long_32K": _cut(stories, 32_000),
        "long_64K": _cut(stories, 64_000),
        "long_200K": _cut(stories, 200_000),
        "long_code_16K": _cut(code, 16_000),
        "multi_turn_chat_8K": _cut(chat, 21_370),
        "multi_turn_chat_32K": _cut(chat, 85_480),
        "long_chinese_32K": _cut(chinese, 31_998),
    }


def _cut(text: str, length: int) -> str:
    """So many characters of it; after the last comes the first."""
    return (text * (-(-length // len(text))))[:length]
