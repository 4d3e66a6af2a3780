"""A tokenizer's vocabulary as `llguidance` takes it: the bytes of every token.

Byte-level BPE is handed over exactly: a token is the bytes that it stands for, also where they are only part of a
character. Control tokens are marked as special, so that no text of a grammar ever matches them; padding stands for no
bytes and is never allowed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from forge.tokenizer import Tokenizer

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (*range(1, 13), 16, 20, 30)
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{length}}}" for length in _LENGTHS), f"{_IN_STRING}+"]
"""Tokens that mostly may come all or none of them, which the library then need not walk through one by one: those of so
many characters at most that stand for text within a JSON string.

Ledger, 151,936 tokens, an answer of 172 tokens with strings of 40 characters at most: the library's own slices have the
lengths 10 and 30 alone, and wherever fewer characters are left in a string it walks the whole vocabulary: 2 ms a mask,
65 ms an answer. With these it is 60 µs and 5.5 ms. They take 0.7 s more when the vocabulary is first loaded."""


_MOST_FORCED, _NEAR_THE_CUT = 512, 64
"""Characters of forced text that are tokenized at once, and the tokens at their end that the cut may have changed.

Ledger, 151,936 tokens, a choice of 57,000 characters: 0.2 ms a mask, 20 ms without the cut."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model as plain data, which another process can be given."""

    tokens: list[bytes]
    """The bytes of each token, by token id; no bytes for padding."""
    special_token_ids: list[int]
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: "Tokenizer", vocab_size: int) -> "Vocabulary":
        """Take a tokenizer's vocabulary. vocab_size: the model's, which may have room for more tokens than the
        tokenizer has."""
        size = min(vocab_size, tokenizer.vocab_size)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)] + [b""] * (vocab_size - size)
        hidden = [token_id for token_id in range(size) if tokenizer.is_hidden(token_id)]
        return cls(tokens, hidden, tokenizer.eos_token_ids)

    @cached_property
    def fingerprint(self) -> str:
        """A text that is equal for equal vocabularies."""
        digest = hashlib.sha256(repr((self.special_token_ids, sorted(self.eos_token_ids))).encode())
        digest.update(b"".join([b"%d:%b" % (len(token), token) for token in self.tokens]))
        return digest.hexdigest()


class Encode:
    """Tokenizes texts for the library. The library swallows what its callbacks raise, and calls the grammar too
    complex: so an exception, Ctrl-C among them, is kept until `reraise`."""

    def __init__(self, encode: Callable[[str], list[int]]):
        self._encode = encode
        self._error: BaseException | None = None

    def __call__(self, text: str) -> list[int]:
        try:
            return self._encode(text)
        except BaseException as error:
            self._error = error
            raise

    @property
    def has_raised(self) -> bool:
        return self._error is not None

    def reraise(self) -> None:
        """Raise what the library has swallowed since the last time."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class _Wrapper:
    """The object that `LLTokenizer` reads, and calls to tokenize forced text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]):
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_token_ids
        self.eos_token_id = min(vocabulary.eos_token_ids)
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text. Of a long text the first tokens are enough, since each call passes all that is left."""
        if len(text) <= _MOST_FORCED:
            return self._encode(text)
        return self._encode(text[:_MOST_FORCED])[:-_NEAR_THE_CUT]


def ll_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> "LLTokenizer":
    """Build the library's tokenizer. encode: the token ids of a text; None takes the longest token that fits, again and
    again.

    Ledger, 151,936 tokens: 1 s, in which the library holds the interpreter's lock."""
    from llguidance import LLTokenizer

    wrapper: Any = _Wrapper(vocabulary, encode or (lambda text: library.greedy_tokenize(text)))
    library = LLTokenizer(wrapper, eos_token=sorted(vocabulary.eos_token_ids), slices=_SLICES)
    return library
