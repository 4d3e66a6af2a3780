"""A Hugging Face folder as a source of weights: config.json, safetensors in one file or in shards, tokenizer.json.

The folder's own words decide what the model is, and as in `forge.model.config` what the forward pass does not compute
is refused rather than ignored: another architecture, RoPE scaling other than YaRN, biases, sliding windows, weights
that are quantized in some library's way, and tensors that a Qwen3 model does not have.

The weights are taken as they are. Hugging Face's Qwen3 and GGUF's pair the same halves of a head for RoPE, so no row
moves (which is not so for Llama). Defaults are those of transformers' `Qwen3Config`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forge.mapped_file import WHOLE_FILE, ModelFileError, printable, shown_path
from forge.model.config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_WIDTH,
    MAX_YARN_FACTOR,
    Qwen3Config,
    expected_tensors,
    numbered_labels,
)
from forge.model.rope import Yarn
from forge.model.safetensors_file import GGML_TYPES, SafetensorsFile, SafetensorsTensor
from forge.model.weight_source import SAMPLING_KEYS, StackedTensor, WeightSource, recommended_sampling
from forge.reasons import Pooling
from forge.tokenizer.spec import TokenizerError, TokenizerSpec, TokenType
from forge.tokenizer.tokenizer_json import spec_from_tokenizer_json

CONFIG, INDEX, WEIGHTS, TOKENIZER = "config.json", "model.safetensors.index.json", "model.safetensors", "tokenizer.json"
GENERATION_CONFIG, POOLING = "generation_config.json", "1_Pooling/config.json"
MODEL_TYPE, MOE_MODEL_TYPE = "qwen3", "qwen3_moe"
CLASSIFICATION = "Qwen3ForSequenceClassification"
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model", CLASSIFICATION, "Qwen3MoeForCausalLM")

MAX_JSON_BYTES = 16 << 20
"""Bytes of config.json and of an index of shards, at most: real ones take kilobytes."""
MAX_SHARDS = 1024
MAX_LAYERS = 4096
"""A malformed file cannot make us list the tensors of 4,000 million layers. The largest Qwen3 has 94."""

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_BODY = "model."
"""Prefix of all tensor names but the head's, unless a bare `Qwen3Model` was saved (Qwen3-Embedding)."""
_HEADS = {"output": "lm_head", "cls.output": "score"}
_STORED_AS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "layers.{layer}.input_layernorm",
    "attn_q": "layers.{layer}.self_attn.q_proj",
    "attn_k": "layers.{layer}.self_attn.k_proj",
    "attn_v": "layers.{layer}.self_attn.v_proj",
    "attn_q_norm": "layers.{layer}.self_attn.q_norm",
    "attn_k_norm": "layers.{layer}.self_attn.k_norm",
    "attn_output": "layers.{layer}.self_attn.o_proj",
    "ffn_norm": "layers.{layer}.post_attention_layernorm",
    "ffn_gate": "layers.{layer}.mlp.gate_proj",
    "ffn_up": "layers.{layer}.mlp.up_proj",
    "ffn_down": "layers.{layer}.mlp.down_proj",
    "ffn_gate_inp": "layers.{layer}.mlp.gate",
    "ffn_gate_exps": "layers.{layer}.mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "layers.{layer}.mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "layers.{layer}.mlp.experts.{expert}.down_proj",
}
"""Hugging Face's names; of the last three there is one for each expert here, and in GGUF one for all experts."""
_SHARD_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_BYTES_COMPARED = 16 << 20
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
"""What sentence-transformers' names mean."""


class ModelFolderError(ModelFileError):
    """A Hugging Face folder that lacks a file, contradicts itself, or holds a model that forge does not run."""


