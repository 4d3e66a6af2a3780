"""A request that another engine began: the same tokens, text and log probabilities from any token on."""

from dataclasses import replace

import pytest

from forge import LLM, SamplingParams
from forge.engine.handoff import Emitted, add_resumed
from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError

PROMPT = list(b"Once upon a time there was a fox who lived by the old mill")
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=3, ignore_eos=True)
CASES = {
    "greedy": replace(SAMPLED, temperature=0.0),
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4),
    "logprobs": replace(SAMPLED, logprobs=2),
    "several samples": replace(SAMPLED, n=3),
    "a grammar": replace(SAMPLED, structured=StructuredOutput(regex="(ab|ba|cc){4,9}"), ignore_eos=False),
    "min_tokens": replace(SAMPLED, min_tokens=9, ignore_eos=False),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("hash", kv="prefix", threads=1, check=True)


def run(engine, request_id: str = "r"):
    """What became of a request: its samples, and of each the text that was released with each token and at the end."""
    seq_ids = [sequence.seq_id for sequence in engine.scheduler.unfinished()]
    released: dict[int, list[str]] = {seq_id: [] for seq_id in seq_ids}
    while engine.has_unfinished():
        record = engine.step()
        for one in (*record.tokens, *record.finished):
            released[one.seq_id].append(one.text)
    outputs = engine.output(request_id).outputs
    facts = [(one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason) for one in outputs]
    return facts, [released[seq_id] for seq_id in sorted(seq_ids)]


def whole(llm: LLM, params: SamplingParams):
    engine = llm.new_engine()
    engine.add_request("r", PROMPT, params)
    return run(engine)


def resumed(llm: LLM, params: SamplingParams, emitted: list[Emitted]):
    engine = llm.new_engine()
    assert add_resumed(engine, emitted, "r", PROMPT, params) == tuple(range(params.n))
    found = run(engine)
    assert engine.cache.stats().used_blocks == 0
    return found


def cut(sample, length: int) -> Emitted:
    token_ids, _, logprobs, _, _ = sample
    length = min(length, len(token_ids) - 1)
    return Emitted(token_ids[:length], (logprobs or ())[:length])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 7, 23])
def test_from_any_token_on_it_is_the_same_request(llm, case: str, length: int):
    params = CASES[case]
    samples, released = whole(llm, params)
    emitted = [cut(sample, length) for sample in samples]
    rest = [texts[len(before.token_ids) :] for texts, before in zip(released, emitted, strict=True)]
    assert resumed(llm, params, emitted) == (samples, rest), "and nothing is chosen or released again"


def test_samples_may_be_at_different_tokens_and_some_not_begun(llm):
    params = CASES["several samples"]
    samples, _ = whole(llm, params)
    assert (
        resumed(llm, params, [cut(sample, length) for sample, length in zip(samples, (0, 5, 17), strict=True)])[0]
        == samples
    )


def test_a_stop_string_across_the_cut_is_found_and_its_text_is_not_released_twice(llm):
    samples, _ = whole(llm, SAMPLED)
    text = samples[0][1]
    params = replace(SAMPLED, stop=(text[8:11],))
    samples, released = whole(llm, params)
    assert samples[0][3] == "stop"
    for length in range(1, len(samples[0][0])):
        found, rest = resumed(llm, params, [cut(samples[0], length)])
        assert (found, rest) == (samples, [released[0][length:]])


def test_what_cannot_be_resumed_is_refused_and_changes_nothing(llm):
    engine = llm.new_engine()
    with pytest.raises(UsageError, match="with its seed"):
        add_resumed(engine, [Emitted((1,))], "r", PROMPT, replace(SAMPLED, seed=None))
    with pytest.raises(UsageError, match="each of its samples"):
        add_resumed(engine, [Emitted((1,))], "r", PROMPT, replace(SAMPLED, n=2))
    with pytest.raises(UsageError, match="a sample of 24 tokens has ended"):
        add_resumed(engine, [Emitted((1,) * 24), Emitted((1,))], "r", PROMPT, replace(SAMPLED, n=2))
    with pytest.raises(UsageError, match="has ended"):
        add_resumed(engine, [Emitted((1,) * 24)], "r", PROMPT, SAMPLED)
    assert not engine.has_unfinished()


def test_it_is_the_same_in_the_bits_of_a_real_model():
    llm = LLM("tales", kv="prefix", threads=1)
    params = replace(SAMPLED, logprobs=1)
    prompt = llm.tokenizer.encode("Once upon a time, a fox")
    engine = llm.new_engine()
    engine.add_request("r", prompt, params)
    samples, _ = run(engine)
    engine = llm.new_engine()
    add_resumed(engine, [cut(samples[0], 11)], "r", prompt, params)
    assert run(engine)[0] == samples
