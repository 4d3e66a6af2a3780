"""Token filters: a request's `allowed_token_ids`, `bad_words` and `min_tokens` as masks over the vocabulary.

They are a `Matcher`, like a grammar's, and cut the mask of a grammar where there is one too. So sampling, drafts and
their verification treat all alike, probabilities are the model's own, and a request without any of them has no matcher.

A bad word is text. A token is refused where its bytes would complete the word in the output, however the word is cut
into tokens; with the bytes of every token sorted, those are the tokens that begin with what is missing of the word,
and the tokens that contain it. Control tokens stand for no text, as in the output.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Items
from functools import cache, lru_cache
from itertools import accumulate

import numpy as np

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import Grammar, Matcher, MatcherError
from forge.tokenizer import Tokenizer


class VocabularyBytes:
    """The bytes of every token, searchable by prefix and by part."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """vocab_size: the model's; tokens that the tokenizer does not have stand for no bytes."""
        size = min(vocab_size, tokenizer.vocab_size)
        hidden = map(tokenizer.is_hidden, range(size))
        self.of = [b"" if is_hidden else tokenizer.token_bytes(i) for i, is_hidden in enumerate(hidden)]
        self.of += [b""] * (vocab_size - size)
        self._order = np.array(sorted(range(vocab_size), key=self.of.__getitem__))
        self._sorted = [self.of[token_id] for token_id in self._order]
        self._joined = np.frombuffer(b"".join(self.of), np.uint8)
        self._ends = np.array([*accumulate(map(len, self.of))])

    def beginning_with(self, prefix: bytes) -> np.ndarray:
        """Return the ids of the tokens that begin with `prefix`, which is not empty, in no order: int64 `[n]`."""
        first = bisect_left(self._sorted, prefix)
        return self._order[first : bisect_right(self._sorted, prefix, first, key=lambda token: token[: len(prefix)])]

    def containing(self, part: bytes) -> np.ndarray:
        """Return the ids of the tokens that contain `part`, which is not empty, ascending, some perhaps twice: int64
        `[n]`."""
        places = np.flatnonzero(self._joined[: max(0, len(self._joined) - len(part) + 1)] == part[0])
        for offset in range(1, len(part)):
            places = places[self._joined[places + offset] == part[offset]]
        token_ids = np.searchsorted(self._ends, places, side="right")
        return token_ids[self._ends[token_ids] >= places + len(part)]


vocabulary_bytes = lru_cache(maxsize=2)(VocabularyBytes)
"""Makes a tokenizer's `VocabularyBytes` once: 151,936 tokens take a quarter of a second. May be called on any
thread."""


class TokenFilter:
    """A `Grammar` of what `params` allow, within what another grammar allows."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, form: Grammar | None):
        """vocab_size: the model's. form: the grammar that holds too."""
        self.form = form
        self.allowed = np.full(vocab_size, params.allowed_token_ids is None)
        self.allowed[[*(params.allowed_token_ids or ())]] = True
        self._words = [word.encode() for word in dict.fromkeys(params.bad_words or ())]
        if self._words:
            vocabulary = vocabulary_bytes(tokenizer, vocab_size)
            self._bytes = vocabulary.of
            self._beginning_with = cache(vocabulary.beginning_with)
            for word in self._words:
                self.allowed[vocabulary.containing(word)] = False
        self._min_tokens, self._unending = params.min_tokens, self.allowed.copy()
        ending = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else tokenizer.eos_token_ids)]
        self._unending[ending] = False
        self._tail = max((len(word) - 1 for word in self._words), default=0)
        """Bytes of the output that a word may have begun in."""

    def new_matcher(self) -> "FilterMatcher":
        return FilterMatcher(self, self.form.new_matcher() if self.form is not None else None)

    def mask(self, output: Items[int]) -> np.ndarray:
        """Return True for every token that the filter allows next, whatever the grammar says: bool `[vocab]`."""
        allowed = self._unending if len(output) < self._min_tokens else self.allowed
        if not self._words:
            return allowed
        mask, tail = allowed.copy(), self._end_of(output)
        for word in self._words:
            for length in range(1, min(len(tail), len(word) - 1) + 1):
                if tail.endswith(word[:length]):
                    mask[self._beginning_with(word[length:])] = False
        return mask

    def _end_of(self, output: Items[int]) -> bytes:
        """Return the end of the output's text in bytes, at least as many as a bad word may have begun in."""
        end, index = b"", len(output)
        while len(end) < self._tail and index:
            index -= 1
            end = self._bytes[output[index]] + end
        return end


class FilterMatcher:
    """The `Matcher` of a `TokenFilter`."""

    def __init__(self, token_filter: TokenFilter, form: Matcher | None):
        self._filter, self._form = token_filter, form

    def mask(self, output: Items[int]) -> np.ndarray:
        mask = self._filter.mask(output)
        if self._form is not None:
            mask = mask & self._form.mask(output)
        if not mask.any():
            raise MatcherError("allowed_token_ids, bad_words, min_tokens and the grammar leave no token")
        return mask

    def num_allowed(self, output: Items[int], token_ids: Items[int]) -> int:
        most = len(token_ids) if self._form is None else self._form.num_allowed(output, token_ids)
        return self._num_kept(output, token_ids[:most])

    def forced(self, output: Items[int]) -> tuple[int, ...]:
        forced = () if self._form is None else self._form.forced(output)
        return forced[: self._num_kept(output, forced)]

    def _num_kept(self, output: Items[int], token_ids: Items[int]) -> int:
        """Return how many of `token_ids` the filter itself accepts."""
        before = [*output]
        for index, token_id in enumerate(token_ids):
            if not self._filter.mask(before)[token_id]:
                return index
            before.append(token_id)
        return len(token_ids)
