"""From a file on disk to a model on a device."""

from collections.abc import Callable

from forge.backends.backend import Array, Backend
from forge.gguf import GGUFFile, GGUFTensor
from forge.model.config import Qwen3Config, check_tensors, expected_tensors
from forge.model.qwen3 import LayerWeights, Qwen3, Qwen3Weights

LoadProgress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor."""

LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attention_output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""`LayerWeights` field → the tensor's name in the file, between `blk.N.` and `.weight`."""


def load_qwen3(file: GGUFFile, backend: Backend, on_progress: LoadProgress | None = None) -> Qwen3:
    """Check the file whole, then load every tensor once.

    Raises `GGUFError` before anything is loaded if a hyper-parameter or a tensor is missing or contradicts another.
    """
    config = Qwen3Config.from_gguf(file)
    check_tensors(file, config)
    total = sum(file.tensors[name].nbytes for name in expected_tensors(config))
    done = 0

    def load(name: str) -> Array:
        nonlocal done
        tensor: GGUFTensor = file.tensors[f"{name}.weight"]
        loaded = backend.load_matrix(tensor) if len(tensor.shape) == 2 else backend.load_vector(tensor)
        done += tensor.nbytes
        if on_progress is not None:
            on_progress(done, total)
        return loaded

    embedding = load("token_embd")
    layers = tuple(
        LayerWeights(**{field: load(f"blk.{index}.{tensor}") for field, tensor in LAYER_TENSORS.items()})
        for index in range(config.num_layers)
    )
    output_norm = load("output_norm")
    head = embedding if config.tie_word_embeddings else load("output")
    return Qwen3(config, Qwen3Weights(embedding, layers, output_norm, head), backend)
