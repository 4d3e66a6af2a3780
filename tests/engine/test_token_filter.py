"""Token filters: `allowed_token_ids` and `bad_words` in the whole engine, each against the plainest oracle."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge import LLM, SamplingParams, StructuredOutput
from forge.engine.sampling import choose_token
from forge.engine.structured_output import MatcherError
from forge.engine.token_filter import FilterMatcher, TokenFilter
from forge.model.model import Draw

BAD = ("the", "Once", "d h", " a ", "é")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tales", kv="paged", check=True)


def says(llm: LLM, **params: Any) -> list[tuple[int, ...]]:
    given: dict[str, Any] = {"max_tokens": 60, "seed": 3} | params
    return [sample.token_ids for sample in llm.generate([PROMPT], SamplingParams(**given))[0].outputs]


class OracleMatcher:
    """Tries every token in turn: it is refused if the output's bytes with it hold a bad word."""

    def __init__(self, llm: LLM, params: SamplingParams):
        tokenizer, size = llm.tokenizer, llm.model.vocab_size
        self._shown = [b"" if tokenizer.is_hidden(i) else tokenizer.token_bytes(i) for i in range(size)]
        self._words = [word.encode() for word in params.bad_words]
        self._allowed = {*range(size)} if params.allowed_token_ids is None else {*params.allowed_token_ids}

    def mask(self, output) -> np.ndarray:
        text = b"".join(self._shown[token_id] for token_id in output)
        said = [text + shown for shown in self._shown]
        return np.array(
            [i in self._allowed and not any(word in said[i] for word in self._words) for i in range(len(said))]
        )


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("speculate", [None, "draft", "ngram"])
@pytest.mark.parametrize("bad_words", [(), BAD], ids=["all words", "bad words"])
def test_the_tokens_are_those_that_a_mask_by_trial_leaves(llm, speculate, bad_words, temperature):
    letters = [i for i in range(llm.model.vocab_size) if llm.tokenizer.token_bytes(i).strip(b" ,").islower()]
    asked = SamplingParams(8, temperature, seed=3, bad_words=bad_words, allowed_token_ids=[*letters, 2])
    prompt = llm.tokenizer.encode(PROMPT)
    expected: list[int] = []
    matcher = OracleMatcher(llm, asked)
    while len(expected) < asked.max_tokens:
        tokens = [*prompt, *expected]
        logits = llm.logits(tokens)[-1]
        expected.append(choose_token(logits, Draw(asked, 3, 0, tokens, len(prompt), matcher)))
        if expected[-1] in llm.tokenizer.eos_token_ids:
            break
    used = llm if speculate is None else LLM("tales", kv="paged", speculate=speculate, k=4, speculate_fixed=True)
    assert list(used.generate([PROMPT], asked)[0].outputs[0].token_ids) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_word_never_comes_and_without_the_rule_it_would(llm, seed):
    plain = {"max_tokens": 60, "temperature": 1.0, "seed": seed}
    assert any(word in llm.tokenizer.decode(says(llm, **plain)[0]) for word in BAD)
    for token_ids in says(llm, **plain, bad_words=BAD, n=2):
        assert not any(word in llm.tokenizer.decode(token_ids, skip_special=True) for word in BAD)


def test_without_a_filter_there_is_no_matcher_and_the_tokens_are_the_same(llm):
    run = llm.start(PROMPT, SamplingParams(8, bad_words=(), allowed_token_ids=None))
    next(iter(run))
    (sequence,) = llm.engine.scheduler.running.values()
    assert sequence.matcher is None and sequence.params.plain_greedy
    list(run)
    everything = range(llm.model.vocab_size)
    assert says(llm, max_tokens=8, allowed_token_ids=everything) == [run.outputs[0].outputs[0].token_ids]


@pytest.mark.parametrize("speculate", [None, "grammar"])
def test_a_filter_cuts_the_mask_of_a_grammar(speculate):
    llm = LLM("tales", kv="paged", speculate=speculate, k=4, speculate_fixed=speculate is not None)
    form = StructuredOutput(regex="[a-e]{9} of snow")
    params = SamplingParams(30, 1.0, seed=1, n=4, structured=form, bad_words=["ab", "c", "ee"])
    for sample in llm.generate([PROMPT], params)[0].outputs:
        assert sample.finish_reason == "stop" and re.fullmatch("[a-e]{9} of snow", sample.text)
        assert not any(word in sample.text for word in params.bad_words)


