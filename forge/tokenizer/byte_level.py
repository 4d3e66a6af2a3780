"""The byte alphabet of byte-level BPE: 256 printable characters, one for each byte.

A vocabulary in a file is a list of strings, but the tokens are byte strings, and many bytes have no character of their
own. GPT-2 settled it: the printable bytes stand for themselves, and the other 68, in order, are U+0100, U+0101, … So a
space is written ``Ġ`` (U+0120) and a newline ``Ċ`` (U+010A). This file owns that correspondence and nothing else.

GPT-2: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from collections.abc import Iterator

_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


def _alphabet() -> Iterator[str]:
    num_unprintable = 0
    for byte in range(256):
        if byte in _PRINTABLE:
            yield chr(byte)
        else:
            yield chr(0x100 + num_unprintable)
            num_unprintable += 1


BYTE_ALPHABET: tuple[str, ...] = tuple(_alphabet())
"""`BYTE_ALPHABET[byte]` is the character that stands for the byte."""

_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


def from_byte_alphabet(token: str) -> bytes:
    """Return the bytes that `token` stands for; a token with any character outside the alphabet stands for its own
    UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")
