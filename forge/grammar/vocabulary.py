"""A tokenizer's vocabulary as `llguidance` takes it: the bytes of every token.

Byte-level BPE is handed over exactly: a token is the bytes that it stands for, also where they are only part of a
character. Control tokens are marked as special, so that no text of a grammar ever matches them; padding stands for no
bytes and is never allowed.
"""

from typing import TYPE_CHECKING, Any

from forge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (*range(1, 13), 16, 20, 30)
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{length}}}" for length in _LENGTHS), f"{_IN_STRING}+"]
"""Tokens that mostly may come all or none of them, which the library then need not walk through one by one: those of so
many characters at most that stand for text within a JSON string.

Ledger, 151,936 tokens, an answer of 172 tokens with strings of 40 characters at most: the library's own slices have the
lengths 10 and 30 alone, and wherever fewer characters are left in a string it walks the whole vocabulary: 2 ms a mask,
65 ms an answer. With these it is 60 µs and 5.5 ms. They take 0.7 s more when the vocabulary is first loaded."""


class _Vocabulary:
    """What `LLTokenizer` reads. It calls the object to tokenize forced text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        size = min(vocab_size, tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)] + [b""] * (vocab_size - size)
        self.special_token_ids = [token_id for token_id in range(size) if tokenizer.is_hidden(token_id)]
        self.eos_token_id = min(tokenizer.eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def ll_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> "LLTokenizer":
    """vocab_size: the model's, which may have room for more tokens than the tokenizer has."""
    from llguidance import LLTokenizer

    vocabulary: Any = _Vocabulary(tokenizer, vocab_size)  # what the library takes is not in its annotations
    return LLTokenizer(vocabulary, eos_token=sorted(tokenizer.eos_token_ids), slices=_SLICES)
