"""At real size: the Qwen vocabulary, if its file is given.

Set FORGE_QWEN_TOKENIZER_JSON to a Qwen3 tokenizer.json (151,669 tokens and more) to run this.
"""

import os
from unicodedata import normalize

import pytest

from forge.tokenizer import Tokenizer
from forge.tokenizer.encoders import SAMPLE
from forge.tokenizer.tokenizer_json import spec_from_tokenizer_json

PATH = os.environ.get("FORGE_QWEN_TOKENIZER_JSON")

pytestmark = pytest.mark.skipif(PATH is None, reason="FORGE_QWEN_TOKENIZER_JSON names no Qwen tokenizer.json")


@pytest.fixture(scope="module")
def real_spec():
    spec = spec_from_tokenizer_json(PATH)
    spec.check_vocabulary()
    return spec


@pytest.fixture(scope="module")
def expected():
    from tokenizers import Tokenizer as HuggingFace

    judge = HuggingFace.from_file(PATH)
    judge.encode_special_tokens = True
    return [judge.encode(text, add_special_tokens=False).ids for text in SAMPLE]


@pytest.mark.parametrize("prefer", ["auto", "reference", "fast"])
def test_the_sample_has_hugging_faces_ids(real_spec, expected, prefer):
    tokenizer = Tokenizer(real_spec, prefer=prefer)
    assert [tokenizer.encode(text) for text in SAMPLE] == expected
    assert [tokenizer.decode(ids) for ids in expected] == [normalize("NFC", text) for text in SAMPLE]


def test_a_short_text_does_not_load_the_vocabulary_whole(real_spec):
    tokenizer = Tokenizer(real_spec)
    tokenizer.encode("Explain how a paged KV cache works.")
    assert tokenizer.implementation == "prompt-cut reference"


def test_fastokens_passes_the_gate(real_spec):
    pytest.importorskip("fastokens")
    tokenizer = Tokenizer(real_spec, prefer="fast")
    assert (tokenizer.prepare(), tokenizer.fallback_reason) == ("fast", None)
