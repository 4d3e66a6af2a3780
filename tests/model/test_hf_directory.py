"""Hugging Face folders as models: what transformers saves computes the same here; what forge cannot run is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from forge.backends.devices import create_backend
from forge.errors import ForgeError, UsageError
from forge.gguf import GGUFFile
from forge.model.catalog import model_name, resolve_model
from forge.model.config import expected_tensors
from forge.model.hf_directory import HuggingFaceDirectory, ModelFolderError, hugging_face_name, read_config
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import one_prefill
from forge.model.safetensors_file import SafetensorsError
from forge.model.weight_source import GGUFWeights, WeightSource
from forge.tokenizer import Tokenizer, TokenizerError, TokenType
from tests.model.raw_safetensors import CONFIG, SMALL, config_json, encoded, packed, random_tensors, write_folder
from tests.small_models import write_small_qwen3
from tests.tokenizer.conftest import tokenizer_document

TOKEN_IDS = np.random.default_rng(0).integers(0, 300, 40).tolist()


def refused(folder: Path, kind: type[ForgeError] = ModelFolderError) -> str:
    """The message of opening `folder`: one printable line that begins with a path in it."""
    with pytest.raises(kind) as caught:
        open_weights(folder)
    assert str(caught.value).isprintable() and str(caught.value).startswith(str(folder))
    return str(caught.value)


def logits(source: WeightSource, device: str = "reference") -> np.ndarray:
    return one_prefill(load_qwen3(source, create_backend(device)), TOKEN_IDS)


# --- the same model as transformers'


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("dtype", "shard"),
    [("float32", "1GB"), ("float32", "100KB"), ("bfloat16", "1GB"), ("bfloat16", "40KB"), ("float16", "1GB")],
)
def test_logits_of_a_saved_model_are_those_of_transformers(tmp_path, dtype, shard, tie):
    torch = pytest.importorskip("torch", reason="parity needs PyTorch: pip install torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SMALL,
        tie_word_embeddings=tie,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
    )
    transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=shard)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    with open_weights(tmp_path) as source:
        assert source.config.rope_theta == 1e6 and source.config.tie_word_embeddings == tie
        actual = logits(source)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKEN_IDS])).logits[0].numpy()

    assert (
        len(list(tmp_path.glob("*.safetensors"))) == 1
        if shard == "1GB"
        else (tmp_path / "model.safetensors.index.json").exists()
    )
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


# --- the interface


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_it_holds_the_tensors_of_llama_cpp_s_names(tmp_path, dtype):
    values = random_tensors()
    with open_weights(write_folder(tmp_path, dtype=dtype)) as source:
        assert source.config == CONFIG.__class__(**vars(CONFIG) | {"rms_norm_eps": 1e-6})
        assert source.nbytes == sum(source.tensor(name).nbytes for name in expected_tensors(CONFIG))
        for name, shape in expected_tensors(CONFIG).items():
            tensor = source.tensor(name)
            stored = np.frombuffer(encoded(values[hugging_face_name(name)], dtype), np.uint8)
            assert (tensor.name, tensor.shape, tensor.ggml_type.name) == (name, shape, dtype)
            assert np.array_equal(tensor.raw(), stored)


def test_the_same_weights_give_the_same_bits_from_gguf_and_from_a_folder(tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf", vocab_size=300)
    with GGUFWeights(GGUFFile.open(path)) as source:
        values = {hugging_face_name(name): source.tensor(name).dequantize() for name in expected_tensors(source.config)}
        expected = logits(source)
        epsilon = source.config.rms_norm_eps
    with open_weights(write_folder(tmp_path / "folder", values, rms_norm_eps=epsilon)) as source:
        assert np.array_equal(logits(source), expected)


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_every_tensor_is_released_after_it_was_loaded(tmp_path, kind):
    events = []

    class Watched:
        def __init__(self, source):
            self.source, self.config, self.nbytes, self.path = source, source.config, source.nbytes, source.path

        def tensor(self, name):
            events.append(("tensor", name))
            return self.source.tensor(name)

        def release(self, name):
            events.append(("release", name))
            self.source.release(name)

    path = write_small_qwen3(tmp_path / "m.gguf") if kind == "gguf" else write_folder(tmp_path)
    with open_weights(path) as source:
        load_qwen3(Watched(source), create_backend("reference"))
        names = list(expected_tensors(source.config))

    released = [name for event, name in events if event == "release"]
    assert sorted(released) == sorted(names)
    for name in names:  # a queries' norm is read once more, for its keys' norm
        assert events[events.index(("release", name)) - 1][0] == "tensor"
        assert ("tensor", name) in events[: events.index(("release", name))]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_released_pages_are_no_longer_this_process_s_memory(tmp_path, kind):
    if kind == "gguf":
        path = file = write_small_qwen3(tmp_path / "m.gguf", vocab_size=20_000)
    else:
        values = random_tensors() | {"model.embed_tokens.weight": np.ones((20_000, 64), np.float32)}
        path, file = write_folder(tmp_path, values, vocab_size=20_000), tmp_path / "model.safetensors"
    with open_weights(path) as source:
        tensor = source.tensor("token_embd.weight")
        tensor.dequantize()
        assert resident(file) >= tensor.nbytes
        source.release("token_embd.weight")
        assert resident(file) < tensor.nbytes // 10


def resident(file: Path) -> int:
    """Bytes of `file`'s mappings that are in memory as this process's."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(f" {file.resolve()}")
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_the_folder_may_be_gone_once_the_weights_are_loaded(tmp_path):
    folder = write_folder(tmp_path / "m")
    with open_weights(folder) as source:
        model = load_qwen3(source, create_backend("reference"))
    (folder / "model.safetensors").unlink()
    assert np.isfinite(one_prefill(model, TOKEN_IDS)).all()


# --- as a model on the command line


def test_a_folder_with_a_config_is_a_model_and_one_without_is_not(tmp_path):
    folder = write_folder(tmp_path / "Qwen3-0.6B")
    assert resolve_model(folder) == folder
    assert model_name(folder) == "Qwen3-0.6B"
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"is a folder; give a \.gguf file in it"):
        resolve_model(folder)


def test_a_folder_runs_as_a_model(tmp_path):
    from forge import LLM, SamplingParams

    folder = with_tokenizer(write_folder(tmp_path / "tiny"))
    llm = LLM(folder, kv="basic", device="reference")
    output = llm.generate(["abc"], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))[0].outputs[0]

    assert llm.model_name == "tiny"
    assert len(output.token_ids) == 5
    assert output.token_ids[0] == int(llm.logits(llm.tokenizer.encode("abc"))[-1].argmax())


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        (None, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True, "temperature": "hot", "eos_token_id": [1]}, {}),
    ],
)
def test_sampling_that_a_folder_recommends_is_read(tmp_path, stated, found):
    folder = write_folder(tmp_path / "tiny")
    if stated is not None:
        (folder / "generation_config.json").write_text(json.dumps(stated))
    with open_weights(folder) as source:
        assert source.default_sampling == found


def test_sampling_that_a_gguf_file_recommends_is_read(tmp_path):
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    with open_weights(write_small_qwen3(tmp_path / "a.gguf", metadata=metadata)) as source:
        assert source.default_sampling == {"temperature": 0.5, "top_k": 20}
    with open_weights(write_small_qwen3(tmp_path / "b.gguf")) as source:
        assert source.default_sampling == {}


# --- its tokenizer


def with_tokenizer(folder: Path) -> Path:
    """Bytes, five added tokens (261 in all), an end of generation."""
    from forge.tokenizer.spec import BYTE_ALPHABET

    document = tokenizer_document({token: token_id for token_id, token in enumerate(BYTE_ALPHABET)}, [])
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    return folder


def test_the_vocabulary_is_filled_up_to_the_rows_of_the_embedding(tmp_path):
    with open_weights(with_tokenizer(write_folder(tmp_path))) as source:
        tokenizer = Tokenizer(source.tokenizer_spec())

    assert tokenizer.vocab_size == CONFIG.vocab_size == 300
    assert tokenizer.token_type(261) == tokenizer.token_type(299) == TokenType.UNUSED
    assert tokenizer.eos_token_ids == {256, 258}
    assert tokenizer.decode(tokenizer.encode("día")) == "día"


def test_more_tokens_than_rows_are_refused(tmp_path):
    values = random_tensors() | {"model.embed_tokens.weight": np.ones((260, 64), np.float32)}
    folder = with_tokenizer(write_folder(tmp_path, values, vocab_size=260))
    with open_weights(folder) as source, pytest.raises(TokenizerError, match="261 tokens, and the model has only 260"):
        source.tokenizer_spec()


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with (
        open_weights(write_folder(tmp_path)) as source,
        pytest.raises(TokenizerError, match=r"tokenizer\.json: missing"),
    ):
        source.tokenizer_spec()


# --- config.json


def test_theta_is_read_where_either_generation_of_transformers_writes_it(tmp_path):
    def theta(**changes) -> float:
        (tmp_path / "config.json").write_text(json.dumps(config_json(**changes)))
        return read_config(tmp_path / "config.json").rope_theta

    assert theta(rope_theta=5e5) == 5e5
    assert theta(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 7e5}) == 7e5
    assert theta(rope_theta=..., rope_scaling=...) == 10_000
    assert theta(rope_theta=2e5, rope_scaling={"type": "default"}) == 2e5


def test_what_is_absent_has_transformers_defaults(tmp_path):
    absent = (
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "hidden_act",
        "architectures",
    )
    (tmp_path / "config.json").write_text(json.dumps(config_json(**dict.fromkeys(absent, ...))))
    config = read_config(tmp_path / "config.json")

    assert (config.head_dim, config.rms_norm_eps, config.max_position_embeddings) == (128, 1e-6, 32_768)
    assert config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"model_type": "llama"}, "model_type", "this folder holds 'llama'; forge runs 'qwen3'"),
        ({"model_type": ...}, "model_type", "forge runs 'qwen3'"),
        ({"model_type": "\x1b[2J"}, "model_type", "'\\x1b[2J'"),
        ({"architectures": ["Qwen3VLForCausalLM"]}, "architectures", "not supported"),
        ({"hidden_act": "gelu"}, "hidden_act", "not supported; forge runs 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "take the model's GGUF file"),
        ({"attention_bias": True}, "attention_bias", "is true"),
        ({"attention_bias": 1}, "attention_bias", "not true or false"),
        ({"use_sliding_window": True}, "use_sliding_window", "is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "full_attention"),
        ({"layer_types": [["x"]]}, "layer_types", "full_attention"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "rope_scaling",
            "RoPE scaling 'llama3' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling", "'linear'"),
        ({"rope_scaling": 4}, "rope_scaling", "is not an object"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters", "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor", "only 1"),
        ({"rope_theta": 0}, "rope_theta", "is not a number of at least 1"),
        ({"rope_theta": "1e6"}, "rope_theta", "is not a number"),
        ({"rope_theta": 10**400}, "rope_theta", "is not a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "between 0 and 1"),
        ({"rms_norm_eps": True}, "rms_norm_eps", "between 0 and 1"),
        ({"hidden_size": ...}, "hidden_size", "missing"),
        ({"hidden_size": "64"}, "hidden_size", "whole number"),
        ({"hidden_size": 64.0}, "hidden_size", "whole number"),
        ({"hidden_size": 2**40}, "hidden_size", "whole number from 1 to"),
        ({"num_hidden_layers": 2**32}, "num_hidden_layers", "from 1 to 4096"),
        ({"num_attention_heads": 3}, "num_key_value_heads", "cannot be shared"),
        ({"num_key_value_heads": 0}, "num_key_value_heads", "whole number from 1"),
        ({"head_dim": 31}, "head_dim", "odd"),
        ({"vocab_size": True}, "vocab_size", "whole number"),
    ],
)
def test_a_config_that_forge_does_not_run_is_refused_by_the_field(tmp_path, changes, field, words):
    message = refused(write_folder(tmp_path, **changes))
    assert message.startswith(f"{tmp_path / 'config.json'}: {field}: ")
    assert words in message


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b"null"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (write_folder(tmp_path) / "config.json").write_bytes(text)
    assert "is not " in refused(tmp_path)


# --- tensors


def test_a_tensor_that_is_missing_is_named(tmp_path):
    values = random_tensors()
    del values["model.layers.1.mlp.up_proj.weight"]
    assert "tensor 'model.layers.1.mlp.up_proj.weight': the model needs this" in refused(write_folder(tmp_path, values))


def test_a_tensor_that_no_qwen3_has_is_refused(tmp_path):
    values = random_tensors() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(128, np.float32)}
    message = refused(write_folder(tmp_path, values), SafetensorsError)
    assert "q_proj.bias" in message and "no such tensor" in message


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path):
    values = random_tensors() | {"model.norm.weight": np.zeros(65, np.float32)}
    assert "shape: [65] where config.json says [64]" in refused(write_folder(tmp_path, values), SafetensorsError)


def test_a_tensor_of_another_dtype_is_refused_by_its_name(tmp_path):
    folder = write_folder(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    assert "forge does not compute with I32; it does with BF16, F16, F32" in refused(folder, SafetensorsError)


def test_a_tied_head_may_be_there_twice_if_it_is_the_same(tmp_path):
    values = random_tensors()
    embedding = values["model.embed_tokens.weight"]
    with open_weights(write_folder(tmp_path / "same", values | {"lm_head.weight": embedding})) as source:
        assert "output.weight" not in expected_tensors(source.config)
        assert source.nbytes == sum(value.nbytes for value in values.values())
    for number, other in enumerate((embedding + 1, embedding[:-1])):
        folder = write_folder(tmp_path / f"other{number}", values | {"lm_head.weight": other})
        assert "differs from model.embed_tokens.weight" in refused(folder, SafetensorsError)


def test_an_untied_model_needs_its_head(tmp_path):
    assert "'lm_head.weight'" in refused(write_folder(tmp_path, tie_word_embeddings=False))


def test_a_damaged_file_is_refused_like_damaged_gguf(tmp_path):
    folder = write_folder(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-5])
    message = refused(folder, SafetensorsError)
    assert "model.safetensors: at byte " in message and "cut short or damaged" in message


# --- shards


def write_shards(folder: Path, **index) -> Path:
    """The weights of `CONFIG` in two files; `index` replaces entries of the weight map."""
    names = list(random_tensors())
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((names[:10], names[10:])):
        values = {name: random_tensors()[name] for name in part}
        stored = {name: (value.shape, encoded(value, "F32")) for name, value in values.items()}
        (folder / f"{number}.safetensors").write_bytes(packed(stored))
        weight_map |= dict.fromkeys(part, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | index}))
    return folder


def test_shards_are_one_model(tmp_path):
    with open_weights(write_folder(tmp_path / "one")) as one, open_weights(write_shards(tmp_path / "two")) as two:
        assert np.array_equal(logits(two), logits(one))


def test_a_missing_shard_is_named(tmp_path):
    (write_shards(tmp_path) / "1.safetensors").unlink()
    assert "1.safetensors: missing (1 of 2 shards)" in refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", 1, None, "a\\b", "a\x1bb", "a\0b"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder = write_shards(tmp_path, **{"model.norm.weight": name})
    assert "is not the name of a file in this folder" in refused(folder)


def test_an_index_that_contradicts_the_shards_is_refused(tmp_path):
    folder = write_shards(tmp_path / "a", **{"model.norm.weight": "0.safetensors"})
    assert "is not in this file by what" in refused(folder, SafetensorsError)
    folder = write_shards(tmp_path / "b", nowhere="0.safetensors")
    assert "weight_map 'nowhere': '0.safetensors' does not have this tensor" in refused(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = write_shards(tmp_path)
    (folder / "1.safetensors").write_bytes((folder / "0.safetensors").read_bytes())
    assert "as well" in refused(folder, SafetensorsError)


@pytest.mark.parametrize("index", [b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"[]"])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    (write_shards(tmp_path) / "model.safetensors.index.json").write_bytes(index)
    refused(tmp_path)


def test_a_single_file_may_have_any_name_and_several_need_an_index(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    open_weights(folder).close()
    (folder / "other.safetensors").write_bytes(b"x")
    assert "2 safetensors files, and no model.safetensors.index.json" in refused(folder)


def test_a_folder_of_other_weights_says_what_forge_reads(tmp_path):
    (write_folder(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "holds no safetensors file; forge reads those and GGUF files" in refused(tmp_path)


def test_opening_closes_its_files_when_it_fails(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(
        "forge.model.safetensors_file.SafetensorsFile.close", lambda self: closed.append(self.path.name)
    )
    (write_shards(tmp_path) / "1.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(SafetensorsError):
        HuggingFaceDirectory.open(tmp_path)
    assert closed == ["0.safetensors"]