def test_a_filter_that_leaves_nothing_ends_the_request_with_the_reason(llm):
    form = StructuredOutput(choice=["happy"])
    sample = llm.generate([PROMPT], SamplingParams(9, structured=form, bad_words=["happy"]))[0].outputs[0]
    assert sample.finish_reason == "error" and "bad_words" in sample.errors[0]


def test_end_of_sequence_comes_only_if_it_is_allowed(llm):
    (eos,) = sorted(llm.tokenizer.eos_token_ids)[:1]
    (some,) = llm.tokenizer.encode("a", add_special_tokens=False)
    assert says(llm, allowed_token_ids=[some]) == [(some,) * 60]
    assert says(llm, allowed_token_ids=[eos]) == [(eos,)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_does_not_change_what_a_filter_leaves(llm, mode):
    params = SamplingParams(60, 1.0, seed=4, n=3, bad_words=BAD)
    expected = [sample.token_ids for sample in llm.generate([PROMPT], params)[0].outputs]
    tight = LLM("tales", kv="paged", num_blocks=12, block_size=8, preemption=mode, max_model_len=80, check=True)
    run = tight.start(PROMPT, params)
    assert any(record.preempted for record in list(run))
    assert [sample.token_ids for sample in run.outputs[0].outputs] == expected


class TwoLetters:
    """A tokenizer of few, overlapping tokens, one of them without text."""

    tokens = (b"", b"a", b"b", b"aa", b"\xc3", b"\xa9", b"ba", b"bb", b"aba", b"ab", b"hidden")
    vocab_size = len(tokens)
    eos_token_ids = frozenset([0])

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def is_hidden(self, token_id: int) -> bool:
        return token_id == len(self.tokens) - 1


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a", "b", "ab", "ba", "abab", "bba", "abb", "aaa", "é", "bé", "abaaébabbabaabaa"]), max_size=3
    ),
    st.lists(st.integers(0, TwoLetters.vocab_size - 1), max_size=6),
    st.integers(0, 4),
    st.one_of(st.none(), st.sets(st.integers(0, TwoLetters.vocab_size + 1), min_size=1)),
    st.booleans(),
)
def test_a_mask_is_the_one_by_trial_whatever_came_before(words, output, min_tokens, named, ignore_eos):
    tokenizer: Any = TwoLetters()
    size = tokenizer.vocab_size + 2  # the model has room for more
    shown = [*TwoLetters.tokens[:-1], b"", b"", b""]
    rest = {"stop_token_ids": [3], "allowed_token_ids": named, "ignore_eos": ignore_eos}
    params = SamplingParams(bad_words=words, min_tokens=min_tokens, **rest)

    def allowed(before) -> list[bool]:
        text = b"".join(shown[token_id] for token_id in before)
        ends = [(word.encode(), text[max(0, len(text) - len(word.encode()) + 1) :]) for word in words]
        refused = {3, *([] if ignore_eos else [0])} if len(before) < min_tokens else set()
        free = {*range(size)} - refused if named is None else named - refused
        return [i in free and not any(word in end + shown[i] for word, end in ends) for i in range(size)]

    def mask(matcher: FilterMatcher) -> list[bool]:
        try:
            left = matcher.mask(output).tolist()
        except MatcherError:
            return [False] * size
        assert any(left), "without a token it says so"
        return left

    matcher = TokenFilter(params, tokenizer, size, None).new_matcher()
    assert mask(matcher) == allowed(output) and matcher.forced([]) == ()
    may_come = [allowed(output[:index])[token_id] for index, token_id in enumerate(output)]
    num_allowed = [*may_come, False].index(False)
    assert matcher.num_allowed([], output) == num_allowed
    grammar: Any = Forces(output)
    matcher = TokenFilter(params, tokenizer, size, grammar).new_matcher()
    assert mask(matcher) == [token_id % 2 == 1 and may for token_id, may in enumerate(allowed(output))]
    assert matcher.forced([]) == tuple(output[:num_allowed])
    assert matcher.num_allowed([], output) == min(2, num_allowed)


class Forces:
    """A grammar, and its matcher: odd tokens may come, none but some may come first, and of any others two."""

    def __init__(self, token_ids: list[int]):
        self.token_ids = tuple(token_ids)

    def new_matcher(self) -> "Forces":
        return self

    def mask(self, output) -> np.ndarray:
        return np.arange(TwoLetters.vocab_size + 2) % 2 == 1

    def forced(self, output) -> tuple[int, ...]:
        return self.token_ids

    def num_allowed(self, output, token_ids) -> int:
        return min(2, len(token_ids))
