"""forge's forward pass against `transformers`' Qwen3ForCausalLM with the same weights, both in float32."""

import numpy as np
import pytest

from forge.backends.devices import create_backend
from forge.gguf import GGUFFile
from forge.model.config import Qwen3Config
from forge.model.hf_directory import hugging_face_name
from forge.model.loader import load_qwen3
from forge.model.manual_batch import one_prefill
from forge.model.weight_source import GGUFWeights
from tests.small_models import write_small_qwen3

torch = pytest.importorskip("torch", reason="parity needs PyTorch: pip install torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install transformers")

SIZES = [
    pytest.param({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}, id="groups of 1"),
    pytest.param({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}, id="groups of 2, wide heads"),
    pytest.param({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}, id="groups of 4, narrow heads"),
]


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_are_those_of_transformers(tmp_path, sizes, tie, theta):
    seed = hash((sizes["head_dim"], tie, theta)) % 1000
    path = write_small_qwen3(tmp_path / "m.gguf", seed=seed, tie=tie, rope_theta=theta, **sizes)
    with GGUFFile.open(path) as file:
        ours = load_qwen3(GGUFWeights(file), create_backend("reference"))
        theirs = hugging_face_model(ours.config, file)
    token_ids = np.random.default_rng(seed).integers(0, ours.vocab_size, 70).tolist()

    actual = one_prefill(ours, token_ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0].numpy()

    assert relative_error(actual, expected) <= 1e-4
    assert np.array_equal(actual.argmax(axis=1), expected.argmax(axis=1))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The worst row's ‖actual - expected‖ / ‖expected‖."""
    return float((np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def hugging_face_model(config: Qwen3Config, file: GGUFFile):
    """Qwen3ForCausalLM in float32 with the weights of `file`, every one of them loaded."""
    hf_config = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_theta=config.rope_theta,
        rope_parameters=rope_parameters(config),
        attention_bias=False,
        attn_implementation="eager",
    )
    model = transformers.Qwen3ForCausalLM(hf_config).float().eval()
    frequencies = model.model.rotary_emb.inv_freq
    assert np.allclose(frequencies.numpy(), config.rope.frequencies(), rtol=2e-6), "transformers took another theta"
    weights = {hugging_face_name(name): torch.from_numpy(tensor.dequantize()) for name, tensor in file.tensors.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if config.tie_word_embeddings:
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    return model


def rope_parameters(config: Qwen3Config) -> dict[str, object]:
    if config.yarn is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": config.yarn.factor,
        "original_max_position_embeddings": config.yarn.original_max_position_embeddings,
    }
