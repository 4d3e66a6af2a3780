"""Exercise 12: streaming text. The check cuts texts into tokens in every way and compares with the engine's own text,
then runs the engine."""

import random
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

from forge.engine import requests
from forge.engine.output_text import OutputText
from forge.exercises.exercise import Costs, Exercise, Part, Trial, words_of
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.tokenizer.tokenizer import TokenBytes

_TEXTS = ("café", "a<b", "ab<end>c", "🦊🦊x", "ü<en<end>", "aaab", "…<e")
_STOPS = ((), ("<end>",), ("aab", "ab"), ("é", "🦊x"), ("a<b", "<"), ("aa", "aaab", "b"), ("nd>", "<end>"))
_INVALID = b"\xff a\xc3( \xe2\x82 \xf0\x9f\xa6 \xc3\xc3\xa9 \x80\x80 \xf0\x9fa".split()


class _Bytes(StreamingDetokenizer):
    """A detokenizer whose token ids are indices into a list of bytes."""

    def __init__(self, tokens: Sequence[bytes]):
        self._bytes = TokenBytes(tokens.__getitem__)
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")


class TextTrial(Trial):
    """Compares the reader's text with the engine's own, token by token."""

    def characters(self, rule: str, data: bytes) -> None:
        pair = self.call_anew(f"piece.whole_characters({data!r})", self.piece.whole_characters, data)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        is_pair = is_pair and isinstance(pair[0], str) and isinstance(pair[1], bytes | bytearray)
        self.require(is_pair, "result", f"it returned {pair!r}")
        text = _Bytes([data]).push(0)
        rest = data[len(data) - _num_held(data) :]
        finding = f"of {data!r} the text is {pair[0]!r} and {bytes(pair[1])!r} is held back: {text!r} and {rest!r}"
        self.require(bytes(pair[1]) == rest, "whole", finding)
        self.require(pair[0] == text, rule, finding)

    def text(self, tokens: Sequence[bytes], stop: Sequence[str]) -> None:
        reference = OutputText(_Bytes(tokens), stop)
        text = self.call_anew(f"text = piece.MyText({tuple(stop)!r})", lambda: self.piece.MyText(stop))
        untouched = self.piece.MyText(stop)
        for number, token in enumerate(tokens):
            was_stopped = reference.stopped_by is not None
            expected = reference.push(number)
            returned = self.call(f"text.push({token!r})", text.push, token)
            self._compare(returned, expected, text, reference, stop, "after" if was_stopped else None)
        expected, was_stopped = reference.finish(), reference.stopped_by is not None
        returned = self.call("text.finish()", text.finish)
        self._compare(returned, expected, text, reference, stop, "after" if was_stopped else "rest")
        returned = self.call("piece.MyText(text.stop).finish()", untouched.finish)
        self.require(returned == "", "own-text", f"a text without tokens is {returned!r}")

    def _compare(
        self, returned: Any, expected: str, text: Any, reference: OutputText, stop: Sequence[str], rule: str | None
    ) -> None:
        self.require(isinstance(returned, str), "result", f"it returned {returned!r}")
        finding = f"it returned {returned!r}, and should return {expected!r}"
        if returned != expected:
            if rule is None and reference.stopped_by is not None:
                rule = "found" if text.stopped_by is None or len(stop) == 1 else "first"
            elif rule is None:
                is_too_much = returned.startswith(expected)
                broken = "\ufffd" in returned and "\ufffd" not in expected
                rule = "whole" if broken else "never-sooner" if is_too_much else "soon"
            self.require(False, rule, finding)
        finding = f"stopped_by is {text.stopped_by!r}, and should be {reference.stopped_by!r}"
        several = text.stopped_by is not None and reference.stopped_by is not None
        self.require(text.stopped_by == reference.stopped_by, "first" if several else "named", finding)


