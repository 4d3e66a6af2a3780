"""The loop: how a request begins, goes on beside others, and ends exactly once."""

import numpy as np
import pytest

from forge.engine.engine import MAX_UNREAD
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Task
from forge.errors import UsageError
from forge.reasons import PoolExhausted
from forge.speculation.lookup import NgramProposer
from tests.engine.scripted import (
    EOS,
    PIECES,
    assert_nothing_held,
    complete,
    letters,
    muddled,
    new_engine,
    run_all,
    saying,
)
from tests.speculation.proposers import speculator

KV = pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])


def engine_saying(text: str, prompt_length: int = 2, **options):
    return new_engine(saying(letters(text), prompt_length), **options)


# How a request ends


@KV
def test_eos_ends_a_request_and_is_a_token_without_text(kv):
    output = complete(engine_saying("abc", kv=kv), "xy", max_tokens=10)

    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", EOS)
    assert output.token_ids == (*letters("abc"), EOS)


@KV
def test_max_tokens_ends_as_length(kv):
    output = complete(engine_saying("abcdef", kv=kv), "xy", max_tokens=3)

    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "length", None)


def test_eos_on_the_last_allowed_token_ends_as_stop():
    output = complete(engine_saying("ab"), "xy", max_tokens=3)

    assert (output.finish_reason, len(output.token_ids)) == ("stop", 3)


def test_a_stop_string_on_the_last_allowed_token_ends_as_stop():
    output = complete(engine_saying("abcd"), "xy", max_tokens=3, stop=["bc"])

    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "bc")
    assert output.token_ids == tuple(letters("abc"))


def test_ignore_eos_goes_on_to_the_length():
    output = complete(engine_saying("ab"), "xy", max_tokens=5, ignore_eos=True)

    assert (output.text, output.finish_reason) == ("ab", "length")
    assert output.token_ids == (*letters("ab"), EOS, EOS, EOS)


@KV
def test_a_prompt_that_fills_the_context_gets_its_one_token(kv):
    output = complete(engine_saying("abc", 8, kv=kv, max_model_len=8), "x" * 8, max_tokens=5)

    assert (output.text, output.finish_reason) == ("a", "length")


@KV
@pytest.mark.parametrize("length", range(1, 9))
def test_the_context_limit_ends_as_length_with_one_token_more_than_there_are_slots(kv, length):
    output = complete(engine_saying("abcdefghijkl", length, kv=kv, max_model_len=8), "x" * length, max_tokens=50)

    assert (len(output.token_ids), output.finish_reason) == (9 - length, "length")


def test_a_stop_token_ends_the_output_and_its_text_stays_out_unless_wanted():
    b = letters("b")
    output = complete(engine_saying("abcd"), "xy", max_tokens=9, stop_token_ids=b)
    assert (output.text, output.finish_reason, output.stop_reason, output.token_ids) == (
        "a",
        "stop",
        *b,
        tuple(letters("ab")),
    )
    output = complete(engine_saying("abcd"), "xy", max_tokens=9, stop_token_ids=b, include_stop_str_in_output=True)
    assert (output.text, output.finish_reason) == ("ab", "stop")
    output = complete(engine_saying("bcd"), "xy", max_tokens=1, stop_token_ids=b)
    assert (output.text, output.finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("proposers", "known"), [((), r"it has none \(--speculate\)"), ((NgramProposer(),), "it has ngram")]
)
def test_a_draft_is_one_that_the_engine_has(proposers, known):
    with pytest.raises(UsageError, match=f"this engine has no 'small'; {known}"):
        complete(
            new_engine(muddled, speculation=speculator(*proposers)), "ab", drafts=["ngram"] * len(proposers) + ["small"]
        )


def test_a_stop_token_is_one_of_the_vocabulary():
    with pytest.raises(UsageError, match="stop_token_ids: token id 999"):
        complete(engine_saying("a"), "xy", max_tokens=9, stop_token_ids=[999])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("min_tokens", [1, 3])
def test_until_min_tokens_nothing_ends_the_output(sampling, min_tokens):
    def script(tokens):
        logits = np.full(len(PIECES), -5.0, np.float32)
        logits[[EOS, *letters("ab")]] = (20.0, 15.0, 10.0)
        return logits

    asked = {"max_tokens": 9, "min_tokens": min_tokens, "stop_token_ids": letters("a"), **sampling}
    output = complete(new_engine(script), "xy", **asked)
    assert (output.text, output.stop_reason) == ("b" * min_tokens, EOS)
    output = complete(new_engine(script), "xy", **asked | {"ignore_eos": True, "stop_token_ids": ()})
    assert len(output.token_ids) == 9 and set(output.token_ids) == {EOS}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [False, True])
