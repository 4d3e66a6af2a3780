"""Chapter 11's experiment: what is forced, what is chosen, what is given up, and the answers to its exercises."""

import json
import math
import re

import pytest

from forge.experiments.constrained import FIELDS, Place, token_lines
from tests.cli.conftest import forge  # noqa: F401 (a fixture)
from tests.grammar.conftest import compiler, tokenizer  # noqa: F401 (fixtures)


def facts(run, *arguments: str) -> dict:
    found = run("constrained", "--only", "run", "--json", *arguments)
    assert found.status == 0, found.err
    return json.loads(found.out)


def test_a_record_is_mostly_forced_and_its_places_add_up(forge):  # noqa: F811
    found = facts(forge)
    places = found["places"]
    assert list(found["record"]) == ["hero", "place", "mood"]
    assert all(value in FIELDS[name] for name, value in found["record"].items())
    assert [place["text"] for place in places if not place["forced"]] == list(found["record"].values())
    assert found["num_tokens"] == found["num_forced"] + found["num_chosen"] == len(places) == 19
    assert "".join(place["text"] for place in places[:-1]) == found["text"] and places[-1]["text"] == "(end)"
    for place in places:
        assert place["probability"] <= place["mass"] * 1.0001 and place["allowed"] >= 1 and place["given_up"] >= 0
        assert (place["given_up"] == 0) == (place["text"] == place["preferred"])
    assert math.isclose(found["given_up"], sum(place["given_up"] for place in places))
    assert found["same_tokens"] and found["proposed_forwards"] < found["plain_forwards"] == 19


def test_the_order_of_the_fields_is_that_of_the_option(forge):  # noqa: F811
    assert list(facts(forge, "--fields", "mood,hero,object")["record"]) == ["mood", "hero", "object"]


def test_a_form_that_the_prompt_asks_for_costs_the_model_little_and_says_what_the_story_says(forge):  # noqa: F811
    unasked, asked = facts(forge), facts(forge, "--ask", "record", "--fields", "hero,place,object,mood")
    assert asked["prompt"].endswith("\n\nWrite a JSON object with hero, place, object and mood.")
    assert asked["record"] == {"hero": "Nutmeg", "place": "cave", "object": "scarf", "mood": "happy"}
    assert asked["given_up"] < 0.25 * unasked["given_up"]


def test_the_six_tokens_of_the_first_answer_are_those(compiler, tokenizer):  # noqa: F811
    from forge import StructuredOutput

    mask = compiler(StructuredOutput(choice=["happy", "sad"])).new_matcher().mask([])
    assert {tokenizer.token_text(i) for i in mask.nonzero()[0].tolist()} == {
        "happy", "hap", "h", "sad", "sa", "s",
    }  # fmt: skip


def test_the_picture_fits_and_says_what_was_chosen_without_colour(forge):  # noqa: F811
    found = forge("constrained", "--only", "run")
    assert found.status == 0 and "\x1b" not in found.out
    assert max(map(len, found.out.splitlines())) <= 80
    chosen = re.findall(r"\[(\w+)\]", found.out)
    assert chosen[:3] == list(facts(forge)["record"].values())
    assert "19 tokens: 16 had to come, 3 were chosen." in found.out


def test_counts_stand_under_their_tokens():
    place = Place(" fox", False, 1234, 0.5, 0.25, " fox", 0.0)
    forced = Place("{", True, 1, 0.5, 0.25, "I", 3.0)
    tokens, counts, _ = (line.plain for line in token_lines([forced, place, forced], 40))
    assert tokens == "{ [␣fox] {" and counts == "1 1,234  1"
    assert len(token_lines([place] * 9, 20)) == 9  # three rows of three


@pytest.mark.parametrize("given", ["", "age", "hero,age"])
def test_a_field_that_is_not_there_is_one_line(forge, given):  # noqa: F811
    found = forge("constrained", "--only", "run", "--fields", given)
    assert found.status == 2 and found.err.count("\n") == 1 and "hero, place, object, mood" in found.err
