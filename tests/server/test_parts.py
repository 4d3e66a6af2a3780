"""The server's small parts, each by itself."""

import asyncio
import re
import socket

from hypothesis import given
from hypothesis import strategies as st

from forge.server.http_protocol import CorkedTransport
from forge.server.messages import Abort, Gauges, Inbox, Outbox, StepSummary, frame
from forge.server.metrics import Histogram, Metrics, ThroughputLine


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
    metrics = Metrics("m", 100, 10, 16)
    line = ThroughputLine(metrics)
    assert line.line(10.0, Gauges()) is None
    metrics.take_step(StepSummary(1.0, 10.5, 100, 4, 50, 0, 0, ()))
    said = line.line(15.0, Gauges(1, 2, 0, 10, 40, 100, 25))
    assert "Avg generation throughput: 10.0 tokens/s" in said
    assert "Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%" in said
    assert line.line(20.0, Gauges()) is None


def test_guesses_are_counted_by_the_place_they_stood_at():
    metrics = Metrics("m", 100, 10, 16)
    for accepted in ((2, 0), (), (3,)):
        metrics.take_step(StepSummary(1.0, 10.5, 0, 2, 3, 0, 4 * len(accepted), accepted))
    text = metrics.text(Gauges())
    found = dict(re.findall(r"^vllm:spec_decode_num_(\w+?)_total{[^}]*0\"} (\d+)", text, re.M))
    assert found["drafts"] == "3" and found["draft_tokens"] == "12" and found["accepted_tokens"] == "5"
    assert re.findall(r'per_pos_total{.*position="(\d)"} (\d)', text) == [("0", "2"), ("1", "2"), ("2", "1")]


def test_a_models_name_cannot_break_the_metrics():
    text = Metrics('a"b\\c\nd', 100, 10, 16).text(Gauges())
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
