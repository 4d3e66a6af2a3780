"""What requests may ask for, and the sequences that they become: without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge.engine.policies import SchedulerConfig
from forge.engine.requests import PromptLimits, RequestState, SequenceBuilder, check_answerable, check_drafts
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import GENERATE, NO_READOUT, Readout, Task
from forge.errors import UsageError
from forge.reasons import PoolExhausted
from tests.engine.schedules import sequence
from tests.engine.scripted import PieceTokenizer, letters

LIMITS = PromptLimits(vocab_size=10, max_model_len=8, max_cached_len=12, block_size=4)
SMALL_POOL = PromptLimits(10, 12, 8, 4)


@pytest.mark.parametrize("limits", [LIMITS, SMALL_POOL])
def test_a_prompt_of_tokens_that_fits_is_a_list_of_them(limits):
    for token_ids in ([0], [9, 0, 5], range(8), np.arange(3)):
        assert limits.checked(token_ids) == list(token_ids)


@pytest.mark.parametrize(
    ("limits", "token_ids", "message"),
    [
        (LIMITS, [1.5], "a prompt is text or a list of token ids"),
        (LIMITS, [], "the prompt is empty"),
        (LIMITS, [3, 10, 4], "token id 10 is outside the vocabulary of 10 tokens"),
        (LIMITS, [3, -1, 4], "token id -1 is outside the vocabulary"),
        (LIMITS, [1] * 9, "the prompt has 9 tokens and the context holds 8"),
        (SMALL_POOL, [1] * 9, "the prompt has 9 tokens, which take 3 blocks of 4, and the whole pool has 2: shorten"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_with_the_numbers(limits, token_ids, message):
    with pytest.raises(UsageError, match=message):
        limits.checked(token_ids)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {3: 1.0, 10: 1.0}}, "logit_bias: token id 10"),
        ({"stop_token_ids": [3, 10]}, "stop_token_ids: token id 10"),
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids: token id 10"),
    ],
)
def test_parameters_name_tokens_of_the_vocabulary(params, message):
    LIMITS.check_bias(SamplingParams())
    LIMITS.check_bias(SamplingParams(logit_bias={0: 1.0, 9: 1.0}, stop_token_ids=[9], allowed_token_ids=[0, 9]))
    with pytest.raises(UsageError, match=message):
        LIMITS.check_bias(SamplingParams(**params))


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("labels", [(), ("yes", "no")])
def test_a_model_answers_what_it_can(embeds, generates, labels):
    model: Any = SimpleNamespace(embeds=embeds, generates=generates, labels=labels)
    can = {"text": generates, "labels": generates or bool(labels), "embedding": embeds}
    tasks = {"text": GENERATE, "labels": Task(candidates=(1,)), "embedding": Task(pooling="mean")}
    uses = "it classifies" if labels else "it embeds"
    for name, task in tasks.items():
        if can[name]:
            check_answerable(task, model)
        else:
            with pytest.raises(UsageError, match="no hidden states" if name == "embedding" else uses):
                check_answerable(task, model)


def test_a_draft_is_named_as_the_engine_knows_it():
    check_drafts(["b"], ["a", "b"])
    for available, known in ((["a", "b"], "it has a, b"), ([], "it has none")):
        with pytest.raises(UsageError, match=f"drafts: this engine has no 'c'; {known}"):
            check_drafts([*available, "c", "d"], available)


def builder(limits: PromptLimits = LIMITS, prefill_only: bool = True, has_scratch: bool = True) -> SequenceBuilder:
    tokenizer: Any = PieceTokenizer()
    return SequenceBuilder(tokenizer, limits, SchedulerConfig(prefill_only=prefill_only), has_scratch)


def test_an_output_is_as_long_as_asked_or_as_there_is_room():
    for limits in (LIMITS, SMALL_POOL):
        for asked, expected in ((1, 1), (4, 4), (5, 4)):
            first = sequence(0, tokens=5, max_tokens=asked, params=SamplingParams(asked))
            builder(limits).complete(first, None, False)
            assert first.max_output_tokens == expected


@pytest.mark.parametrize(("limits", "is_limited"), [(LIMITS, False), (SMALL_POOL, True)])
def test_the_pool_limits_a_generation_where_it_leaves_less_than_was_asked(limits, is_limited):
    for asked, task in ((6, GENERATE), (7, GENERATE), (7, Task(candidates=(1,)))):
        first = sequence(0, max_tokens=asked, params=SamplingParams(asked), task=task)
        builder(limits).complete(first, None, False)
        limit = PoolExhausted(8) if is_limited and asked > 6 and task is GENERATE else None
        assert first.length_limit == limit and (first.task is GENERATE) == (task is GENERATE)


@pytest.mark.parametrize("options", [{}, {"prefill_only": False}, {"has_scratch": False}])
@pytest.mark.parametrize("cache", [{}, {"retain_cache": True}, {"continues_from": 4}, {"computed": True}])
def test_one_token_is_prefill_only_where_that_is_allowed_and_no_cache_is_used(options, cache):
    computed = cache.get("computed", False)
    fields = {name: value for name, value in cache.items() if name != "computed"}
    for number, max_tokens, n in ((0, 1, 1), (1, 2, 1), (2, 1, 2)):
        first = sequence(number, max_tokens=max_tokens, params=SamplingParams(max_tokens, n=n), **fields)
        samples = builder(**options).complete(first, None, computed)
        assert first.prefill_only == (number == 0 and not options and not cache)
        assert len(samples) == n and samples[0] is first
    for sample in (False, True):
        task = sequence(0, task=Task(sample=sample, candidates=(1,)), params=SamplingParams(n=2), **fields)
        assert builder(**options).complete(task, None, computed) == (task,)
        assert (task.prefill_only, task.max_output_tokens) == (True, int(sample))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_scored_prompt_is_a_task(max_tokens):
    first = sequence(0, max_tokens=max_tokens, params=SamplingParams(max_tokens, prompt_logprobs=3), task=GENERATE)
    builder().complete(first, None, False)
    assert first.task == Task(max_tokens > 0, score_from=1, top=3)


@pytest.mark.parametrize("has_grammar", [False, True])
def test_samples_share_nothing_that_grows(has_grammar):
    grammar: Any = SimpleNamespace(new_matcher=lambda: object()) if has_grammar else None
    first = sequence(5, params=SamplingParams(n=3))
    _, *samples = builder().complete(first, grammar, False)
    assert [(sample.seq_id, sample.sample_index) for sample in samples] == [(6, 1), (7, 2)]
    for name in ("token_ids", "waiting_samples", "errors", "logprobs", "output_text"):
        values = [getattr(sample, name) for sample in (first, *samples)]
        assert len(set(map(id, values))) == 3, name
        assert name == "output_text" or values[0] == values[1] == values[2]
    assert len({id(sample.matcher) for sample in samples}) == 1 + has_grammar


def test_a_text_is_rebuilt_from_the_tokens_that_are_left():
    params = SamplingParams(stop=["d"], include_stop_str_in_output=True, min_tokens=2)
    one = sequence(0, tokens=3, token_ids=[1, 2, 3, *letters("dadb")], params=params)
    one.logprobs = [None] * 6
    builder().rebuild_text(one)
    assert (one.output_text.text, one.output_text.stopped_by, len(one.logprobs)) == ("dad", "d", 4)


def test_an_output_has_all_that_its_sequences_know():
    first, second = sequence(0, token_ids=[1, 2, 3, 4]), sequence(1, params=SamplingParams(logprobs=0))
    second.sample_index, second.finish_reason, second.stop_reason, second.errors = 1, "stop", "x", ["late"]
    second.logprobs, second.readout = [None], Readout(candidates=(-1.0,))
    state = RequestState("text", (first, second))
    assert state.seq_ids == (0, 1)
    metrics: Any = {0: "cost 0", 1: "cost 1"}.__getitem__
    output = state.output(metrics)
    assert (output.request_id, output.prompt, output.seed) == (first.request_id, "text", first.seed)
    assert (output.prompt_token_ids, output.prompt_logprobs) == ((1, 2, 3), None)
    seen = [(one.index, one.token_ids, one.finish_reason, one.logprobs, one.metrics) for one in output.outputs]
    assert seen == [(0, (4,), None, None, "cost 0"), (1, (), "stop", (None,), "cost 1")]
    assert [(one.stop_reason, one.errors, one.readout) for one in output.outputs][1] == ("x", ("late",), second.readout)


@pytest.mark.parametrize(("readout", "partial"), [(None, 2), (3, 2), (None, None)])
def test_the_scores_of_a_prompt_stand_behind_the_tokens_without_any(readout, partial):
    scores = {number: Readout(scores=(((1, -1.0),),) * number) for number in (2, 3)}
    first = sequence(0, tokens=5, task=Task(score_from=2))
    first.readout, first.partial = scores.get(readout), scores.get(partial, NO_READOUT)
    state, known = RequestState(None, (first,)), readout or partial
    expected = (None, None, *scores[known].scores) if known else ()
    metrics: Any = {0: None}.get
    assert state.output(metrics).prompt_logprobs == expected
