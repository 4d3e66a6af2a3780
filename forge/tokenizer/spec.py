"""A tokenizer as plain data: the vocabulary, the merges and the few switches beside them, checked.

`TokenizerSpec` is what every implementation is built from, whatever file it came from. It owns the checks that a file's
tokenizer is one that forge supports (byte-level BPE with Qwen's pre-tokenizer), and never encodes anything.

What is checked when: structure (kinds, lengths, ids in range, the byte alphabet) always; that each merge is well formed
and stays inside the vocabulary at once for a small vocabulary, and for a large one by the loader of the merges, because
at 151,936 tokens that check alone costs several times what a short prompt needs (`check_vocabulary` does it on
request).

The byte alphabet of byte-level BPE is 256 printable characters, one for each byte: a vocabulary in a file is a list of
strings, but the tokens are byte strings, and many bytes have no character of their own. GPT-2 settled it: the printable
bytes stand for themselves, and the other 68, in order, are U+0100, U+0101, … So a space is written ``Ġ`` (U+0120) and a
newline ``Ċ`` (U+010A).

GPT-2: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from forge.errors import ForgeError

_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
_STAND_INS = map(chr, count(0x100))

BYTE_ALPHABET = tuple(chr(byte) if byte in _PRINTABLE else next(_STAND_INS) for byte in range(256))
"""`BYTE_ALPHABET[byte]` is the character that stands for the byte."""

_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


def from_byte_alphabet(token: str) -> bytes:
    """Return the bytes that `token` stands for; a token with any character outside the alphabet stands for its own
    UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")


Scalar = TypeVar("Scalar", str, int, bool)

SUPPORTED_MODEL = "gpt2"
"""`tokenizer.ggml.model` of byte-level BPE."""

SUPPORTED_PRE = "qwen2"
"""`tokenizer.ggml.pre`: how text is split before BPE. Qwen2, Qwen2.5 and Qwen3 share it."""

SMALL_VOCABULARY = 32_768
"""Tokens up to which checking and loading everything costs less than being clever about it (a few milliseconds)."""

MAX_MATCHED_TOKENS = 8_192
"""Control and user-defined tokens are looked for in the text one by one; Qwen3 has 26."""

_END_OF_GENERATION_NAMES = ("<|endoftext|>", "<|im_end|>")
_END_OF_GENERATION_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_BYTE_ALPHABET_SET = frozenset(BYTE_ALPHABET)


class TokenizerError(ForgeError):
    """A file's tokenizer is malformed or of a kind that forge does not support; the message names the file's key."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, with GGUF's numbers."""

    NORMAL = 1
    """Text in the byte alphabet, made by merges."""
    UNKNOWN = 2
    CONTROL = 3
    """Structure, such as `<|im_end|>`: matched in text only where the caller allows it, hidden by `skip_special`."""
    USER_DEFINED = 4
    """Matched in any text and shown as text, such as Qwen3's `<think>`."""
    UNUSED = 5
    """Padding of the vocabulary: never made, stands for no text."""
    BYTE = 6


