"""Every implementation gives the ids of a Hugging Face tokenizer that was built from a tokenizer.json by hand."""

from unicodedata import normalize

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.tokenizer import Tokenizer
from forge.tokenizer.encoders import SAMPLE, PromptCutEncoder, ReferenceEncoder, cut_vocabulary

from .conftest import TRAINING_TEXT
from .strategies import MODEST, texts

snippets = st.sampled_from(TRAINING_TEXT).flatmap(lambda text: st.integers(0, len(text)).map(lambda cut: text[cut:]))


def hugging_face_ids(hugging_face, text, *, allow_special):
    hugging_face.encode_special_tokens = not allow_special
    return hugging_face.encode(text, add_special_tokens=False).ids


def same_nfc(hugging_face, text):
    """Whether Hugging Face's normalizer, of an older Unicode, agrees on `text` with Python's."""
    return hugging_face.normalizer.normalize_str(text) == normalize("NFC", text)


@pytest.fixture(scope="module", params=["reference", "fast"])
def encoding(request, spec):
    if request.param == "fast":
        pytest.importorskip("fastokens")
    tokenizer = Tokenizer(spec, prefer=request.param)
    assert tokenizer.prepare() == request.param, tokenizer.fallback_reason
    return tokenizer


@pytest.fixture(scope="module")
def reference(spec):
    return ReferenceEncoder(spec)


@MODEST
@given(text=texts | snippets, allow_special=st.booleans())
@example("<think>\u0338<|im_end|>\u0338", False)
@example("<think>\u0338<|im_end|>\u0338", True)
def test_ids_equal_hugging_faces(encoding, hugging_face, text, allow_special):
    if same_nfc(hugging_face, text):
        expected = hugging_face_ids(hugging_face, text, allow_special=allow_special)
        assert encoding.encode(text, allow_special=allow_special) == expected


@pytest.mark.parametrize("text", SAMPLE)
def test_ids_equal_hugging_faces_on_the_gates_sample(encoding, hugging_face, text):
    assert encoding.encode(text) == hugging_face_ids(hugging_face, text, allow_special=False)


@MODEST
@given(ids=st.lists(st.integers(0, 580), max_size=40))
def test_decoding_equals_hugging_faces(tokenizer, hugging_face, ids):
    assert tokenizer.decode(ids) == hugging_face.decode(ids, skip_special_tokens=False)


@MODEST
@given(text=texts | snippets)
def test_the_vocabulary_cut_to_a_prompt_gives_the_same_ids(spec, reference, text):
    parts = [normalize("NFC", part) for part in (text, text[len(text) // 2 :])]
    assert PromptCutEncoder(spec).encode_parts(parts) == [reference.encode(part) for part in parts]


def test_the_cut_keeps_only_what_the_text_can_reach(spec):
    vocabulary, merges = cut_vocabulary(spec, {"the"})
    assert set(vocabulary) <= {"t", "h", "e", "th", "he", "the"}
    assert vocabulary["the"] == spec.tokens.index("the")
    assert [" ".join(merge) for merge in merges] == [
        merge for merge in spec.merges if merge.replace(" ", "") in vocabulary
    ]


def test_long_runs_are_not_cut(spec):
    assert PromptCutEncoder(spec).encode_parts(["x" * 1_000]) is None
