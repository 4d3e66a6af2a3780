"""Mixtures of experts: transformers' logits on random small shapes, from GGUF and from a Hugging Face folder; and on
the CPU the same bits in any batch."""

from dataclasses import replace

import numpy as np
import pytest

from forge.backends.cpu.op_layout import ROWS_NEAR
from forge.backends.devices import create_backend
from forge.backends.reference import ReferenceBackend
from forge.errors import ForgeError
from forge.gguf import GGMLType, GGUFError, GGUFFile
from forge.gguf.writer import write_gguf
from forge.model.backend import Backend, Operations
from forge.model.config import Qwen3Config, expected_tensors
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import Part, flat_batch, new_storage, one_prefill
from forge.model.qwen3_moe import Qwen3Moe
from tests.backends.cpu.models import ThreadedBackend, small_model
from tests.model.raw_safetensors import write_folder
from tests.small_models import array_tensor, small_metadata, write_small_qwen3

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
TOKEN_IDS = np.random.default_rng(0).integers(0, 280, 40).tolist()


def logits(path, device: str = "reference") -> np.ndarray:
    with open_weights(path) as source:
        return one_prefill(load_qwen3(source, create_backend(device)), TOKEN_IDS)


def their_model(sizes: dict, seed: int):
    torch = pytest.importorskip("torch", reason="parity needs PyTorch: pip install torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install transformers")
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=300,
        num_hidden_layers=2,
        intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **sizes,
    )
    config._experts_implementation = "eager"  # the others want shapes in multiples of 16 bytes
    return transformers.Qwen3MoeForCausalLM(config).float().eval(), torch


def random_sizes(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    experts = int(rng.integers(2, 17))
    return {
        "hidden_size": 4 * int(rng.integers(3, 30)),
        "moe_intermediate_size": int(rng.integers(3, 70)),
        "num_attention_heads": kv_heads * int(rng.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * int(rng.integers(2, 20)),
        "num_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, experts + 1)),
        "norm_topk_prob": bool(seed % 2),
        "tie_word_embeddings": bool(seed % 3),
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_folders_logits_are_those_of_transformers_on_random_shapes(tmp_path, seed):
    theirs, torch = their_model(random_sizes(seed), seed)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    for device in ("reference", "cpu"):
        actual = logits(tmp_path, device)
        assert np.abs(actual - expected).max() <= 2e-4 * np.abs(expected).max(), device


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0", "Q4_0", "F16"])
def test_a_gguf_file_on_the_cpu_is_near_the_reference(tmp_path, tensor_type):
    """With rounded activations a few rows may choose another expert, where two are nearly as likely."""
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type=tensor_type, seed=2, **MOE | {"intermediate_size": 64})
    want, got = logits(path), logits(path, "cpu")
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(error) < (1e-5 if tensor_type.startswith("F") else 4e-2)
    if tensor_type.startswith("F"):
        assert error.max() < 1e-5


def test_a_gguf_file_says_the_same_as_a_folder(tmp_path):
    theirs, _ = their_model(random_sizes(1) | {"norm_topk_prob": True}, 1)
    theirs.save_pretrained(tmp_path / "folder")
    with open_weights(tmp_path / "folder") as source:
        config = source.config
        tensors = [array_tensor(n, GGMLType.F32, source.tensor(n).dequantize()) for n in expected_tensors(config)]
        path = write_gguf(tmp_path / "m.gguf", small_metadata(config), tensors)
    with GGUFFile.open(path) as file:
        assert replace(Qwen3Config.from_gguf(file), rms_norm_eps=config.rms_norm_eps) == config
    np.testing.assert_allclose(logits(path), logits(tmp_path / "folder"), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=["Q8_0", "F32", "Q3_K"])
def models(request):
    """The same mixture for several numbers of threads."""
    sizes = MOE | {"intermediate_size": 256} if request.param == "Q3_K" else MOE
    loaded = [small_model(ThreadedBackend(threads), request.param, seed=3, **sizes) for threads in (1, 2, 3)]
    yield loaded
    for model in loaded:
        model.backend._pool.close()


def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(models):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 280, length).tolist() for length in (1, 9, 17, 30)]
    alone = [one_prefill(models[0], prompt, kv_dtype="float32") for prompt in prompts]
    blocks = [[0], [1], [2, 3], [4, 5]]
    for model in models:
        assert isinstance(model, Qwen3Moe)
        for order in ([0, 1, 2, 3], [3, 0, 2], [1]):
            storage = new_storage(model, 8, 16, "float32")
            parts = [Part(prompts[n], 0, len(prompts[n]), blocks[n]) for n in order]
            together = model.forward(flat_batch(parts, 16), storage)
            assert together.tobytes() == np.concatenate([alone[n] for n in order]).tobytes()


def test_more_rows_than_pass_over_weights_together_change_no_bit():
    """Of a prefill whose every row has the same two experts, against its chunks."""
    model = small_model(ThreadedBackend(2), "Q8_0", seed=4, num_experts=2, num_experts_per_tok=2, num_layers=1)
    prompt = np.random.default_rng(2).integers(0, 280, 2 * ROWS_NEAR + 25).tolist()
    whole, table = one_prefill(model, prompt, kv_dtype="float32"), list(range(-(-len(prompt) // 16)))
    storage = new_storage(model, len(table), 16, "float32")
    for start in range(0, len(prompt), 40):
        end = min(start + 40, len(prompt))
        got = model.forward(flat_batch([Part(prompt, start, end, table)], 16), storage)
        assert np.array_equal(got, whole[start:end]), start
    model.backend._pool.close()


def test_devices_without_experts_say_so():
    class Other(ReferenceBackend):
        load_experts = Backend.load_experts

    with pytest.raises(ForgeError, match="no mixture of experts: use --device cpu"):
        small_model(Other(), "F32", **MOE)
    assert "experts" not in Operations.__abstractmethods__


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qwen3moe.expert_used_count": 9}, "9 is not from 1 to 8"),
        ({"qwen3moe.expert_count": 4}, "has 8 where qwen3moe.expert_count says 4"),
        ({"qwen3moe.expert_count": 0}, "0 is not from 1 to"),
    ],
)
def test_a_gguf_mixture_that_contradicts_itself_is_refused(tmp_path, change, words):
    with pytest.raises(GGUFError, match=words):
        open_weights(write_small_qwen3(tmp_path / "m.gguf", metadata=change, **MOE))


def test_layers_without_experts_between_are_refused(tmp_path):
    moe = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}
    with pytest.raises(ForgeError, match="mixtures whose layers all have experts"):
        open_weights(write_folder(tmp_path / "m", **moe))
