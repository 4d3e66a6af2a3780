"""What one can see of the server from outside: health, metrics, the timeline of a request, the steps."""

import json
import re
import socket
import threading
import urllib.request
from dataclasses import replace

import pytest

from forge import LLM, SamplingParams, __version__
from forge.server.step_feed import without_texts
from forge.trace.codec import codec_of
from forge.trace.records import FinishRecord, SpecCycle, StepRecord, TokenVerdict
from tests.waiting import PATIENCE, until


def test_health_is_a_plain_ok(server):
    assert server.request("/health") == (200, {"status": "ok"})


def test_ping_and_version(server):
    assert server.request("/ping") == (200, {"status": "ok"})
    assert server.request("/version") == (200, {"version": __version__})


ALIASES = {
    "/completions": {"prompt": "a", "max_tokens": 2},
    "/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/embeddings": {"input": "a"},
    "/rerank": {},
    "/score": {"text_1": "a", "text_2": "b"},
    "/models": None,
    "/models/small": None,
}


@pytest.mark.parametrize("path", ALIASES)
def test_an_alias_without_v1_answers_as_the_whole_path_does(server, path):
    status, found = server.request(path, ALIASES[path])
    expected, same = server.request(f"/v1{path}", ALIASES[path])
    assert status == expected < 404 and found.keys() == same.keys()


def test_metrics_have_the_names_that_dashboards_ask_for(server):
    _, text = server.request("/metrics")
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ):
        assert re.search(rf"^{name}{{.*}} [0-9.e+-]+$", text, re.M), name
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert re.search(rf'^vllm:{name}_seconds_bucket{{.*le="\+Inf"}} \d+$', text, re.M), name


def test_every_metric_is_described_once_and_buckets_only_grow(server):
    server.request("/v1/completions", {"prompt": "abc", "max_tokens": 5})
    _, text = server.request("/metrics")
    described = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(described) == len(set(described))
    buckets: dict[str, list[int]] = {}
    for name, labels, count in re.findall(r'^(\S+)_bucket{(.*),le=".*"} (\d+)$', text, re.M):
        buckets.setdefault(f"{name}_count{{{labels}}}", []).append(int(count))
    assert len(buckets) > 10 and all(counts == sorted(counts) for counts in buckets.values())
    for name, counts in buckets.items():
        assert f"{name} {counts[-1]}\n" in text


def test_histograms_have_the_bounds_that_dashboards_were_made_for(server):
    _, text = server.request("/metrics")
    for name, some in (
        ("time_to_first_token_seconds", (0.001, 0.02, 0.75, 7.5, 640.0, 2560.0)),
        ("inter_token_latency_seconds", (0.01, 0.025, 0.075, 0.4, 40.0, 80.0)),
        ("request_time_per_output_token_seconds", (0.01, 0.15, 80.0)),
        ("e2e_request_latency_seconds", (0.3, 0.8, 15.0, 960.0, 7680.0)),
        ("request_inference_time_seconds", (0.3, 7680.0)),
        ("iteration_tokens_total", (1.0, 8.0, 512.0, 16384.0)),
        ("request_params_n", (1.0, 2.0, 20.0)),
        ("request_params_max_tokens", (1.0, 2.0, 5.0, 500.0)),
        ("request_max_num_generation_tokens", (1.0, 500.0)),
        ("request_prompt_tokens", (1.0, 500.0)),
    ):
        found = {float(bound) for bound in re.findall(rf'^vllm:{name}_bucket{{.*le="([^"]+)"}}', text, re.M)}
        assert found >= {*some, float("inf")}, name
    assert re.search(r'^vllm:cache_config_info{.*block_size="16".*} 1$', text, re.M)


def test_counters_count(server):
    assert until(server.is_idle)
    names = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:prefix_cache_queries")
    before = [server.metric(name) for name in names]
    _, found = server.request("/v1/completions", {"prompt": "abc", "max_tokens": 5, "n": 2, "ignore_eos": True})
    assert until(server.is_idle)
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 10, 2, 3]
    assert found["usage"]["completion_tokens"] == 10


