"""A tokenizer of 256 tokens, one for each byte, and three control tokens: nothing is trained and nothing is lost.

It is `Tokenizer` in all but encoding: there is nothing to merge and nothing to normalize, so `decode(encode(s)) == s`
for every text. Byte b is token b.
"""

import numpy as np

from forge.tokenizer.spec import BYTE_ALPHABET, TokenizerSpec, TokenType
from forge.tokenizer.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(CONTROL_TOKENS)
EOS_TOKEN_ID = 256 + CONTROL_TOKENS.index("<|im_end|>")


class ByteTokenizer(Tokenizer):
    """`Tokenizer` with one token per byte."""

    implementation = "bytes"

    def __init__(self) -> None:
        types = np.array([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(CONTROL_TOKENS), np.int32)
        names = {"eos_token_id": EOS_TOKEN_ID}
        super().__init__(TokenizerSpec((*BYTE_ALPHABET, *CONTROL_TOKENS), types, merges=(), special_ids=names))
        for table in (self.bytes_of, self.shown_bytes):
            table.update({byte: bytes([byte]) for byte in range(256)})

    def prepare(self) -> str:
        return self.implementation

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]
