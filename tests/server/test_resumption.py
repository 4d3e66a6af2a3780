"""Event ids: what a client has of a stream is left out, whatever the pieces that the rest comes in."""

from dataclasses import dataclass, field, replace

import pytest

from forge import SamplingParams
from forge.errors import UsageError
from forge.server.engine_client import Generation, Prompt
from forge.server.resumption import StreamPosition, checksum_of, parse_event_id, shown_id

PARAMS = SamplingParams(max_tokens=9, n=2)


@dataclass
class Part:
    choice: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def event_id(position: StreamPosition) -> str:
    marked = position.mark(b"data: x\n\n").decode()
    assert marked.startswith("data: x\nid: ") and marked.endswith("\n\n")
    return marked.split("id: ")[1].strip()


def test_an_id_says_what_the_client_has():
    position = StreamPosition("cmpl-1", 77, 0xABC, 2)
    assert position.is_new(Part(0, [1, 2])) and position.is_new(Part(1, [3])) and position.is_new(Part(1, [], "stop"))
    seen = parse_event_id(event_id(position))
    assert (seen.request_id, seen.seed, seen.checksum) == ("cmpl-1", 77, 0xABC)
    assert (seen.tokens, seen.ended) == ((2, 1), (False, True))
    assert shown_id("cmpl-1~2f") == "cmpl-1"


def test_what_the_client_has_is_left_out_and_an_end_that_it_has_not_is_sent():
    seen = parse_event_id("cmpl-1:7:00000abc:2,3e")
    position = StreamPosition("cmpl-1~2", 7, 0xABC, 2, seen)
    assert not position.is_new(Part(0, [1])) and not position.is_new(Part(0, [1]))
    assert not position.is_new(Part(1, [1, 2, 3])) and not position.is_new(Part(1, [], "stop"))
    assert position.is_new(Part(0, [], "length"))


@pytest.mark.parametrize("cut", range(6))
def test_a_generation_is_cut_exactly_where_the_client_stopped(cut: int):
    generation = Generation("r", [Prompt([1])], SamplingParams(max_tokens=9), stream=True)
    generation.position = StreamPosition("r", 7, 1, 1, parse_event_id(f"r:7:00000001:{cut}"))
    for token in range(6):
        generation.add_token(0, token, str(token), None)
    parts = list(generation._deltas)
    new = [part for part in parts if generation.position.is_new(part)]
    assert "".join(part.text for part in new) == "012345"[cut:]


def test_the_id_of_a_request_says_that_the_client_has_no_token():
    seen = parse_event_id("chatcmpl-1f")
    assert (seen.request_id, seen.tokens) == ("chatcmpl-1f", ())


@pytest.mark.parametrize("text", ["", "x", "a:b:c:d", "cmpl-1:7:00000abc:", "cmpl 1:7:00000abc:1", "c:7:00000abc:1,"])
def test_an_id_of_another_server_is_refused(text: str):
    with pytest.raises(UsageError, match="no id of an event or a request"):
        parse_event_id(text)


def test_an_id_of_another_body_is_refused():
    checksum = checksum_of([[1, 2]], PARAMS)
    assert checksum == checksum_of([[1, 2]], replace(PARAMS, seed=4))
    assert checksum not in (checksum_of([[1, 3]], PARAMS), checksum_of([[1, 2]], replace(PARAMS, temperature=0.5)))
    with pytest.raises(UsageError, match="another request"):
        StreamPosition("r", 7, checksum, 2, parse_event_id("r:7:00000001:1,1"))
