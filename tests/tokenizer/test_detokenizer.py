"""Streaming: the same text as decoding everything at once, as early as it is certain."""

from hypothesis import given
from hypothesis import strategies as st

from forge.tokenizer import StreamingDetokenizer

from .strategies import MODEST, texts


def stream(tokenizer, ids, *, skip_special):
    detokenizer = StreamingDetokenizer(tokenizer, skip_special=skip_special)
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.flush()]


@MODEST
@given(data=st.data(), skip_special=st.booleans())
def test_a_stream_of_any_ids_joins_to_what_decode_gives(tokenizer, data, skip_special):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    assert "".join(stream(tokenizer, ids, skip_special=skip_special)) == tokenizer.decode(
        ids, skip_special=skip_special
    )


@MODEST
@given(data=st.data())
def test_a_stream_of_bytes_joins_to_what_decode_gives(tokenizer, data):
    """Single bytes only, so that most sequences are invalid UTF-8 in some way."""
    byte_ids = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    ids = data.draw(st.lists(st.sampled_from(byte_ids), max_size=40))
    parts = stream(tokenizer, ids, skip_special=True)
    expected = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
    assert "".join(parts) == expected


@MODEST
@given(text=texts)
def test_valid_text_streams_without_replacement_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    parts = stream(tokenizer, ids, skip_special=False)
    assert "".join(parts) == tokenizer.decode(ids)
    assert parts[-1] == ""
    assert sum(part.count("\ufffd") for part in parts) == tokenizer.decode(ids).count("\ufffd")


def ids_of_bytes(tokenizer, data):
    id_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [id_of[bytes([byte])] for byte in data]


def test_an_incomplete_character_is_held_back_until_its_last_byte(tokenizer):
    ids = ids_of_bytes(tokenizer, "é👍".encode())
    assert stream(tokenizer, ids, skip_special=True) == ["", "é", "", "", "", "👍", ""]


def test_an_incomplete_character_at_the_end_comes_with_the_flush(tokenizer):
    assert stream(tokenizer, ids_of_bytes(tokenizer, b"a\xf0\x9f\x91"), skip_special=True) == [
        "a",
        "",
        "",
        "",
        "\ufffd",
    ]


def test_an_invalid_byte_is_replaced_as_soon_as_that_is_certain(tokenizer):
    assert stream(tokenizer, ids_of_bytes(tokenizer, b"\xffa\xe5b"), skip_special=True) == [
        "\ufffd",
        "a",
        "",
        "\ufffdb",
        "",
    ]


def test_after_a_flush_a_new_stream_begins(tokenizer):
    detokenizer = StreamingDetokenizer(tokenizer)
    lead, tail = ids_of_bytes(tokenizer, "é".encode())
    assert (detokenizer.push(lead), detokenizer.flush()) == ("", "\ufffd")
    assert detokenizer.push(tail) == "\ufffd"
    assert detokenizer.flush() == ""


def test_control_tokens_are_skipped_or_shown(tokenizer):
    ids = tokenizer.encode("<think>hi<|im_end|>", allow_special=True)
    assert "".join(stream(tokenizer, ids, skip_special=True)) == "<think>hi"
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "<think>hi<|im_end|>"
