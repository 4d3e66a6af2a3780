"""Text to token ids and back, for byte-level BPE as Qwen has it.

`Tokenizer` owns what Qwen's tokenizer does around BPE: control and user-defined tokens are found in the raw text first,
and what lies between them is brought to NFC and encoded. Ids of plain text come from `encoders`; decoding is a lookup
of each token's bytes and belongs to no implementation.

The order matters in one corner. A user-defined token's text keeps its id even where a combining mark follows it, as
Qwen has it (`<think>` and then U+0338), so there `decode(encode(s))` is NFC piece by piece, not of the whole. For every
other string `decode(encode(s)) == NFC(s)`, with the NFC of Python's own `unicodedata`. (llama.cpp does not normalize at
all; Hugging Face's normalizer knows an older Unicode and leaves some recent combining marks in the order they came.)
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any
from unicodedata import normalize

import numpy as np

from forge.errors import UsageError
from forge.tokenizer.chat_template import (
    QWEN3_CHAT_TEMPLATE,
    ChatTemplate,
    beginnings,
    choose_mark,
    marked,
    up_to_content,
)
from forge.tokenizer.encoders import Encoders, FastEncoder, PlainEncoder, Preference, ReferenceEncoder
from forge.tokenizer.spec import TokenizerSpec, TokenType, from_byte_alphabet

_HIDDEN_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """The bytes of tokens, each found when it is first asked for."""

    def __init__(self, find: Callable[[int], bytes]):
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        token_bytes = self[token_id] = self._find(token_id)
        return token_bytes


class Tokenizer:
    """A vocabulary, ready to encode and decode; loads nothing heavy before the first text to encode.

    `prefer` says which implementation to load (`encoders`): a server `"fast"`, a single command `"auto"`. Encoding and
    decoding may be called from several threads."""

    def __init__(
        self,
        spec: TokenizerSpec,
        *,
        prefer: Preference = "auto",
        build_fast: Callable[[ReferenceEncoder], PlainEncoder] = FastEncoder,
    ) -> None:
        self.spec = spec
        self.vocab_size = len(spec.tokens)
        """Number of token ids, padding included."""
        self.bos_token_id, self.eos_token_id = spec.bos_token_id, spec.eos_token_id
        self.eos_token_ids = spec.eos_token_ids
        """The ids that end a generation."""
        self._encoders = Encoders(spec, prefer, build_fast)
        self.bytes_of = TokenBytes(self._find_bytes)
        """The bytes that each token stands for, often only part of a character; none for padding."""
        self.shown_bytes = TokenBytes(lambda token_id: b"" if self.is_hidden(token_id) else self.bytes_of[token_id])
        """The bytes of each token that are shown: none for one that `skip_special` leaves out."""

    @property
    def fingerprint(self) -> str:
        """A text that is equal for two tokenizers whose ids mean the same (`TokenizerSpec.fingerprint`)."""
        return self.spec.fingerprint

    @property
    def implementation(self) -> str:
        """The implementation that encoded the last text: "fast", "reference" or "prompt-cut reference"; "not loaded"
        before the first."""
        return self._encoders.last_used or "not loaded"

    @property
    def fallback_reason(self) -> str | None:
        """Why the fast path is not used although it was wanted; None when it is, or was not asked for."""
        return self._encoders.fallback_reason

    def prepare(self) -> str:
        """Load now what the first text would load; return that implementation's name (see `implementation`)."""
        return self._encoders.prepare()

    def encode(self, text: str, *, allow_special: bool = False, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of `text`.

        The text of a control token becomes that token only with `allow_special`, which is for prompts that a chat
        template rendered; in what a user typed it stays text. `add_special_tokens` puts the spec's `prefix_ids` and
        `suffix_ids` around it; None does so unless `allow_special`, as a rendered prompt is complete. Raises
        `UsageError` for text that is not Unicode."""
        return self.encode_batch([text], allow_special=allow_special, add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, allow_special: bool = False, add_special_tokens: bool | None = None
    ) -> list[list[int]]:
        """Return the token ids of each of `texts`, as `encode` does, from one call of the encoder. Raises `UsageError`
        for text that is not Unicode, and for one text where several are expected."""
        if isinstance(texts, str):
            raise UsageError("encode_batch takes a list of texts: encode takes one text")
        for text in texts:
            check_unicode(text)
        adds = not allow_special if add_special_tokens is None else add_special_tokens
        return self._encode_split([list(self._split(text, allow_special)) for text in texts], adds)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        parse_special: bool = False,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        **template: Any,
    ) -> tuple[str, list[int]]:
        """Render the prompt for a conversation, as text and as token ids.

        Control tokens of the chat template become tokens; what a message spells like one stays text, unless
        `parse_special` is set. With `continue_final_message` the prompt ends with the last message's content, to be
        gone on with. `template` are keywords of `apply_chat_template`, whose errors are raised."""
        pattern = None if parse_special else self._control_beginnings
        mark = choose_mark([*messages, template.get("tools")]) if pattern else ""
        shown = [marked(message, pattern, mark) for message in messages] if pattern else messages
        if pattern and template.get("tools"):
            template["tools"] = marked(template["tools"], pattern, mark)
        rendered = self.apply_chat_template(shown, **template)
        check_unicode(rendered)
        if continue_final_message:
            rendered = up_to_content(rendered, shown[-1])
        parts = self._split(rendered, True)
        if pattern:
            parts = [part.replace(mark, "") if isinstance(part, str) else part for part in parts]
            rendered = rendered.replace(mark, "")
        return rendered, self._encode_split([list(parts)], add_special_tokens)[0]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Decode `ids` to text; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves control tokens out.

        Raises `UsageError` for an id outside the vocabulary."""
        table = self.shown_bytes if skip_special else self.bytes_of
        return b"".join([table[token_id] for token_id in ids]).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, often only part of a character; none for padding."""
        return self.bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """Return one token as a person should see it: its text, `\xe2` for a byte that is no character by itself,
        padding by its name."""
        if self.token_type(token_id) == TokenType.UNUSED:
            return self.spec.tokens[token_id]
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")

    def token_type(self, token_id: int) -> TokenType:
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens")
        return TokenType(self.spec.token_types[token_id])

    def is_hidden(self, token_id: int) -> bool:
        """Return whether `skip_special` leaves this token out."""
        return token_id in self._hidden_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        """Render the prompt for a conversation as text; `encode_chat` gives its token ids too.

        `messages` are mappings with `role` and `content`. `enable_thinking=False` asks a Qwen3 template for an answer
        without thinking; None leaves it to the template. `tools` and what became of their calls are shown as Qwen3
        shows them where the file's own template has no tools. Raises `ForgeError` when the template or a message is
        bad."""
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        template = self._chat_template
        if not template.has_tools and (variables.get("tools") or any(map(_is_about_tools, messages))):
            template = self._new_template(None)
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return self._new_template(self.spec.chat_template)

    def _new_template(self, source: str | None) -> ChatTemplate:
        """Return the model's own template, or Qwen3's."""
        tokens = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        variables = {name: self.spec.tokens[i] if i is not None else "" for name, i in tokens.items()}
        return ChatTemplate(source or QWEN3_CHAT_TEMPLATE, variables)

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """The ids that `skip_special` leaves out, computed once because every generated token is looked up."""
        return frozenset(np.flatnonzero(np.isin(self.spec.token_types, _HIDDEN_TYPES)).tolist())

    @cached_property
    def _id_of_matched(self) -> dict[str, int]:
        matched = (*self.spec.control_ids, *self.spec.user_defined_ids)
        return {self.spec.tokens[token_id]: token_id for token_id in matched if self.spec.tokens[token_id]}

    @cached_property
    def _control_beginnings(self) -> re.Pattern[str] | None:
        return beginnings(self.spec.tokens[token_id] for token_id in self.spec.control_ids)

    @cached_property
    def _user_defined_pattern(self) -> re.Pattern[str] | None:
        return _any_of(self.spec.tokens[token_id] for token_id in self.spec.user_defined_ids)

    @cached_property
    def _every_matched_pattern(self) -> re.Pattern[str] | None:
        return _any_of(self._id_of_matched)

    def _split(self, text: str, allow_special: bool) -> Iterable[str | int]:
        """Split `text` into plain text and ids of tokens matched whole, alternating; empty text is left out."""
        pattern = self._every_matched_pattern if allow_special else self._user_defined_pattern
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > start:
                yield text[start : match.start()]
            yield self._id_of_matched[match.group()]
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _encode_split(self, texts: list[list[str | int]], add_special_tokens: bool) -> list[list[int]]:
        """Encode texts, each given as alternating plain text and tokens."""
        encoded = iter(self._encode_plain([part for parts in texts for part in parts if isinstance(part, str)]))
        prefix, suffix = (self.spec.prefix_ids, self.spec.suffix_ids) if add_special_tokens else ((), ())
        joined = []
        for parts in texts:
            ids = [[part] if isinstance(part, int) else next(encoded) for part in parts]
            joined.append([*prefix, *chain.from_iterable(ids), *suffix])
        return joined

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        return self._encoders.encode_parts([normalize("NFC", text) for text in texts]) if texts else []

    def _find_bytes(self, token_id: int) -> bytes:
        token_type, token = self.token_type(token_id), self.spec.tokens[token_id]
        if token_type == TokenType.NORMAL:
            return from_byte_alphabet(token)
        if token_type == TokenType.UNUSED:
            return b""
        byte = _BYTE_TOKEN.fullmatch(token) if token_type == TokenType.BYTE else None
        return bytes([int(byte[1], 16)]) if byte else token.encode("utf-8", errors="replace")


def _is_about_tools(message: Mapping[str, Any]) -> bool:
    return isinstance(message, Mapping) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Compile a pattern for any of `tokens`, the longest if several fit; None without tokens."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def check_unicode(text: str) -> None:
    """Raise `UsageError` for text with half of a surrogate pair in it, which no encoding of Unicode has."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}, half of a surrogate pair and no character"
        cure = "read the input as UTF-8, or remove it"
        raise UsageError(f"character {error.start} of the text is {half}: {cure}") from None
