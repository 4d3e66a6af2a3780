"""Text that may be shown: whole characters, nothing that a stop string may still swallow, never taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.engine.output_text import OutputText


class Pieces:
    """A detokenizer whose tokens are the pieces themselves."""

    def __init__(self, end: str = ""):
        self.end = end

    def push(self, piece):
        return piece

    def flush(self):
        end, self.end = self.end, ""
        return end


def shown(pieces, stop=(), end=""):
    """(what each piece released, what the end released, the stop string found)."""
    text = OutputText(Pieces(end), stop)
    released = []
    for piece in pieces:
        released.append(text.push(piece))
        if text.stopped_by is not None:
            break
    last = text.finish()
    assert text.text == "".join(released) + last
    return released, last, text.stopped_by


def test_without_stop_strings_everything_is_shown_at_once():
    assert shown(["a", "", "bc"]) == (["a", "", "bc"], "", None)


def test_a_stop_string_is_cut_out_with_what_follows():
    assert shown(["one two", " three"], ["wo"]) == (["one t"], "", "wo")


def test_a_stop_string_that_spans_tokens_is_held_back_from_its_first_character():
    assert shown(["a E", "N", "D b"], ["END"]) == (["a ", "", ""], "", "END")


def test_what_only_looked_like_a_stop_string_is_shown_once_that_is_clear():
    assert shown(["a E", "N", "E", " b"], ["END"]) == (["a ", "", "EN", "E b"], "", None)


def test_what_is_held_back_at_the_end_is_shown():
    assert shown(["a", "EN"], ["END"]) == (["a", ""], "EN", None)


def test_a_stop_string_found_inside_held_back_text():
    assert shown(["xaab", "c"], ["aabd", "ab"]) == (["xa"], "", "ab")
    assert shown(["aab", "c"], ["aaab", "abc"]) == (["a", ""], "", "abc")


def test_of_two_that_are_complete_at_once_the_longer_wins():
    assert shown(["x--", "-y"], ["-", "---"]) == (["x"], "", "-")
    assert shown(["xEND"], ["ND", "END"]) == (["x"], "", "END")


def test_overlapping_stop_strings_end_at_the_one_that_is_complete_first():
    for pieces in (["abc"], ["a", "bc"], ["ab", "c"], ["a", "b", "c"]):
        released, last, stopped_by = shown(pieces, ["abc", "b"])
        assert ("".join(released) + last, stopped_by) == ("a", "b")


def test_a_stop_string_completed_by_the_last_bytes_is_found():
    assert shown(["a"], ["\ufffd"], end="\ufffd") == (["a"], "", "\ufffd")


def test_nothing_is_shown_after_a_stop_string():
    text = OutputText(Pieces(), ["!"])
    text.push("a!b")

    assert text.push("c") == ""
    assert text.finish() == ""
    assert text.text == "a"


def test_finish_can_be_called_twice():
    text = OutputText(Pieces("z"), ["END"])
    text.push("aE")

    assert (text.finish(), text.finish()) == ("Ez", "")


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text("abc", max_size=4), max_size=12), STOPS, st.text("ab", max_size=2))
def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens(pieces, stops, end):
    whole = "".join(pieces) + end
    ends = [(whole.index(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    expected = whole[: min(ends)[0] + min(ends)[1]] if ends else whole

    released, last, _ = shown(pieces, stops, end)

    assert "".join(released) + last == expected


@given(st.lists(st.text("abc", min_size=1, max_size=3), max_size=12), STOPS)
def test_what_is_held_back_is_only_ever_the_beginning_of_a_stop_string(pieces, stops):
    text = OutputText(Pieces(), stops)
    for index, piece in enumerate(pieces):
        text.push(piece)
        if text.stopped_by is not None:
            return
        held = "".join(pieces[: index + 1])[len(text.text) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("stop", ["a" * 50, "ab" * 25])
def test_long_repetitive_text_is_released_without_delay(stop):
    text = OutputText(Pieces(), [stop])
    for _ in range(20):
        text.push("a" * 40 + "c")

    assert len(text.text) == 20 * 41


def test_the_stop_string_stays_where_it_is_wanted():
    text = OutputText(Pieces(), ["END"], include_stop=True)
    assert [text.push(piece) for piece in ("a E", "N", "D b")] == ["a ", "", "END"]
    assert text.finish() == "" and text.stopped_by == "END"


def test_stop_strings_are_not_searched_in_the_first_tokens():
    text = OutputText(Pieces(), ["b"], min_tokens=2)
    assert [text.push(piece) for piece in ("ab", "cb", "dbe")] == ["ab", "cb", "d"]
    assert text.stopped_by == "b"
