"""One token per byte: nothing is lost, whatever the text."""

import pytest
from hypothesis import given

from forge.errors import UsageError
from forge.tokenizer import StreamingDetokenizer
from forge.tokenizer.byte_tokenizer import CONTROL_TOKENS, EOS_TOKEN_ID, VOCAB_SIZE, ByteTokenizer
from tests.tokenizer.strategies import texts

TOKENIZER = ByteTokenizer()


@given(texts)
def test_every_text_comes_back_as_it_was(text):
    ids = TOKENIZER.encode(text)
    streamed = StreamingDetokenizer(TOKENIZER)

    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert "".join(map(streamed.push, ids)) + streamed.flush() == text


def test_a_byte_is_its_own_token():
    assert [TOKENIZER.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert TOKENIZER.vocab_size == VOCAB_SIZE == 259


def test_control_tokens_are_found_where_they_are_allowed_and_end_a_text():
    text = "hi<|im_end|>"

    assert TOKENIZER.encode(text, allow_special=True) == [*b"hi", EOS_TOKEN_ID]
    assert TOKENIZER.encode(text) == list(text.encode())
    assert TOKENIZER.decode([*b"hi", EOS_TOKEN_ID], skip_special=True) == "hi"
    assert TOKENIZER.eos_token_ids == {256, EOS_TOKEN_ID}
    assert all(map(TOKENIZER.is_hidden, range(256, 256 + len(CONTROL_TOKENS))))


def test_a_conversation_becomes_a_prompt():
    prompt = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])

    assert TOKENIZER.decode(TOKENIZER.encode(prompt, allow_special=True)) == prompt
    assert "<|im_start|>user\nhi<|im_end|>" in prompt


def test_half_a_character_is_refused():
    with pytest.raises(UsageError, match="surrogate"):
        TOKENIZER.encode("\ud800")
