"""The same tokenizer from a Hugging Face folder."""

import copy
import json

import pytest

from forge.errors import UsageError
from forge.tokenizer import Tokenizer, TokenizerError
from forge.tokenizer.tokenizer_json import spec_from_tokenizer_json

from .conftest import NUM_PADDING


@pytest.fixture
def folder(document, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_a_folder_gives_the_tokenizer_of_the_gguf_file(folder, tokenizer):
    from_folder = Tokenizer(spec_from_tokenizer_json(folder))
    assert from_folder.fingerprint == tokenizer.fingerprint
    assert from_folder.vocab_size == tokenizer.vocab_size - NUM_PADDING
    text = "<think>the pool</think><|im_end|>"
    for allow_special in (False, True):
        assert from_folder.encode(text, allow_special=allow_special) == tokenizer.encode(
            text, allow_special=allow_special
        )


def test_the_files_beside_it_complete_it(folder, tokenizer, entries):
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": "one"})
    write(folder, "generation_config.json", {"eos_token_id": [3, 4]})
    spec = spec_from_tokenizer_json(folder / "tokenizer.json")
    assert spec.eos_token_id == entries["tokens"].index("<|im_end|>")
    assert spec.eos_token_ids == tokenizer.eos_token_ids | {3, 4}
    assert (spec.chat_template, spec.bos_token_id, spec.prefix_ids, spec.suffix_ids) == ("one", None, (), ())
    write(folder, "chat_template.jinja", "two")
    assert spec_from_tokenizer_json(folder).chat_template == "two"


def test_unclaimed_ids_become_padding(document, folder):
    spread = copy.deepcopy(document)
    spread["added_tokens"][-1]["id"] += 5
    write(folder, "tokenizer.json", spread)
    tokenizer = Tokenizer(spec_from_tokenizer_json(folder))
    gap = tokenizer.vocab_size - 2
    assert tokenizer.decode([gap]) == ""


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda document: document.update(normalizer=None), "normalizer"),
        (
            lambda document: document["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "."}),
            "pre_tokenizer",
        ),
        (lambda document: document["model"].update(type="Unigram"), "model"),
        (lambda document: document["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda document: document["model"].update(merges=[["a"]]), "merges"),
        (lambda document: document["model"].update(merges=None), "malformed"),
        (lambda document: document["model"]["vocab"].update(far=10**12), "token ids"),
        (lambda document: document["model"]["vocab"].update(far="1"), "malformed"),
        (lambda document: document.pop("model"), "malformed"),
    ],
)
def test_another_kind_of_tokenizer_is_refused(document, folder, change, problem):
    other = copy.deepcopy(document)
    change(other)
    write(folder, "tokenizer.json", other)
    with pytest.raises(TokenizerError, match=problem):
        spec_from_tokenizer_json(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_a_file_that_is_not_a_tokenizer_is_one_error(folder, content):
    write(folder, "tokenizer.json", content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        spec_from_tokenizer_json(folder)


def test_a_missing_file_is_one_error(tmp_path):
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        spec_from_tokenizer_json(tmp_path)


def _template(*single):
    ids = {"<s>": 3, "</s>": 4}
    added = {token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in ids.items()}
    pieces = [{"Sequence" if one == "A" else "SpecialToken": {"id": one, "type_id": 0}} for one in single]
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": added}


@pytest.mark.parametrize(
    "wrap", [lambda step: step, lambda step: {"type": "Sequence", "processors": [{"type": "ByteLevel"}, step]}]
)
def test_the_post_processor_says_which_tokens_go_around_a_text(document, folder, wrap):
    step = _template("<s>", "A", "</s>", "</s>")
    write(folder, "tokenizer.json", document | {"post_processor": wrap(step)})
    spec = spec_from_tokenizer_json(folder)
    assert (spec.prefix_ids, spec.suffix_ids) == ((3,), (4, 4))


def test_the_ids_are_those_of_the_tokenizers_library(document, folder):
    from tokenizers import Tokenizer as Theirs
    from tokenizers.processors import TemplateProcessing

    theirs = Theirs.from_str(json.dumps(document))
    end = theirs.token_to_id("<|endoftext|>")
    theirs.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)])
    theirs.save(str(folder / "tokenizer.json"))
    for text in ("the pool", "", "one two"):
        ids = Tokenizer(spec_from_tokenizer_json(folder)).encode(text)
        assert ids == theirs.encode(text).ids and ids[-1] == end


def test_a_post_processor_that_forge_does_not_know_is_refused(document, folder):
    write(folder, "tokenizer.json", document | {"post_processor": {"type": "BertProcessing"}})
    with pytest.raises(TokenizerError, match="post_processor BertProcessing"):
        spec_from_tokenizer_json(folder)
