"""The matcher of one sequence: `llguidance`'s parser, kept where the sequence's tokens say.

Every call brings the output tokens. What the parser has consumed beyond what agrees with them is rolled back, what it
lacks is consumed, so verification walks it forward over draft tokens and the next step takes the rejected ones back.
Tokens that end the output are not the parser's. What follows one is dropped by the engine: anything may come.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge.engine.containers import num_common
from forge.engine.structured_output import MatcherError
from forge.grammar.vocabulary import Encode

if TYPE_CHECKING:
    from llguidance import LLMatcher

TOO_COMPLEX = "the grammar needs more work for one token than is allowed: make it simpler"
_NO_TOKEN = "NoExtensionBias"
"""How the library's message begins where the grammar goes on and no token does. All its other errors are limits."""
_FEW = 16
"""If fewer than one word of a mask (32 tokens) in this many has an allowed token, only such words are unpacked."""
_MAX_MASKS = 16
"""Positions whose masks are kept for a second call: verification asks again for what a draft has asked."""


class CompiledGrammar:
    """A compiled grammar, from which each sequence gets its own matcher."""

    def __init__(
        self, parser: "LLMatcher", eos_token_ids: frozenset[int], vocab_size: int, encode: Encode | None = None
    ):
        """encode: what the parser calls for forced text."""
        self.encode = encode
        self._parser, self.eos_token_ids, self.vocab_size = parser, eos_token_ids, vocab_size
        self.anything = np.ones(vocab_size, bool)
        """The mask after the end."""
        self.anything.flags.writeable = False
        self.is_spent = False
        """The states that its sequences have visited, and share, are as many as the library allows: it answers no more
        and has to be compiled again."""

    def new_matcher(self) -> "GrammarMatcher":
        return GrammarMatcher(self, self.new_parser())

    def new_parser(self) -> "LLMatcher":
        return self._parser.deep_copy()


class GrammarMatcher:
    """The `Matcher` of a `CompiledGrammar`."""

    def __init__(self, grammar: CompiledGrammar, parser: "LLMatcher"):
        self._grammar, self._parser = grammar, parser
        self._consumed: list[int] | None = []
        """The tokens that the parser has consumed; None while it consumes or rolls back, for an interruption."""
        self._masks: dict[int, np.ndarray] = {}
        """Masks by position, valid for `_consumed`."""

    def mask(self, output: Sequence[int]) -> np.ndarray:
        """Return True for every token that may come next: bool `[vocab]`. Raises `MatcherError`."""
        if self._has_ended(output):
            return self._grammar.anything
        if not self.move_to(output):
            if self._parser.is_error() or self._grammar.is_spent:
                raise self._failure()
            raise MatcherError("the output does not follow its grammar")
        mask = self._masks.get(len(output))
        if mask is None:
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            mask = self._masks[len(output)] = self._compute()
        return mask

    def num_allowed(self, output: Sequence[int], token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids`, from the first on, may follow."""
        if self._has_ended(output) or not self.move_to(output):
            return 0
        eos = self._grammar.eos_token_ids
        text = next((index for index, token_id in enumerate(token_ids) if token_id in eos), len(token_ids))
        allowed = self._parser.validate_tokens(list(token_ids[:text]))
        if allowed == text < len(token_ids) and self.move_to([*output, *token_ids[:text]]):
            allowed += self._parser.is_accepting()
        return allowed

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the text that must come next, and an end if nothing else may come."""
        if self._has_ended(output) or not self.move_to(output):
            return ()
        token_ids = tuple(self._parser.compute_ff_tokens())
        self._reraise()
        if self._parser.is_stopped() and self._parser.is_accepting():
            return (min(self._grammar.eos_token_ids),)
        return token_ids

    def _has_ended(self, output: Sequence[int]) -> bool:
        return not self._grammar.eos_token_ids.isdisjoint(output)

    def _compute(self) -> np.ndarray:
        bits = np.frombuffer(self._parser.compute_bitmask(), np.uint8)
        self._reraise()
        if self._parser.is_error():
            raise self._failure()
        words = bits.reshape(-1, 4)
        some = np.flatnonzero(bits.view(np.uint32))
        if len(some) < len(words) // _FEW:  # a third of the time of all
            unpacked = np.zeros((len(words), 32), np.uint8)
            unpacked[some] = np.unpackbits(words[some], axis=1, bitorder="little")
            mask = unpacked.reshape(-1)[: self._grammar.vocab_size].view(bool)
        else:
            mask = np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little").view(bool)
        mask.flags.writeable = False
        return mask

    def _failure(self) -> MatcherError:
        """Return why the parser has stopped."""
        if self._parser.get_error().startswith(_NO_TOKEN):
            return MatcherError("no token of this model's vocabulary may come next by the grammar")
        self._grammar.is_spent = True
        return MatcherError(TOO_COMPLEX)

    def move_to(self, output: Sequence[int]) -> bool:
        """Bring the parser to where these tokens end; False if the grammar refuses one of them."""
        known, self._consumed = self._consumed, None
        output = list(output)
        if known is None:
            self._parser.reset()
            known = []
            self._masks.clear()
        num_kept = self.roll_back(known, output)
        missing = output[num_kept:]
        moved = self._parser.try_consume_tokens(missing)
        self._consumed = [*known[:num_kept], *missing[:moved]]
        return moved == len(missing)

    def roll_back(self, known: list[int], output: list[int]) -> int:
        """Take back what the parser has consumed of `known` beyond what agrees with `output`; return how many tokens
        stay."""
        agreeing = num_common(known, output)
        if agreeing < len(known):
            self._parser.rollback(len(known) - agreeing)
            self._masks = {position: mask for position, mask in self._masks.items() if position <= agreeing}
        return agreeing

    def _reraise(self) -> None:
        """Raise what the tokenizer raised and the parser, which asks it for masks and forced text, swallowed. The next
        call begins with a new parser."""
        if self._grammar.encode is not None and self._grammar.encode.has_raised:
            self._parser, self._consumed = self._grammar.new_parser(), None
            self._grammar.encode.reraise()
