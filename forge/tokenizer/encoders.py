"""Which implementation encodes a text: decided by what each costs to load and by how much there is to encode.

Measured, in milliseconds, medians on two busy Zen 4 cores: the first prompt of 240 characters, load included, and then
64,000 characters of English and of the gate's multilingual sample. Importing `tokenizers` costs 4 on top.

                          4,096 tokens                  151,936 tokens
                          1st prompt  64,000 chars      1st prompt  64,000 chars
    prompt-cut reference  not used                      15          (the next prompt 8)
    reference             4.5         20 to 21          250         16 to 20
    fast, with its gate   27          0.2 to 1.8        1,290       0.15 to 1.9

So a short command on a large vocabulary never loads it whole: the third path, the prompt's cut, is kept as it saves
each `forge generate` on such a model a quarter of a second. A second-long load is worth it only to who encodes millions
of characters, and a server says so in advance. In between the rule is the ski renter's: change over when as
much has been paid by staying as the change costs, which is never worse than twice the best choice in hindsight. What
has been paid is counted in prompts and characters, not in time, so the same calls always take the same path. And the
path can never be seen in the ids: the cut is exact, and the fast path is used only behind the equality gate.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Literal

from forge.tokenizer.equality_gate import PlainEncoder, first_difference
from forge.tokenizer.fast import FastEncoder
from forge.tokenizer.huggingface import PromptCutEncoder, ReferenceEncoder
from forge.tokenizer.spec import SMALL_VOCABULARY, TokenizerSpec

Preference = Literal["auto", "fast", "reference"]

MAX_CUTS = 20
"""Prompts encoded with a cut vocabulary before the whole one is loaded: 250 ms against 8 to 15 each."""

FAST_PAYS_AFTER_CHARS_PER_TOKEN = 30
"""Characters encoded, per token of the vocabulary, before fastokens is loaded: 8 µs a token for 0.27 µs a character."""


class Encoders:
    """The implementations of one `TokenizerSpec`, each built when first chosen and at most once.

    `prefer="fast"` loads the fast path at the first text, `"reference"` never does, `"auto"` follows the rule above.
    `build_fast` is a parameter so that a test can inject a fast path that is wrong. Safe to use from several threads.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        prefer: Preference = "auto",
        build_fast: Callable[[TokenizerSpec], PlainEncoder] = FastEncoder,
    ) -> None:
        self.fallback_reason: str | None = None
        self.last_used: str | None = None
        self._spec = spec
        self._prefer = prefer
        self._build_fast = build_fast
        self._lock = Lock()
        self._num_chars = 0
        self._num_cuts = 0
        self._cut: PromptCutEncoder | None = None
        self._reference: ReferenceEncoder | None = None
        self._fast: PlainEncoder | None = None

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Encode each part of one prompt; a part is NFC and holds no token to be matched whole."""
        with self._lock:
            self._num_chars += sum(map(len, parts))
            fast = self._fast_if_due()
        if fast is not None:
            try:
                ids = [fast.encode(part) for part in parts]
            except Exception as error:  # a foreign package: whatever it refuses, the reference takes
                self._give_up_fast(f"it fails on a text: {error}")
            else:
                self.last_used = "fast"
                return ids
        return self._encode_by_reference(parts)

    def prepare(self) -> str:
        """Loads now what the preference will load anyway and says which implementation that is."""
        with self._lock:
            if self._prefer != "auto" and self._fast_if_due() is not None:
                return "fast"
            if self._prefer == "auto" and self._may_cut():
                return PromptCutEncoder.name
            self._load_reference()
            return ReferenceEncoder.name

    def _encode_by_reference(self, parts: Sequence[str]) -> list[list[int]]:
        if self._may_cut():
            self._num_cuts += 1
            self._cut = self._cut or PromptCutEncoder(self._spec)
            ids = self._cut.encode_parts(parts)
            if ids is not None:
                self.last_used = self._cut.name
                return ids
        with self._lock:
            reference = self._load_reference()
        self.last_used = reference.name
        return [reference.encode(part) for part in parts]

    def _may_cut(self) -> bool:
        is_large = len(self._spec.tokens) > SMALL_VOCABULARY
        return is_large and self._reference is None and self._prefer == "auto" and self._num_cuts < MAX_CUTS

    def _load_reference(self) -> ReferenceEncoder:
        if self._reference is None:
            self._reference = ReferenceEncoder(self._spec)
        return self._reference

    def _fast_if_due(self) -> PlainEncoder | None:
        if self._fast is not None or self.fallback_reason is not None or self._prefer == "reference":
            return self._fast
        is_due = self._num_chars >= FAST_PAYS_AFTER_CHARS_PER_TOKEN * len(self._spec.tokens)
        if self._prefer == "fast" or is_due:
            self._fast = self._load_fast()
        return self._fast

    def _load_fast(self) -> PlainEncoder | None:
        """Load the fast path if it can be had and passes the gate; else return None, with `fallback_reason` set."""
        reference = self._load_reference()
        try:
            fast = self._build_fast(self._spec)
        except ImportError:
            self.fallback_reason = "fastokens is not installed"
            return None
        except Exception as error:  # a foreign package: whatever it refuses, the reference takes
            self.fallback_reason = _one_line(f"fastokens does not load this vocabulary: {error}")
            return None
        difference = first_difference(fast, reference)
        if difference is not None:
            self.fallback_reason = _one_line(f"fastokens is not the reference's equal: {difference}")
            return None
        return fast

    def _give_up_fast(self, reason: str) -> None:
        with self._lock:
            self._fast = None
            self.fallback_reason = _one_line(f"fastokens: {reason}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
