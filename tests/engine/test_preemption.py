"""The engine under memory pressure: whatever happens to a sequence on the way, what it says and when it says it."""

import numpy as np
import pytest

from forge import LLM
from forge.engine.engine import Engine
from forge.engine.policies import VICTIM_POLICIES
from forge.engine.sampling_params import SamplingParams
from forge.errors import UsageError
from forge.trace.records import StepRecord
from tests.engine.schedules import waiting
from tests.engine.scripted import assert_nothing_held, letters, muddled, new_engine, run_all
from tests.small_models import write_small_qwen3

TEXTS = ("abcdefgh", "abcdzzzz", "say something", "q")
UNENDING = {"ignore_eos": True}


def pressed(kv: str = "paged", num_blocks: int = 6, **config) -> Engine:
    """An engine in whose pool hardly more than one of its sequences fits."""
    return new_engine(muddled, kv=kv, num_blocks=num_blocks, **config)


def add_all(engine: Engine, **params) -> None:
    for text in TEXTS:
        engine.add_request(text, letters(text), SamplingParams(**{"max_tokens": 10, **UNENDING, **params}))


def outputs(engine: Engine) -> list:
    found = [engine.output(text) for text in TEXTS]
    for text in TEXTS:
        engine.forget(text)
    assert_nothing_held(engine)
    return [([one.token_ids for one in output.outputs], output.prompt_logprobs) for output in found]


def unpressed(**params) -> list:
    engine = new_engine(muddled, kv="basic", max_num_seqs=1)
    add_all(engine, **params)
    run_all(engine)
    return outputs(engine)


def preemptions(records: list[StepRecord]) -> list:
    return [one for record in records for one in record.preempted]


