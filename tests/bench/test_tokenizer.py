"""The tokenizer bench: its inputs, and a gate that lets nothing be timed that is not equal."""

import json

import pytest

from forge.bench import tokenizer as bench
from forge.bench.tokenizer import inputs
from forge.gguf import GGUFFile
from forge.tokenizer import spec_from_gguf
from forge.views.screen import draw
from tests.small_models import write_small_qwen3
from tests.views.records import piped, written

LENGTHS = {
    "tiny": 5,
    "short_english": 51,
    "short_chinese": 90,
    "medium_prose": 674,
    "code_snippet": 470,
    "mixed_multilingual": 641,
    "long_repeat": 2_025,
    "long_unique": 4_000,
    "very_long": 8_000,
    "chat_template": 212,
    "long_32K": 32_000,
    "long_64K": 64_000,
    "long_200K": 200_000,
    "long_code_16K": 16_000,
    "multi_turn_chat_8K": 21_370,
    "multi_turn_chat_32K": 85_480,
    "long_chinese_32K": 31_998,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small_qwen3(tmp_path_factory.mktemp("tokenizers") / "small.gguf")


@pytest.fixture(scope="module")
def contestants(path):
    with GGUFFile.open(path) as file:
        spec = spec_from_gguf(file)
    return bench.Ours(spec), bench.Theirs(path, spec)


class Wrong:
    """A tokenizer that answers one question wrongly."""

    def __init__(self, right, question: str):
        self._right, self._question = right, question

    def __getattr__(self, name: str):
        answer = getattr(self._right, name)
        return (lambda given: answer(given)[:-1]) if name == self._question else answer


def test_there_are_seventeen_kinds_of_input_each_of_its_length():
    assert {name: len(text) for name, text in inputs().items()} == LENGTHS


@pytest.mark.parametrize("name", ["tiny", "code_snippet", "mixed_multilingual", "chat_template", "short_chinese"])
def test_equal_tokenizers_pass_the_gate(contestants, name):
    bench.check_equal(*contestants, name, inputs()[name])


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("encode", "^encode differs"),
        ("encode_plain", "^encode without special tokens differs"),
        ("decode", "^decode differs"),
        ("stream", "^streaming decode differs"),
    ],
)
def test_each_difference_is_found(contestants, question, message):
    ours, theirs = contestants
    with pytest.raises(bench.NotEqual, match=message):
        bench.check_equal(ours, Wrong(theirs, question), "chat_template", inputs()["chat_template"])


def test_threads_that_disagree_are_found(contestants):
    ours, theirs = contestants
    text = inputs()["short_english"]
    bench.check_threads(ours, text, theirs.encode(text))
    with pytest.raises(bench.NotEqual, match="8 threads"):
        bench.check_threads(ours, text, theirs.encode(text)[:-1])


def test_nothing_is_timed_where_the_gate_fails(path, monkeypatch):
    monkeypatch.setattr(bench, "inputs", lambda: {name: inputs()[name] for name in ("tiny", "medium_prose")})
    monkeypatch.setattr(bench, "Ours", lambda spec: Wrong(bench.Theirs(path, spec), "decode"))
    monkeypatch.setattr(bench, "_times", lambda *given: pytest.fail("something was timed"))
    with pytest.raises(bench.NotEqual):
        bench.bench_tokenizer.measure(lambda text: None, str(path))


def test_the_whole_of_it_on_a_small_vocabulary(path, monkeypatch):
    small = ("tiny", "medium_prose", "very_long")
    monkeypatch.setattr(bench, "inputs", lambda: {name: inputs()[name] for name in small})
    monkeypatch.setattr(bench, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(bench, "LOADS", 1)
    found = bench.bench_tokenizer.measure(lambda text: None, str(path))
    assert [one["name"] for one in found["encode"]] == [one["name"] for one in found["decode"]] == list(small)
    facts = json.loads(json.dumps(found))
    assert facts["encode"][0]["speed_up"] == facts["encode"][0]["theirs"] / facts["encode"][0]["ours"]
    assert [one["name"] for one in facts["batch"]] == ["1", "4", "16", "64"]
    assert facts["fallback_reason"] is None and facts["implementation"] == "fast"


@pytest.mark.parametrize("reason", [None, "fastokens is not installed"])
def test_a_library_is_not_said_to_equal_itself(reason):
    facts = {"source": "x", "vocabulary": 1, "fallback_reason": reason, "machine": "m", "encode": [], "decode": []}
    row = {"name": "", "theirs": 1.0, "ours": 1.0, "speed_up": 1.0}
    console = piped(96)
    draw(console, bench.screen(facts | {"batch": [], "concurrent": row, "streaming": row, "load": row}))
    assert ("equal ids and texts" in written(console)) == (reason is None)
    assert ("beside itself" in written(console)) == (reason is not None)
