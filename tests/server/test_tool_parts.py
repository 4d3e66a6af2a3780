"""Tool calls are read from text, however it is cut; what is no call stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.server.splitting import ToolCallSplitter

NAMES = {"weather", "time"}
ROME, NOON = '{"city": "Rome"}', '{"at": "no}<on\\"", "in": [{}]}'


def tag(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = {
    "one": (tag("weather", ROME), "", [("weather", ROME)]),
    "two": (tag("weather", ROME) + "\n" + tag("time", NOON), "", [("weather", ROME), ("time", NOON)]),
    "text before": ("Let me see.\n\n" + tag("time", "{}"), "Let me see.", [("time", "{}")]),
    "text behind": (tag("time", "{}") + "\nThere it is.", "There it is.", [("time", "{}")]),
    "text between": (tag("time", "{}") + "\nand so\n" + tag("time", "{}"), "and so", [("time", "{}")] * 2),
    "another order": (
        '<tool_call>{"arguments": {"city":"Rome"}, "name": "weather"}</tool_call>',
        "",
        [("weather", '{"city": "Rome"}')],
    ),
    "compact": ('<tool_call>{"name":"time","arguments":{"a":1}}</tool_call>', "", [("time", '{"a":1}')]),
    "no tag": ("1 < 2 and <tool> \n", "1 < 2 and <tool> \n", []),
    "unknown name": (" " + tag("wizard", ROME), " " + tag("wizard", ROME), []),
    "no json": ("a <tool_call>\nx\n</tool_call> b", "a <tool_call>\nx\n</tool_call> b", []),
    "no object": (tag("time", "5"), tag("time", "5"), []),
    "cut in the tag": ("so <tool_c", "so <tool_c", []),
    "cut in the name": ('so <tool_call>\n{"na', 'so <tool_call>\n{"na', []),
    "cut in the arguments": ('<tool_call>\n{"name": "time", "arguments": {"at": "', "", [("time", '{"at": "')]),
    "cut behind the arguments": (tag("time", ROME)[:-5], "", [("time", ROME)]),
    "broken arguments": ('<tool_call>{"name": "time", "arguments": {"a": </tool_call> so', "so", [("time", '{"a": ')]),
}


def whole(text: str, is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls by name and arguments, of a text that comes in one piece."""
    splitter = ToolCallSplitter(NAMES)
    content, calls = splitter.push(text)
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return content + splitter.finish(is_cut), [tuple(call["function"].values()) for call in calls]


@pytest.mark.parametrize("name", CASES)
def test_content_and_calls_of_a_whole_text(name):
    text, content, calls = CASES[name]
    assert whole(text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("so <tool_c", "so", []),
        ('so <tool_call>\n{"na', "so", []),
        ('<tool_call>\n{"name": "find', "", []),
        (tag("time", ROME) + "\n<tool_call>", "", [("time", ROME)]),
        (*CASES["cut in the arguments"],),
        ("1 <", "1 <", []),
    ],
)
def test_the_beginning_of_a_call_that_was_cut_is_no_content(text, content, calls):
    assert whole(text, is_cut=True) == (content, calls)


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_a_chunk_has_one_entry_for_each_call(length):
    text, splitter = "\n".join([tag("time", ROME), tag("weather", NOON), tag("time", "{}")]), ToolCallSplitter(NAMES)
    for start in range(0, len(text), length):
        _, entries = splitter.push(text[start : start + length])
        assert len({entry["index"] for entry in entries}) == len(entries)
    assert splitter.num_calls == 3


@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_pieces_add_up_to_the_same_however_the_text_is_cut(name, data):
    text, content, calls = CASES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    splitter, said, pieces = ToolCallSplitter(NAMES), "", []
    for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more, found = splitter.push(text[first:last])
        said, pieces = said + more, pieces + found
    said += splitter.finish()
    begun = [piece for piece in pieces if "id" in piece]
    assert [piece["index"] for piece in begun] == list(range(len(calls)))
    joined = [
        (one["function"]["name"], "".join(p["function"]["arguments"] for p in pieces if p["index"] == one["index"]))
        for one in begun
    ]
    assert (said, joined) == (content, calls)


def test_arguments_come_before_the_call_is_whole():
    splitter = ToolCallSplitter(NAMES)
    _, pieces = splitter.push('<tool_call>\n{"name": "weather", "arguments": {"ci')
    (piece,) = pieces
    assert piece["function"] == {"name": "weather", "arguments": '{"ci'}
    assert json.loads('{"ci' + splitter.push('ty": 1}}\n</tool')[1][0]["function"]["arguments"]) == {"city": 1}
