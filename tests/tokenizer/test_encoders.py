"""Which implementation encodes: the gate in front of the fast path, every way to fall back, and the rule of costs."""

import subprocess
import sys

import pytest

from forge.tokenizer import Tokenizer, TokenizerError, encoders
from forge.tokenizer.encoders import SAMPLE, ReferenceEncoder, first_difference


class ReversedIds(ReferenceEncoder):
    def encode(self, text):
        return super().encode(text)[::-1]


class WrongForLateText(ReferenceEncoder):
    """Right on everything but one text of the sample."""

    def encode(self, text):
        ids = super().encode(text)
        return ids[:-1] if text == SAMPLE[-1] else ids


class FailsOnPrompts(ReferenceEncoder):
    """Passes the gate and then refuses a text."""

    def encode(self, text):
        if text == "refuse me":
            raise RuntimeError("match limit\nreached")
        return super().encode(text)


def of_spec(kind):
    """Build the fast path of a vocabulary without the reference that it is held against."""
    return lambda reference: kind(reference.spec)


def not_installed(reference):
    raise ImportError("no module named fastokens")


def refuses_to_load(reference):
    raise ValueError("unsupported\npre-tokenizer")


class CountsTexts(ReferenceEncoder):
    def __init__(self, spec):
        super().__init__(spec)
        self.num_texts = 0

    def encode(self, text):
        self.num_texts += 1
        return super().encode(text)


@pytest.mark.parametrize(
    "build_fast, reason",
    [
        (of_spec(ReversedIds), "not the reference's equal"),
        (of_spec(WrongForLateText), f"text {len(SAMPLE) - 1} of the sample differs"),
        (not_installed, "not installed"),
        (refuses_to_load, "does not load this vocabulary: unsupported pre-tokenizer"),
    ],
)
def test_a_fast_path_that_fails_the_gate_is_never_used(spec, tokenizer, build_fast, reason):
    fast = Tokenizer(spec, prefer="fast", build_fast=build_fast)
    assert fast.encode("a block table of blocks") == tokenizer.encode("a block table of blocks")
    assert fast.implementation == "reference"
    assert reason in fast.fallback_reason
    assert "\n" not in fast.fallback_reason


def test_a_fast_path_that_passes_is_used(spec):
    fast = Tokenizer(spec, prefer="fast", build_fast=of_spec(CountsTexts))
    assert fast.prepare() == "fast"
    fast.encode("blocks")
    assert (fast.implementation, fast.fallback_reason) == ("fast", None)


def test_fastokens_passes_the_gate(spec):
    pytest.importorskip("fastokens")
    fast = Tokenizer(spec, prefer="fast")
    assert (fast.prepare(), fast.fallback_reason) == ("fast", None)


def test_a_text_that_the_fast_path_refuses_goes_to_the_reference(spec, tokenizer):
    fast = Tokenizer(spec, prefer="fast", build_fast=of_spec(FailsOnPrompts))
    assert fast.encode("blocks") == tokenizer.encode("blocks")
    assert fast.encode("refuse me") == tokenizer.encode("refuse me")
    assert fast.implementation == "reference"
    assert "match limit reached" in fast.fallback_reason


def test_the_gate_names_the_first_text_that_differs(spec):
    reference = ReferenceEncoder(spec)
    assert first_difference(reference, reference) is None
    assert "text 1 of the sample differs from token 0 on" in first_difference(
        ReversedIds(spec), reference, ["", "the pool"]
    )


def test_reference_means_that_the_fast_path_is_not_even_built(spec):
    reference = Tokenizer(spec, prefer="reference", build_fast=refuses_to_load)
    reference.encode("x" * 100_000)
    assert (reference.implementation, reference.fallback_reason) == ("reference", None)


def test_nothing_is_loaded_before_the_first_text(spec):
    assert Tokenizer(spec).implementation == "not loaded"


def test_a_small_vocabulary_loads_the_reference_and_changes_to_fast_once_that_pays(spec):
    tokenizer = Tokenizer(spec, build_fast=of_spec(CountsTexts))
    tokenizer.encode("blocks")
    assert tokenizer.implementation == "reference"
    tokenizer.encode("block " * (encoders.FAST_PAYS_AFTER_CHARS_PER_TOKEN * len(spec.tokens) // 6 + 1))
    assert tokenizer.implementation == "fast"


def test_a_large_vocabulary_is_cut_for_the_first_texts_and_then_loaded(spec, tokenizer, monkeypatch):
    monkeypatch.setattr(encoders, "SMALL_VOCABULARY", 0)
    large = Tokenizer(spec)
    assert large.prepare() == "prompt-cut reference"
    used = []
    for _ in range(encoders.MAX_CUTS + 1):
        assert large.encode("the pool") == tokenizer.encode("the pool")
        used.append(large.implementation)
    assert used == ["prompt-cut reference"] * encoders.MAX_CUTS + ["reference"]


def test_a_chat_prompt_is_cut_once_for_all_its_parts(spec, tokenizer, monkeypatch):
    monkeypatch.setattr(encoders, "SMALL_VOCABULARY", 0)
    monkeypatch.setattr(encoders, "MAX_CUTS", 1)
    large = Tokenizer(spec)
    prompt = "<|im_start|>user\nthe pool<|im_end|>\n<|im_start|>assistant\n"
    assert large.encode(prompt, allow_special=True) == tokenizer.encode(prompt, allow_special=True)
    assert large.implementation == "prompt-cut reference"


def test_a_large_vocabulary_is_loaded_for_a_text_with_long_runs(spec, tokenizer, monkeypatch):
    monkeypatch.setattr(encoders, "SMALL_VOCABULARY", 0)
    large = Tokenizer(spec)
    assert large.encode("x" * 2_000) == tokenizer.encode("x" * 2_000)
    assert large.implementation == "reference"


def test_merges_of_a_large_vocabulary_are_checked_when_they_are_loaded(entries, monkeypatch):
    from forge.tokenizer import TokenizerSpec, spec

    monkeypatch.setattr(spec, "SMALL_VOCABULARY", 0)
    for bad_merge in ("zz qq", "t  he", "the", "t h e"):
        unchecked = TokenizerSpec(**entries | {"merges": [*entries["merges"], bad_merge]})
        with pytest.raises(TokenizerError, match="merges"):
            Tokenizer(unchecked, prefer="reference").encode("the")


def test_importing_the_package_loads_no_tokenizer_library():
    program = (
        "import sys, forge.tokenizer; print(sorted({'tokenizers', 'fastokens', 'jinja2', 'torch'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
