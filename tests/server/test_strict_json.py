"""What a body may cost: its values are counted before it is parsed, and large bodies are parsed one after another."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.server import strict_json
from forge.server.errors import ApiError
from forge.server.strict_json import MAX_FIELDS, MAX_VALUES, BodyParser, Counts, counts_of

TEXTS = st.text(alphabet='ab,:[{"\\', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def truth(value) -> Counts:
    """Values and fields of a JSON value, counted one by one."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    counts = [truth(one) for one in inner]
    fields = len(value) if isinstance(value, dict) else 0
    return Counts(1 + sum(one.values for one in counts), fields + sum(one.fields for one in counts))


@given(VALUES, st.integers(0, 40), st.integers(0, 40))
def test_a_count_is_never_too_low_for_what_is_let_in_nor_too_high_for_what_is_refused(value, values, fields):
    body, real = json.dumps(value).encode(), truth(value)
    counts = counts_of(body, Counts(values, fields))
    num_empty = body.count(b"[]") + body.count(b"{}")  # in texts, too: more than there are does no harm here
    if counts.values <= values and counts.fields <= fields:
        assert real.values <= counts.values and real.fields <= counts.fields
    if counts.values > values:
        assert real.values + num_empty > values or real.values + real.fields > values + fields
    if counts.fields > fields:
        assert real.fields > fields


def dumps(value) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


COSTLY = {
    "unknown fields": {"prompt": "x", **{f"k{number:x}": 1 for number in range(MAX_FIELDS)}},
    "fields of a message": {
        "messages": [{"role": "user", "content": "a"} | dict.fromkeys(map(str, range(MAX_FIELDS)))]
    },
    "metadata": {"prompt": "x", "metadata": dict.fromkeys(map(str, range(MAX_FIELDS)), "v")},
    "logit_bias": {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MAX_FIELDS)), 1)},
    "schemas of tools": {"tools": [{"parameters": dict.fromkeys(map(str, range(MAX_FIELDS // 16)))}] * 16},
    "token ids": {"prompt": [1] * (MAX_VALUES + 100)},
    "token ids of many prompts": {"prompt": [[1] * (MAX_VALUES // 100)] * 101},
    "tokens": {"tokens": [1] * (MAX_VALUES + 100)},
    "lists of nothing": {"prompt": "x", "metadata": [[]] * MAX_VALUES},
    "objects of nothing": {"prompt": "x", "metadata": [{}] * MAX_VALUES},
    "texts of nothing": {"prompt": "x", "metadata": [""] * (MAX_VALUES + 100)},
    "deep nesting, often": {"prompt": "x", "metadata": [[[[[[[[[[]]]]]]]]]] * (MAX_VALUES // 5)},
    "messages": {"messages": [{"role": "user", "content": "a"}] * MAX_FIELDS},
    "stop strings": {"prompt": "x", "stop": ["a"] * (MAX_VALUES + 100)},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(name, monkeypatch):
    def parse(*arguments, **options):
        raise AssertionError("it was parsed")

    monkeypatch.setattr(strict_json, "from_json", parse)
    with pytest.raises(ApiError, match=r"the body has at least .* at most") as refused:
        asyncio.run(BodyParser(64).parse(dumps(COSTLY[name])))
    assert refused.value.status == 413 and refused.value.code == "body_too_large"


def test_a_body_that_is_cut_costs_no_more_than_its_values():
    with pytest.raises(ApiError, match="at least"):
        asyncio.run(BodyParser(64).parse(b'{"prompt": ' + b"[" * (MAX_VALUES + 100)))


def test_a_text_may_be_as_long_as_a_body_whatever_it_is_made_of():
    text = '{"a": [1, "b\\", c"]},' * 50_000
    assert asyncio.run(BodyParser(64).parse(dumps({"prompt": text}))) == {"prompt": text}


def test_token_ids_of_a_whole_context_are_let_in():
    ids = [1] * (MAX_VALUES + 1000)
    assert asyncio.run(BodyParser(1100).parse(dumps({"prompt": ids}))) == {"prompt": ids}


def test_between_two_large_bodies_the_loop_is_free_for_as_long_as_one_took(monkeypatch):
    order, clock = [], iter(range(100))

    def parse(body, **options):
        order.append("parse")
        return body

    async def pause(seconds: float) -> None:
        order.append(f"pause {seconds}")

    monkeypatch.setattr(strict_json, "from_json", parse)
    monkeypatch.setattr(strict_json.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(strict_json.asyncio, "sleep", pause)

    async def at_once() -> None:
        parser = BodyParser(64)
        await asyncio.gather(*(parser.parse(b" " * 100_000) for _ in range(3)))

    asyncio.run(at_once())
    assert order == ["parse", "pause 1.0"] * 3


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize", "/v1/embeddings", "/v1/responses"])
def test_every_endpoint_refuses_such_a_body_and_says_how_many_go(server, path):
    body = {"prompt": "x", "input": "x", "tokens": [1], "metadata": [0] * (MAX_VALUES + 2000)}
    status, answer = server.request(path, body)
    assert status == 413 and answer["error"]["code"] == "body_too_large"
    assert "values, at most" in answer["error"]["message"]
