"""`forge bench tokenizer`: the fast path beside Hugging Face `tokenizers`, on one vocabulary, in the same run.

Nothing is timed that is not equal first. The gate compares, over every kind of input: the ids with control tokens
matched, the ids with their text left as text, the decoded text, and the text decoded token by token; then 8 threads
encode 100 times each, and all 800 must agree. Both are called from Python, as a serving engine here would call them.

There are seventeen kinds of text, from one word to 200,000 characters: prose, code, chats, several scripts. Each has
the length that its kind has in the tables of Prelude's tokenizer, on which this is modelled.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from forge.bench import kit
from forge.bench.kit import Facts, Progress
from forge.bench.worker import timed
from forge.errors import ForgeError, UsageError
from forge.gguf import GGUFFile
from forge.model.catalog import is_hash_model, resolve_model
from forge.tokenizer import StreamingDetokenizer, Tokenizer, TokenizerSpec, spec_from_gguf
from forge.tokenizer.encoders import ReferenceEncoder
from forge.tokenizer.tokenizer_json import spec_from_tokenizer_json
from forge.views.palette import ACCENT
from forge.views.screen import Part, Table, check, fill, title, trouble
from forge.views.text import one_line
from forge.workload.judging import held_out_stories
from forge.workload.requests import PASSAGE

BATCHES = (1, 4, 16, 64)
BATCH_INPUT = "medium_prose"
THREADS, ENCODES, LOADS = 8, 100, 3
TURN_SECONDS = 0.15
"""Calls of one kind go on for about so long, and are at least three."""


class NotEqual(ForgeError):
    """The two tokenizers disagree: there is nothing to time."""


def screen(facts: Facts) -> Iterator[Part]:
    yield title("How fast is text turned into tokens, and back?")
    on = kit.where({"machine": facts["machine"]}, "µs per call, medians")
    yield fill("{source:line}, {vocabulary:count} tokens", facts) + on
    if reason := facts["fallback_reason"]:
        yield trouble(f"Hugging Face tokenizers beside itself, as the fast path is not used: {one_line(reason)}")
    else:
        yield check(True, "equal ids and texts on every input, and from 8 threads at once")
    times = ("tokenizers: {theirs:us}", "fast path: {ours:us}", "faster: {speed_up:ratio x}")
    us = {"us": lambda value: f"{value:,.{0 if value >= 100 else 1 if value >= 1 else 2}f}"}
    for kind in ("encode", "decode"):
        columns = [f"{kind}: {{name}}", "chars: {chars:count}", "tokens: {tokens:count}", *times]
        yield from (None, Table.of(facts[kind], *columns, formats=us, styles={4: ACCENT}))
    rows = [row | {"name": f"encode a batch of {row['name']}"} for row in facts["batch"]]
    rows.append(facts["concurrent"] | {"name": f"{THREADS} threads x {ENCODES} encodes, per encode"})
    rows += [facts["streaming"] | {"name": "streaming decode, per token"}, facts["load"]]
    yield from (None, Table.of(rows, ": {name}", *times, formats=us))
    yield f"Batches and threads: {BATCH_INPUT}. Both are called from Python."


@kit.benchmark(screen)
def bench_tokenizer(
    say: Progress,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A bundled or pulled model, a GGUF file, a tokenizer.json, or a folder with one."
        ),
    ] = "tales",
) -> Facts:
    """Encode, decode, streams, batches, threads and load time, over seventeen kinds of text, against tokenizers.

    Nothing is timed before all results are equal.

    [dim]forge bench tokenizer path/to/tokenizer.json[/dim]
    """
    if is_hash_model(source):
        raise UsageError("the hash model reads bytes: there is no tokenizer to measure")
    path = Path(source).expanduser()
    path = path if path.suffix == ".json" else resolve_model(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    spec, texts = open_spec(path), inputs()
    say("load")
    theirs, their_load = _loaded(lambda: Theirs(path, open_spec(path) if path.suffix != ".json" else spec))
    ours, our_load = _loaded(lambda: Ours(open_spec(path)))
    for name, text in texts.items():
        say(f"equal? {name}")
        check_equal(ours, theirs, name, text)
    say("equal? 8 threads")
    text, long = texts[BATCH_INPUT], texts["very_long"]
    check_threads(ours, text, theirs.encode(text))

    def measure(name: str, chars: int, tokens: int, call: Callable[[Any], Any], per: int = 1) -> Facts:
        return times(name, chars, tokens, *(us / per for us in _times(call, theirs, ours)))

    encode, decode = [], []
    for name, passage in texts.items():
        say(f"encode and decode {name}")
        ids = theirs.encode(passage)
        encode.append(measure(name, len(passage), len(ids), methodcaller("encode", passage)))
        decode.append(measure(name, len(passage), len(ids), methodcaller("decode", ids)))
    say("streams, batches, threads")
    ids = theirs.encode(long)
    at_once = [_threads_seconds(contender, text) * 1e6 for contender in (theirs, ours)]
    return {
        "source": path.name,
        "vocabulary": len(spec.tokens),
        "implementation": ours.tokenizer.implementation,
        "fallback_reason": ours.tokenizer.fallback_reason,
        "encode": encode,
        "decode": decode,
        "streaming": measure("per token", len(long), len(ids), methodcaller("stream", ids), len(ids)),
        "batch": [measure(str(n), len(text), n, methodcaller("encode_batch", [text] * n)) for n in BATCHES],
        "concurrent": times(f"{THREADS} threads", len(text), THREADS * ENCODES, *at_once),
        "load": times("load", 0, len(spec.tokens), their_load * 1e6, our_load * 1e6),
    }


def times(name: str, chars: int, tokens: int, theirs: float, ours: float) -> Facts:
    """Build the facts of a comparison: median microseconds per call."""
    size = {"name": name, "chars": chars, "tokens": tokens}
    return size | {"theirs": theirs, "ours": ours, "speed_up": theirs / ours}


class Ours:
    """forge's tokenizer with its fast path loaded."""

    def __init__(self, spec: TokenizerSpec):
        self.tokenizer = Tokenizer(spec, prefer="fast")
        self.tokenizer.prepare()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_special=True)

    def encode_plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def stream(self, ids: Sequence[int]) -> list[str]:
        stream = StreamingDetokenizer(self.tokenizer, skip_special=False)
        return [*[stream.push(token_id) for token_id in ids], stream.flush()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


class Theirs:
    """Hugging Face `tokenizers`, from its own file where there is one, otherwise from the same vocabulary."""

    def __init__(self, path: Path, spec: TokenizerSpec):
        from tokenizers import Tokenizer as HuggingFace

        self.tokenizer = (
            HuggingFace.from_file(str(path)) if path.suffix == ".json" else HuggingFace.from_str(_document(spec))
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        self.tokenizer.encode_special_tokens = True
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self.tokenizer.encode_special_tokens = False

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def stream(self, ids: Sequence[int]) -> list[str]:
        from tokenizers.decoders import DecodeStream

        stream, tokenizer = DecodeStream(skip_special_tokens=False), self.tokenizer
        return [stream.step(tokenizer, token_id) or "" for token_id in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]


def open_spec(path: Path) -> TokenizerSpec:
    """Return the tokenizer of a GGUF file, of a tokenizer.json, or of a folder with one. Raises the error of its
    format."""
    if path.is_dir() or path.suffix == ".json":
        return spec_from_tokenizer_json(path)
    with GGUFFile.open(path) as file:
        return spec_from_gguf(file)


def check_equal(ours: "Ours | Theirs", theirs: "Ours | Theirs", name: str, text: str) -> None:
    """Raise `NotEqual` unless both encode `text` alike, with and without control tokens, and decode alike, at once and
    token by token."""
    ids = theirs.encode(text)
    same = {
        "encode": ours.encode(text) == ids,
        "encode without special tokens": ours.encode_plain(text) == theirs.encode_plain(text),
        "decode": ours.decode(ids) == theirs.decode(ids),
        "streaming decode": "".join(ours.stream(ids)) == "".join(theirs.stream(ids)),
    }
    for operation, equal in same.items():
        if not equal:
            raise NotEqual(f"{operation} differs from Hugging Face tokenizers on {name}: nothing is timed")


def check_threads(ours: "Ours | Theirs", text: str, expected: Sequence[int]) -> None:
    """Raise `NotEqual` unless 8 threads that encode 100 times each all get `expected`."""
    with ThreadPoolExecutor(THREADS) as threads:
        equals = threads.map(lambda _: [ours.encode(text) == expected for _ in range(ENCODES)], range(THREADS))
        if not all(map(all, equals)):
            raise NotEqual(f"encode differs when {THREADS} threads do it at once: nothing is timed")


def _loaded(load: Callable[[], Any]) -> tuple[Any, float]:
    """Return what was loaded, and the median of the seconds that it took."""
    loads = [timed(load) for _ in range(LOADS)]
    return loads[-1][0], median(seconds for _, seconds in loads)


def _times(call: Callable[[Any], Any], theirs: "Ours | Theirs", ours: "Ours | Theirs") -> list[float]:
    """Time a call of each, the two in turns; return the median microseconds per call."""
    seconds: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < TURN_SECONDS:
        seconds.append((timed(lambda: call(theirs))[1], timed(lambda: call(ours))[1]))
    return [median(column) * 1e6 for column in zip(*seconds[1:], strict=True)]


def _threads_seconds(contender: "Ours | Theirs", text: str) -> float:
    """Return the seconds per encode while 8 threads encode."""
    with ThreadPoolExecutor(THREADS) as threads:

        def encode_all() -> None:
            list(threads.map(lambda _: [contender.encode(text) for _ in range(ENCODES)], range(THREADS)))

        return median(timed(encode_all)[1] for _ in range(5)) / (THREADS * ENCODES)


def _document(spec: TokenizerSpec) -> str:
    """Return a tokenizer.json of the whole tokenizer: NFC in front, added tokens matched."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    controls = set(spec.control_ids)
    document = json.loads(ReferenceEncoder(spec).tokenizer_json())
    document |= {"normalizer": {"type": "NFC"}, "decoder": document["pre_tokenizer"]["pretokenizers"][1]}
    document["added_tokens"] = [
        {"id": token_id, "content": spec.tokens[token_id], "special": token_id in controls, **flags}
        for token_id in sorted({*controls, *spec.user_defined_ids})
    ]
    return json.dumps(document)


_TEXTS = Path(__file__).with_name("tokenizer_texts.json")
"""The texts that inputs are cut from, beside stories."""


def inputs() -> dict[str, str]:
    """Return the texts by kind."""
    texts = json.loads(_TEXTS.read_text(encoding="utf-8"))
    chinese, code, mixed = (texts[name] for name in ("chinese", "code", "mixed"))
    stories = "\n\n".join(held_out_stories())
    turns = [(role, PASSAGE if text is None else text) for role, text in texts["turns"]]
    chat = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return {
        "tiny": "river",
        "short_english": "The ferry went out at dusk, and did not come back. "[:51],
        "short_chinese": _cut(chinese, 90),
        "medium_prose": _cut(PASSAGE + " ", 674),
        "code_snippet": _cut(code, 470),
        "mixed_multilingual": _cut(mixed, 641),
        "long_repeat": _cut("the quick brown fox jumps over the lazy dog, and ", 2025),
        "long_unique": _cut(stories, 4000),
        "very_long": _cut(stories, 8000),
        "chat_template": _cut(chat, 212),
        "long_32K": _cut(stories, 32_000),
        "long_64K": _cut(stories, 64_000),
        "long_200K": _cut(stories, 200_000),
        "long_code_16K": _cut(code, 16_000),
        "multi_turn_chat_8K": _cut(chat, 21_370),
        "multi_turn_chat_32K": _cut(chat, 85_480),
        "long_chinese_32K": _cut(chinese, 31_998),
    }


def _cut(text: str, length: int) -> str:
    """Return the first `length` characters of `text`, repeated as often as needed."""
    return (text * (-(-length // len(text))))[:length]