@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("victim", VICTIM_POLICIES)
def test_preempted_sequences_say_what_they_say_undisturbed_and_each_token_once(kv, block_size, preemption, victim):
    engine = pressed(kv, 24 // block_size, block_size=block_size, preemption=preemption, preempt=victim)
    add_all(engine)

    records = run_all(engine)

    assert {one.preemption for one in preemptions(records)} == {preemption}
    told = [(token.seq_id, token.position) for record in records for token in record.tokens]
    assert sorted(told) == [(seq_id, len(text) + place) for seq_id, text in enumerate(TEXTS) for place in range(10)]
    assert sorted(one.seq_id for record in records for one in record.finished) == [0, 1, 2, 3]
    assert outputs(engine) == unpressed()


def test_a_step_that_preempts_still_delivers_the_tokens_of_the_others():
    engine = pressed()
    add_all(engine)

    for record in run_all(engine):
        victims = {one.seq_id for one in record.preempted}
        complete = {item.seq_id for item in record.items if not item.remaining}
        assert {token.seq_id for token in record.tokens} == complete
        assert not victims & complete


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_metrics_count_preemptions_and_what_had_to_be_computed_again(kv):
    engine = pressed(kv)
    add_all(engine)
    records = run_all(engine)

    for seq_id, text in enumerate(TEXTS):
        metrics = engine.output(text).metrics
        lost = [one.tokens_lost for one in preemptions(records) if one.seq_id == seq_id]
        found = [one.num_cached for record in records for one in record.admitted if one.seq_id == seq_id]
        assert (metrics.times_preempted, metrics.tokens_cached) == (len(lost), found[0])
        assert metrics.tokens_recomputed == sum(lost) - sum(found[1:])
        assert metrics.tokens_computed == len(text) + 9 - found[0] + metrics.tokens_recomputed
    assert any(one.how == "recompute" and one.num_cached for record in records for one in record.admitted) == (
        kv == "prefix"
    )


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_a_victim_whose_block_this_step_was_to_copy_is_swapped_out_from_the_copys_source(kv):
    def outputs_in(num_blocks: int) -> tuple[list, list]:
        engine = pressed(kv, num_blocks, preemption="swap", max_num_batched_tokens=12, order="priority")
        samples = SamplingParams(max_tokens=10, n=2, temperature=1.0, seed=3, **UNENDING)
        engine.add_request("samples", letters("abcdefghijklmn"), samples, priority=9)
        records = [engine.step()]
        for name in ("one", "two"):
            engine.add_request(name, letters("wxyz"), SamplingParams(max_tokens=10, **UNENDING))
        records += run_all(engine)
        found = [engine.output(name).outputs for name in ("samples", "one", "two")]
        return [one.token_ids for samples in found for one in samples], records

    expected, _ = outputs_in(num_blocks=60)
    found, records = outputs_in(num_blocks=7)

    assert {one.seq_id for one in records[2].preempted} == {0, 1}
    assert {one.preemption for one in preemptions(records)} == {"swap"}
    assert found == expected


@pytest.mark.parametrize("config", [{"max_num_batched_tokens": 4}, {"chunked_prefill": False}, {}])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_prompt_logprobs_are_right_in_chunks_and_when_preempted_midway(config, preemption):
    engine = pressed("prefix", preemption=preemption, **config)
    add_all(engine, prompt_logprobs=2, n=2)

    records = run_all(engine)

    assert preemptions(records)
    assert outputs(engine) == unpressed(prompt_logprobs=2, n=2)


def test_a_prompt_preempted_midway_is_scored_from_where_it_was():
    engine = pressed(num_blocks=7, max_num_batched_tokens=4)
    engine.add_request("short", letters("abcd"), SamplingParams(max_tokens=12, **UNENDING))
    engine.step()
    text = letters("a longer prompt of twenty")[:20]
    engine.add_request("long", text, SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True))
    records = run_all(engine)

    assert any(0 < one.tokens_lost < 20 for one in preemptions(records)), "it was not preempted in its prompt"
    alone = new_engine(muddled)
    alone.add_request("long", text, SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True))
    run_all(alone)
    assert engine.output("long").prompt_logprobs == alone.output("long").prompt_logprobs


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers():
    engine = pressed(num_blocks=3)

    with pytest.raises(UsageError, match="13 tokens, which take 4 blocks of 4, and the whole pool has 3"):
        engine.add_request("large", letters("thirteen long"), SamplingParams())

    engine.add_request("other", letters("a"), SamplingParams(max_tokens=1))
    (rejected,) = engine.step().rejected
    assert (rejected.request_id, "the whole pool has 3" in rejected.message) == ("large", True)


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_a_prompt_that_exactly_fills_the_pool_gets_its_one_token(kv):
    engine = pressed(kv, num_blocks=3)
    engine.add_request("full", letters("twelve chars"), SamplingParams(max_tokens=9, **UNENDING))
    engine.add_request("next", letters("abc"), SamplingParams(max_tokens=2, **UNENDING))
    records = run_all(engine)

    full, after = engine.output("full").outputs[0], engine.output("next").outputs[0]
    assert (len(full.token_ids), full.finish_reason) == (1, "length")
    assert len(after.token_ids) == 2
    assert not preemptions(records)


def test_one_that_grows_into_the_pools_limit_ends_as_length():
    engine = pressed(num_blocks=3)
    engine.add_request("grows", letters("abc"), SamplingParams(max_tokens=99, **UNENDING))
    run_all(engine)

    output = engine.output("grows").outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (12 - 3 + 1, "length")


# Abort


def is_queued(engine: Engine) -> bool:
    return any(one.request_id == "it" for one in waiting(engine.scheduler))


def is_mid_prefill(engine: Engine) -> bool:
    return any(
        one.request_id == "it" and 0 < engine.cache.computed_length(one.seq_id) < one.num_prompt_tokens
        for one in engine.scheduler.running.values()
    )


def is_decoding(engine: Engine) -> bool:
    return any(one.request_id == "it" and one.num_output_tokens == 2 for one in engine.scheduler.running.values())


def is_before_its_last_step(engine: Engine) -> bool:
    return any(one.request_id == "it" and one.num_output_tokens == 8 for one in engine.scheduler.running.values())


def is_swapped(engine: Engine) -> bool:
    scheduler = engine.scheduler
    return any(scheduler.queue.sequences[seq_id].request_id == "it" for seq_id in scheduler.host_pool.entries)