class HuggingFaceDirectory(WeightSource):
    """An open Hugging Face folder: a `WeightSource`. Made by `HuggingFaceDirectory.open`; a context manager."""

    def __init__(self, path: Path, config: Qwen3Config, files: Mapping[str, SafetensorsFile]):
        """`files` has the file of each tensor by Hugging Face's name. Checks that they are the tensors of `config`."""
        self.path, self.config = path, config
        self._files, self._body = files, _body(files)
        self.pooling = _pooling(path / POOLING)
        self.default_sampling: Mapping[str, float] = _recommended_sampling(path / GENERATION_CONFIG)
        _check_tensors(path, config, files)
        names = expected_tensors(config)
        self.nbytes = sum(self.tensor(name).nbytes for name in names)

    @classmethod
    def open(cls, path: Path) -> "HuggingFaceDirectory":
        """Read config.json and every shard's header.

        Raises `ModelFolderError` or `SafetensorsError` unless they are one sound Qwen3 model."""
        with ExitStack() as opened:
            config = read_config(path / CONFIG)
            files = _open_files(path, opened)
            source = cls(path, _with_head(config, files), files)
            opened.pop_all()
            return source

    def tensor(self, name: str) -> SafetensorsTensor | StackedTensor:
        parts = [self._files[stored].tensors[stored] for stored in self._stored(name)]
        return StackedTensor(name, parts) if _is_of_experts(name) else replace(parts[0], name=name)

    def release(self, name: str) -> None:
        for stored in self._stored(name):
            self._files[stored].release(stored)

    def _stored(self, name: str) -> list[str]:
        return hugging_face_names(name, self._body, self.config.num_experts)

    def tokenizer_spec(self) -> TokenizerSpec:
        """Return the spec of tokenizer.json, filled up with padding to the rows of the embedding, as GGUF's converter
        does."""
        file = self.path / TOKENIZER
        if not file.is_file():
            raise TokenizerError(f"{shown_path(file)}: missing, and forge needs it beside the weights")
        spec = spec_from_tokenizer_json(file)
        known, rows = len(spec.tokens), self.config.vocab_size
        if known > rows:
            raise TokenizerError(f"{shown_path(file)}: {known} tokens, and the model has only {rows}")
        padding = [f"[PAD{token_id}]" for token_id in range(known, rows)]
        types = np.append(spec.token_types, np.full(len(padding), TokenType.UNUSED, np.int32))
        return replace(spec, tokens=[*spec.tokens, *padding], token_types=types)

    def close(self) -> None:
        for file in set(self._files.values()):
            file.close()


