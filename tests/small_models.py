"""Small, valid Qwen3 GGUF files with random weights, for every test that needs a model file."""

from pathlib import Path

import numpy as np

from forge.gguf.ggml_types import GGMLType, GGUFValueType, row_nbytes
from forge.gguf.writer import NewTensor, TypedValue, encode, write_gguf
from forge.model.config import Qwen3Config, expected_tensors
from forge.model.synth import hyper_parameters, random_blocks

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "e r", "Ġt he", "o n", "Ġ s", "r e", "a t")
NORMAL, CONTROL = 1, 3


def byte_alphabet() -> list[str]:
    """GPT-2's stand-in for each byte, by byte: itself where printable, otherwise the next one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def small_tokenizer(vocab_size: int | None = None) -> dict[str, object]:
    """Metadata of a byte-level BPE tokenizer: bytes, merged pairs, control tokens, unused filler to `vocab_size`."""
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in MERGES] + list(CONTROL_TOKENS)
    types = [NORMAL] * (256 + len(MERGES)) + [CONTROL] * len(CONTROL_TOKENS)
    if vocab_size is not None and vocab_size < len(tokens):
        raise ValueError(f"the tokenizer has {len(tokens)} tokens; a vocabulary of {vocab_size} is too small")
    for index in range(len(tokens), vocab_size or 0):
        tokens.append(f"[PAD{index}]")
        types.append(5)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": TypedValue(types, GGUFValueType.ARRAY, GGUFValueType.INT32),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def small_metadata(config: Qwen3Config) -> dict[str, object]:
    """The metadata of a whole file for `config`, as llama.cpp's converter writes it."""
    entries = {
        "general.architecture": "qwen3",
        "general.name": "small random qwen3",
        "general.quantization_version": 2,
        **hyper_parameters(config),
        **small_tokenizer(config.vocab_size),
    }
    if not config.num_experts:
        return entries
    entries = {name.replace("qwen3.", "qwen3moe.", 1): value for name, value in entries.items()}
    return entries | {
        "general.architecture": "qwen3moe",
        "qwen3moe.expert_count": config.num_experts,
        "qwen3moe.expert_used_count": config.num_experts_per_tok,
        "qwen3moe.expert_feed_forward_length": config.intermediate_size,
    }


def small_config(
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 96,
    vocab_size: int = 288,
    tie: bool = True,
    rope_theta: float = 1e6,
    max_position_embeddings: int = 1024,
    num_experts: int = 0,
    num_experts_per_tok: int = 0,
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=float(np.float32(1e-6)),  # as a file holds it
        rope_theta=rope_theta,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
    )


UNIT_DEVIATION = {
    GGMLType.Q2_K: (80, 13.9),
    GGMLType.Q3_K: (108, 43.4),
    GGMLType.IQ4_NL: (0, 67.5),
    GGMLType.IQ4_XS: (0, 1250.0),
    GGMLType.IQ3_S: (0, 140.0),
    GGMLType.IQ3_XXS: (0, 142.0),
}
"""The byte of a block's float16 factor, and the standard deviation of random bytes' values under a factor of 1; of the
types that forge never writes, and the gguf package cannot quantize to."""
MADE_DIRECTLY = {GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, *UNIT_DEVIATION}
"""The types of which random blocks are made, because nothing here quantizes to them."""


def random_weights(ggml_type: GGMLType, shape: tuple[int, ...], std: float, rng: np.random.Generator) -> np.ndarray:
    """Raw blocks, uint8 `[..., bytes of a row]`, of random values with mean 0 and about the given deviation."""
    if ggml_type not in MADE_DIRECTLY:
        return encode(ggml_type, rng.standard_normal(shape, dtype=np.float32) * np.float32(std))
    elements, nbytes = ggml_type.block
    count = int(np.prod(shape)) // elements
    if ggml_type not in UNIT_DEVIATION:
        return random_blocks(ggml_type, count, std, rng).reshape(*shape[:-1], -1)
    blocks, (at, deviation) = rng.integers(0, 256, (count, nbytes), dtype=np.uint8), UNIT_DEVIATION[ggml_type]
    blocks[:, at : at + 2] = np.array([std / deviation], "<f2").view(np.uint8)
    if ggml_type == GGMLType.IQ4_NL:  # whose values are not centered: as many factors are negative as positive
        blocks[:, at + 1] |= rng.integers(0, 2, count, np.uint8) << 7
    if ggml_type == GGMLType.Q2_K:
        blocks[:, 82:84] = np.array([1.5 * std / deviation], "<f2").view(np.uint8)  # quants are 1.5 in the mean
    return blocks.reshape(*shape[:-1], -1)


def array_tensor(name: str, ggml_type: GGMLType, data: np.ndarray) -> NewTensor:
    """A tensor of a float array, which is encoded, or of raw blocks, uint8 `[..., bytes of a row]`."""
    if data.dtype != np.uint8:
        return NewTensor(name, ggml_type, data.shape, lambda: [encode(ggml_type, data)])
    block = ggml_type.block
    shape = (*data.shape[:-1], data.shape[-1] // block.nbytes * block.elements)
    return NewTensor(name, ggml_type, shape, lambda: [np.ascontiguousarray(data)])


def small_tensors(config: Qwen3Config, tensor_type: GGMLType, seed: int = 0) -> list[NewTensor]:
    """Random weights for `config`. Norms are F32 near 1; a matrix whose rows are not whole blocks is F32 too."""
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in expected_tensors(config).items():
        if name.endswith("ffn_gate_inp.weight"):  # which no quantizer touches
            router = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)
            tensors.append(array_tensor(name, GGMLType.F32, router))
            continue
        if len(shape) == 1:
            norm = 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
            tensors.append(array_tensor(name, GGMLType.F32, norm))
            continue
        ggml_type = tensor_type if shape[-1] % tensor_type.block.elements == 0 else GGMLType.F32
        std = 0.1 if name in ("token_embd.weight", "output.weight") else 1 / shape[-1] ** 0.5
        tensors.append(array_tensor(name, ggml_type, random_weights(ggml_type, shape, std, rng)))
    return tensors


def write_small_qwen3(
    path: Path,
    *,
    tensor_type: GGMLType | str = "F32",
    seed: int = 0,
    metadata: dict[str, object] | None = None,
    **sizes,
) -> Path:
    """Write a small random Qwen3 model to `path`, in the sizes of `small_config`'s keywords.

    `metadata` adds or replaces entries. The same arguments give the same file. Q4_K, Q5_K and Q6_K need sizes in
    multiples of 256 to be used at all.
    """
    config = small_config(**sizes)
    ggml_type = GGMLType[tensor_type] if isinstance(tensor_type, str) else GGMLType(tensor_type)
    entries = small_metadata(config) | (metadata or {})
    return write_gguf(path, entries, small_tensors(config, ggml_type, seed))


def gguf_beginning(folder: Path, tensor_type: str = "F32", metadata: dict[str, object] | None = None) -> bytes:
    """A file of one tensor, which is said to be of `tensor_type`: what a header alone says of a model."""
    data = np.zeros((4, row_nbytes(GGMLType[tensor_type], 256)), np.uint8)
    tensor = array_tensor("token_embd.weight", GGMLType[tensor_type], data)
    entries = small_metadata(small_config(hidden_size=256)) | (metadata or {})
    return write_gguf(folder / "beginning.gguf", entries, [tensor]).read_bytes()
