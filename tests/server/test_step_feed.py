"""Watching the steps: how many may, and what it costs."""

import asyncio
import socket

import pytest

from forge.server import step_feed
from forge.server.errors import ApiError
from forge.server.step_feed import MAX_SUBSCRIBERS, StepFeed
from tests.waiting import eventually, until


class Client:
    """Gives the steps of a test; None ends them."""

    feed = None

    def watch(self, feed) -> None:
        self.feed = feed


@pytest.fixture
def encoded(monkeypatch):
    """What was encoded, with steps that are numbers."""
    steps = []

    class Codec:
        @staticmethod
        def encode(step: int) -> int:
            steps.append(step)
            return step

    monkeypatch.setattr(step_feed, "codec_of", lambda kind: Codec)
    monkeypatch.setattr(step_feed, "_PAUSE", 0)
    return steps


def test_a_subscriber_too_many_is_refused_until_one_leaves():
    async def watch() -> None:
        feed = StepFeed(Client(), texts=True)
        subscribers = [feed.join() for _ in range(MAX_SUBSCRIBERS)]
        with pytest.raises(ApiError, match=f"{MAX_SUBSCRIBERS} clients watch") as refused:
            feed.join()
        assert refused.value.status == 429 and refused.value.retry_after
        feed.leave(subscribers[0])
        feed.join()

    asyncio.run(watch())


def test_a_step_is_encoded_once_for_all_subscriber_and_comes_to_each(encoded):
    async def watch() -> list[bytes]:
        client = Client()
        feed = StepFeed(client, texts=True)
        subscribers = [feed.join() for _ in range(3)]
        for step in (1, 2, None):
            client.feed(step)
        return [b"".join([piece async for piece in feed.pieces(subscriber)]) for subscriber in subscribers]

    assert asyncio.run(watch()) == [b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"] * 3
    assert encoded == [1, 2]


def test_steps_that_come_together_are_one_piece_and_one_that_falls_behind_misses_the_oldest(encoded, monkeypatch):
    monkeypatch.setattr(step_feed, "_MOST_BEHIND", 3)

    async def watch() -> list[bytes]:
        client = Client()
        feed = StepFeed(client, texts=True)
        subscriber = feed.join()
        for step in (1, 2, 3, 4, None):
            client.feed(step)
        await eventually(lambda: feed._reading is None)  # it has read the end
        return [piece async for piece in feed.pieces(subscriber)]

    assert asyncio.run(watch()) == [b"data: 3\n\ndata: 4\n\ndata: [DONE]\n\n"]


def test_nothing_is_read_where_nobody_watches(encoded):
    async def watch() -> None:
        client = Client()
        feed = StepFeed(client, texts=True)
        subscriber = feed.join()
        assert client.feed is not None
        feed.leave(subscriber)
        assert client.feed is None

    asyncio.run(watch())


def test_a_server_has_so_many_subscriber_and_answers_the_next_in_one_line(server, forge):
    raws = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_SUBSCRIBERS)]
    for raw in raws:
        raw.sendall(b"GET /debug/steps HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
    status, answer = server.request("/debug/steps")
    assert status == 429 and answer["error"]["code"] == "too_many_subscribers"
    found = forge("watch", server.url)
    assert found.status == 2 and f"{MAX_SUBSCRIBERS} clients watch" in found.err and found.err.count("\n") == 1
    raws.pop().close()

    def is_let_in() -> bool:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"GET /debug/steps HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return raw.recv(1000).startswith(b"HTTP/1.1 200")

    assert until(is_let_in)
    for raw in raws:
        raw.close()