def test_with_min_tokens_log_probabilities_are_the_models_own(sampling, drafts):
    logits = np.full(len(PIECES), -5.0, np.float32)
    logits[[EOS, *letters("ab")]] = (1.0, 0.5, 0.25)
    speculation = speculator(NgramProposer(1, 2), k=3) if drafts else None
    engine = new_engine(lambda tokens: logits, speculation=speculation)

    output = complete(engine, "xaaaa", max_tokens=5, min_tokens=3, logprobs=2, **sampling)

    log_total = float(np.log(np.exp(logits.astype(np.float64)).sum()))
    assert len(output.token_ids) >= 3 and output.logprobs is not None
    for token_id, listed in zip(output.token_ids, output.logprobs, strict=True):
        assert [top for top, _ in listed[:2]] == [EOS, *letters("a")]
        assert dict(listed)[token_id] == pytest.approx(float(logits[token_id]) - log_total)


def test_min_tokens_holds_beside_allowed_tokens():
    script = lambda tokens: np.linspace(9, 0, len(PIECES), dtype=np.float32)  # noqa: E731
    output = complete(new_engine(script), "xy", max_tokens=5, min_tokens=3, allowed_token_ids=[EOS, *letters("ab")])

    assert (output.text, output.stop_reason) == ("aaa", EOS)


def test_where_every_token_would_end_it_before_min_tokens_the_request_alone_is_an_error():
    engine = new_engine(muddled)
    engine.add_request("none", letters("ab"), SamplingParams(min_tokens=1, stop_token_ids=range(len(PIECES))))
    engine.add_request("other", letters("ab"), SamplingParams(max_tokens=3, ignore_eos=True))
    run_all(engine)

    (failed,) = engine.output("none").outputs
    reason = "allowed_token_ids, bad_words, min_tokens and the grammar leave no token"
    assert (failed.finish_reason, failed.errors) == ("error", (reason,))
    assert engine.output("other").outputs[0].finish_reason == "length"


def test_a_task_of_tokens_alone_is_an_ordinary_generation():
    engine = new_engine(muddled)
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2)
    engine.add_request("task", letters("ab"), params, task=Task(sample=True))
    run_all(engine)

    assert [len(one.token_ids) for one in engine.output("task").outputs] == [5, 5]


def test_eos_on_the_token_that_fills_the_context_ends_as_stop():
    assert complete(engine_saying("ab", 6, max_model_len=8), "x" * 6, max_tokens=9).finish_reason == "stop"


@KV
def test_no_tokens_but_prompt_logprobs_takes_one_forward(kv):
    engine = engine_saying("abc", kv=kv)
    output = complete(engine, "xyz", max_tokens=0, prompt_logprobs=1)

    assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
    assert engine.model.forwards == [[3]]


@KV
def test_samples_of_a_prompt_that_is_only_scored_end_in_the_step_that_scores_it(kv):
    engine = engine_saying("abc", kv=kv)
    engine.add_request("scored", letters("xyz"), SamplingParams(n=3, max_tokens=0, prompt_logprobs=1))
    engine.checks_invariants = True
    record = engine.step()

    assert sorted((finish.seq_id, finish.reason) for finish in record.finished) == [(i, "length") for i in range(3)]
    assert not engine.has_unfinished() and engine.scheduler.queues.finished == 3
    engine.forget("scored")
    assert_nothing_held(engine)


def test_samples_of_a_prompt_that_no_pool_can_hold_end_with_it_and_say_why():
    engine = new_engine(muddled, kv="paged", num_blocks=2, max_model_len=32)
    engine.add_request("large", letters("abcdefgh"), SamplingParams(n=2, max_tokens=8, ignore_eos=True))
    run_all(engine)

    finished = [sample.finish_reason for sample in engine.output("large").outputs]
    assert finished == ["length"] * 2 and engine.scheduler.queues.finished == 2
    engine.forget("large")
    assert_nothing_held(engine)


# Requests that cannot run


