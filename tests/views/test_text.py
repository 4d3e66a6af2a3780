import pytest

from forge.views.text import WordWrap, neutralise, one_line, quoted, tail


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("bell\x07 back\x08", "bell␇ back␈"),
        ("csi \x9b31m", "csi \ufffd31m"),
        ("rubout \x7f", "rubout ␡"),
        ("return\r", "return␍"),
        ("turned \u202eround", "turned \ufffdround"),
        ("half \ud83d", "half \ufffd"),
    ],
)
def test_a_control_character_becomes_a_visible_sign(raw, shown):
    assert neutralise(raw) == shown


def test_ordinary_text_of_any_script_is_left_alone():
    text = "a\tb\nc naïve 狐とランタン 🦊 [bold]"
    assert neutralise(text) == text


def test_every_code_point_comes_out_printable_or_as_line_and_tab():
    shown = neutralise("".join(map(chr, range(0x300))))
    assert not [c for c in shown if (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) and c not in "\n\t"]


def test_a_quoted_token_stays_on_its_line():
    assert quoted(' "\n\t\x1b\\') == '" \\"\\n\\t␛\\\\"'


def test_one_line_joins_white_space():
    assert one_line(" a\n\tb\x1b ") == "a b␛"


def test_tail_keeps_the_end_and_says_that_it_cut():
    assert tail("short", 10) == "short"
    cut = tail("word " * 100, 50)
    assert cut.startswith("…") and cut.endswith("word ") and len(cut) <= 51


def wrapped(width, *pieces):
    wrap = WordWrap(width)
    return "".join([*map(wrap.feed, pieces), wrap.flush()])


def test_wrapping_breaks_at_spaces_wherever_the_pieces_end():
    text = "the quick brown fox jumps over the lazy dog"
    expected = "the quick \nbrown fox \njumps over \nthe lazy \ndog"
    assert wrapped(10, text) == expected
    assert wrapped(10, *text) == expected
    assert wrapped(10, "the qu", "ick brown f", "ox jumps over the lazy dog") == expected


def test_wrapping_keeps_line_breaks_and_starts_anew_after_them():
    assert wrapped(10, "one two\n", "three four") == "one two\nthree four"


def test_a_word_longer_than_the_line_is_left_to_the_terminal():
    assert wrapped(4, "a ", "bcdefghijkl", " m") == "a \nbcdefghijkl \nm"


def test_wrapping_only_adds_line_breaks():
    text = '狐 is a  fox.\n\nIt said:\t"hello there", and ran '
    assert wrapped(12, *text).replace("\n", "") == text.replace("\n", "")
    assert wrapped(None, *text) == text