def test_a_steps_tokens_are_those_of_prompts_and_all_that_are_generated(server):
    assert until(server.is_idle)

    def observed() -> float:
        return float(re.search(r"^vllm:iteration_tokens_total_sum{.*} (\S+)$", server.request("/metrics")[1], re.M)[1])

    before = observed()
    _, found = server.request("/v1/completions", {"prompt": "never seen", "max_tokens": 4, "ignore_eos": True})
    assert until(server.is_idle) and observed() - before == found["usage"]["total_tokens"]


def test_questions_count_too(server):
    assert until(server.is_idle)
    names = ("vllm:prompt_tokens", "vllm:request_success", "vllm:generation_tokens")
    before = [server.metric(name) for name in names]
    assert server.request("/v1/embeddings", {"input": ["abc", "defgh"]})[0] == 200
    assert [server.metric(name) - count for name, count in zip(names, before, strict=True)] == [8, 2, 0]


def test_the_timeline_of_a_request_can_be_read_while_it_is_kept(server):
    _, found = server.request("/v1/completions", {"prompt": "abcde", "max_tokens": 4, "ignore_eos": True})
    status, timeline = server.request(f"/debug/requests/{found['id']}")
    assert status == 200 and timeline["state"] == "ended" and timeline["num_prompt_tokens"] == 5
    assert [event["event"] for event in timeline["events"]][-2:] == ["admit", "finish"]
    assert len(timeline["samples"][0]["tokens"]) == 4
    steps = [token["step"] for token in timeline["samples"][0]["tokens"]]
    assert steps == sorted(set(steps))


def test_a_request_of_several_prompts_can_be_read_too(server):
    _, found = server.request("/v1/completions", {"prompt": ["abcde", "bcd"], "max_tokens": 4, "ignore_eos": True})
    status, timeline = server.request(f"/debug/requests/{found['id']}")
    assert status == 200 and timeline["state"] == "ended" and timeline["num_prompt_tokens"] == 8
    assert [len(sample["tokens"]) for sample in timeline["samples"]] == [4, 4]


def test_steps_are_sent_as_they_happen(server):
    answer = urllib.request.urlopen(server.url + "/debug/steps", timeout=PATIENCE)
    body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}
    asking = threading.Thread(target=server.request, args=("/v1/completions", body))
    asking.start()
    records = []
    while not records or not records[-1]["finished"]:
        line = answer.readline()
        if line.startswith(b"data: "):
            records.append(json.loads(line[6:]))
    asking.join()
    answer.close()
    numbers = [record["step"] for record in records]
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    assert records[0]["items"][0]["phase"] == "prefill"
    tokens = [token for record in records for token in record["tokens"]]
    assert len(tokens) == 6 and not any(token["text"] or token["token_id"] for token in tokens)


def test_a_records_texts_and_token_ids_are_taken_out():
    record = next(iter(LLM("hash").start(["ab"], SamplingParams(max_tokens=1, logprobs=1))))
    cycle = SpecCycle(0, "draft", 2, (5, 6), (TokenVerdict(5, True, 5), TokenVerdict(6, False, 7)), (5, 7), 0.1, 0.2)
    shown = without_texts(replace(record, cycles=(cycle,), finished=(FinishRecord(0, "stop", "a secret", "stop"),)))
    text = json.dumps(codec_of(StepRecord).encode(shown))
    assert "secret" not in text and shown.items == record.items and len(shown.tokens) == len(record.tokens) == 1
    assert shown.tokens[0][2:] == (0, "", None, None) and shown.finished[0].stop is None
    assert shown.cycles[0].proposed == shown.cycles[0].emitted == (0, 0)
    assert {(one.token_id, one.target_argmax) for one in shown.cycles[0].verdicts} == {(0, 0)}


def test_a_subscriber_that_leaves_is_forgotten(server):
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.sendall(b"GET /debug/steps HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert raw.recv(1000).startswith(b"HTTP/1.1 200")
    raw.close()
    assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_the_document_names_every_endpoint(server):
    _, found = server.request("/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/health", "/generate"} <= set(found["paths"])