def test_an_empty_prompt_is_refused_with_what_that_means():
    engine = new_engine(muddled)
    with pytest.raises(UsageError, match=r"the prompt is empty: a model continues text.*give it at least one word"):
        engine.add_request("r", [], SamplingParams())
    assert_nothing_held(engine)


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    engine = new_engine(muddled)
    engine.add_request("r", [1], SamplingParams())
    with pytest.raises(UsageError, match="'r' is already known"):
        engine.add_request("r", [2], SamplingParams())
    run_all(engine)

    assert engine.output("r").prompt_token_ids == (1,)


# What a step computes


def test_off_computes_the_whole_sequence_at_every_step():
    engine = engine_saying("abcd", 3, kv="off")
    complete(engine, "xyz", max_tokens=4)

    assert engine.model.forwards == [[3], [4], [5], [6]]


def test_basic_prefills_once_and_then_decodes_one_token_at_a_time():
    engine = engine_saying("abcd", 3)
    complete(engine, "xyz", max_tokens=4)

    assert engine.model.forwards == [[3], [1], [1], [1]]


def test_records_say_what_was_computed_and_chosen():
    engine = engine_saying("ab", 3)
    engine.report_probabilities = True
    engine.add_request("r", letters("xyz"), SamplingParams(max_tokens=5))

    first, second, third = run_all(engine)

    assert [(item.phase, item.start, item.num_tokens) for item in first.items] == [("prefill", 0, 3)]
    assert [(item.phase, item.start, item.num_tokens) for item in second.items] == [("decode", 3, 1)]
    assert [record.step for record in (first, second, third)] == [1, 2, 3]
    assert [token.position for token in (*first.tokens, *second.tokens, *third.tokens)] == [3, 4, 5]
    assert first.tokens[0].token_id == letters("a")[0]
    assert first.tokens[0].probability == pytest.approx(1.0, abs=1e-6)
    assert (first.cache.tokens_held, second.cache.tokens_held, third.cache.tokens_held) == (3, 4, 5)
    assert first.cache.bytes_held == 3 * 8
    assert [finish.reason for finish in third.finished] == ["stop"]
    assert first.tokens_computed == 3
    assert [[one.request_id for one in record.arrived] for record in (first, second)] == [["r"], []]
    assert first.cache.bytes_reserved == 8 * 4 * 8, "a whole run of eight blocks"
    assert all(0 <= record.sample_ms <= (record.ended - record.started) * 1e3 for record in (first, second, third))


def test_metrics_count_the_tokens_that_were_computed():
    for kv, computed in (("off", (3, 4, 5)), ("basic", (3, 1, 1))):
        output = complete(engine_saying("abcdef", 3, kv=kv), "xyz", max_tokens=3)
        assert output.metrics.forward_tokens == computed
        assert len(output.metrics.forward_ms) == 3
        assert (output.metrics.num_prompt_tokens, output.metrics.num_output_tokens) == (3, 3)
        assert output.metrics.arrived <= output.metrics.first_token <= output.metrics.last_token


# Many at once


@KV
def test_requests_beside_others_give_the_tokens_that_they_give_alone(kv):
    prompts = ["a", "hello", "the quick brown", "zz", "q w", "hello"]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    alone = [complete(new_engine(muddled, kv=kv), prompt, max_tokens=12, temperature=1.0, seed=3) for prompt in prompts]

    engine = new_engine(muddled, kv=kv, max_num_seqs=3)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", letters(prompt), params)
    run_all(engine)

    for index, expected in enumerate(alone):
        output = engine.output(f"r{index}").outputs[0]
        assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
        engine.forget(f"r{index}")
    assert_nothing_held(engine)


@KV
def test_samples_are_independent_and_each_can_be_reproduced(kv):
    params = SamplingParams(max_tokens=10, temperature=1.5, seed=11, n=6, ignore_eos=True)
    engine = new_engine(muddled, kv=kv, max_num_seqs=4)  # fewer than there are samples
    engine.add_request("r", letters("hello"), params)
    engine.add_request("beside", letters("a b"), SamplingParams(max_tokens=9, temperature=1.0))
    run_all(engine)
    outputs = engine.output("r").outputs

    again = new_engine(muddled, kv=kv, max_num_seqs=8)
    again.add_request("r", letters("hello"), params)
    run_all(again)

    assert [output.index for output in outputs] == list(range(6))
    assert len({output.token_ids for output in outputs}) == 6
    assert [output.token_ids for output in outputs] == [output.token_ids for output in again.output("r").outputs]
    alone = complete(new_engine(muddled), "hello", max_tokens=10, temperature=1.5, seed=11, ignore_eos=True)
    assert alone.token_ids == outputs[0].token_ids