def _num_held(data: bytes) -> int:
    """Count the bytes at the end that may still become a character."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def _cuts(data: bytes) -> Iterator[list[bytes]]:
    """Yield every way to cut a few bytes into tokens, and some ways for longer data."""
    places = range(1, len(data))
    random_ = random.Random(len(data))
    ways = range(1 << len(places)) if len(data) <= 6 else [random_.getrandbits(len(places)) for _ in range(40)]
    for way in [0, (1 << len(places)) - 1, *ways]:
        at = [0, *(place for place in places if way >> (place - 1) & 1), len(data)]
        yield [data[start:end] for start, end in pairwise(at)]


def _check_characters(piece: ModuleType) -> None:
    trial = TextTrial(piece)
    for text in (*_TEXTS, "", "\x00\x7f\u07ff\u0800\uffff\U0010ffff"):
        data = text.encode()
        for end in range(len(data) + 1):
            trial.characters("whole", data[:end])
    for data in _INVALID:
        trial.characters("invalid", data)
    random_ = random.Random(0)
    for _ in range(300):
        trial.characters("invalid", bytes(random_.choice(b"a\x80\x9f\xa6\xbf\xc3\xe2\xf0\xf4\xff") for _ in range(5)))


def _check_text(piece: ModuleType) -> None:
    trial = TextTrial(piece)
    for stop in _STOPS:
        for text in _TEXTS:
            for tokens in _cuts(text.encode()):
                trial.text(tokens, stop)
        for data in _INVALID:
            trial.text([data[:1], b"", data[1:]], stop)
    trial.text([b"a\xc3"], ["\ufffd"])
    random_ = random.Random(0)
    for _ in range(200):
        words = ["".join(random_.choice("abé") for _ in range(random_.randint(1, 4))) for _ in range(3)]
        data = "".join(random_.choice("abé") for _ in range(9)).encode()
        trial.text(random_.choice(list(_cuts(data))), words)

    def work(number: int) -> Callable[[], None]:
        def steps() -> None:
            text = piece.MyText(["<end>"])
            for _ in range(number):
                text.push(b"word <")

        return steps

    trial.require_growth("for _ in range(20_000): text.push(b'word <')", work, 500, 20_000, 250)


@contextmanager
def engine(piece: ModuleType) -> Iterator[None]:
    with (
        patch.object(requests, "StreamingDetokenizer", lambda tokenizer: tokenizer),
        patch.object(requests, "OutputText", _text_of(piece)),
    ):
        yield


def _text_of(piece: ModuleType) -> Callable[..., Any]:
    """Return `OutputText` built on the reader's class. Options unknown to the exercise stay the engine's own."""

    class ReadersText:
        """One sequence's text, assembled by the reader's class."""

        def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
            self._tokenizer, self._text = tokenizer, piece.MyText(stop)
            self._begun: list[str] = []

        @property
        def text(self) -> str:
            return "".join(self._begun)

        @property
        def stopped_by(self) -> str | None:
            return self._text.stopped_by

        def push(self, token_id: int) -> str:
            token = b"" if self._tokenizer.is_hidden(token_id) else self._tokenizer.token_bytes(token_id)
            self._begun.append(self._text.push(token))
            return self._begun[-1]

        def finish(self) -> str:
            self._begun.append(self._text.finish())
            return self._begun[-1]

    def new(tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0) -> Any:
        if include_stop or min_tokens:
            return OutputText(StreamingDetokenizer(tokenizer), stop, include_stop, min_tokens)
        return ReadersText(tokenizer, stop)

    return new


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    tokens = [b" word", b"\xf0\x9f\xa6", b"\x8a<"] * (number // 3 + 1)
    pushed: Sequence[Any] = tokens if piece else range(len(tokens))

    def work() -> None:
        text = piece.MyText(["<end>"]) if piece else OutputText(_Bytes(tokens), ["<end>"])
        for token in pushed:
            text.push(token)
        text.finish()

    return work


EXERCISE = Exercise(
    **words_of("streaming_text"),
    parts=(
        Part(("whole_characters",), _check_characters),
        Part(("whole_characters", "MyText.push", "MyText.finish"), _check_text),
    ),
    costs=Costs("{:,} tokens", (16, 256, 4096), _cost),
    engine=engine,
    options={"kv": "paged"},
    prompts=("Once upon a time", "The fox and the lantern"),
    params=(
        {"max_tokens": 40, "ignore_eos": True, "stop": (" he said", ". The", " and a")},
        {"max_tokens": 24, "ignore_eos": True},
    ),
)
