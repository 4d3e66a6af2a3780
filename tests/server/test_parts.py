"""The server's small parts, each by itself."""

import asyncio
import json
import logging
import re
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.grammar.sandbox import CompilersBusy
from forge.server import schema
from forge.server.engine_client import MAX_DELTAS, Delta, Generation, Prompt
from forge.server.errors import ApiError
from forge.server.http_protocol import CorkedTransport
from forge.server.messages import Abort, Gauges, Inbox, Outbox, StepSummary, frame
from forge.server.metrics import Histogram, Metrics, ThroughputLine
from forge.server.requests import RequestReader, beside_the_loop, special_of
from forge.server.responses import CompletionShape, size_of
from forge.server.serving import OncePerSecond
from forge.server.settings import Settings
from forge.tokenizer.byte_tokenizer import ByteTokenizer
from forge.trace.records import RequestMetrics
from tests.waiting import PATIENCE

READY = SimpleNamespace(model_name="m", max_model_len=100, num_blocks=10, block_size=16)


def reader_of(tokenizer: ByteTokenizer, recommended: dict[str, float] | None = None) -> RequestReader:
    facts = {"tokenizer": lambda: tokenizer, "vocab_size": tokenizer.vocab_size, "default_sampling": recommended or {}}
    return RequestReader(SimpleNamespace(**vars(READY), **facts), Settings())


@given(st.lists(st.text(max_size=50), max_size=20), st.lists(st.integers(1, 40), min_size=1, max_size=50))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(messages, sizes):
    data, inbox, found = b"".join(map(frame, messages)), Inbox(), []
    while data:
        for size in sizes:
            found += inbox.feed(data[:size])
            data = data[size:]
    assert found == messages


def test_an_outbox_never_waits_and_loses_nothing():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    outbox, inbox, found = Outbox(ours), Inbox(), []
    message = "x" * 3_000_000
    outbox.put(message)
    assert not outbox.is_empty, "more than a socket takes at once"
    while not found:
        found += inbox.feed(theirs.recv(1 << 20))
        outbox.flush()
    assert found == [message] and outbox.is_empty
    outbox.put(Abort(3))
    assert inbox.feed(theirs.recv(1 << 20)) == [Abort(3)]
    ours.close()
    theirs.close()


@given(st.lists(st.floats(0, 100)), st.integers(1, 5))
def test_a_histogram_counts_each_value_below_its_bounds(values, times):
    histogram = Histogram((0.5, 1.0, 50.0))
    for value in values:
        histogram.observe(value, times)
    lines = histogram.lines("m", 'a="b"')
    counts = [int(line.rsplit(" ", 1)[1]) for line in lines[:4]]
    bounds = (0.5, 1.0, 50.0, float("inf"))
    assert counts == [times * sum(value <= bound for value in values) for bound in bounds]
    assert lines[-1] == f'm_count{{a="b"}} {times * len(values)}'


def test_the_line_about_throughput_is_said_when_something_happened():
    metrics = Metrics(READY)
    line = ThroughputLine(metrics)
    assert line.line(10.0) is None
    metrics.take_step(StepSummary(1.0, 10.5, 100, 4, 50, 0))
    metrics.gauges = Gauges(1, 2, 0, 10, 40, 100, 25)
    said = line.line(15.0)
    assert "Avg generation throughput: 10.0 tokens/s" in said
    assert "Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%" in said
    metrics.gauges = Gauges()
    assert line.line(20.0) is None


def test_guesses_are_counted_by_the_place_they_stood_at():
    metrics = Metrics(READY)
    for accepted in ((2, 0), (), (3,)):
        metrics.take_step(StepSummary(1.0, 10.5, 0, 2, 3, 0, tuple(("small", 4, one, True) for one in accepted)))
    metrics.take_step(StepSummary(1.0, 10.5, 0, 1, 1, 0, (("other", 1, 0, False),)))
    text = metrics.text("m")
    found = dict(re.findall(r'^vllm:spec_decode_(\w+){[^}]*draft="small"} ([\d.]+)', text, re.M))
    assert found["num_drafts_total"] == "3" and found["num_draft_tokens_total"] == "12"
    assert found["num_accepted_tokens_total"] == "5" and float(found["draft_acceptance_rate"]) == 5 / 12
    assert 'spec_decode_num_won_total{model_name="m",engine="0",draft="other"} 0' in text
    accepted_at = re.findall(r'accepted_tokens_per_pos_total{.*draft="small",position="(\d)"} (\d)', text)
    assert accepted_at == [("0", "2"), ("1", "2"), ("2", "1"), ("3", "0")]
    assert re.findall(r'draft_tokens_per_pos_total{.*draft="small",position="(\d)"} (\d)', text)[3] == ("3", "3")


