"""An untrained vocabulary: byte-level BPE of any size, laid out as Qwen's, for models of random weights.

The bytes come first in Qwen's order, then tokens made by merges, then Qwen's 26 added tokens, then padding. At the full
151,936 every one of those has the id that it has in Qwen3 (`<|im_end|>` is 151,645). It depends on its size and on
nothing else, so any two synthetic models of one size share it, and one may draft for the other.

The merges join letters into pieces of words, likelier letters first and shorter pieces rather than longer ones, with
and without the space before a word. Text is cut into tokens of about two letters, where a trained vocabulary has four;
but they are made by as many merges, and by the same code.
"""

from dataclasses import dataclass

import numpy as np

from forge.errors import UsageError
from forge.tokenizer.byte_level import BYTE_ALPHABET
from forge.tokenizer.spec import TokenType

QWEN_NORMAL_TOKENS = 151_643
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
USER_DEFINED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
MIN_VOCABULARY = 256 + 1 + len(CONTROL_TOKENS) + len(USER_DEFINED_TOKENS)
"""One of them made by a merge: GGUF cannot hold an empty list, and no reader takes a tokenizer without merges."""

_LETTERS = "etaoinshrdlcumwfgypbvkjxqzETAOINSHRDLCUMWFGYPBVKJXQZ"
_SPACE = "Ġ"
_LONGEST = 12
_DRAWS = 1 << 16


@dataclass(frozen=True)
class SyntheticVocabulary:
    """As a GGUF file has it; id = index."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def synthetic_vocabulary(size: int) -> SyntheticVocabulary:
    """Build a vocabulary of exactly `size` tokens. Raises `UsageError` for one that has no room for Qwen's own."""
    if size < MIN_VOCABULARY:
        needed = f"bytes, a merge and Qwen's own tokens take {MIN_VOCABULARY}"
        raise UsageError(f"a vocabulary of {size} is too small: {needed}")
    added = (*CONTROL_TOKENS, *USER_DEFINED_TOKENS)
    num_normal = min(QWEN_NORMAL_TOKENS, size - len(added))
    merges = _merges(num_normal - 256)
    tokens = [*sorted(BYTE_ALPHABET), *("".join(pair) for pair in merges), *added]
    types = [TokenType.NORMAL] * num_normal
    types += [TokenType.CONTROL] * len(CONTROL_TOKENS) + [TokenType.USER_DEFINED] * len(USER_DEFINED_TOKENS)
    padding = [f"[PAD{token_id}]" for token_id in range(len(tokens), size)]
    types += [TokenType.UNUSED] * len(padding)
    return SyntheticVocabulary(tokens + padding, list(map(int, types)), list(map(" ".join, merges)))


def _merges(count: int) -> list[tuple[str, str]]:
    """`count` merges, each of two tokens that exist by then into a third that did not."""
    rng = np.random.default_rng(0)
    rights = list(_LETTERS)
    lefts = [_SPACE, *_LETTERS]
    known: set[str] = set()
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        for left_draw, right_draw in (rng.random((_DRAWS, 2)) ** 3).tolist():  # the cube prefers what came early
            left, right = lefts[int(left_draw * len(lefts))], rights[int(right_draw * len(rights))]
            joined = left + right
            if joined in known or len(joined) > _LONGEST:
                continue
            known.add(joined)
            merges.append((left, right))
            lefts.append(joined)
            if left[0] != _SPACE:
                rights.append(joined)
            if len(merges) == count:
                break
    return merges
