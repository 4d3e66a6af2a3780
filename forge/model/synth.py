"""Models of random weights: a GGUF file of a real model's shape, so that anyone can measure without a download.

What a kernel costs depends on shapes and types, not on what the weights say. So a synthetic file has the shapes of a
published Qwen3 (or any others), the tensor types that llama.cpp's `llama-quantize` would choose, a vocabulary of full
size that every tokenizer accepts, and numbers that keep the forward pass in an ordinary range: matrices of mean 0 and
deviation 1/sqrt(inputs), norms near 1. What it says is noise.

Weights come in units of `UNIT_ELEMENTS`, each from a random generator of its own that is seeded with the model's seed,
the tensor's name and the unit's number. So a file depends on the seed and on nothing else (with the same version of
NumPy), memory stays at a few megabytes, and quantized blocks are drawn as blocks: nothing is quantized.

Ledger, 2 busy cores: bound by drawing random bits. Qwen3-0.6B takes 2.7 s in Q8_0, 2.6 s in Q4_0 and 14 s in F16,
whose numbers are drawn from a normal distribution one by one; peak memory is 120 MB, Python and NumPy included.

The vocabulary is untrained: byte-level BPE of any size, laid out as Qwen's. The bytes come first in Qwen's order, then
tokens made by merges, then Qwen's 26 added tokens, then padding. At the full 151,936 every one of those has the id that
it has in Qwen3 (`<|im_end|>` is 151,645). It depends on its size and on nothing else, so any two synthetic models of
one size share it, and one may draft for the other. The merges join letters into pieces of words, likelier letters first
and shorter pieces rather than longer ones, with and without the space before a word. Text is cut into tokens of about
two letters, where a trained vocabulary has four; but they are made by as many merges, and by the same code.
"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from forge.errors import ForgeError, UsageError
from forge.gguf.ggml_types import FLOAT_TYPES, GGMLType
from forge.model.config import Qwen3Config, expected_tensors
from forge.tokenizer.spec import BYTE_ALPHABET, TokenType

QWEN_NORMAL_TOKENS = 151_643
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
USER_DEFINED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
MIN_VOCABULARY = 256 + 1 + len(CONTROL_TOKENS) + len(USER_DEFINED_TOKENS)
"""One of them made by a merge: GGUF cannot hold an empty list, and no reader takes a tokenizer without merges."""

_LETTERS = "etaoinshrdlcumwfgypbvkjxqzETAOINSHRDLCUMWFGYPBVKJXQZ"
_SPACE = "Ġ"
_LONGEST = 12
_DRAWS = 1 << 16


@dataclass(frozen=True)
class SyntheticVocabulary:
    """As a GGUF file has it; id = index."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def synthetic_vocabulary(size: int) -> SyntheticVocabulary:
    """Build a vocabulary of exactly `size` tokens. Raises `UsageError` for one that has no room for Qwen's own."""
    if size < MIN_VOCABULARY:
        needed = f"bytes, a merge and Qwen's own tokens take {MIN_VOCABULARY}"
        raise UsageError(f"a vocabulary of {size} is too small: {needed}")
    added = (*CONTROL_TOKENS, *USER_DEFINED_TOKENS)
    num_normal = min(QWEN_NORMAL_TOKENS, size - len(added))
    merges = _merges(num_normal - 256)
    tokens = [*sorted(BYTE_ALPHABET), *("".join(pair) for pair in merges), *added]
    types = [TokenType.NORMAL] * num_normal
    types += [TokenType.CONTROL] * len(CONTROL_TOKENS) + [TokenType.USER_DEFINED] * len(USER_DEFINED_TOKENS)
    padding = [f"[PAD{token_id}]" for token_id in range(len(tokens), size)]
    types += [TokenType.UNUSED] * len(padding)
    return SyntheticVocabulary(tokens + padding, list(map(int, types)), list(map(" ".join, merges)))


def _merges(count: int) -> list[tuple[str, str]]:
    """Draw `count` merges, each of two tokens that exist by then into a third that did not."""
    rng = np.random.default_rng(0)
    rights = list(_LETTERS)
    lefts = [_SPACE, *_LETTERS]
    known: set[str] = set()
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        for left_draw, right_draw in (rng.random((_DRAWS, 2)) ** 3).tolist():  # the cube prefers what came early
            left, right = lefts[int(left_draw * len(lefts))], rights[int(right_draw * len(rights))]
            joined = left + right
            if joined in known or len(joined) > _LONGEST:
                continue
            known.add(joined)
            merges.append((left, right))
            lefts.append(joined)
            if left[0] != _SPACE:
                rights.append(joined)
            if len(merges) == count:
                break
    return merges


