"""From weights on disk to a model on a device."""

from collections.abc import Callable

from forge.backends.backend import Array, Backend
from forge.model.qwen3 import LayerWeights, Qwen3, Qwen3Weights
from forge.model.weight_source import WeightSource

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
"""`LayerWeights` field → the tensor's name in its source, between `blk.N.` and `.weight`."""


def load_qwen3(source: WeightSource, backend: Backend, on_progress: LoadProgress | None = None) -> Qwen3:
    """Load every tensor once, giving back each one's pages of the file before the next is read.

    So the peak of memory is what the backend keeps, with one tensor of the file beside it.
    """
    config, done = source.config, 0

    def load(name: str) -> Array:
        nonlocal done
        tensor = source.tensor(f"{name}.weight")
        loaded = backend.load_matrix(tensor) if len(tensor.shape) == 2 else backend.load_vector(tensor)
        source.release(f"{name}.weight")
        done += tensor.nbytes
        if on_progress is not None:
            on_progress(done, source.nbytes)
        return loaded

    embedding = load("token_embd")
    layers = tuple(
        LayerWeights(**{field: load(f"blk.{index}.{tensor}") for field, tensor in LAYER_TENSORS.items()})
        for index in range(config.num_layers)
    )
    output_norm = load("output_norm")
    head = embedding if config.tie_word_embeddings else load("output")
    return Qwen3(config, Qwen3Weights(embedding, layers, output_norm, head), backend)
