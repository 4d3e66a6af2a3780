"""The glossary has every term that a chapter introduces and every symbol that a screen shows."""

import json
import re
from dataclasses import fields

import pytest

from forge.book.catalog import entries
from forge.book.chapter import Chapter, Finding, Predict, Prose
from forge.book.glossary import find_term, load_glossary
from forge.errors import UsageError
from forge.model.qwen3 import DenseLayerWeights
from forge.views.block_map import LEGEND

GLOSSARY = load_glossary()
OPERATIONS = [field.name for field in fields(DenseLayerWeights) if not field.name.endswith("_norm")]


def texts(chapter: Chapter) -> list[str]:
    found = []
    for block in chapter.blocks:
        if isinstance(block, Prose):
            found.append(block.text)
        elif isinstance(block, Predict):
            found += [block.question, block.why, *(choice.why for choice in block.choices)]
        if isinstance(block, Predict | Finding):
            found += [outcome.text for outcome in block.outcomes]
    return found


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.command)
def test_every_term_that_a_chapter_introduces_is_in_the_glossary(entry):
    introduced = [term for text in texts(entry.chapter) for term in re.findall(r"\*\*([^*{}]+)\*\*", text)]
    for term in introduced:
        assert find_term(" ".join(term.split()), GLOSSARY)


@pytest.mark.parametrize(
    "symbol", [*OPERATIONS, "swiglu", "write_kv", "rope", "0*4", "2*3!", "13!", "tok/s", "α", "KV held"]
)
def test_symbols_of_the_screens_are_in_the_glossary(symbol):
    assert find_term(symbol, GLOSSARY)


def test_every_sign_of_the_map_of_blocks_is_in_the_glossary():
    for sign in re.findall(r"(?:^|   )(\S)(?= \w)", LEGEND):
        if not sign.isdigit():
            assert find_term(sign, GLOSSARY)


def test_every_entry_is_read_once_and_says_something():
    names = [name for term in GLOSSARY for name in term.names]
    assert len(GLOSSARY) > 100 and not {name for name in names if names.count(name) > 1}
    assert all(term.text.endswith((".", ":")) and term.names for term in GLOSSARY)
    assert all(term.chapter is None or 1 <= term.chapter <= len(entries()) for term in GLOSSARY)


def test_a_term_is_found_in_any_case_and_number():
    assert find_term("Prefill", GLOSSARY).names[0] == "prefill"
    assert find_term("KV Caches", GLOSSARY).names[0] == "KV cache"
    assert find_term("17*9!", GLOSSARY).names[0] == "0*4 2*3! 13!"
    with pytest.raises(UsageError, match=r"did you mean .*prefill"):
        find_term("prefil", GLOSSARY)
    with pytest.raises(UsageError, match=r"did you mean kv "):
        find_term("KV", GLOSSARY)
    with pytest.raises(UsageError, match="forge glossary lists"):
        find_term("zzzzzz", GLOSSARY)


def test_the_command(forge):
    found = forge("glossary", "prefill")
    assert (
        found.status == 0 and "over the tokens of a prompt" in found.out and "forge kv-cache, explains it" in found.out
    )
    assert json.loads(forge("glossary", "prefill", "--json").out)["chapter"] == 2
    every = forge("glossary")
    assert every.status == 0 and max(map(len, every.out.splitlines())) <= 80 and "swiglu" in every.out
    assert forge("glossary", "prefil").status == 2
