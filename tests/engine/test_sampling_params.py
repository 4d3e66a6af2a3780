"""What a request may ask for, and the one line that refuses the rest."""

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError

NAN, INF = float("nan"), float("inf")


def test_the_defaults_are_one_greedy_sample_of_16_tokens():
    params = SamplingParams()
    assert params.greedy and (params.max_tokens, params.min_tokens, params.n) == (16, 0, 1)
    assert (params.top_p, params.top_k, params.min_p) == (1, 0, 0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert (params.stop, params.include_stop_str_in_output, params.drafts) == ((), False, None)
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, True, "1", None, 10**400], ids=str)
def test_nan_infinities_and_what_is_no_number_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"{name} must be a finite number") as raised:
        SamplingParams(**{name: value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("n", 0),
        ("n", 1.0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [7]),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=name.replace("stop", "stop string")) as raised:
        SamplingParams(**{name: value})
    assert raised.value.exit_code == 2


def test_no_tokens_are_valid_only_with_prompt_logprobs():
    with pytest.raises(UsageError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(UsageError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0, logprobs=3)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize(
    ("given", "kept"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), (None, ())]
)
def test_stop_is_one_string_or_several(given, kept):
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_words": [""]}, "bad_words are texts, none of them empty"),
        ({"bad_words": [7]}, "bad_words are texts, none of them empty"),
        ({"drafts": ["small", 7]}, r"drafts are names, got \('small', 7\)"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [True]}, "a token id of allowed_token_ids must be a whole number, got True"),
        ({"allowed_token_ids": [3, 4.0]}, "a token id of allowed_token_ids must be a whole number, got 4.0"),
        ({"max_tokens": -1}, "max_tokens must not be negative, got -1"),
        ({"num_speculative_tokens": 0.5}, "num_speculative_tokens must be a whole number, got 0.5"),
        ({"stop_token_ids": [True]}, "a token id of stop_token_ids must be a whole number, got True"),
        ({"stop_token_ids": [5, True]}, "a token id of stop_token_ids must be a whole number, got True"),
        ({"min_tokens": -1}, "min_tokens must be between 0 and max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be between 0 and max_tokens, which is 8, got 9"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must not be negative"),
        ({"structured": "a|b"}, "structured must be a StructuredOutput"),
        ({"structured": StructuredOutput(regex="a"), "ignore_eos": True}, "ignore_eos and min_tokens do not go with"),
        ({"structured": StructuredOutput(regex="a"), "min_tokens": 1}, "ignore_eos and min_tokens do not go with"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_refusal_says_what_is_wrong(values, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**values)


def test_lists_and_single_texts_are_kept_as_tuples():
    params = SamplingParams(allowed_token_ids=[3, 4], bad_words="no", drafts="small", stop_token_ids=[5])
    assert (params.allowed_token_ids, params.bad_words) == ((3, 4), ("no",))
    assert (params.drafts, params.stop_token_ids) == (("small",), (5,))
    assert SamplingParams(bad_words=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "filters", "has_matcher"),
    [
        ({}, False, False),
        ({"min_tokens": 1}, True, True),
        ({"bad_words": "no"}, True, True),
        ({"allowed_token_ids": [0]}, True, True),
        ({"structured": StructuredOutput(regex="a")}, False, True),
    ],
    ids=str,
)
def test_what_restricts_tokens_makes_a_request_less_than_plain(values, filters, has_matcher):
    params = SamplingParams(max_tokens=1, **values)
    assert (params.filters_tokens, params.needs_token_only) == (filters, not has_matcher)
    assert params.plain_greedy == (not has_matcher)


def test_values_at_the_edges_are_accepted():
    SamplingParams(top_p=1, min_p=1, top_k=0, seed=0, temperature=0, n=1, logprobs=0)
    SamplingParams(logit_bias={0: 1.0})
    SamplingParams(top_p=1e-300, min_p=0, seed=2**64 - 1, repetition_penalty=1e-300)


def test_a_bias_is_kept_as_pairs_in_order_and_makes_a_request_less_than_plain():
    params = SamplingParams(logit_bias={7: -1.0, 3: 2})
    assert params.logit_bias == ((3, 2), (7, -1.0)) and not params.plain_greedy and hash(params)


@pytest.mark.parametrize(
    "name", ["temperature", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_what_needs_more_than_the_argmax_is_not_plain(name):
    assert SamplingParams().plain_greedy
    assert not SamplingParams(**{name: 0 if name == "logprobs" else 2}).plain_greedy


@pytest.mark.parametrize(
    "bias", [{1: 1.0, -1: 1.0}, {1: float("nan")}, {1: float("inf")}, {"1": 1.0}, {1: "x"}, {True: 1.0}]
)
def test_a_bias_without_a_meaning_is_refused(bias):
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias=bias)