def test_a_models_name_cannot_break_the_metrics():
    text = Metrics(READY).text('a"b\\c\nd')
    assert 'model_name="a\\"b\\\\c\\nd"' in text


class Wire:
    def __init__(self):
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


def test_what_is_written_in_one_turn_goes_out_as_one_piece():
    async def write() -> Wire:
        wire = Wire()
        corked = CorkedTransport(wire, asyncio.get_running_loop(), 1.0)
        corked.write(b"a")
        corked.write(b"b")
        await asyncio.sleep(0)
        corked.write(b"c")
        corked.close()
        corked.close()
        return wire

    wire = asyncio.run(write())
    assert wire.writes == [b"ab", b"c"] and wire.closed


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "not taken"])
def test_an_answer_that_is_taken_late_or_not_at_all_leaves_no_error_behind(taken):
    """A transport has no loop any more once it has closed, and must not be aborted then."""
    errors, answer, lost = [], b"x" * (8 << 20), asyncio.Event()

    class Answering(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            self.corked = CorkedTransport(transport, asyncio.get_running_loop(), PATIENCE if taken else 0.1)
            self.corked.write(answer)
            self.corked.close()

        def connection_lost(self, error) -> None:
            self.corked.closed()
            self.corked.close()  # as uvicorn does
            lost.set()

    async def read() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        serving = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*serving.sockets[0].getsockname(), limit=1 << 16)
        data = await reader.read() if taken else b""
        await asyncio.wait_for(lost.wait(), PATIENCE)
        with suppress(ConnectionError):
            data += await reader.read()
        writer.close()
        serving.close()
        return data

    assert (asyncio.run(read()) == answer) == taken
    assert not errors


MANY = 100_000
WRONG = {
    "prompts": (schema.CompletionRequest, {"prompt": [1.5] * MANY}),
    "prompts of nothing": (schema.CompletionRequest, {"prompt": [{}] * MANY}),
    "token ids": (schema.CompletionRequest, {"prompt": [1, *["a"] * MANY]}),
    "token ids of many prompts": (schema.CompletionRequest, {"prompt": [[1, *["a"] * MANY]] * 3}),
    "more prompts than any server takes": (schema.CompletionRequest, {"prompt": ["a"] * MANY}),
    "stop strings": (schema.CompletionRequest, {"prompt": "a", "stop": [{}] * MANY}),
    "biases": (schema.CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "b")}),
    "messages": (schema.ChatRequest, {"messages": [{}] * MANY}),
    "sound messages": (schema.ChatRequest, {"messages": [{"role": "user", "content": "a"}] * MANY}),
    "parts of a message": (schema.ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    "tokens": (schema.DetokenizeRequest, {"tokens": ["a"] * MANY}),
    "inputs": (schema.EmbeddingRequest, {"input": [None] * MANY}),
    "documents": (schema.RerankRequest, {"query": "a", "documents": [{}] * MANY}),
    "texts": (schema.ScoreRequest, {"text_1": "a", "text_2": [1] * MANY}),
    "labels": (schema.ClassifyRequest, {"input": "a", "labels": [1] * MANY}),
}


@pytest.mark.parametrize("name", WRONG)
def test_validation_stops_at_the_first_wrong_item(name):
    model, body = WRONG[name]
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() <= 4  # one for each type that a prompt may have


def test_long_work_is_done_beside_the_loop():
    async def where(size: int) -> threading.Thread:
        return await beside_the_loop(size, threading.current_thread)

    assert asyncio.run(where(10)) is threading.main_thread()
    assert asyncio.run(where(100_000)) is not threading.main_thread()


def test_an_answers_size_counts_its_tokens_and_all_log_probabilities():
    token = ((1, -0.5), (2, -1.5))
    sample = CompletionOutput(0, "ab", (1, 1), "length", None, (token, token), RequestMetrics(3, 2, 0.0, None, None))
    output = RequestOutput("r", None, (1, 1, 1), (sample,), (None, token, token), 0)
    assert size_of([output, output]) == 2 * (2 + 4 + 4)
    generation = Generation("id", [Prompt([1])] * 2, SamplingParams())
    shape = CompletionShape(generation, "m", ByteTokenizer(), schema.CompletionRequest(prompt=""), "fp")
    body = json.loads(shape.written([output, output]))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][1]["logprobs"]["token_logprobs"] == [-0.5, -0.5] and body["usage"]["total_tokens"] == 10


