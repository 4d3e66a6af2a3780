"""Thinking is free text before the form, and nothing but its own tags begins or ends it."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from forge import LLM, SamplingParams, StructuredOutput
from forge.errors import UsageError
from forge.grammar.compiler import GrammarCompiler
from forge.grammar.thinking import ThinkingGrammar, thinks
from forge.tokenizer.byte_tokenizer import ByteTokenizer
from forge.tokenizer.spec import TokenType

FORM = {"regex": "(yes|no)!"}


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, allow_special=True, add_special_tokens=False)


@pytest.mark.parametrize(
    ("thinking", "good", "bad"),
    [
        ("may_open", ["yes!", "<think>\nWell.\n</think>\n\nno!", "<think></think>no!"], ["Well. yes!", "</think>yes!"]),
        (
            "open",
            ["Well.</think>\n\nyes!", "</think>no!"],
            ["yes!", "<think>x</think>yes!", "x</think>\n\n\n\nyes!", "x</think>y\n\nes!"],
        ),
        ("none", ["yes!"], ["<think></think>yes!"]),
    ],
)
def test_what_may_be_said(compiler, tokenizer, thinking, good, bad):
    matcher, eos = compiler(StructuredOutput(**FORM, thinking=thinking)).new_matcher(), min(tokenizer.eos_token_ids)
    for text in (*good, *bad):
        token_ids = [*ids(tokenizer, text), eos]
        walked = 0
        while walked < len(token_ids) and matcher.mask(token_ids[:walked])[token_ids[walked]]:
            walked += 1
        assert (walked == len(token_ids)) == (text in good), text
        for length in range(len(token_ids) + 1):
            assert matcher.num_allowed([], token_ids[:length]) == min(length, walked), text
        assert matcher.num_allowed([], [*token_ids, token_ids[0]]) == walked, "nothing follows the end"


def test_a_blank_line_comes_after_the_thinking_and_not_after_the_same_tag_in_an_answer(compiler, tokenizer):
    matcher = compiler(StructuredOutput(regex=r"[^\n]*", thinking="open")).new_matcher()
    (blank_line,) = ids(tokenizer, "\n\n")
    assert matcher.mask(ids(tokenizer, "x</think>"))[blank_line]
    assert not matcher.mask(ids(tokenizer, "x</think>x</think>"))[blank_line]


def test_no_control_token_comes_while_it_thinks(compiler, tokenizer):
    mask = compiler(StructuredOutput(**FORM, thinking="open")).new_matcher().mask([])
    hidden = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_hidden(token_id)]
    assert not mask[hidden].any() and np.count_nonzero(mask) > 4000


def test_text_is_forced_by_the_form_alone(compiler, tokenizer):
    matcher = compiler(StructuredOutput(**FORM, thinking="open")).new_matcher()
    answer = ids(tokenizer, "ye")
    thought = ids(tokenizer, "Well.</think>")
    assert matcher.forced(thought[:-1]) == matcher.forced(thought) == ()
    form = compiler(StructuredOutput(**FORM)).new_matcher()
    assert matcher.forced([*thought, *answer]) == form.forced(answer) != ()


def tokenizer_of(*tokens: str) -> SimpleNamespace:
    """A tokenizer of single characters and tags."""
    tags = [index for index, token in enumerate(tokens) if len(token) > 1]
    types = [TokenType.USER_DEFINED if index in tags else TokenType.NORMAL for index in range(len(tokens))]
    spec = SimpleNamespace(tokens=[*tokens], user_defined_ids=tags, token_types=types)
    return SimpleNamespace(spec=spec, encode=lambda text, **_: [tokens.index(letter) for letter in text])


def test_a_tokenizer_thinks_that_has_both_tags(tokenizer):
    assert thinks(tokenizer) and thinks(tokenizer_of("<think>", "</think>")) and not thinks(tokenizer_of("<think>"))


def test_a_blank_line_of_two_tokens_does_not_come_after_thinking():
    of_two = tokenizer_of("<think>", "</think>", "\n", "y")
    form = np.array([False, False, False, True])
    grammar = SimpleNamespace(new_matcher=lambda: SimpleNamespace(mask=lambda output: form))
    matcher = ThinkingGrammar(grammar, of_two, 4, is_open=True).new_matcher()
    assert matcher.mask([]).tolist() == [False, True, True, True], "thinking"
    assert np.array_equal(matcher.mask([1]), form)


def test_the_bundled_model_ends_in_the_form():
    llm = LLM("tales", kv="paged")
    close = ids(llm.tokenizer, "</think>")[0]
    params = SamplingParams(
        60, 1.0, seed=2, logit_bias={close: 12.0}, structured=StructuredOutput(**FORM, thinking="open")
    )
    one = llm.generate("Is the fox happy?", params)[0].outputs[0]
    assert one.finish_reason == "stop" and re.search("</think>(yes|no)!$", one.text.replace("\n", ""))


def test_a_model_without_thinking_refuses_it():
    with pytest.raises(UsageError, match="does not think"):
        GrammarCompiler(ByteTokenizer(), 259)(StructuredOutput(**FORM, thinking="open"))
