"""Safetensors files put together by hand, right or wrong on purpose, and small Hugging Face folders around them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge.model.config import expected_tensors
from forge.model.hf_directory import hugging_face_name
from forge.model.safetensors_file import SafetensorsError, SafetensorsFile
from tests.small_models import small_config

STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def raw(header: bytes | str | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A whole file; `length` where the header's stated one is to be wrong."""
    text = json.dumps(header) if isinstance(header, dict) else header
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def encoded(values: np.ndarray, dtype: str) -> bytes:
    """Float32 `values` as a file has them in `dtype`; bfloat16 by cutting, which is exact for what fits."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(STORED[dtype]).tobytes()


def packed(tensors: dict[str, tuple[tuple[int, ...], bytes]], dtype: str = "F32") -> bytes:
    """A sound file of these tensors, name → (shape, bytes)."""
    header, data = {}, b""
    for name, (shape, stored) in tensors.items():
        header[name] = entry(list(shape), len(data), len(data) + len(stored), dtype)
        data += stored
    return raw(header, data)


def refused(path: Path) -> SafetensorsError:
    """The error of opening `path`, which must be one printable line that begins with the file's name."""
    with pytest.raises(SafetensorsError) as caught:
        SafetensorsFile.open(path)
    error = caught.value
    assert str(error).startswith(f"{path}: ") and str(error).isprintable()
    assert len(str(error)) < len(str(path)) + 400
    if error.offset is not None:
        assert f"at byte {error.offset}, {error.field}: " in str(error)
    return error


CONFIG = small_config(vocab_size=300)
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""The sizes of `CONFIG` by transformers' names."""


def config_json(**changes: Any) -> dict[str, Any]:
    """The config.json of `CONFIG`; a change to `...` takes the key out."""
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_attention_heads,
        "num_key_value_heads": CONFIG.num_key_value_heads,
        "head_dim": CONFIG.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of `CONFIG` under Hugging Face's names, exact in bfloat16."""
    rng = np.random.default_rng(seed)
    values = {hugging_face_name(n): rng.standard_normal(s, np.float32) for n, s in expected_tensors(CONFIG).items()}
    return {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in values.items()}


def write_folder(folder: Path, tensors: dict[str, np.ndarray] | None = None, dtype: str = "F32", **config: Any) -> Path:
    """A sound folder without a tokenizer: config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    values = random_tensors() if tensors is None else tensors
    stored = {name: (value.shape, encoded(value, dtype)) for name, value in values.items()}
    (folder / "model.safetensors").write_bytes(packed(stored, dtype))
    (folder / "config.json").write_text(json.dumps(config_json(**config)))
    return folder
