"""A vocabulary as plain data."""

import pytest

from forge.grammar.vocabulary import Encode, Vocabulary, ll_tokenizer


def test_vocabularies_have_the_same_fingerprint_only_if_they_are_equal():
    tokens, special, eos = [b"a", b"bc", b"", b"end"], [2, 3], frozenset([2, 3])
    others = [
        Vocabulary([b"ab", b"c", b"", b"end"], special, eos),
        Vocabulary([b"a", b"bd", b"", b"end"], special, eos),
        Vocabulary([*tokens, b""], special, eos),
        Vocabulary(tokens, [3], eos),
        Vocabulary(tokens, special, frozenset([3])),
    ]
    first = Vocabulary(tokens, special, eos)
    assert first.fingerprint == Vocabulary([*tokens], [*special], frozenset([3, 2])).fingerprint
    assert len({vocabulary.fingerprint for vocabulary in (first, *others)}) == 1 + len(others)


def test_what_the_library_swallows_is_kept_and_raised_once():
    def interrupted(text: str) -> list[int]:
        raise KeyboardInterrupt(text)

    encode = Encode(interrupted)
    encode.reraise()
    assert not encode.has_raised
    with pytest.raises(KeyboardInterrupt, match="fox"):
        encode("fox")
    assert encode.has_raised
    with pytest.raises(KeyboardInterrupt, match="fox"):
        encode.reraise()
    encode.reraise()
    assert not encode.has_raised


def test_without_a_tokenizer_a_text_is_that_of_its_longest_tokens():
    tokens = [b"a", b"b", b"ab", b"aba", b"end"]
    library = ll_tokenizer(Vocabulary(tokens, [4], frozenset([4])))
    assert library.tokenize_str("ababab") == [3, 1, 2]