FULL_VOCABULARY = 151_936
_AS_PUBLISHED: dict[str, Any] = {
    "head_dim": 128,
    "vocab_size": FULL_VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}
"""What the dense Qwen3 models have in common, by the fields of `Qwen3Config`."""
UNIT_ELEMENTS = 1 << 20
OUTPUT_NORM = 4.0
"""The last norm's mean. Logits then deviate by about 4, so that a few hundred of 151,936 tokens are likely; with 1 a
sample would be nearly uniform, and everything that looks at probabilities would be looking at nothing."""

SynthProgress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


class SynthError(ForgeError):
    """The file cannot be written: it exists, or there is no room."""


@dataclass(frozen=True)
class Quantization:
    """A kind of file, as `llama-quantize` makes it: the type of most matrices, and `general.file_type`.

    `mixed`: some layers' attn_v and ffn_down get more bits (the `_M` of K-quants). `small`: only the first ones get a
    few (the `_S`)."""

    base: GGMLType
    file_type: int
    mixed: bool = False
    small: bool = False


QUANTIZATIONS = {
    "F32": Quantization(GGMLType.F32, 0),
    "F16": Quantization(GGMLType.F16, 1),
    "BF16": Quantization(GGMLType.BF16, 32),
    "Q8_0": Quantization(GGMLType.Q8_0, 7),
    "Q4_0": Quantization(GGMLType.Q4_0, 2),
    "Q4_1": Quantization(GGMLType.Q4_1, 3),
    "Q5_0": Quantization(GGMLType.Q5_0, 8),
    "Q5_1": Quantization(GGMLType.Q5_1, 9),
    "Q4_K_S": Quantization(GGMLType.Q4_K, 14, small=True),
    "Q4_K_M": Quantization(GGMLType.Q4_K, 15, mixed=True),
    "Q5_K_S": Quantization(GGMLType.Q5_K, 16),
    "Q5_K_M": Quantization(GGMLType.Q5_K, 17, mixed=True),
    "Q6_K": Quantization(GGMLType.Q6_K, 18),
}
_ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

_FALLBACKS = {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q5_K: GGMLType.Q5_1, GGMLType.Q6_K: GGMLType.Q8_0}
"""The type that llama.cpp takes if rows are not whole blocks of 256; F16 if they are not whole blocks of 32 either."""


def synthetic_config(**sizes: Any) -> Qwen3Config:
    """Build a shape of the given fields of `Qwen3Config`; the others are `_AS_PUBLISHED`. Raises `UsageError` for one
    that no Qwen3 model can have."""
    config = Qwen3Config(**_AS_PUBLISHED | sizes)
    for name, value in vars(config).items():
        if isinstance(value, int) and not 0 <= value < 2**31:
            raise UsageError(f"{name} {value} is out of range")
        if value == 0 and not isinstance(value, bool) and "experts" not in name:  # it makes dense models
            raise UsageError(f"{name} must be at least 1")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UsageError(f"{heads} heads cannot share {kv_heads} key and value heads evenly")
    if config.head_dim % 2:
        raise UsageError(f"a head of {config.head_dim} is odd, and RoPE turns pairs")
    return config


_SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    name: synthetic_config(**dict(zip(_SIZES, sizes, strict=True)))
    for name, *sizes in (
        ("qwen3-0.6b", 28, 1024, 3072, 16, 8),
        ("qwen3-1.7b", 28, 2048, 6144, 16, 8),
        ("qwen3-4b", 36, 2560, 9728, 32, 8),
    )
}
"""The dense Qwen3 models with tied embeddings, as published (https://huggingface.co/Qwen)."""


@dataclass(frozen=True)
class SyntheticFile:
    """What `synth` wrote. `type_bytes` has the bytes of tensors by the name of their type."""

    path: Path
    bytes: int
    parameters: int
    tensors: int
    type_bytes: dict[str, int]


