"""Bodies as JSON is defined: UTF-8, no NaN, no infinity, no half characters, and no deeper than can be read.

A body that does not say it is JSON is refused: a page in a browser may send any other kind to this machine without
asking first. `to_json` writes bodies, an event in 1 µs instead of the standard library's 10.

pydantic's own parser reads them, as FastAPI brings it: it refuses all of that by itself, at 200 levels, and reads a
megabyte of prompts in 6 ms (the standard library: 19). msgspec would be 99 ms more of start-up for the same, and says
"data was truncated" of half a character; orjson gives an integer of more than 64 bits other digits.

Parsing holds the interpreter's lock, on a thread too, and what it costs is decided by the number of values and not by
the bytes: 4 MB are one text (2 ms) or 1.3 million empty lists (0.6 s, with the collector's share). So the values of a
body are counted before it is parsed, and large bodies are parsed one after another with a pause between two of them.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from orjson import dumps as to_json
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from forge.server.errors import ApiError

__all__ = ["BodyParser", "JsonAnswer", "StrictRoute", "to_json"]

MAX_VALUES = 1 << 18
"""Values of one body at most, beyond one for each token of the model's context: 260,000 token ids take 10 ms, as many
lists 40."""
MAX_FIELDS = 1 << 15
"""Fields of all objects of one body together, at most: one takes up to 2 µs, where a body is looked through several
times."""
_LARGE = 1 << 14
"""Bytes from which on a body waits for its turn."""


_CLEARER = {"recursion limit": "it is nested too deeply", "hex escape": "an escape in it is half of a surrogate pair"}
"""The parser's words, and what to say instead."""


class JsonAnswer(Response):
    """An answer whose body `to_json` has written."""

    media_type = "application/json"


class Counts(NamedTuple):
    """The numbers of values and fields in a JSON text."""

    values: int
    """Numbers, texts, lists and objects; one more for each empty list and object."""
    fields: int


def counts_of(body: bytes, enough: Counts) -> Counts:
    """Count the values and fields of a JSON text, or a bound: no fewer than there are if that is within `enough`, and
    no more than there are if it is not.

    Builds no object per value. What is no JSON counts as what a parser can build of it before it finds the mistake.
    """
    most = _counts(body)
    if most.values <= enough.values and most.fields <= enough.fields:
        return most
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = body.count(b'"') // 2
    if num_texts > enough.values + enough.fields:  # each is a value or the name of a field
        return Counts(num_texts - enough.fields, 0)
    return _counts(b"".join(body.split(b'"')[::2]))


def _counts(body: bytes) -> Counts:
    return Counts(1 + body.count(b",") + body.count(b"[") + body.count(b"{"), body.count(b":"))


class BodyParser:
    """Parses bodies as strict JSON: no NaN, no infinity, bounded depth, bounded numbers of values and of fields."""

    def __init__(self, max_model_len: int):
        self._most = Counts(MAX_VALUES + max_model_len, MAX_FIELDS)
        self._turn = asyncio.Lock()

    async def parse(self, body: bytes) -> Any:
        """Return the parsed value. After a large one the loop is free for as long as that took. Raises `ApiError` and
        `HTTPException`."""
        if len(body) <= _LARGE:
            return self._parse(body)
        async with self._turn:
            began = time.perf_counter()
            try:
                return self._parse(body)
            finally:
                await asyncio.sleep(time.perf_counter() - began)

    def _parse(self, body: bytes) -> Any:
        counts = counts_of(body, self._most)
        for name, count, most in zip(Counts._fields, counts, self._most, strict=True):
            if count > most:
                message = f"the body has at least {count} {name}, at most {most} go: send less in one request"
                raise ApiError(message, 413, code="body_too_large")
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            problem = next((words for message, words in _CLEARER.items() if message in str(error)), str(error))
            raise HTTPException(400, f"the body is not JSON: {problem}") from None


class StrictRequest(Request):
    """A request whose body has been parsed."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class StrictRoute(APIRoute):
    """A route whose requests are `StrictRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Any:
            if request.method == "POST" and not _says_json(request.headers.get("content-type", "")):
                raise HTTPException(415, "send the body as JSON, with the header content-type: application/json")
            strict = StrictRequest(request.scope, request.receive)
            if body := await strict.body():
                strict.parsed = await request.app.state.body_parser.parse(body)
            return await handle(strict)

        return strictly


def _says_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