def hugging_face_name(name: str, body: str = _BODY, expert: int = 0) -> str:
    """Translate `blk.0.attn_q.weight` to `model.layers.0.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if stem in _HEADS:
        return f"{_HEADS[stem]}.weight"
    before, _, kind = stem.rpartition(".")
    return f"{body}{_STORED_AS[kind]}.weight".format(layer=before.removeprefix("blk."), expert=expert)


def hugging_face_names(name: str, body: str, num_experts: int) -> list[str]:
    """Return the Hugging Face names of a tensor: several if it holds all experts."""
    return [hugging_face_name(name, body, expert) for expert in range(num_experts if _is_of_experts(name) else 1)]


def _is_of_experts(name: str) -> bool:
    return name.endswith("_exps.weight")


def read_config(path: Path) -> Qwen3Config:
    """Read the hyper-parameters of a config.json. Raises `ModelFolderError` for one that is missing, senseless or not
    supported."""
    values = _Values(path, _read_json(path))
    _check_kind(values)
    num_attention_heads = values.integer("num_attention_heads", MAX_HEADS)
    num_key_value_heads = values.integer("num_key_value_heads", MAX_HEADS, default=num_attention_heads)
    if num_attention_heads % num_key_value_heads:
        problem = f"{num_key_value_heads} key and value heads cannot be shared by {num_attention_heads} query heads"
        raise values.error("num_key_value_heads", problem)
    head_dim = values.integer("head_dim", MAX_WIDTH, default=128)
    if head_dim % 2:
        raise values.error("head_dim", f"{head_dim} is odd; RoPE turns pairs")
    theta, yarn, attention_factor = _rope(values)
    is_moe = values.values.get("model_type") == MOE_MODEL_TYPE
    stated_as = "num_experts" if "num_experts" in values.values else "num_local_experts"  # by release of transformers
    experts = values.integer(stated_as, MAX_EXPERTS, default=128) if is_moe else 0
    stated = values.integer("max_position_embeddings", MAX_CONTEXT, default=32_768)
    return Qwen3Config(
        vocab_size=values.integer("vocab_size", MAX_CONTEXT),
        hidden_size=values.integer("hidden_size", MAX_WIDTH),
        intermediate_size=values.integer("moe_intermediate_size" if is_moe else "intermediate_size", MAX_WIDTH),
        num_experts=experts,
        num_experts_per_tok=values.integer("num_experts_per_tok", experts, default=8) if is_moe else 0,
        norm_topk_prob=values.flag("norm_topk_prob") if is_moe else True,
        num_layers=values.integer("num_hidden_layers", MAX_LAYERS),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6, lambda epsilon: 0 < epsilon < 1, "between 0 and 1"),
        rope_theta=theta,
        max_position_embeddings=max(stated, yarn.max_position_embeddings if yarn is not None else 0),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        labels=_labels(values),
        generates=values.values.get("architectures") != [CLASSIFICATION],
        yarn=yarn,
        rope_attention_factor=attention_factor,
    )


def check_supported(path: Path) -> None:
    """Raise `ModelFolderError` if the config.json at `path` is of a kind that forge does not run, whatever its
    sizes."""
    _check_kind(_Values(path, _read_json(path)))


class _Values:
    """A JSON object with typed reads, each of which raises a `ModelFolderError` that names the field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def error(self, key: str, problem: str) -> ModelFolderError:
        return ModelFolderError(self.path, f"{self.prefix}{key}", problem)

    def integer(self, key: str, maximum: int, default: int | None = None) -> int:
        """Read an integer from 1 to `maximum`; null is as good as absent, and without a default it must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= maximum:
            stated = "missing" if value is None else printable(value)
            raise self.error(key, f"{stated}, and must be a whole number from 1 to {maximum}")
        return value

    def number(self, key: str, default: float, valid: Callable[[float], bool], words: str) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not is_finite or not valid(value):
            raise self.error(key, f"{printable(value)} is not a number {words}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if type(value) is not bool:
            raise self.error(key, f"{printable(value)} is not true or false")
        return value

    def section(self, key: str) -> "_Values":
        """Return the object at `key`; an empty one where it is null or absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "is not an object")
        return _Values(self.path, value or {}, f"{self.prefix}{key}.")


def _check_kind(values: _Values) -> None:
    """Refuse what is not one Qwen3 model of full attention with plain weights."""
    model_type = values.values.get("model_type")
    if model_type not in (MODEL_TYPE, MOE_MODEL_TYPE):
        problem = f"this folder holds {printable(model_type)}; forge runs {MODEL_TYPE!r} and {MOE_MODEL_TYPE!r}"
        raise values.error("model_type", problem)
    if values.values.get("decoder_sparse_step") not in (None, 1) or values.values.get("mlp_only_layers"):
        raise values.error("mlp_only_layers", "forge runs mixtures whose layers all have experts")
    architectures = values.values.get("architectures")
    if architectures is not None and architectures not in [[name] for name in ARCHITECTURES]:
        problem = f"{printable(architectures)} is not supported; forge runs {', '.join(ARCHITECTURES)}"
        raise values.error("architectures", problem)
    for key, only in (("hidden_act", "silu"), ("quantization_config", None)):
        value = values.values.get(key)
        if value not in (None, only):
            hint = f"forge runs {printable(only)}" if only else "take the model's GGUF file, or its plain weights"
            raise values.error(key, f"{printable(value)} is not supported; {hint}")
    for key in ("attention_bias", "use_sliding_window"):
        if values.flag(key):
            raise values.error(key, "is true, and forge does not compute that")
    layer_types = values.values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise values.error("layer_types", "forge runs models whose layers are all full_attention")


def _labels(values: _Values) -> tuple[str, ...]:
    """Return the names in `id2label` in order of their numbers, for a classification head; none for another model."""
    if values.values.get("architectures") != [CLASSIFICATION]:
        return ()
    named = values.section("id2label").values
    count = len(named) or values.integer("num_labels", MAX_HEADS, default=2)  # transformers' default
    return tuple(str(named.get(str(number), label)) for number, label in enumerate(numbered_labels(count)))


