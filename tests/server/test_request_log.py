"""What `/debug` says of a request: waits with their reasons, preemptions with their cost, the times of its tokens."""

import json

from forge.engine.sampling_params import SamplingParams
from forge.server.request_log import MAX_ENDED, RequestLog
from tests.engine.scripted import muddled, new_engine

THREE = SamplingParams(max_tokens=3, ignore_eos=True)


def logged_engine(logits_after, **options):
    engine = new_engine(logits_after, **options)
    return engine, RequestLog(engine.timeline)


def logged(engine, log, *names, params=THREE, prompt=(1, 2, 3, 4, 5, 6, 7)):
    for name in names:
        log.begin(name, engine.add_request(name, list(prompt), params))


def run(engine, log, *names):
    """Run to the end, and end each request as the server does."""
    while engine.has_unfinished():
        engine.step()
    for name in names:
        log.end(name)
        engine.forget(name)


def test_a_deferred_request_says_which_sequence_computes_its_prefix():
    engine, log = logged_engine(muddled, kv="prefix", block_size=2, num_blocks=64)
    logged(engine, log, "first", "second")
    run(engine, log, "first", "second")
    found = log.timeline("second")
    assert json.loads(json.dumps(found)) == found
    assert [event["event"] for event in found["events"]] == ["wait", "admit", "finish"]
    wait, admission, end = found["events"]
    assert wait["why"].endswith("deferred while seq 0 computed the same 6-token prefix")
    assert wait["reason"] == {"owner": 0, "num_tokens": 6} and (wait["step"], wait["until_step"]) == (1, 1)
    assert admission["why"] == "admitted: 1 block; 6 tokens from the cache" and admission["num_cached"] == 6
    assert end["why"] == "ended: length"
    assert [len(one["tokens"]) for one in found["samples"]] == [3] and found["finish_reasons"] == ["length"]


def test_times_are_those_of_the_metrics():
    engine, log = logged_engine(muddled, kv="paged")
    logged(engine, log, "one", params=SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=1, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    output = engine.output("one")
    log.end("one")
    for sample, own in zip(log.timeline("one")["samples"], output.outputs, strict=True):
        assert sample["num_output_tokens"] == own.metrics.num_output_tokens
        assert [one["milliseconds"] for one in sample["forwards"]] == list(own.metrics.forward_ms)
        assert [one["tokens"] for one in sample["forwards"]] == list(own.metrics.forward_tokens)


def test_a_request_of_several_prompts_is_known_by_the_id_of_the_whole():
    engine, log = logged_engine(muddled, kv="paged", max_num_seqs=1)
    logged(engine, log, "many-0", "many-1")
    assert log.timeline("many")["state"] == "unfinished" and log.timeline("many")["events"] == []
    run(engine, log, "many-0", "many-1")
    found = log.timeline("many")
    assert (found["request_id"], found["state"], found["num_prompt_tokens"]) == ("many", "ended", 14)
    assert [one["index"] for one in found["samples"]] == [0, 1]
    waits = [event for event in found["events"] if event["event"] == "wait"]
    assert [one["sample"] for one in waits] == [1] and "1 sequence ran, the limit" in waits[0]["why"]
    assert log.timeline("many-1")["num_prompt_tokens"] == 7 and log.timeline("other") is None


def test_an_abort_before_the_first_step_leaves_nothing_behind():
    engine, log = logged_engine(muddled, kv="paged")
    logged(engine, log, "gone", "stays")
    engine.abort("gone")
    log.end("gone")
    engine.forget("gone")
    run(engine, log, "stays")
    assert log.timeline("gone")["finish_reasons"] == ["abort"]
    assert engine.timeline.requests() == () and engine.timeline.queue() == ()


def test_the_last_ended_requests_are_kept():
    engine, log = logged_engine(muddled, kv="paged")
    for number in range(MAX_ENDED + 2):
        logged(engine, log, f"r{number}", params=SamplingParams(max_tokens=1), prompt=(1, 2))
        run(engine, log, f"r{number}")
    assert log.timeline("r1") is None and log.timeline("r2")["state"] == "ended" and len(log._seq_ids) == MAX_ENDED
