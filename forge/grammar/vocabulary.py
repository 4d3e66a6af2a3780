"""A tokenizer's vocabulary as `llguidance` takes it: the bytes of every token.

Byte-level BPE is handed over exactly: a token is the bytes that it stands for, also where they are only part of a
character. Control tokens are marked as special, so that no text of a grammar ever matches them; padding stands for no
bytes and is never allowed.
"""

from typing import TYPE_CHECKING, Any

from forge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


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
    return LLTokenizer(vocabulary, eos_token=sorted(tokenizer.eos_token_ids))