def test_the_bos_token_comes_where_the_model_wants_it_unless_the_body_does_not():
    tokenizer = ByteTokenizer()
    tokenizer.spec = replace(tokenizer.spec, prefix_ids=(256,), bos_token_id=256)
    reader = reader_of(tokenizer)

    def first(body: schema.CompletionRequest | schema.ChatRequest) -> int:
        if isinstance(body, schema.ChatRequest):
            return asyncio.run(reader.chat_prompt(body)).token_ids[0]
        return asyncio.run(reader.prompts(body.prompt, **special_of(body)))[0].token_ids[0]

    messages = [schema.Message(role="user", content="a")]
    assert first(schema.CompletionRequest(prompt="a")) == 256
    assert first(schema.CompletionRequest(prompt="a", add_special_tokens=False)) == ord("a")
    assert first(schema.ChatRequest(messages=messages)) == 257, "the template's own <|im_start|>"
    assert first(schema.ChatRequest(messages=messages, add_special_tokens=True)) == 256


@pytest.mark.parametrize(
    ("recommended", "asked", "used"),
    [
        ({}, {}, (0.0, 0)),
        ({}, {"temperature": 0.7}, (0.7, 0)),
        ({"temperature": 0.6, "top_k": 20}, {}, (0.6, 20)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": -1}, (0.0, 0)),
    ],
)
def test_a_body_that_says_nothing_is_greedy_unless_the_model_s_file_recommends_otherwise(recommended, asked, used):
    tokenizer = ByteTokenizer()
    reader = reader_of(tokenizer, recommended)
    params = reader.completion_params(schema.CompletionRequest(prompt="a", **asked), [Prompt([1])])
    assert (params.temperature, params.top_k) == used


def pieces(generation: Generation) -> list[Delta]:
    async def take() -> list[Delta]:
        return await anext(generation.updates())

    return asyncio.run(take())


def test_tokens_of_a_lone_stream_stay_apart_however_late_they_are_taken():
    one = Generation("r", [Prompt([1])], SamplingParams(), True)
    for token_id in (5, 6, 7):
        one.add_token(0, token_id, "a", None, apart=True)
    one.delta(0).finish_reason = "length"
    assert [delta.token_ids for delta in pieces(one)] == [[5], [6], [7]]
    for token_id in range(MAX_DELTAS + 100):
        one.add_token(0, token_id, "a", None, apart=True)
    found = pieces(one)
    assert len(found) == MAX_DELTAS and sum(len(delta.token_ids) for delta in found) == MAX_DELTAS + 100


def test_tokens_of_one_stream_among_several_share_a_delta():
    one = Generation("r", [Prompt([1])], SamplingParams(n=2), True)
    for choice, token_id in ((0, 5), (1, 6), (0, 7)):
        one.add_token(choice, token_id, "a", None)
    assert [(delta.choice, delta.token_ids, delta.text) for delta in pieces(one)] == [(0, [5, 7], "aa"), (1, [6], "a")]


def test_what_goes_wrong_over_and_over_is_logged_once_a_second():
    limit = OncePerSecond()

    def passes(message: str, second: float, level: int = logging.ERROR, *arguments) -> bool:
        record = logging.LogRecord("forge", level, "", 0, message, arguments, None)
        record.created = second
        return limit.filter(record)

    assert [passes("a", second) for second in (10.0, 10.1, 10.9, 11.0)] == [True, False, False, True]
    assert passes("b", 11.0) and all(passes("c", 11.0, logging.INFO) for _ in range(3))
    assert [passes("%d died", 12.0, logging.ERROR, process) for process in (7, 8, 8)] == [True, True, False]


def test_more_grammars_than_may_wait_are_429():
    def busy(structured):
        raise CompilersBusy(128)

    body = schema.CompletionRequest(prompt="x", structured_outputs={"regex": "a"})
    reader = reader_of(ByteTokenizer())
    reader.grammars.check = busy
    structured = StructuredOutput(regex="a")
    with pytest.raises(ApiError, match="128 grammars are waiting") as caught:
        asyncio.run(reader.compiled(structured, body))
    assert (caught.value.status, caught.value.param) == (429, "structured_outputs") and caught.value.retry_after
