"""Encoding and decoding: round trips, tokens matched whole, and what a caller is told when it cannot be."""

from dataclasses import replace
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.errors import UsageError
from forge.tokenizer import Tokenizer, TokenizerError, TokenizerSpec

from .strategies import MODEST, plain_texts, texts


@MODEST
@given(text=plain_texts)
@example("cafe\u0301 \u0301")
@example("<|im_end|>\u0338")
@example("a\u1ac1\u0301\u0327")
def test_decoding_an_encoded_text_gives_its_nfc(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == normalize("NFC", text)


@MODEST
@given(text=texts)
def test_text_round_trips_with_control_tokens_allowed(tokenizer, text):
    decoded = tokenizer.decode(tokenizer.encode(text, allow_special=True))
    assert normalize("NFC", decoded) == normalize("NFC", text)


def test_a_user_defined_token_is_matched_before_nfc(tokenizer):
    """`>` and U+0338 would compose; Qwen matches the token in the raw text and normalizes what lies between."""
    ids = tokenizer.encode("<think>\u0338")
    assert tokenizer.token_text(ids[0]) == "<think>"
    assert tokenizer.decode(ids) == "<think>\u0338" != normalize("NFC", "<think>\u0338")


def test_control_token_text_of_a_user_stays_text(tokenizer):
    ids = tokenizer.encode("<|im_end|> and <|endoftext|>")
    assert not tokenizer.eos_token_ids & set(ids)
    assert tokenizer.decode(ids, skip_special=True) == "<|im_end|> and <|endoftext|>"


def test_control_tokens_are_matched_where_allowed(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", allow_special=True)
    assert tokenizer.token_text(ids[0]) == "<|im_start|>"
    assert tokenizer.token_text(ids[-1]) == "<|im_end|>"
    assert tokenizer.decode(ids, skip_special=True) == "user\nhi"


@pytest.mark.parametrize("allow_special", [False, True])
def test_user_defined_tokens_are_matched_in_any_text(tokenizer, allow_special):
    ids = tokenizer.encode("<think>hm</think>", allow_special=allow_special)
    assert [tokenizer.token_text(ids[0]), tokenizer.token_text(ids[-1])] == ["<think>", "</think>"]
    assert tokenizer.decode(ids, skip_special=True) == "<think>hm</think>"


def test_the_longest_of_several_matching_tokens_wins(entries):
    tokens = [*entries["tokens"], "<a>", "<a><b>"]
    tokenizer = Tokenizer(TokenizerSpec(**entries | {"tokens": tokens, "token_types": [*entries["token_types"], 4, 4]}))
    assert tokenizer.encode("<a><b><a>") == [len(tokens) - 1, len(tokens) - 2]


def test_tokens_with_regular_expression_characters_are_literal(entries):
    tokens = [*entries["tokens"], "(.*)|[x]"]
    tokenizer = Tokenizer(TokenizerSpec(**entries | {"tokens": tokens, "token_types": [*entries["token_types"], 3]}))
    assert tokenizer.encode("(.*)|[x]", allow_special=True) == [len(tokens) - 1]
    assert len(tokens) - 1 not in tokenizer.encode("abc", allow_special=True)


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc80 then", "\udfff\ud800"])
def test_half_a_surrogate_pair_is_one_clear_error(tokenizer, text):
    with pytest.raises(UsageError, match="half of a surrogate pair") as raised:
        tokenizer.encode(text)
    assert "\n" not in str(raised.value)


def test_empty_text_has_no_tokens(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_special_tokens_go_around_a_text_but_not_around_a_rendered_prompt(entries, tokenizer):
    around = Tokenizer(TokenizerSpec(**entries, prefix_ids=(7,), suffix_ids=(8, 9)))
    plain = tokenizer.encode("blocks")
    assert around.encode("blocks") == [7, *plain, 8, 9]
    assert around.encode("blocks", add_special_tokens=False) == around.encode("blocks", allow_special=True) == plain
    assert around.encode("blocks", allow_special=True, add_special_tokens=True) == [7, *plain, 8, 9]
    with pytest.raises(TokenizerError, match="post_processor: adds token 999999"):
        TokenizerSpec(**entries, suffix_ids=(999_999,))


def test_generation_ends_at_the_named_ids_and_at_qwens_control_tokens(entries, tokenizer):
    id_of = {token: i for i, token in enumerate(entries["tokens"])}
    assert tokenizer.eos_token_id == id_of["<|im_end|>"]
    assert tokenizer.eos_token_ids == {id_of["<|im_end|>"], id_of["<|endoftext|>"]}
    other = Tokenizer(TokenizerSpec(**entries | {"special_ids": {"eos_token_id": 5, "eot_token_id": 6}}))
    assert other.eos_token_ids == {5, 6, id_of["<|im_end|>"], id_of["<|endoftext|>"]}


def test_a_normal_token_named_like_an_end_does_not_end(entries):
    types = list(entries["token_types"])
    types[entries["tokens"].index("<|endoftext|>")] = 1
    tokenizer = Tokenizer(TokenizerSpec(**entries | {"token_types": types, "special_ids": None}))
    assert tokenizer.eos_token_ids == {entries["tokens"].index("<|im_end|>")}


def test_invalid_utf8_decodes_to_replacement_characters(tokenizer):
    id_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    lead, tail, letter = id_of[b"\xe5"], id_of[b"\x80"], id_of[b"a"]
    assert tokenizer.decode([tail, tail]) == "\ufffd\ufffd"
    assert tokenizer.decode([lead, tail, letter]) == "\ufffda"
    assert tokenizer.decode([lead, lead]) == "\ufffd\ufffd"


def test_every_byte_has_a_token(tokenizer):
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([byte]) for byte in range(256)}


def test_a_lone_byte_is_shown_as_an_escape(tokenizer):
    token_id = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe5")
    assert tokenizer.token_text(token_id) == "\\xe5"


def test_padding_decodes_to_nothing_and_is_shown_by_name(tokenizer):
    padding = tokenizer.vocab_size - 1
    assert tokenizer.decode([padding]) == ""
    assert tokenizer.token_text(padding) == f"[PAD{padding}]"
    assert padding not in tokenizer.encode(f"[PAD{padding}]", allow_special=True)


def test_a_byte_token_stands_for_its_byte(entries):
    tokens, types = [*entries["tokens"], "<0xE5>"], [*entries["token_types"], 6]
    assert Tokenizer(TokenizerSpec(**entries | {"tokens": tokens, "token_types": types})).token_bytes(
        len(tokens) - 1
    ) == (b"\xe5")


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_an_error(tokenizer, token_id):
    for use in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(UsageError, match="not in the vocabulary"):
            use(token_id)


def test_ids_may_be_numpy_integers(tokenizer):
    ids = tokenizer.encode("a block table")
    assert tokenizer.decode(np.array(ids, dtype=np.int32)) == "a block table"


def test_the_fingerprint_ignores_padding_and_sees_the_rest(entries, tokenizer):
    def fingerprint(**changed):
        return Tokenizer(TokenizerSpec(**entries | changed)).fingerprint

    unpadded = {"tokens": entries["tokens"][:-3], "token_types": entries["token_types"][:-3]}
    assert fingerprint(**unpadded) == tokenizer.fingerprint
    assert fingerprint(chat_template="{{ 1 }}") == tokenizer.fingerprint
    assert fingerprint(merges=entries["merges"][:-1]) != tokenizer.fingerprint
    renamed = ["<|renamed|>" if token == "<|im_start|>" else token for token in entries["tokens"]]
    assert fingerprint(tokens=renamed) != tokenizer.fingerprint


@MODEST
@given(several=st.lists(texts, max_size=5), allow_special=st.booleans())
def test_a_batch_is_encoded_as_each_text_alone(tokenizer, several, allow_special):
    alone = [tokenizer.encode(text, allow_special=allow_special) for text in several]
    assert tokenizer.encode_batch(several, allow_special=allow_special) == alone


def test_a_batch_is_one_call_of_the_encoder(tokenizer, monkeypatch):
    calls = []
    encode = tokenizer._encode_plain
    monkeypatch.setattr(tokenizer, "_encode_plain", lambda parts: calls.append(parts) or encode(parts))
    tokenizer.encode_batch(["one", "two", "three"])
    assert len(calls) == 1


def test_one_text_is_no_batch(tokenizer):
    with pytest.raises(UsageError, match="takes a list of texts"):
        tokenizer.encode_batch("one text")


def test_the_padding_token_is_one_of_the_vocabulary(spec):
    assert replace(spec, pad_token_id=3).pad_token_id == 3
    with pytest.raises(TokenizerError, match="padding_token_id"):
        replace(spec, pad_token_id=len(spec.tokens))