def test_a_drawn_seed_is_reported_and_gives_the_same_tokens_again():
    engine = new_engine(muddled)
    engine.add_request("r", letters("abc"), SamplingParams(max_tokens=12, temperature=2.0))
    run_all(engine)
    output = engine.output("r")

    again = complete(new_engine(muddled), "abc", max_tokens=12, temperature=2.0, seed=output.seed)

    assert again.token_ids == output.outputs[0].token_ids


def test_a_cache_with_fewer_runs_than_sequences_serves_them_in_order():
    engine = new_engine(muddled, max_num_seqs=4, num_blocks=16)  # two runs of eight blocks
    for index in range(5):
        engine.add_request(f"r{index}", letters("ab"), SamplingParams(max_tokens=3, ignore_eos=True))
    records = run_all(engine)

    assert max(len(record.items) for record in records) == 2
    first_steps = {}
    for record in records:
        for item in record.items:
            first_steps.setdefault(item.seq_id, record.step)
    assert list(first_steps) == [0, 1, 2, 3, 4]


@KV
def test_requests_that_arrive_later_join_and_change_nothing(kv):
    expected = complete(new_engine(muddled, kv=kv), "early", max_tokens=10, ignore_eos=True).token_ids
    engine = new_engine(muddled, kv=kv)
    engine.add_request("early", letters("early"), SamplingParams(max_tokens=10, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add_request("late", letters("late one"), SamplingParams(max_tokens=3, ignore_eos=True))
    records = run_all(engine)

    assert engine.output("early").outputs[0].token_ids == expected
    assert [item.phase for item in records[0].items] == ["decode", "prefill"]
    assert records[0].phase == "prefill"


# Text as it is streamed


HALVES = ("<eos>", "a", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", "END", "E", "N", "ND ", "x")


@pytest.mark.parametrize("seed", range(60))
def test_streamed_pieces_join_to_the_text_exactly(seed):
    rng = np.random.default_rng(seed)
    said = rng.integers(1, len(HALVES), 15).tolist()
    stop = [["END"], ["E", "ND"], ["é", "€"], ["\ufffd", "NN"], [], ["xE", "Ex"]][seed % 6]
    engine = new_engine(saying(said, 1), pieces=HALVES)
    (seq_id,) = engine.add_request("r", [1], SamplingParams(max_tokens=14, stop=stop))
    records = run_all(engine)
    output = engine.output("r").outputs[0]

    streamed = "".join(token.text for record in records for token in record.tokens)
    finishes = [finish for record in records for finish in record.finished]
    assert [finish.seq_id for finish in finishes] == [seq_id]
    assert streamed + finishes[0].text == output.text
    whole = b"".join(engine.tokenizer.pieces[token] for token in output.token_ids).decode("utf-8", "replace")
    assert whole.startswith(output.text)
    assert not any(text in output.text for text in stop)
    assert (finishes[0].reason, finishes[0].stop) == (output.finish_reason, output.stop_reason)
    if output.finish_reason == "length":
        assert output.text == whole
    else:
        assert whole[len(output.text) :].startswith(output.stop_reason)


def test_a_half_character_at_the_end_shows_as_a_replacement():
    output = complete(new_engine(saying([1, 2], 1), pieces=HALVES), [1], max_tokens=2)

    assert output.text == "a\ufffd"


def test_a_stop_string_completed_by_the_end_of_the_text_ends_as_stop():
    output = complete(new_engine(saying([1, 2], 1), pieces=HALVES), [1], max_tokens=2, stop=["\ufffd"])

    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "\ufffd")


# Aborting


@KV
@pytest.mark.parametrize("steps", range(4))
def test_an_abort_keeps_the_text_and_frees_the_cache(kv, steps):
    engine = engine_saying("abcdef", kv=kv)
    engine.add_request("r", letters("xy"), SamplingParams(max_tokens=9))
    for _ in range(steps):
        engine.step()

    engine.abort("r")

    output = engine.output("r").outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abcdef"[:steps], "abort", None)
    engine.forget("r")
    assert_nothing_held(engine)


def test_an_abort_shows_what_was_held_back():
    engine = engine_saying("abc")
    engine.add_request("r", letters("xy"), SamplingParams(max_tokens=9, stop=["bcd"]))
    for _ in range(3):
        engine.step()
    engine.abort("r")

    assert engine.output("r").outputs[0].text == "abc"


def test_an_abort_ends_running_and_waiting_samples_and_leaves_other_requests_alone():
    expected = complete(new_engine(muddled), "other", max_tokens=8, ignore_eos=True).token_ids
    engine = new_engine(muddled, max_num_seqs=3)
    engine.add_request("r", letters("ab"), SamplingParams(max_tokens=20, n=5, temperature=1.0, ignore_eos=True))
    engine.add_request("other", letters("other"), SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    engine.abort("r")
    engine.scheduler.check_invariants()
    run_all(engine)

    assert {output.finish_reason for output in engine.output("r").outputs} == {"abort"}
    assert [len(output.token_ids) for output in engine.output("r").outputs] == [1, 1, 1, 1, 1]
    assert engine.output("other").outputs[0].token_ids == expected
    engine.forget("r")
    engine.forget("other")
    assert_nothing_held(engine)


def test_aborting_what_has_ended_changes_nothing():
    engine = engine_saying("ab")
    engine.add_request("r", letters("xy"), SamplingParams(max_tokens=9))
    run_all(engine)
    before = engine.output("r")
    engine.abort("r")

    assert engine.output("r") == before
    assert before.outputs[0].finish_reason == "stop"


# Logits that are no numbers


def broken_after(length: int):
    """A script whose logits are no numbers after so many tokens that begin with an "a"."""

    def script(tokens):
        if len(tokens) == length and tokens[:1] == letters("a"):
            return np.full(len(PIECES), np.nan, np.float32)
        return muddled(tokens)

    return script


def assert_broken(sample, num_tokens: int) -> None:
    assert (sample.finish_reason, len(sample.token_ids)) == ("error", num_tokens)
    assert "not finite" in sample.errors[0]


@KV
@pytest.mark.parametrize("params", [{}, {"logprobs": 1}, {"temperature": 1.0, "seed": 3}])
def test_broken_logits_end_the_sequence_that_they_are_of_and_nobody_else(kv, params):
    alone = complete(new_engine(muddled), "cd", max_tokens=9, ignore_eos=True)
    engine = new_engine(broken_after(4), kv=kv)
    (broken,) = engine.add_request("r", letters("ab"), SamplingParams(max_tokens=9, ignore_eos=True, **params))
    engine.add_request("other", letters("cd"), SamplingParams(max_tokens=9, ignore_eos=True))
    records = run_all(engine)

    assert_broken(engine.output("r").outputs[0], 2)
    assert engine.output("other").outputs[0].token_ids == alone.token_ids
    (finish,) = [one for record in records for one in record.finished if one.seq_id == broken]
    assert finish.reason == "error" and "not finite" in finish.error
    for request_id in ("r", "other"):
        engine.forget(request_id)
    assert_nothing_held(engine)


@KV
@pytest.mark.parametrize("length", [1, 2, 5])
def test_broken_logits_within_or_after_a_prompt_end_all_samples_of_it(kv, length):
    engine = new_engine(broken_after(length), kv=kv, max_num_batched_tokens=4)
    engine.add_request("r", letters("abcde"), SamplingParams(max_tokens=3, n=3, prompt_logprobs=0, temperature=1.0))
    run_all(engine)

    for sample in engine.output("r").outputs:
        assert_broken(sample, 0)
    engine.forget("r")
    assert_nothing_held(engine)


def test_what_a_forward_with_broken_logits_wrote_is_no_hit():
    engine = new_engine(broken_after(4), kv="prefix")
    for request_id in "xy":
        engine.add_request(request_id, letters("abcd"), SamplingParams(max_tokens=3))
        records = run_all(engine)
        assert_broken(engine.output(request_id).outputs[0], 0)
        assert records[0].admitted[0].num_cached == 0


# Log probabilities


@KV
def test_logprobs_come_with_every_token_also_beside_others(kv):
    engine = new_engine(muddled, kv=kv)
    engine.add_request("r", letters("ab"), SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True))
    engine.add_request("plain", letters("cd"), SamplingParams(max_tokens=6, ignore_eos=True))
    records = run_all(engine)

    output = engine.output("r").outputs[0]
    assert len(output.logprobs) == len(output.token_ids) == 6
    for row, token_id in zip(output.logprobs, output.token_ids, strict=True):
        assert row[0][0] == token_id  # greedy: the likeliest
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
    recorded = [token.logprobs for record in records for token in record.tokens if token.seq_id == 0]
    assert recorded == list(output.logprobs)
    assert engine.output("plain").outputs[0].logprobs is None
    assert engine.output("plain").prompt_logprobs is None


# Ids that are not known, and continuations


def test_aborting_an_unknown_request_changes_nothing():
    engine = new_engine(muddled, kv="paged")
    engine.add_request("known", letters("hello"), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    with pytest.raises(KeyError):
        engine.abort("unknown")
    record = engine.step()
    assert [(item.phase, item.num_tokens) for item in record.items] == [("decode", 1)], "nothing is computed again"


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_a_continuation_has_an_id_of_its_own_and_survives_whatever_happens_to_its_origin(kv):
    engine = new_engine(muddled, kv=kv)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (first,) = engine.add_request("first", letters("hello"), params, retain_cache=True)
    run_all(engine)
    said = engine.output("first").outputs[0].token_ids
    prompt = [*letters("hello"), *said, *letters("abc")]
    expected = complete(new_engine(muddled, kv=kv), prompt, max_tokens=4, ignore_eos=True).token_ids

    engine.add_request("second", prompt, params, continues_from=first)
    engine.add_request("again", prompt, params, continues_from=first)  # continued twice
    engine.add_request("never", prompt, params, continues_from=999)  # an id that was never given
    engine.add_request("salted", prompt, params, continues_from=first, salt="other")
    engine.abort("first")
    engine.forget("first")
    run_all(engine)

    for name in ("second", "again", "never", "salted"):
        output = engine.output(name)
        assert output.outputs[0].token_ids == expected, name
        engine.forget(name)
    assert_nothing_held(engine)


def test_another_salt_does_not_inherit_a_retained_cache():
    engine = new_engine(muddled, kv="paged")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (first,) = engine.add_request("first", letters("hello"), params, retain_cache=True, salt="a")
    run_all(engine)
    prompt = [*letters("hello"), *engine.output("first").outputs[0].token_ids]
    for name, salt in (("theirs", "b"), ("own", "a")):
        engine.add_request(name, prompt, params, continues_from=first, salt=salt)
        run_all(engine)
    assert engine.output("theirs").metrics.tokens_cached == 0
    assert engine.output("own").metrics.tokens_cached == len(prompt) - 1


def test_continuing_a_sequence_that_still_runs_computes_from_the_tokens():
    engine = new_engine(muddled, kv="paged")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (first,) = engine.add_request("first", letters("hello"), params, retain_cache=True)
    engine.step()
    engine.add_request("second", letters("hello"), params, continues_from=first)
    run_all(engine)
    assert engine.output("second").outputs[0].token_ids == engine.output("first").outputs[0].token_ids


def test_a_sequence_that_the_pool_ends_says_so():
    engine = new_engine(muddled, kv="paged", num_blocks=3, max_model_len=64)
    engine.add_request("grows", letters("abc"), SamplingParams(max_tokens=40, ignore_eos=True))
    records = run_all(engine)
    assert records[-1].finished[0].reason == "length"
    assert records[-1].finished[0].why == PoolExhausted(num_tokens=12)
    engine = new_engine(muddled, kv="paged", num_blocks=3, max_model_len=8)
    engine.add_request("fits", letters("abc"), SamplingParams(max_tokens=40, ignore_eos=True))
    assert run_all(engine)[-1].finished[0].why is None, "the context ends it"


def test_a_run_whose_timeline_is_not_asked_keeps_few_records():
    engine = new_engine(muddled, max_model_len=2 * MAX_UNREAD)
    engine.add_request("long", letters("a"), SamplingParams(max_tokens=MAX_UNREAD + 40, ignore_eos=True))
    unread = []
    while engine.has_unfinished():
        engine.step()
        unread.append(len(engine.timeline.journal))
    assert max(unread) == MAX_UNREAD and unread[3] == 5
    assert len(engine.output("long").outputs[0].metrics.forward_ms) == MAX_UNREAD + 40
