import io
from dataclasses import replace

import pytest

from forge.trace.records import BlockMap, ItemRecord, TableRecord
from forge.views.chat import ChatView, turn_sentence
from forge.views.terminal import ForgeConsole
from tests.views.records import LABEL, flat, piped, step, written


def test_an_answer_is_printed_as_it_comes_without_escapes():
    console = piped()
    view = ChatView(console, LABEL)
    view.step(step(1, 4, 1.0, "Hello \x1b[2J"))
    view.step(step(2, 1, 1.0, "[there]"))
    assert written(console) == "Hello ␛[2J[there]"


def test_a_turn_says_what_the_cache_saved():
    result = flat(5)
    first = replace(result.records[0], items=(ItemRecord(7, "prefill", 3, 1),))
    sentence = turn_sentence(replace(result, records=(first, *result.records[1:])))
    assert sentence.startswith("1 of 4 prompt tokens computed, 3 held · first token 2.1 ms")
    assert sentence.endswith("length")


def test_a_turn_whose_blocks_are_reported_ends_with_a_picture_of_them():
    console, result = piped(), flat(3)
    blocks = BlockMap(16, (TableRecord(7, False, (0,), 6, 6),), (1, 0, 0), (), (0,))
    shown = replace(result, records=tuple(replace(record, blocks=blocks) for record in result.records))
    ChatView(console, LABEL).finish(shown)
    assert "seq 0" in written(console) and "and keeps its 1 block" in written(console)


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_message_that_is_never_finished_ends_its_line(monkeypatch, end):
    def ends(prompt):
        raise end

    monkeypatch.setattr("builtins.input", ends)
    console = ForgeConsole(file=io.StringIO(), force_terminal=True)
    if end is EOFError:
        assert ChatView(console, LABEL).ask() is None
    else:
        with pytest.raises(KeyboardInterrupt):
            ChatView(console, LABEL).ask()
    assert [line for line in console.file.getvalue().splitlines() if "line cleared" not in line] == [""] * (
        1 if end is EOFError else 2
    )


def test_ctrl_c_in_a_pipe_ends_the_conversation_at_once(monkeypatch):
    def ends(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", ends)
    with pytest.raises(KeyboardInterrupt):
        ChatView(console := piped(), LABEL).ask()
    assert written(console) == ""