def _rope(values: _Values) -> tuple[float, Yarn | None, float]:
    """Read theta, YaRN and the attention factor: from `rope_parameters`, where newer transformers write them, or from
    `rope_scaling` and the config itself. Scaling other than YaRN is refused."""
    theta = values.number("rope_theta", 10_000.0, lambda theta: theta >= 1, "of at least 1")
    yarn, attention_factor = None, 1.0
    for key in ("rope_scaling", "rope_parameters"):
        section = values.section(key)
        kind = section.values.get("rope_type", section.values.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise values.error(key, f"RoPE scaling {printable(kind)} is not supported; YaRN is")
        if section.number("partial_rotary_factor", 1.0, lambda factor: factor == 1, "that forge supports: only 1") == 1:
            theta = section.number("rope_theta", theta, lambda theta: theta >= 1, "of at least 1")
        if kind == "yarn":
            yarn = _yarn(section, values)
            attention_factor = section.number("attention_factor", yarn.attention_factor, lambda f: f > 0, "above 0")
    if yarn is not None and theta <= 1:
        raise values.error("rope_theta", "YaRN needs more than 1")
    return theta, yarn, attention_factor


def _yarn(section: _Values, values: _Values) -> Yarn:
    """Read YaRN as transformers' `_compute_yarn_parameters` does, with the given `factor`."""
    for key, only in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if section.values.get(key) not in (None, only):
            raise section.error(key, "is not supported")
    if section.values.get("factor") is None:
        raise section.error("factor", "missing, and YaRN needs it")
    stated = values.integer("max_position_embeddings", MAX_CONTEXT, default=32_768)
    return Yarn(
        section.number("factor", 1.0, lambda f: 1 <= f <= MAX_YARN_FACTOR, f"from 1 to {MAX_YARN_FACTOR}"),
        section.integer("original_max_position_embeddings", MAX_CONTEXT, default=stated),
        section.number("beta_fast", 32.0, lambda beta: beta > 0, "above 0"),
        section.number("beta_slow", 1.0, lambda beta: beta > 0, "above 0"),
    )


def _open_files(folder: Path, opened: ExitStack) -> dict[str, SafetensorsFile]:
    """Open the file of each tensor, by the tensor's name; `opened` closes what is opened on the way."""
    index = folder / INDEX
    weight_map = _weight_map(index) if index.is_file() else None
    names = sorted(set(weight_map.values())) if weight_map is not None else [_only_file(folder)]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFolderError(folder / missing[0], WHOLE_FILE, f"missing ({len(missing)} of {len(names)} shards)")
    files: dict[str, SafetensorsFile] = {}
    for name in names:
        file = SafetensorsFile.open(folder / name)
        opened.callback(file.close)
        for tensor in file.tensors:
            if tensor in files:
                raise file.tensor_error(tensor, "", f"is in {printable(files[tensor].path.name)} as well")
            if weight_map is not None and weight_map.get(tensor) != name:
                raise file.tensor_error(tensor, "", f"is not in this file by what {INDEX} says")
            files[tensor] = file
    for tensor, name in (weight_map or {}).items():
        if tensor not in files:
            problem = f"{printable(name)} does not have this tensor"
            raise ModelFolderError(index, f"weight_map {printable(tensor)}", problem)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Map each tensor to its shard; all shards are plain names of files in the folder."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(index, "weight_map", "must be an object that names the file of each tensor")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            problem = f"{printable(name)} is not the name of a file in this folder"
            raise ModelFolderError(index, f"weight_map {printable(tensor)}", problem)
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise ModelFolderError(index, "weight_map", f"more than {MAX_SHARDS} shards")
    return weight_map


def _only_file(folder: Path) -> str:
    """Return the one file of weights in a folder without an index."""
    if (folder / WEIGHTS).exists():
        return WEIGHTS
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(names) == 1:
        return names[0]
    if names:
        problem = f"{len(names)} safetensors files, and no {INDEX} that says what they hold"
        raise ModelFolderError(folder, WHOLE_FILE, problem)
    raise ModelFolderError(folder, WHOLE_FILE, "holds no safetensors file; forge reads those and GGUF files")


def _body(files: Mapping[str, SafetensorsFile]) -> str:
    """Return the prefix of the tensor names in this file (`model.` or empty)."""
    return "" if _EMBEDDING in files and _BODY + _EMBEDDING not in files else _BODY


def _with_head(config: Qwen3Config, files: Mapping[str, SafetensorsFile]) -> Qwen3Config:
    """Return `config` without an output head if a bare model was saved without one (Qwen3-Embedding-8B)."""
    has_head = config.tie_word_embeddings or _HEAD in files or _body(files) == _BODY
    return config if has_head else replace(config, generates=False)


def _check_tensors(folder: Path, config: Qwen3Config, files: Mapping[str, SafetensorsFile]) -> None:
    body = _body(files)
    expected = {
        stored: shape[1:] if _is_of_experts(name) else shape
        for name, shape in expected_tensors(config).items()
        for stored in hugging_face_names(name, body, config.num_experts)
    }
    for name, shape in expected.items():
        if name not in files:
            problem = "the model needs this tensor, and no file here has it"
            raise ModelFolderError(folder, f"tensor {printable(name)}", problem)
        tensor = files[name].tensors[name]
        if tensor.dtype not in GGML_TYPES:
            problem = f"forge does not compute with {tensor.dtype}; it does with {', '.join(sorted(GGML_TYPES))}"
            raise files[name].tensor_error(name, "dtype", problem)
        if tensor.shape != shape:
            raise files[name].tensor_error(name, "shape", f"{list(tensor.shape)} where {CONFIG} says {list(shape)}")
    for name, file in files.items():
        if name not in expected and not (name == _HEAD and config.tie_word_embeddings):
            problem = f"a {MODEL_TYPE} model has no such tensor, and leaving it out could change what the model says"
            raise file.tensor_error(name, "", problem)
    if config.tie_word_embeddings and _HEAD in files:
        _check_tied(files, body + _EMBEDDING)


def _check_tied(files: Mapping[str, SafetensorsFile], name: str) -> None:
    """Check a tied matrix that the file holds twice (Qwen3-0.6B's does): two different ones would be two different
    models."""
    embedding, head = files[name].tensors[name], files[_HEAD].tensors[_HEAD]
    same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
    if not same or not all(np.array_equal(left, right) for left, right in _pieces(embedding.raw(), head.raw())):
        raise files[_HEAD].tensor_error(_HEAD, "", f"differs from {name}, and {CONFIG} says that they are one")
    for stored in (name, _HEAD):
        files[stored].release(stored)


def _pieces(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for start in range(0, arrays[0].size, _BYTES_COMPARED):
        yield tuple(array[start : start + _BYTES_COMPARED] for array in arrays)


def _recommended_sampling(path: Path) -> dict[str, float]:
    """Return what generation_config.json recommends; nothing if there is none, or if it recommends greedy decoding."""
    values = _read_json(path) if path.is_file() else {}
    return recommended_sampling(values, {name: name for name in SAMPLING_KEYS}) if values.get("do_sample") else {}


def _pooling(path: Path) -> Pooling:
    """Return the pooling that sentence-transformers names for the folder; by default the last token, as all Qwen3
    models do."""
    if not path.is_file():
        return "last"
    values = _read_json(path)
    modes = [name.removeprefix("pooling_mode_") for name in values if name.startswith("pooling_mode_") and values[name]]
    stated = "+".join(modes) or str(values.get("pooling_mode", "lasttoken"))
    if stated not in _POOLINGS:
        raise ModelFolderError(path, "pooling_mode", f"{printable(stated)} is not supported: forge pools last or mean")
    return _POOLINGS[stated]


def _read_json(path: Path) -> dict[str, Any]:
    """Read the object that `path` holds. Raises `ModelFolderError` if it is missing, too large, or none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelFolderError(path, WHOLE_FILE, f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_JSON_BYTES:
        raise ModelFolderError(path, WHOLE_FILE, f"has more than {MAX_JSON_BYTES} bytes")
    try:
        values = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise ModelFolderError(path, WHOLE_FILE, f"is not JSON: {reason}") from None
    if not isinstance(values, dict):
        raise ModelFolderError(path, WHOLE_FILE, "is not a JSON object")
    return values
