"""Thinking stays outside the grammar: free text up to `</think>`, and the form after it.

A model that thinks before it answers says worse things if it must begin with `{`. So its thinking is any text that does
not end the output, and the grammar begins with the token after `</think>`, or after the blank line that Qwen3 leaves.
"""

from collections.abc import Sequence

import numpy as np

from forge.engine.structured_output import Grammar, Matcher
from forge.errors import UsageError
from forge.tokenizer import Tokenizer
from forge.tokenizer.spec import TokenType

OPEN, CLOSE, BLANK_LINE = "<think>", "</think>", "\n\n"


def thinks(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary has the tokens that thinking begins and ends with."""
    return {OPEN, CLOSE} <= {tokenizer.spec.tokens[token_id] for token_id in tokenizer.spec.user_defined_ids}


class ThinkingGrammar:
    """A `Grammar` whose outputs may begin with thinking."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, vocab_size: int, is_open: bool):
        """is_open: the prompt ends inside the thinking; otherwise the output may open it. Raises `UsageError` if the
        tokenizer has no tokens for that."""
        tokens = {tokenizer.spec.tokens[token_id]: token_id for token_id in tokenizer.spec.user_defined_ids}
        if not thinks(tokenizer):
            raise UsageError(f"this model does not think: its vocabulary has no {OPEN}")
        self._grammar, self.is_open = grammar, is_open
        self.open, self.close = tokens[OPEN], tokens[CLOSE]
        blank_line = tokenizer.encode(BLANK_LINE, add_special_tokens=False)
        self.blank_line = blank_line[0] if len(blank_line) == 1 else None
        types = np.asarray(tokenizer.spec.token_types)[:vocab_size]
        self.anything = np.zeros(vocab_size, bool)
        """The mask while thinking: text, and the end of the thinking."""
        self.anything[: len(types)] = types == TokenType.NORMAL
        self.anything[self.close] = True

    def new_matcher(self) -> "ThinkingMatcher":
        return ThinkingMatcher(self, self._grammar.new_matcher())


class ThinkingMatcher:
    """The `Matcher` of a `ThinkingGrammar`. All its state is the inner matcher's."""

    def __init__(self, thinking: ThinkingGrammar, matcher: Matcher):
        self._thinking, self._matcher = thinking, matcher

    def mask(self, output: Sequence[int]) -> np.ndarray:
        """Return True for every token that may come next: bool `[vocab]`. Raises `MatcherError`."""
        thinking, answer = self._thinking, self._answer(output)
        if answer is None:
            return thinking.anything
        mask = self._matcher.mask(answer)
        extra = None
        if not output:
            extra = thinking.open
        elif output[-1] == thinking.close and not answer:
            extra = thinking.blank_line
        if extra is None or mask[extra]:
            return mask
        mask = mask.copy()
        mask[extra] = True
        return mask

    def num_allowed(self, output: Sequence[int], token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids`, from the first on, may follow."""
        walked = list(output)
        for index, token_id in enumerate(token_ids):
            answer = self._answer(walked)
            if answer:  # from here on the grammar's own
                return index + self._matcher.num_allowed(answer, token_ids[index:])
            if not self.mask(walked)[token_id]:
                return index
            walked.append(token_id)
        return len(token_ids)

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the text that must come next."""
        answer = self._answer(output)
        return self._matcher.forced(answer) if answer else ()

    def _answer(self, output: Sequence[int]) -> Sequence[int] | None:
        """Return the output after the thinking; None while it lasts."""
        thinking = self._thinking
        if not thinking.is_open and (not output or output[0] != thinking.open):
            return output
        if thinking.close not in output:
            return None
        answer = list(output[list(output).index(thinking.close) + 1 :])
        return answer[1:] if answer and answer[0] == thinking.blank_line else answer
