import json
import re
from random import Random

import pytest

from forge.tokenizer.chat_template import ChatTemplate
from models.consistency import consistency
from models.corpus.documents import FACTS, STORIES, document
from models.corpus.facts import facts_and_questions
from models.corpus.questions import ASKERS, LABELS, Phrasing, ask
from models.corpus.records import FIELDS, record, record_chat
from models.corpus.stories import Story, draw_world, tell
from models.corpus.tools import tool_chat
from models.export import CHAT_TEMPLATE


def told(number: int) -> Story:
    rng = Random(number)
    return tell(draw_world(rng), rng, 0.5)


@pytest.mark.parametrize("write", [*STORIES, *FACTS])
def test_every_kind_of_document_is_a_function_of_its_number_and_has_no_slot_left(write):
    for number in range(50):
        text = document(number, {write: 1.0})
        assert text == document(number, {write: 1.0})
        assert not re.search(r"\{\w+\}", text)


@pytest.mark.parametrize("kind", ASKERS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_is_a_label_and_an_option(kind, held_out):
    for number in range(100):
        question = ask(told(number), Random(number), kind, held_out)
        assert question.answer in LABELS[kind]
        assert question.answer in question.options


def test_a_phrasing_that_is_held_out_is_never_used_in_training():
    for kind in set(ASKERS) - {"object"}:
        cases = [(told(n), f"{n} {k}", kind) for n in range(20) for k in range(60)]
        trained = {ask(story, Random(seed), kind).text for story, seed, kind in cases}
        assert not trained & {ask(story, Random(seed), kind, held_out=True).text for story, seed, kind in cases}


def test_yes_and_no_are_equally_frequent():
    of_stories = [ask(told(n), Random(n), "yes_no").answer for n in range(1000)]
    of_facts = [q.answer for n in range(500) for q in facts_and_questions(Random(n))[1] if q.kind == "yes_no"]
    for answers in (of_stories, of_facts):
        assert 0.45 < answers.count("yes") / len(answers) < 0.55


def test_a_false_place_or_object_is_nowhere_in_the_text():
    story = told(1)
    for noun in (Phrasing(Random(n), story.text).absent(LABELS["place"]) for n in range(100)):
        assert not re.search(rf"\b{noun}\b", story.text.lower())


def test_a_record_is_json_and_says_what_the_story_says():
    for number in range(100):
        story = told(number)
        values = json.loads(record(story, FIELDS))
        assert list(values) == list(FIELDS)
        assert values["ending"] in ("happy", "sad")
        for field in ("hero", "place", "object"):
            assert values[field].lower() in story.text.lower()


def test_every_record_of_a_conversation_parses():
    for number in range(100):
        for answer in re.findall(r"assistant\n(\{.*?)<\|im_end\|>", record_chat(Random(number))):
            json.loads(answer)


def test_the_chat_template_writes_tools_and_calls_as_the_corpus_does():
    """Render the messages of a document with tools: the template of the files must give its text back."""
    for number in range(30):
        text = tool_chat(Random(number))
        tools = [json.loads(line) for line in re.search(r"<tools>\n(.*?)\n</tools>\n", text, re.S)[1].splitlines()]
        messages = []
        for role, content in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.S)[1:]:
            if call := re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", content):
                function = json.loads(call[1])
                calls = [{"type": "function", "function": function}]
                messages.append({"role": role, "content": "", "tool_calls": calls})
            elif response := re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", content):
                messages.append({"role": "tool", "content": response[1]})
            else:
                messages.append({"role": role, "content": content})
        assert render(messages, tools) == text


def test_the_chat_template_without_tools_is_plain_chatml():
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages, None, add_generation_prompt=True) == expected


def render(messages, tools, add_generation_prompt=False):
    return ChatTemplate(CHAT_TEMPLATE, {}).render(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def test_stories_of_the_corpus_are_consistent():
    assert consistency(told(number).text for number in range(200)).share > 0.995


@pytest.mark.parametrize("kind", ["object", "name", "kind", "place"])
def test_a_detail_that_changes_under_way_is_counted(kind):
    text = (
        "Once upon a time, there was a little fox named Maple. Maple had a brass lantern and a rusty key. Maple went "
        "to the river. Among the reeds, the fox met Willow, a young owl. "
    )
    change = {
        "object": "The drum glowed.",
        "name": "Pebble laughed.",
        "kind": "The bear laughed.",
        "place": "It lay on the beach.",
    }
    assert consistency([text]).share == 1.0
    found = consistency([text + change[kind]])
    assert found.total[kind] - found.right[kind] == 1
    assert len(found.wrong) == 1