def is_preempted(engine: Engine) -> bool:
    return any(one.request_id == "it" and one.times_preempted for one in waiting(engine.scheduler))


def is_forked(engine: Engine) -> bool:
    return sum(one.request_id == "it" for one in engine.scheduler.running.values()) == 2


def has_a_fork_that_waits(engine: Engine) -> bool:
    return any(one.request_id == "it" and one.num_output_tokens for one in waiting(engine.scheduler))


def is_to_be_forked(engine: Engine) -> bool:
    return is_mid_prefill(engine) and any(one.waiting_samples for one in engine.scheduler.running.values())


@pytest.mark.parametrize(
    ("moment", "preemption", "n"),
    [
        (is_queued, "recompute", 1),
        (is_mid_prefill, "recompute", 1),
        (is_decoding, "recompute", 1),
        (is_before_its_last_step, "recompute", 1),
        (is_swapped, "swap", 1),
        (is_preempted, "recompute", 1),
        (is_to_be_forked, "recompute", 2),
        (is_forked, "recompute", 2),
        (has_a_fork_that_waits, "recompute", 3),
    ],
)
@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_an_abort_at_any_moment_frees_everything_and_ends_once(kv, moment, preemption, n):
    engine = pressed(kv, 8, preemption=preemption, max_num_batched_tokens=6, max_num_seqs=3)
    others = SamplingParams(max_tokens=18, **UNENDING)
    engine.add_request("one", letters("abcdefgh"), others)
    seq_ids = engine.add_request("it", letters("something"), SamplingParams(max_tokens=9, n=n, **UNENDING))
    ended: list[int] = []
    while not moment(engine):
        ended += [one.seq_id for one in engine.step().finished]
        assert engine.has_unfinished(), "it never came to that"
    said = [one.token_ids for one in engine.output("it").outputs]

    engine.abort("it")
    engine.scheduler.check_invariants()
    engine.abort("it")
    ended += [one.seq_id for record in run_all(engine) for one in record.finished]

    output = engine.output("it")
    assert [one.token_ids for one in output.outputs] == said
    assert {one.finish_reason for one in output.outputs} == {"abort"}
    assert not set(seq_ids) & set(ended)
    assert engine.scheduler.num_finished == 1 + n
    alone = new_engine(muddled)
    alone.add_request("one", letters("abcdefgh"), others)
    run_all(alone)
    assert engine.output("one").outputs[0].token_ids == alone.output("one").outputs[0].token_ids
    for request_id in ("one", "it"):
        engine.forget(request_id)
    assert_nothing_held(engine)


# A real model


def logits_of_all(llm: LLM, prompts: list[list[int]]) -> tuple[dict[int, list[np.ndarray]], int]:
    """Each sequence's logits, step by step, and how often somebody was preempted."""
    kept: dict[int, list[np.ndarray]] = {}
    llm.engine.on_logits.append(lambda seq_id, logits: kept.setdefault(seq_id, []).append(logits))
    records = list(llm.start(prompts, SamplingParams(max_tokens=12, **UNENDING)))
    return kept, len(preemptions(records))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf", tensor_type="Q8_0")


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_real_models_logits_have_the_same_bits_under_preemption(model, kv, mode, kv_dtype):
    rng = np.random.default_rng(1)
    prompts = [[7, 7, 7, 7, *rng.integers(0, 256, length).tolist()] for length in (5, 9, 1, 20, 13)]
    free, _ = logits_of_all(LLM(model, kv="basic", block_size=4, max_model_len=64, kv_dtype=kv_dtype), prompts)

    sizes = {"block_size": 4, "max_model_len": 64, "num_blocks": 12, "max_num_batched_tokens": 24}
    tight = LLM(model, kv=kv, preemption=mode, kv_dtype=kv_dtype, **sizes)
    found, num_preempted = logits_of_all(tight, prompts)

    assert num_preempted > 1
    assert found.keys() == free.keys()
    for seq_id, expected in free.items():
        assert np.array_equal(found[seq_id], expected), f"sequence {seq_id}"