class TokenizerMetadata(Protocol):
    """The part of a GGUF file that `spec_from_gguf` needs: `forge.gguf.GGUFFile` has it."""

    @property
    def path(self) -> Path: ...

    def get(self, key: str, kind: type[Scalar]) -> Scalar | None: ...

    def string_array(self, key: str) -> Sequence[str]: ...

    def int_array(self, key: str) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class TokenizerSpec:
    """A byte-level BPE tokenizer as data; token id = index into `tokens`.

    `tokens` are in the byte alphabet for NORMAL tokens and plain text for the others; `token_types`
    becomes int32 `[len(tokens)]`; `merges` are `"left right"`, the most important first. `special_ids` are what the
    file names: `eos_token_id`, `eot_token_id`, `eom_token_id`. `prefix_ids` and `suffix_ids` are special tokens that
    belong around a text, such as the `<|endoftext|>` at whose place Qwen3-Embedding reads its vector. `key_prefix` is
    what error messages call the entries by.
    Raises `TokenizerError` on construction for anything that the checks above find.
    """

    tokens: Sequence[str]
    token_types: np.ndarray
    merges: Sequence[str]
    pre: str = SUPPORTED_PRE
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    special_ids: Mapping[str, int] | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    key_prefix: str = "tokenizer.ggml."

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_types", np.asarray(self.token_types))
        self._check_structure()
        object.__setattr__(self, "token_types", self.token_types.astype(np.int32))
        if len(self.tokens) <= SMALL_VOCABULARY:
            self.check_vocabulary()

    def error(self, key: str, problem: str) -> TokenizerError:
        """Build the error for what is wrong with `key`, in one wording for all of them."""
        return TokenizerError(f"{self.key_prefix}{key}: {problem}")

    @property
    def eos_token_id(self) -> int | None:
        return (self.special_ids or {}).get("eos_token_id")

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation: those the file names, and the control tokens that Qwen ends a turn with."""
        by_name = (i for i in self.control_ids if self.tokens[i] in _END_OF_GENERATION_NAMES)
        return frozenset((*by_name, *(self.special_ids or {}).values()))

    @cached_property
    def control_ids(self) -> list[int]:
        return self._ids_of_type(TokenType.CONTROL)

    @cached_property
    def user_defined_ids(self) -> list[int]:
        return self._ids_of_type(TokenType.USER_DEFINED)

    @cached_property
    def unmergeable_ids(self) -> list[int]:
        """Ids that BPE must never produce: everything that is not text made by merges."""
        return np.flatnonzero(self.token_types != TokenType.NORMAL).tolist()

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of what the ids mean: tokens, merges and pre-tokenizer, without padding at the end of the
        vocabulary.

        Two models whose fingerprints are equal can share token ids, so one may draft for the other."""
        import hashlib  # not part of every command's start: 2.5 ms

        used = np.flatnonzero(self.token_types != TokenType.UNUSED)
        num_used = int(used[-1]) + 1 if len(used) else 0
        digest = hashlib.blake2b(self.pre.encode(), digest_size=16)
        for strings in (self.tokens[:num_used], self.merges):
            digest.update(f"\0{len(strings)}\0".encode())
            digest.update("\0".join(strings).encode("utf-8", errors="surrogatepass"))
        return digest.hexdigest()

    def check_vocabulary(self) -> None:
        """Raise `TokenizerError` unless tokens are distinct and every merge joins two tokens into a third."""
        vocabulary = set(self.tokens)
        if len(vocabulary) != len(self.tokens):
            twice = next(token for token, number in Counter(self.tokens).items() if number > 1)
            raise self.error("tokens", f"{twice!r:.80} is there twice, and a token must have one id")
        vocabulary.difference_update(self.tokens[token_id] for token_id in self.unmergeable_ids)
        for rank, merge in enumerate(self.merges):
            parts = merge.split(" ")
            if len(parts) != 2 or not all(parts):
                raise self.error("merges", f"entry {rank} is {merge!r:.80}, which is not 'left right'")
            for part in (*parts, "".join(parts)):
                if part not in vocabulary:
                    raise self.error("merges", f"entry {rank} is {merge!r:.80}, but {part!r:.80} is not a normal token")

    def _check_every_byte_has_a_token(self) -> None:
        missing = _BYTE_ALPHABET_SET.difference(self.tokens[:512])  # where every known vocabulary has them
        missing = missing and missing.difference(self.tokens)
        missing |= _BYTE_ALPHABET_SET.intersection(self.tokens[token_id] for token_id in self.unmergeable_ids)
        if missing:
            byte = BYTE_ALPHABET.index(min(missing))
            raise self.error("tokens", f"no normal token for {len(missing)} of the 256 bytes, such as 0x{byte:02x}")

    def _ids_of_type(self, token_type: TokenType) -> list[int]:
        return np.flatnonzero(self.token_types == token_type).tolist()

    def _check_structure(self) -> None:
        if self.pre != SUPPORTED_PRE:
            raise self.error("pre", f"{self.pre!r:.80} is not supported; forge splits text as {SUPPORTED_PRE!r} only")
        if not len(self.tokens):
            raise self.error("tokens", "the vocabulary is empty")
        if self.token_types.shape != (len(self.tokens),):
            raise self.error("token_type", f"{self.token_types.size} entries for {len(self.tokens)} tokens")
        valid_type = (self.token_types >= min(TokenType)) & (self.token_types <= max(TokenType))
        if not valid_type.all():
            wrong = int(np.flatnonzero(~valid_type)[0])
            raise self.error("token_type", f"entry {wrong} is {int(self.token_types[wrong])}, not one of 1 to 6")
        num_matched = len(self.control_ids) + len(self.user_defined_ids)
        if num_matched > MAX_MATCHED_TOKENS:
            raise self.error("token_type", f"{num_matched} control and user-defined tokens, over {MAX_MATCHED_TOKENS}")
        self._check_every_byte_has_a_token()
        named = {"bos_token_id": self.bos_token_id, "padding_token_id": self.pad_token_id, **(self.special_ids or {})}
        for key, token_id in named.items():
            if token_id is not None and not 0 <= token_id < len(self.tokens):
                raise self.error(key, f"{token_id} is not an id of the {len(self.tokens)} tokens")
        around = (*self.prefix_ids, *self.suffix_ids)
        if not all(0 <= token_id < len(self.tokens) for token_id in around):
            raise self.error("post_processor", f"adds token {max(around)}, and there are {len(self.tokens)} tokens")


