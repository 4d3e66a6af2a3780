"""The reference: Hugging Face `tokenizers`, built from a `TokenizerSpec`.

`ReferenceEncoder` holds the whole vocabulary. `PromptCutEncoder` is the same library and the same BPE, given only the
part of the vocabulary that one text can reach, because loading is what a short command pays for.

Why the cut is exact: a merge replaces two neighbours within one pre-token by their concatenation, so whatever BPE
produces is a substring of a pre-token. A token that is no substring of any of the text's pre-tokens can never appear,
nor can a merge that makes it ever apply; leaving them out changes nothing, and the order of the rest is kept.

Ledger, real Qwen vocabulary (151,936 tokens), a prompt of 240 characters: bound by touching every string once. Whole
vocabulary 190 to 250 ms (dictionary 23, splitting merges 30 to 50, BPE 142 to 160). Cut 8 to 15 ms (set lookups of the
tokens 5 to 8, of the merges 3 to 5.5, the rest under 0.5), once for all parts of a chat prompt. It loses when many
prompts come, so `encoders` counts them, and for long runs without a break, whose substrings grow with the square of the
length: `MAX_SUBSTRINGS`.

Both encoders take text that is already NFC and free of control and user-defined tokens: that is the tokenizer's part.
"""

from collections.abc import Sequence
from typing import Any

from forge.tokenizer.spec import TokenizerSpec

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions, in either case
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the one space or mark before it
    r"|\p{N}"  # each digit alone
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # a run of punctuation, with the line ends after it
    r"|\s*[\r\n]+"  # blank lines
    r"|\s+(?!\S)"  # spaces but the last, which belongs to the word after them
    r"|\s+"
)
"""The `qwen2` pre-tokenizer: where text is cut before BPE runs inside each part."""

MAX_SUBSTRINGS = 100_000
"""Distinct pre-tokens' substrings up to which cutting the vocabulary is cheaper than loading it."""


class ReferenceEncoder:
    """The whole vocabulary in Hugging Face `tokenizers`. Raises `TokenizerError` for merges that leave it."""

    name = "reference"

    def __init__(self, spec: TokenizerSpec) -> None:
        vocabulary = mergeable_vocabulary(spec)
        merges = [_pair(merge) for merge in spec.merges]
        self._tokenizer = _build(spec, vocabulary, merges, _pre_tokenizer())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class PromptCutEncoder:
    """Encodes a prompt with the vocabulary cut to what that prompt can reach; keeps nothing between prompts."""

    name = "prompt-cut reference"

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._pre_tokenizer = _pre_tokenizer()

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of each part of one prompt, or None when its pre-tokens are too long for the cut to be worth
        it."""
        pieces = {piece for part in parts for piece, _ in self._pre_tokenizer.pre_tokenize_str(part)}
        if sum(len(piece) * (len(piece) + 1) // 2 for piece in pieces) > MAX_SUBSTRINGS:
            return None
        vocabulary, merges = cut_vocabulary(self._spec, pieces)
        cut = _build(self._spec, vocabulary, merges, self._pre_tokenizer)
        return [cut.encode(part, add_special_tokens=False).ids for part in parts]


def mergeable_vocabulary(spec: TokenizerSpec) -> dict[str, int]:
    """Map each token that BPE may produce to its id. Raises `TokenizerError` when two tokens are equal."""
    vocabulary = dict(zip(spec.tokens, range(len(spec.tokens)), strict=True))
    if len(vocabulary) != len(spec.tokens):
        spec.check_vocabulary()
    for token_id in spec.unmergeable_ids:
        del vocabulary[spec.tokens[token_id]]
    return vocabulary


def cut_vocabulary(spec: TokenizerSpec, pieces: set[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the tokens and merges that can occur in `pieces` (pre-tokens in the byte alphabet), merges in their
    order."""
    reachable = {piece[i:j] for piece in pieces for i in range(len(piece)) for j in range(i + 1, len(piece) + 1)}
    vocabulary = {token: token_id for token_id, token in enumerate(spec.tokens) if token in reachable}
    for token_id in spec.unmergeable_ids:
        if vocabulary.get(spec.tokens[token_id]) == token_id:
            del vocabulary[spec.tokens[token_id]]
    candidates = {f"{token[:cut]} {token[cut:]}" for token in vocabulary for cut in range(1, len(token))}
    return vocabulary, [_pair(merge) for merge in filter(candidates.__contains__, spec.merges)]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer() -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _build(spec: TokenizerSpec, vocabulary: dict[str, int], merges: list[tuple[str, str]], pre_tokenizer: Any) -> Any:
    from tokenizers import Tokenizer, models

    try:
        model = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # the library raises a plain Exception or TypeError for merges it cannot take
        spec.check_vocabulary()
        raise spec.error("merges", f"the tokenizers library refuses them: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer
