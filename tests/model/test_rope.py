"""YaRN equals transformers' on random shapes, from GGUF keys and from config.json, within the original context and
beyond; a factor of 1 is no scaling; `attn_factor` is applied as llama.cpp does."""

import json
import math

import numpy as np
import pytest

from forge.backends.devices import create_backend
from forge.errors import ForgeError
from forge.gguf import GGUFFile
from forge.model.config import Qwen3Config
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import one_prefill
from forge.model.rope import Rope, Yarn
from forge.model.weight_source import GGUFWeights
from tests.model.raw_safetensors import write_folder
from tests.model.test_transformers_parity import hugging_face_model
from tests.small_models import write_small_qwen3

TOKEN_IDS = np.random.default_rng(0).integers(0, 280, 150).tolist()
YARN = {
    "qwen3.rope.scaling.type": "yarn",
    "qwen3.rope.scaling.factor": 4.0,
    "qwen3.rope.scaling.original_context_length": 40,
}


def config_of(tmp_path, metadata=None, **sizes) -> Qwen3Config:
    with GGUFFile.open(write_small_qwen3(tmp_path / "m.gguf", metadata=metadata, **sizes)) as file:
        return Qwen3Config.from_gguf(file)


def logits(path, device="reference", token_ids=TOKEN_IDS) -> np.ndarray:
    with open_weights(path) as source:
        return one_prefill(load_qwen3(source, create_backend(device)), token_ids)


def theirs(head_dim: int, theta: float, parameters: dict) -> tuple[np.ndarray, float]:
    """transformers' frequencies and attention factor."""
    transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=1 << 15, rope_parameters={"rope_theta": theta} | parameters
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    return frequencies.numpy(), attention_factor


@pytest.mark.parametrize("seed", range(20))
def test_yarn_is_that_of_transformers_on_random_shapes(seed):
    rng = np.random.default_rng(seed)
    head_dim, theta = 2 * int(rng.integers(1, 80)), float(10 ** rng.uniform(1, 7))
    yarn = Yarn(float(rng.choice([1, 1.5, 2, 4, 8.25, 32])), int(rng.integers(16, 50_000)))
    betas = {}
    if seed % 2:
        betas = {"beta_fast": float(rng.uniform(8, 64)), "beta_slow": float(rng.uniform(0.5, 4))}
        yarn = Yarn(yarn.factor, yarn.original_max_position_embeddings, **betas)
    expected, attention_factor = theirs(
        head_dim,
        theta,
        {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
        }
        | betas,
    )
    assert Rope(head_dim, theta, yarn).frequencies() == pytest.approx(expected, rel=2e-6)
    assert yarn.attention_factor == pytest.approx(attention_factor)


def test_logits_are_those_of_transformers_within_and_beyond_the_original_context(tmp_path):
    torch = pytest.importorskip("torch", reason="parity needs PyTorch: pip install torch")
    path = write_small_qwen3(tmp_path / "m.gguf", seed=5, metadata=YARN, rope_theta=1e4)
    with GGUFFile.open(path) as file:
        config = Qwen3Config.from_gguf(file)
        model = hugging_face_model(config, file)
    with torch.no_grad():
        expected = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    assert np.abs(logits(path) - expected).max() <= 2e-4 * np.abs(expected).max()
    plain = logits(write_small_qwen3(tmp_path / "plain.gguf", seed=5, rope_theta=1e4))
    assert np.abs(plain - expected).max() > 1e-2 * np.abs(expected).max(), "YaRN changes something"


def test_a_folder_says_the_same_as_a_gguf_file(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
    older = write_folder(tmp_path / "older", rope_scaling=scaling, rope_theta=1e4, max_position_embeddings=64)
    newer = write_folder(
        tmp_path / "newer", rope_parameters=scaling | {"rope_theta": 1e4}, rope_theta=..., max_position_embeddings=64
    )
    oldest = write_folder(
        tmp_path / "oldest",
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
        rope_theta=1e4,
    )
    expected = config_of(tmp_path, YARN, rope_theta=1e4, max_position_embeddings=64).rope
    for folder in (older, newer, oldest):
        with open_weights(folder) as source:
            assert source.config.rope == expected
    with open_weights(older) as source:
        assert source.config.max_position_embeddings == 160
    assert config_of(tmp_path, YARN, max_position_embeddings=64).max_position_embeddings == 160
    assert config_of(tmp_path, YARN, max_position_embeddings=1024).max_position_embeddings == 1024
    stated = write_folder(tmp_path / "stated", rope_scaling=scaling | {"attention_factor": 1.5, "beta_fast": 16})
    with open_weights(stated) as source:
        assert source.config.rope_attention_factor == 1.5 and source.config.yarn.beta_fast == 16


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_factor_of_1_is_no_scaling(tmp_path, device):
    plain = logits(write_small_qwen3(tmp_path / "plain.gguf"), device)
    for number, factor in enumerate([1.0, 0.0]):
        path = write_small_qwen3(tmp_path / f"{number}.gguf", metadata=YARN | {"qwen3.rope.scaling.factor": factor})
        np.testing.assert_allclose(logits(path, device), plain, rtol=0, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("kind", [None, "none", "linear", "yarn"])
def test_attn_factor_is_applied_whatever_the_type(tmp_path, kind):
    """As in llama.cpp: cos and sin are multiplied by it, so scores by its square, with or without YaRN."""
    metadata = {"qwen3.rope.scaling.attn_factor": 0.5} | ({} if kind is None else {"qwen3.rope.scaling.type": kind})
    metadata |= {name: value for name, value in YARN.items() if kind == "yarn" and not name.endswith("type")}
    config = config_of(tmp_path, metadata)
    assert config.rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1 if kind == "yarn" else 1))
    assert (config.yarn is not None) == (kind == "yarn")
    if kind is None:
        changed = logits(tmp_path / "m.gguf")
        assert np.abs(changed - logits(write_small_qwen3(tmp_path / "plain.gguf"))).max() > 1e-3


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_short_contexts_are_computed_as_long_ones(tmp_path, device):
    """It is static: a prompt's first rows are the same beside what comes later."""
    path = write_small_qwen3(tmp_path / "m.gguf", metadata=YARN)
    assert logits(path, device, TOKEN_IDS[:20]).tobytes() == logits(path, device)[:20].tobytes()


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"qwen3.rope.scaling.type": "longrope"}, "rope.scaling.type", "'longrope' is not supported"),
        ({"qwen3.rope.scaling.factor": 0.5}, "rope.scaling.factor", "is not from 1 to 1024"),
        ({"qwen3.rope.scaling.factor": 4096.0}, "rope.scaling.factor", "is not from 1 to 1024"),
        ({"qwen3.rope.scaling.type": "linear"}, "rope.scaling.factor", "RoPE scaling by 4.0 is not supported"),
        ({"qwen3.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor", "forge supports 1 only"),
        ({"qwen3.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier", "forge supports 0 only"),
        ({"qwen3.rope.scaling.attn_factor": -1.0}, "attn_factor", "is not above 0"),
        ({"qwen3.rope.scaling.yarn_beta_fast": 0.0}, "yarn_beta_fast", "is not above 0"),
    ],
)
def test_what_makes_no_sense_in_a_gguf_file_is_refused(tmp_path, change, field, words):
    with pytest.raises(ForgeError) as caught:
        config_of(tmp_path, YARN | change)
    assert field in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factor": None}, "factor: missing"),
        ({"factor": 0.5}, "is not a number from 1 to 1024"),
        ({"mscale": 1.0}, "mscale: is not supported"),
        ({"truncate": False}, "truncate: is not supported"),
        ({"rope_type": "dynamic"}, "'dynamic' is not supported; YaRN is"),
        ({"original_max_position_embeddings": 0}, "must be a whole number"),
    ],
)
def test_what_makes_no_sense_in_a_folder_is_refused(tmp_path, change, words):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40} | change
    folder = write_folder(tmp_path / "m", rope_scaling=scaling)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    with pytest.raises(ForgeError, match=words):
        open_weights(folder)


def test_a_files_own_reader_sees_the_same(tmp_path):
    with GGUFFile.open(write_small_qwen3(tmp_path / "m.gguf", metadata=YARN)) as file:
        assert GGUFWeights(file).config.yarn == Yarn(4.0, 40)
