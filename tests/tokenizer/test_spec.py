"""What a file's tokenizer must be: everything else is one error that names the entry."""

from pathlib import Path

import numpy as np
import pytest

from forge.errors import ForgeError
from forge.tokenizer import Tokenizer, TokenizerError, TokenizerSpec, spec_from_gguf


class FakeFile:
    """The metadata of a GGUF file, typed as its reader does."""

    path = Path("model.gguf")

    def __init__(self, metadata):
        self.metadata = metadata

    def get(self, key, kind):
        return self.metadata.get(key)

    def string_array(self, key):
        return self.metadata[key]

    def int_array(self, key):
        return np.array(self.metadata[key])


@pytest.fixture
def metadata(entries):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": entries["tokens"],
        "tokenizer.ggml.token_type": entries["token_types"],
        "tokenizer.ggml.merges": entries["merges"],
        "tokenizer.ggml.bos_token_id": entries["bos_token_id"],
        "tokenizer.ggml.eos_token_id": entries["special_ids"]["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    }


def changed(entries, key, index, value):
    return entries | {key: [*entries[key][:index], value, *entries[key][index + 1 :]]}


def test_a_gguf_files_tokenizer_is_read_whole(metadata, tokenizer):
    metadata |= {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.ggml.eot_token_id": 7}
    from_file = Tokenizer(spec_from_gguf(FakeFile(metadata)))
    assert from_file.fingerprint == tokenizer.fingerprint
    assert from_file.eos_token_ids == tokenizer.eos_token_ids | {7}
    assert (from_file.bos_token_id, from_file.spec.prefix_ids) == (tokenizer.bos_token_id, ())
    assert from_file.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_a_tokenizer_survives_a_real_gguf_file(metadata, tokenizer, tmp_path):
    gguf = pytest.importorskip("gguf")
    from forge.gguf import GGUFFile

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        from_file = Tokenizer(spec_from_gguf(file))
    assert from_file.fingerprint == tokenizer.fingerprint
    assert from_file.encode("Größe 字 'LL") == tokenizer.encode("Größe 字 'LL")


@pytest.mark.parametrize(
    "key, value, problem",
    [
        ("model", "llama", "'llama' is not supported; forge has 'gpt2' only"),
        ("model", None, "the file carries no tokenizer"),
        ("pre", "llama-bpe", "'llama-bpe' is not supported; forge splits text as 'qwen2' only"),
        ("pre", None, "missing"),
        ("eos_token_id", 10**6, "is not an id"),
        ("eos_token_id", -1, "is not an id"),
        ("eot_token_id", 10**6, "is not an id"),
        ("bos_token_id", 10**6, "is not an id"),
    ],
)
def test_an_unsupported_or_wrong_entry_is_named(metadata, key, value, problem):
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError) as raised:
        spec_from_gguf(FakeFile(metadata))
    assert f"tokenizer.ggml.{key}: " in str(raised.value)
    assert problem in str(raised.value)
    assert str(raised.value).startswith("model.gguf: ")


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_that_the_file_does_not_name_cannot_be_added(metadata, name):
    metadata |= {f"tokenizer.ggml.{name}_token_id": None, f"tokenizer.ggml.add_{name}_token": True}
    with pytest.raises(TokenizerError, match=f"add_{name}_token"):
        spec_from_gguf(FakeFile(metadata))


def test_the_file_says_which_tokens_go_around_a_text(metadata):
    metadata |= {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.add_eos_token": True}
    assert spec_from_gguf(FakeFile(metadata)).suffix_ids == (5,)
    metadata |= {"tokenizer.ggml.bos_token_id": 6, "tokenizer.ggml.add_bos_token": True}
    assert spec_from_gguf(FakeFile(metadata)).prefix_ids == (6,)


def test_token_types_must_be_as_many_as_tokens(entries):
    with pytest.raises(TokenizerError, match=r"token_type: \d+ entries for \d+ tokens"):
        TokenizerSpec(**entries | {"token_types": entries["token_types"][:-1]})


@pytest.mark.parametrize("token_type", [0, 7, -1, 2**32 + 1])
def test_a_token_type_must_be_one_that_gguf_has(entries, token_type):
    with pytest.raises(TokenizerError, match="token_type: entry 9 is"):
        TokenizerSpec(**changed(entries, "token_types", 9, token_type))


@pytest.mark.parametrize(
    "merge, problem",
    [
        ("the", "not 'left right'"),
        ("t h e", "not 'left right'"),
        (" the", "not 'left right'"),
        ("t ", "not 'left right'"),
        ("", "not 'left right'"),
        ("q\u4e00 t", "is not a normal token"),
        ("Ġ <|im_end|>", "is not a normal token"),
        ("z q", "'zq' is not a normal token"),
    ],
)
def test_a_merge_must_join_two_tokens_into_a_third(entries, merge, problem):
    with pytest.raises(TokenizerError) as raised:
        TokenizerSpec(**changed(entries, "merges", 3, merge))
    assert "tokenizer.ggml.merges: entry 3" in str(raised.value)
    assert problem in str(raised.value)


def test_a_merge_must_not_make_a_control_token(entries):
    product = entries["merges"][3].replace(" ", "")
    with pytest.raises(TokenizerError, match=r"merges: entry 3 is .* is not a normal token"):
        TokenizerSpec(**changed(entries, "token_types", entries["tokens"].index(product), 3))


def test_a_token_may_not_be_there_twice(entries):
    with pytest.raises(TokenizerError, match="tokens: 'the' is there twice"):
        TokenizerSpec(**changed(entries, "tokens", len(entries["tokens"]) - 1, "the"))


def test_every_byte_needs_a_token(entries):
    index = entries["tokens"].index("Ġ")
    with pytest.raises(TokenizerError, match="no normal token for 1 of the 256 bytes, such as 0x20"):
        TokenizerSpec(**changed(entries, "tokens", index, "something else") | {"merges": []})
    with pytest.raises(TokenizerError, match="0x20"):
        TokenizerSpec(**changed(entries, "token_types", index, 3) | {"merges": []})


def test_an_empty_vocabulary_is_an_error(entries):
    with pytest.raises(TokenizerError, match="empty"):
        TokenizerSpec(**entries | {"tokens": [], "token_types": [], "merges": []})


def test_a_flood_of_control_tokens_is_refused(entries):
    flood = [f"<|{i}|>" for i in range(10_000)]
    with pytest.raises(TokenizerError, match="control and user-defined"):
        TokenizerSpec(
            **entries | {"tokens": entries["tokens"] + flood, "token_types": entries["token_types"] + [3] * len(flood)}
        )


def test_hostile_names_are_shown_escaped_and_short(entries):
    with pytest.raises(ForgeError) as raised:
        TokenizerSpec(**changed(entries, "merges", 0, "\x1b[31m" + "x" * 10_000))
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 300