def spec_from_gguf(file: TokenizerMetadata) -> TokenizerSpec:
    """Read the tokenizer that a GGUF file carries in `tokenizer.ggml.*` and `tokenizer.chat_template`.

    Raises `TokenizerError` when it is absent, inconsistent, or not byte-level BPE split as Qwen2, and the file's own
    `GGUFError` for an entry of the wrong type."""
    prefix = f"{file.path}: tokenizer.ggml."
    model, pre = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    if model is None:
        raise TokenizerError(f"{prefix}model: missing; the file carries no tokenizer")
    if model != SUPPORTED_MODEL:
        raise TokenizerError(f"{prefix}model: {model!r:.80} is not supported; forge has {SUPPORTED_MODEL!r} only")
    if pre is None:
        raise TokenizerError(f"{prefix}pre: missing; forge splits text as {SUPPORTED_PRE!r} only")
    named = {key: file.get(f"tokenizer.ggml.{key}", int) for key in _END_OF_GENERATION_KEYS}
    return TokenizerSpec(
        tokens=file.string_array("tokenizer.ggml.tokens"),
        token_types=file.int_array("tokenizer.ggml.token_type"),
        merges=file.string_array("tokenizer.ggml.merges"),
        pre=pre,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        pad_token_id=file.get("tokenizer.ggml.padding_token_id", int),
        special_ids={key: token_id for key, token_id in named.items() if token_id is not None},
        prefix_ids=_added(file, "bos", prefix),
        suffix_ids=_added(file, "eos", prefix),
        chat_template=file.get("tokenizer.chat_template", str),
        key_prefix=prefix,
    )


def _added(file: TokenizerMetadata, name: str, prefix: str) -> tuple[int, ...]:
    """Return the token that `add_bos_token` or `add_eos_token` asks for."""
    if not file.get(f"tokenizer.ggml.add_{name}_token", bool):
        return ()
    token_id = file.get(f"tokenizer.ggml.{name}_token_id", int)
    if token_id is None:
        raise TokenizerError(f"{prefix}add_{name}_token: is true, but there is no {name}_token_id")
    return (token_id,)