def synth(
    path: Path,
    config: Qwen3Config,
    quantization: str = "Q8_0",
    *,
    name: str = "synthetic qwen3",
    seed: int = 0,
    pure: bool = False,
    force: bool = False,
    on_progress: SynthProgress | None = None,
) -> SyntheticFile:
    """Write a random model. It appears under its name only once it is whole.

    quantization: one of `QUANTIZATIONS`, in any case. pure: all matrices of that type, no mixture. force: an existing
    file is replaced. Raises `UsageError` for what has no meaning, `SynthError` if the file is there already or does not
    fit on the disk.
    """
    kind = find_quantization(quantization)
    if seed < 0:
        raise UsageError(f"--seed must not be negative, got {seed}")
    from forge.gguf.writer import NewTensor, write_gguf  # which imports the gguf package

    types, shapes = tensor_types(config, kind, pure), expected_tensors(config)
    tensors = [
        NewTensor(tensor, types[tensor], shape, partial(_weights, tensor, types[tensor], shape, seed))
        for tensor, shape in shapes.items()
    ]
    type_bytes: Counter[str] = Counter()
    for new in tensors:
        type_bytes[new.ggml_type.name] += new.nbytes
    _check_place(path, type_bytes.total(), force)
    metadata = _metadata(config, kind, name)
    written = 0

    def advance(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if on_progress is not None:
            on_progress(written, type_bytes.total())

    try:
        write_gguf(path, metadata, tensors, advance)
    except OSError as error:
        hint = "; the unfinished file is removed" if error.errno == errno.ENOSPC else ""
        raise SynthError(f"{path}: cannot be written: {error.strerror or error}{hint}") from None
    parameters = sum(map(prod, shapes.values()))
    return SyntheticFile(path, path.stat().st_size, parameters, len(shapes), dict(type_bytes))


def find_quantization(name: str) -> Quantization:
    """Find the entry of `QUANTIZATIONS` called `name`, in upper or lower case. Raises `UsageError`."""
    known = _ALIASES.get(name.upper(), name.upper())
    if known not in QUANTIZATIONS:
        raise UsageError(f"unknown type {name!r:.40}; there are {', '.join(QUANTIZATIONS)}")
    return QUANTIZATIONS[known]


def default_file_name(shape: str, quantization: str) -> str:
    """Return the name of a synthetic model's file: `qwen3-0.6b-q8_0.gguf`."""
    return f"{shape}-{quantization.lower()}.gguf"


def tensor_types(config: Qwen3Config, kind: Quantization, pure: bool = False) -> dict[str, GGMLType]:
    """Return the type of every tensor, as `llama_tensor_get_type` (src/llama-quant.cpp) chooses it without an
    importance matrix: norms stay F32; the output matrix, which may be the embedding, gets Q6_K in every quantized file
    below Q8_0."""
    return {
        name: GGMLType.F32 if len(shape) == 1 else _fitting(_matrix_type(name, config, kind, pure), shape[1])
        for name, shape in expected_tensors(config).items()
    }


def _matrix_type(name: str, config: Qwen3Config, kind: Quantization, pure: bool) -> GGMLType:
    if pure or kind.base.block.elements == 1:
        return kind.base
    if name == ("token_embd.weight" if config.tie_word_embeddings else "output.weight"):
        return kind.base if kind.base == GGMLType.Q8_0 else GGMLType.Q6_K
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return kind.base
    layer, num_layers = int(name.split(".")[1]), config.num_layers
    eighth = num_layers // 8
    if kind.mixed and (layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2):
        return GGMLType.Q6_K
    if kind.small and layer < (4 if name.endswith("attn_v.weight") else eighth):
        return GGMLType.Q5_K
    return kind.base


def _fitting(ggml_type: GGMLType, columns: int) -> GGMLType:
    """Return `ggml_type`, or what llama.cpp takes instead if a row of `columns` is not whole blocks of it."""
    for candidate in (ggml_type, _FALLBACKS.get(ggml_type, GGMLType.F16)):
        if columns % candidate.block.elements == 0:
            return candidate
    return GGMLType.F16


def _weights(name: str, ggml_type: GGMLType, shape: tuple[int, ...], seed: int) -> Iterator[np.ndarray]:
    """Yield the tensor's data: a norm whole, a matrix unit by unit."""
    if len(shape) == 1:
        mean = OUTPUT_NORM if name == "output_norm.weight" else 1.0
        deviations = _generator(seed, name, 0).standard_normal(shape, np.float32)
        yield (np.float32(mean) + np.float32(0.1) * deviations).view(np.uint8)
        return
    size, num_blocks = max(1, UNIT_ELEMENTS // ggml_type.block.elements), prod(shape) // ggml_type.block.elements
    for unit, start in enumerate(range(0, num_blocks, size)):
        yield random_blocks(ggml_type, min(size, num_blocks - start), shape[1] ** -0.5, _generator(seed, name, unit))


def _generator(seed: int, name: str, unit: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(name.encode()), unit])


def random_blocks(ggml_type: GGMLType, count: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` raw blocks, uint8 [count, bytes of a block], whose values have mean 0 and about the deviation `std`.

    Normally distributed for the float types and those with a minimum per block. Of the others, uniform quants under
    scales that are 0.5 to 1.5 times the mean, and for K types within a factor of two of each other; as many scales are
    negative as positive where quants reach further down than up, so that the mean is 0. Minima of K types center each
    group.
    """
    from forge.gguf.writer import encode  # which imports the gguf package

    elements, nbytes = ggml_type.block
    if ggml_type in FLOAT_TYPES or ggml_type in (GGMLType.Q4_1, GGMLType.Q5_1):
        values = rng.standard_normal(count * elements, dtype=np.float32) * np.float32(std)
        return encode(ggml_type, values).reshape(count, nbytes)
    if elements == 256:
        return _random_superblocks(ggml_type, rng.integers(0, 256, (count, nbytes), dtype=np.uint8), std, rng)
    bits = {GGMLType.Q8_0: 8, GGMLType.Q4_0: 4, GGMLType.Q5_0: 5}[ggml_type]
    blocks = np.frombuffer(rng.bytes(count * nbytes), np.uint8).reshape(count, nbytes).copy()
    scales = rng.uniform(0.5, 1.5, count) * (std / (2**bits / 12**0.5))
    if ggml_type == GGMLType.Q8_0:
        quants = blocks[:, 2:].view(np.int8)
        np.maximum(quants, -127, out=quants)  # no quantizer writes -128
    else:
        scales *= rng.integers(0, 2, count) * 2 - 1
    blocks[:, :2] = scales.astype("<f2").view(np.uint8).reshape(count, 2)
    return blocks


def _random_superblocks(ggml_type: GGMLType, blocks: np.ndarray, std: float, rng: np.random.Generator) -> np.ndarray:
    """Make scales and minima for the random quants of Q4_K, Q5_K or Q6_K."""
    if ggml_type == GGMLType.Q6_K:
        scales = rng.integers(64, 128, (len(blocks), 16), dtype=np.uint8)
        signs = rng.integers(0, 2, scales.shape, np.int8) * 2 - 1
        blocks[:, 192:208] = (scales.view(np.int8) * signs).view(np.uint8)
        blocks[:, 208:210] = _float16_bytes(std / (96 * 18.5))
        return blocks
    # A uniform quant of b bits deviates by 2^b / sqrt(12) around (2^b - 1) / 2; the six-bit scales are 32 to 63, equal
    # to their minima, and packed as `forge.gguf.block_formats` unpacks them.
    largest = 15 if ggml_type == GGMLType.Q4_K else 31
    scale = std / (48 * (largest + 1) / 12**0.5)
    blocks[:, 0:2], blocks[:, 2:4] = _float16_bytes(scale), _float16_bytes(scale * largest / 2)
    scales = rng.integers(32, 64, (len(blocks), 8), dtype=np.uint8)
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    last = (scales[:, 4:] & 0x0F) | (scales[:, 4:] << 4)
    blocks[:, 4:16] = np.concatenate([first, first, last], axis=1)
    return blocks


def _float16_bytes(value: float) -> np.ndarray:
    return np.array([value], dtype="<f2").view(np.uint8)


def _metadata(config: Qwen3Config, kind: Quantization, name: str) -> dict[str, object]:
    from forge.tokenizer.chat_template import QWEN3_CHAT_TEMPLATE

    vocabulary = synthetic_vocabulary(config.vocab_size)
    return {
        "general.architecture": "qwen3",
        "general.type": "model",
        "general.name": name,
        "general.description": "random weights, for measuring: what it says is noise",
        "general.file_type": kind.file_type,
        "general.quantization_version": 2,
        **hyper_parameters(config),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.token_types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.eos_token_id": vocabulary.id_of("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": vocabulary.id_of("<|endoftext|>"),
        "tokenizer.ggml.padding_token_id": vocabulary.id_of("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": QWEN3_CHAT_TEMPLATE,
    }


def hyper_parameters(config: Qwen3Config) -> dict[str, object]:
    """Return the metadata from which `Qwen3Config.from_gguf` reads a dense model's sizes."""
    return {
        "qwen3.block_count": config.num_layers,
        "qwen3.context_length": config.max_position_embeddings,
        "qwen3.embedding_length": config.hidden_size,
        "qwen3.feed_forward_length": config.intermediate_size,
        "qwen3.attention.head_count": config.num_attention_heads,
        "qwen3.attention.head_count_kv": config.num_key_value_heads,
        "qwen3.attention.key_length": config.head_dim,
        "qwen3.attention.value_length": config.head_dim,
        "qwen3.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "qwen3.rope.freq_base": config.rope_theta,
    }


def _check_place(path: Path, needed: int, force: bool) -> None:
    """Refuse before anything is made: a folder, an existing file, a disk without room."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name the file to write")
    if path.exists() and not force:
        raise SynthError(f"{path}: exists already; --force replaces it")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder")
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise SynthError(f"{path}: needs {needed / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB left")
    if not os.access(path.parent, os.W_OK):
        raise SynthError(f"{path.parent}: this folder may not be written to; give --out another")
