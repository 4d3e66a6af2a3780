"""A vocabulary as plain data."""

from forge.grammar.vocabulary import Vocabulary


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
