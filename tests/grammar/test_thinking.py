"""Thinking is free text before the form, and nothing but its own tags begins or ends it."""

import re

import numpy as np
import pytest

from forge import LLM, SamplingParams, StructuredOutput
from forge.errors import UsageError
from forge.grammar.compiler import GrammarCompiler
from forge.tokenizer.byte_tokenizer import ByteTokenizer

FORM = {"regex": "(yes|no)!"}


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, allow_special=True, add_special_tokens=False)


@pytest.mark.parametrize(
    ("thinking", "good", "bad"),
    [
        ("may_open", ["yes!", "<think>\nWell.\n</think>\n\nno!", "<think></think>no!"], ["Well. yes!", "</think>yes!"]),
        ("open", ["Well.</think>\n\nyes!", "</think>no!"], ["yes!", "<think>x</think>yes!"]),
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


def test_no_control_token_comes_while_it_thinks(compiler, tokenizer):
    mask = compiler(StructuredOutput(**FORM, thinking="open")).new_matcher().mask([])
    hidden = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_hidden(token_id)]
    assert not mask[hidden].any() and np.count_nonzero(mask) > 4000


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
