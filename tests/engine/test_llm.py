"""The Python API around a small real model: the same bits whatever the cache, the company or the block size."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from forge import LLM, ForgeError, SamplingParams, UsageError
from forge import llm as llm_module
from forge.engine import readout, sampler
from forge.engine.sampling import BrokenLogits
from tests.small_models import write_small_qwen3

PROMPTS = ["the rain in", "a", "Once upon a time, there was", "héllo €"]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.2, top_p=0.9, seed=9, n=2, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_qwen3(tmp_path_factory.mktemp("model") / "small.gguf", head_dim=16, seed=5)


def load(path, **options) -> LLM:
    return LLM(path, device="reference", **options)


@pytest.fixture(scope="module")
def off(path) -> LLM:
    return load(path, kv="off")


@pytest.fixture(scope="module")
def basic(path) -> LLM:
    return load(path, kv="basic")


def tokens(outputs) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def logits_of(llm: LLM, prompt, params=GREEDY, beside=()) -> np.ndarray:
    """The logits of each output token of the first prompt, as they were seen while generating."""
    run = llm.start([prompt, *beside], params, keep_logits=True)
    list(run)
    return np.array(run.logits)


def assert_nothing_held(llm: LLM) -> None:
    engine = llm.engine
    engine.scheduler.check_invariants()
    assert engine.cache.stats().used_blocks == 0
    assert (engine._requests, engine.timeline.requests(), engine.on_logits) == ({}, (), [])
    assert not engine.has_unfinished()


# The same bits


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {"kv": "basic"},
        {"kv": "on", "block_size": 1},
        {"kv": "basic", "block_size": 64, "max_model_len": 80},
        {"kv": "basic", "max_num_seqs": 1},
        {"kv": "off", "max_num_seqs": 3},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_cache_switched_off(path, off, options, params):
    llm = load(path, **options)

    assert tokens(llm.generate(PROMPTS, params)) == tokens(off.generate(PROMPTS, params))
    assert_nothing_held(llm)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_have_the_same_bits_with_the_cache_off_basic_alone_and_beside_others(off, basic, prompt):
    expected = logits_of(off, prompt)

    assert np.array_equal(logits_of(basic, prompt), expected)
    assert np.array_equal(logits_of(basic, prompt, beside=PROMPTS), expected)
    assert np.array_equal(logits_of(off, prompt, beside=PROMPTS), expected)


@pytest.mark.parametrize("kv", ["off", "basic"])
def test_logits_of_all_tokens_at_once_are_those_seen_while_generating(request, kv):
    llm = request.getfixturevalue(kv)
    (output,) = llm.generate([PROMPTS[0]], GREEDY)
    generated = output.outputs[0].token_ids
    prompt_length = len(output.prompt_token_ids)

    every = llm.logits([*output.prompt_token_ids, *generated])

    assert every.shape == (prompt_length + len(generated), llm.model.vocab_size)
    assert every.dtype == np.float32
    assert np.array_equal(every[prompt_length - 1 : -1], logits_of(llm, PROMPTS[0]))
    assert every[prompt_length - 1 : -1].argmax(axis=1).tolist() == list(generated)


@pytest.mark.parametrize("kv", ["off", "basic"])
def test_several_prompts_at_once_give_the_tokens_that_each_gives_alone(request, kv):
    llm = request.getfixturevalue(kv)

    alone = [tokens(llm.generate(prompt, SAMPLED)) for prompt in PROMPTS]

    assert tokens(llm.generate(PROMPTS, SAMPLED)) == [sample for samples in alone for sample in samples]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
def test_rounded_keys_are_rounded_with_the_cache_off_too(path, off, kv_dtype):
    rounded = [load(path, kv=kv, kv_dtype=kv_dtype) for kv in ("off", "basic")]
    seen = [logits_of(llm, PROMPTS[2]) for llm in rounded]

    assert np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], logits_of(off, PROMPTS[2]))
    tokens_in = rounded[1].tokenizer.encode(PROMPTS[2])
    assert np.array_equal(rounded[1].logits(tokens_in)[-1], seen[0][0])


def test_an_unknown_kv_dtype_lists_the_supported_ones(path):
    with pytest.raises(UsageError, match="unknown kv dtype 'int3'; supported: float32, float16, bfloat16, int8"):
        load(path, kv_dtype="int3")


# Prompts and outputs


def test_a_prompt_is_text_or_token_ids(basic):
    token_ids = basic.tokenizer.encode("the rain")
    expected = basic.generate("the rain", GREEDY)

    for prompt in (["the rain"], token_ids, [token_ids], np.array(token_ids), (tuple(token_ids),)):
        outputs = basic.generate(prompt, GREEDY)
        assert tokens(outputs) == tokens(expected)
        assert outputs[0].prompt_token_ids == tuple(token_ids)
    assert expected[0].prompt == "the rain"
    assert basic.generate(token_ids, GREEDY)[0].prompt is None


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["ok", ""]], ids=repr)
def test_an_empty_prompt_is_refused_and_nothing_is_left_queued(basic, prompt):
    with pytest.raises(UsageError, match="the prompt is empty"):
        basic.generate(prompt, GREEDY)
    assert_nothing_held(basic)


@pytest.mark.parametrize("prompt", [{"prompt": "the rain"}, b"rain", 5, None, [{"a": 1}], ["ok", b"rain"]], ids=repr)
def test_what_is_no_prompt_is_not_taken_for_one(basic, prompt):
    with pytest.raises(UsageError, match="a prompt is text or a list of token ids"):
        basic.generate(prompt, GREEDY)
    assert_nothing_held(basic)


@pytest.mark.parametrize("params", [5, {"max_tokens": 5}, [GREEDY]], ids=repr)
def test_what_are_no_params_is_said(basic, params):
    with pytest.raises(UsageError, match="params are SamplingParams"):
        basic.generate(["the rain"], params)


def test_no_prompt_at_all_is_refused(basic):
    with pytest.raises(UsageError, match="there is no prompt"):
        basic.generate([], GREEDY)


def test_one_prompt_that_cannot_run_refuses_them_all(basic):
    with pytest.raises(UsageError, match="outside the vocabulary"):
        basic.generate([[1, 2], [3, 999_999]], GREEDY)
    assert_nothing_held(basic)


def test_outputs_come_in_the_order_of_the_prompts_whoever_ends_first(path):
    llm = load(path, kv="basic", max_model_len=64)
    long, short = [7] * 60, [7] * 3
    outputs = llm.generate([short, long], SamplingParams(max_tokens=50, ignore_eos=True))

    assert [len(output.prompt_token_ids) for output in outputs] == [3, 60]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [50, 5]


def test_the_text_is_that_of_the_tokens(basic):
    for sample in basic.generate(PROMPTS, GREEDY):
        assert sample.outputs[0].text == basic.tokenizer.decode(sample.outputs[0].token_ids, skip_special=True)


def test_metrics_show_what_the_cache_saves(off, basic):
    without, cached = (llm.generate("the rain in", GREEDY)[0].metrics for llm in (off, basic))
    length = without.num_prompt_tokens

    assert without.forward_tokens == tuple(range(length, length + 12))
    assert cached.forward_tokens == (length, *[1] * 11)


def test_max_model_len_bounds_what_is_reserved(path):
    small, large = load(path, kv="basic", max_model_len=32), load(path, kv="basic", max_model_len=64)

    assert large.engine.cache.num_blocks == 2 * small.engine.cache.num_blocks
    with pytest.raises(UsageError, match="the prompt has 33 tokens and the context holds 32"):
        small.generate([[1] * 33])


# Log probabilities


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("kv", ["off", "basic"])
def test_logprobs_are_those_of_the_logits(request, kv):
    llm = request.getfixturevalue(kv)
    params = SamplingParams(max_tokens=5, logprobs=4, prompt_logprobs=3, temperature=1.5, seed=2, ignore_eos=True)
    (output,) = llm.generate(["the rain in"], params)
    prompt, sample = output.prompt_token_ids, output.outputs[0]
    expected = [log_softmax(row) for row in llm.logits([*prompt, *sample.token_ids])]

    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    scored = [*zip(output.prompt_logprobs[1:], prompt[1:], expected, [3] * 99, strict=False)]
    scored += [*zip(sample.logprobs, sample.token_ids, expected[len(prompt) - 1 :], [4] * 5, strict=False)]
    assert len(scored) == len(prompt) - 1 + 5
    for found, token_id, row, count in scored:
        likeliest = np.argsort(-row, kind="stable")[:count].tolist()
        assert [i for i, _ in found] == (likeliest if token_id in likeliest else [*likeliest, token_id])
        assert [value for _, value in found] == pytest.approx([row[i] for i, _ in found], rel=1e-5)
        assert np.exp([value for _, value in found]).sum() <= 1 + 1e-6


@pytest.mark.parametrize("kv", ["off", "basic"])
def test_a_long_prompt_is_scored_in_pieces_with_the_same_bits(request, kv, monkeypatch):
    llm = request.getfixturevalue(kv)
    params = SamplingParams(max_tokens=2, n=2, temperature=1.0, seed=1, prompt_logprobs=2, ignore_eos=True)
    prompt, rows, forward = [*range(5, 35)], [], llm.model.forward
    (whole,) = llm.generate([prompt], params)

    def counted(batch, storage):
        rows.append(len(batch.logit_rows))
        return forward(batch, storage)

    monkeypatch.setattr(llm.model, "forward", counted)
    monkeypatch.setattr(llm.engine.scheduler, "_max_logit_rows", 8)
    monkeypatch.setattr(readout, "max_logit_rows", lambda vocab_size: 8)
    (pieces,) = llm.generate([prompt, [1, 2, 3]], params)[:1]

    assert max(rows) == 8
    assert pieces.prompt_logprobs == whole.prompt_logprobs
    assert tokens([pieces]) == tokens([whole])


def test_all_logprobs_together_are_a_distribution(basic):
    (output,) = basic.generate(["the"], SamplingParams(max_tokens=1, logprobs=10_000))
    values = [value for _, value in output.outputs[0].logprobs[0]]

    assert len(values) == basic.model.vocab_size
    assert np.exp(values).sum() == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)


def test_a_prompt_can_be_scored_without_generating(basic):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = basic.generate(["the rain in"], params)

    assert output.outputs[0].token_ids == ()
    assert [[i for i, _ in row] for row in output.prompt_logprobs[1:]] == [[i] for i in output.prompt_token_ids[1:]]
    (one,) = basic.generate([[5]], params)
    assert one.prompt_logprobs == (None,)


# Runs


def test_streamed_text_joins_to_the_output(basic):
    run = basic.start(PROMPTS[:1], SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3))
    pieces = []
    for record in run:
        pieces += [token.text for token in record.tokens] + [finish.text for finish in record.finished]

    assert "".join(pieces) == run.outputs[0].outputs[0].text


def test_outputs_can_be_read_while_the_run_is_under_way(basic):
    run = basic.start("the rain", GREEDY)
    lengths = [len(run.outputs[0].outputs[0].token_ids) for _ in run]

    assert lengths == list(range(1, 13))
    assert run.outputs is run.outputs


def test_a_run_that_is_left_half_way_can_be_taken_up_again(basic):
    expected = tokens(basic.generate("the rain", GREEDY))
    run = basic.start("the rain", GREEDY)
    for record in run:
        if record.tokens[0].position > 5:
            break
    list(run)

    assert tokens(run.outputs) == expected
    assert_nothing_held(basic)


def test_a_run_that_is_left_half_way_can_be_aborted(basic):
    run = basic.start(PROMPTS, GREEDY)
    next(iter(run))
    run.abort()
    run.abort()

    assert {output.outputs[0].finish_reason for output in run.outputs} == {"abort"}
    assert [len(output.outputs[0].token_ids) for output in run.outputs] == [1] * 4
    assert list(run) == []
    assert_nothing_held(basic)


def test_leaving_the_loop_at_the_last_record_leaves_nothing_behind(basic):
    run = basic.start("the rain", GREEDY)
    for record in run:
        if record.finished:
            break

    assert_nothing_held(basic)
    assert run.outputs[0].outputs[0].finish_reason == "length"


def test_threads_take_turns_at_one_model():
    llm = LLM("hash", kv="prefix", num_blocks=64, max_model_len=256)
    prompts = [f"thread {number} " * 3 for number in range(8)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [tokens(llm.generate(prompt, params)) for prompt in prompts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            found = list(threads.map(lambda prompt: tokens(llm.generate(prompt, params)), prompts * 3))
    finally:
        sys.setswitchinterval(interval)

    assert found == expected * 3
    assert_nothing_held(llm)


def test_a_model_that_nobody_has_any_more_gives_its_cache_back_at_once(path):
    llm = load(path, kv="paged", speculate="ngram")
    llm.generate(PROMPTS, GREEDY)
    storage = weakref.ref(llm.engine.storage)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert storage() is None, "something refers back to the engine"
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [0, 1])
def test_two_runs_at_once_each_come_to_their_end(basic, first):
    expected = [tokens(basic.generate(prompt, GREEDY)) for prompt in PROMPTS[:2]]
    runs = [basic.start(prompt, GREEDY) for prompt in PROMPTS[:2]]
    list(runs[first])
    list(runs[1 - first])

    assert [tokens(run.outputs) for run in runs] == expected
    assert_nothing_held(basic)


def test_keeping_logits_of_one_run_is_not_undone_by_another_beside_it(basic):
    expected = logits_of(basic, PROMPTS[0])
    plain = basic.start(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True))
    next(iter(plain))

    assert np.array_equal(logits_of(basic, PROMPTS[0]), expected)
    plain.abort()
    assert_nothing_held(basic)


def test_logits_are_kept_of_the_steps_that_another_run_takes_too(basic):
    expected = logits_of(basic, PROMPTS[0])
    run, other = (basic.start([prompt], GREEDY, keep_logits=True) for prompt in PROMPTS[:2])
    next(iter(run))
    list(other)
    list(run)

    assert np.array_equal(np.array(run.logits), expected)
    assert len(other.logits) == len(other.outputs[0].outputs[0].token_ids)
    assert basic.engine.on_logits == []


@pytest.mark.parametrize("late", [False, True])
def test_logits_are_kept_once_of_a_token_whose_step_failed_before_and_after_it_stood(basic, monkeypatch, late):
    expected, owner = logits_of(basic, PROMPTS[0]), basic.engine.scheduler if late else sampler
    run = basic.start([PROMPTS[0]], GREEDY, keep_logits=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for record in run:
            if record.tokens[0].position > 4:
                patch.setattr(owner, "commit" if late else "argmax_rows", interrupt)
    kept = len(run.outputs[0].outputs[0].token_ids)
    assert len(run.logits) == kept
    list(run)

    assert np.array_equal(np.array(run.logits), expected)


def test_logits_of_a_token_that_its_step_lost_are_dropped(basic):
    expected = logits_of(basic, PROMPTS[0])
    run = basic.start([PROMPTS[0]], GREEDY, keep_logits=True)
    next(iter(run))
    basic.engine.on_logits.append(interrupt)  # called after the run has kept them
    with pytest.raises(KeyboardInterrupt):
        next(iter(run))
    basic.engine.on_logits.remove(interrupt)

    assert len(run.logits) == 1
    list(run)
    assert np.array_equal(np.array(run.logits), expected)


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_the_seed_is_known_from_the_start(basic):
    run = basic.start("the", SamplingParams(temperature=1.0))
    seed = run.seed
    list(run)

    assert run.seed == seed == run.outputs[0].seed
    again = basic.generate("the", SamplingParams(temperature=1.0, seed=seed))
    assert tokens(again) == tokens(run.outputs)


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, BrokenLogits("no numbers"), MemoryError])
def test_generate_gives_everything_back_when_a_step_fails(basic, monkeypatch, trouble):
    expected = tokens(basic.generate(PROMPTS, GREEDY))
    forward, calls = basic.model.forward, []

    def failing(batch, storage):
        calls.append(batch)
        if len(calls) == 3:
            raise trouble
        return forward(batch, storage)

    monkeypatch.setattr(basic.model, "forward", failing)
    with pytest.raises(trouble if isinstance(trouble, type) else type(trouble)):
        basic.generate(PROMPTS, GREEDY)

    assert_nothing_held(basic)
    assert tokens(basic.generate(PROMPTS, GREEDY)) == expected


# Options


def test_an_unknown_kv_mode_is_refused_before_the_model_is_loaded(path, monkeypatch):
    monkeypatch.setattr(llm_module, "load_model", None)
    with pytest.raises(UsageError, match="unknown kv mode 'pagd'; supported: off, basic") as raised:
        load(path, kv="pagd")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "num_blocks", "threads", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_whole_numbers_of_at_least_one(path, name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} must be a whole number of at least 1"):
        load(path, **{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "a"])
def test_a_host_pool_may_be_empty_and_no_less(path, value):
    with pytest.raises(UsageError, match="--num-host-blocks must be a whole number of at least 0"):
        load(path, num_host_blocks=value)
    assert load(path, kv="paged", preemption="swap", num_host_blocks=0).engine.scheduler.host_pool.num_free == 0


def test_more_context_than_the_model_has_is_refused(path):
    with pytest.raises(UsageError, match="--max-model-len 1025 is more than the 1024 tokens of this model's context"):
        load(path, max_model_len=1025)
    assert load(path).max_model_len == 1024


@pytest.mark.parametrize("kv", ["off", "basic"])
def test_a_cache_that_no_machine_has_room_for_is_one_line(path, kv):
    with pytest.raises(ForgeError, match="does not fit in memory: lower --max-model-len"):
        load(path, kv=kv, max_num_seqs=10**15, num_blocks=None if kv == "off" else 10**15)


def test_a_pool_too_small_for_one_sequence_is_refused(path):
    with pytest.raises(UsageError, match="--num-blocks 3 cannot hold one sequence of 1024 tokens"):
        load(path, kv="basic", num_blocks=3)


def test_loading_reports_progress_to_the_end(path):
    calls = []
    load(path, on_load_progress=lambda done, total: calls.append((done, total)))

    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("bad", [[], [-1], [288], [5, 10**9]])
def test_logits_of_nothing_or_of_unknown_tokens_are_refused(basic, bad):
    with pytest.raises(UsageError, match="between 0 and 287"):
        basic.logits(bad)


def test_logits_touch_nothing_that_is_running(basic):
    expected = tokens(basic.generate("the rain", GREEDY))
    run = basic.start("the rain", GREEDY)
    for _ in run:
        basic.logits([1, 2, 3])

    assert tokens(run.outputs) == expected


def test_keeping_time_changes_nothing(path, basic):
    timed = load(path, kv="basic", time_operations=True)

    assert tokens(timed.generate(PROMPTS, SAMPLED)) == tokens(basic.generate(PROMPTS, SAMPLED))
    assert np.array_equal(timed.logits([1, 2, 3]), basic.logits([1, 2, 3]))
    assert {time.operation for time in timed.operation_times()} >= {"attention", "ffn_gate", "output head", "embed"}
    assert basic.operation_times() == ()


def test_with_check_a_rule_that_does_not_hold_ends_the_step_and_the_next_begins_anew(path, off, monkeypatch):
    llm = load(path, kv="paged", check=True)
    expected = tokens(off.generate(PROMPTS[:2], GREEDY))
    run = llm.start(PROMPTS[:2], GREEDY)
    next(iter(run))

    def broken():
        raise AssertionError("block 3 is in two tables")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.scheduler, "check_invariants", broken)
        with pytest.raises(AssertionError, match="block 3"):
            next(iter(run))
    for _ in run:
        pass

    assert tokens(run.outputs) == expected
    assert not load(path, kv="paged").engine.checks_invariants
