"""What a Qwen3 model is, as numbers, and whether a GGUF file really holds one.

`Qwen3Config.from_gguf` reads the hyper-parameters and refuses what the forward pass does not compute: another
architecture, RoPE scaling other than YaRN, a split file. `check_tensors` then holds the file's tensors against
them. A file that passes both has every weight the model needs, in the shape that it needs, and nothing besides that
could change the output.

Refused rather than ignored: every tensor that is not in `expected_tensors`. A bias or a `rope_freqs.weight` left out
would give a model that runs and says something else; and no tensor of a Qwen3 file is without effect.

Names and defaults are llama.cpp's (`load_hparams` in src/llama-model.cpp).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from forge.gguf import SUPPORTED_TYPES, GGUFError, GGUFFile, TensorEntry
from forge.mapped_file import printable
from forge.model.rope import Rope, Yarn

ARCHITECTURE, MOE_ARCHITECTURE = "qwen3", "qwen3moe"
CLASSIFIER = "cls.output.weight"
"""The classification head, of rerankers for one: rows that score a whole text (llama.cpp's `rank` pooling)."""
DEFAULT_ROPE_THETA = 10_000.0

MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 12
MAX_CONTEXT = 2**31 - 1
MAX_YARN_FACTOR = 1024


@dataclass(frozen=True)
class Qwen3Config:
    """The hyper-parameters of a Qwen3 model; names as in Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    labels: tuple[str, ...] = ()
    """The names of the rows of a classification head; empty for a model with an output head."""
    generates: bool = True
    """Whether there is an output head. An embedding model may lack it, a classifier does."""
    yarn: Yarn | None = None
    rope_attention_factor: float = 1.0
    num_experts: int = 0
    """Experts of a mixture of experts (`intermediate_size` is then that of one expert); 0 for a dense model."""
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts are made to sum to 1."""

    @property
    def rope(self) -> Rope:
        """The rotation of queries and keys with their positions."""
        return Rope(self.head_dim, self.rope_theta, self.yarn, self.rope_attention_factor)

    @property
    def query_size(self) -> int:
        """The width of all query heads together: `num_attention_heads * head_dim`, which need not be `hidden_size`."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """The width of all key heads together, and of all value heads: `num_key_value_heads * head_dim`."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Qwen3Config":
        """Read the hyper-parameters from `file`. Raises GGUFError for one that is missing, senseless or not
        supported."""
        _check_kind(file)
        yarn = _yarn(file)
        stretched = yarn.max_position_embeddings if yarn is not None else 0
        is_moe = file.metadata["general.architecture"] == MOE_ARCHITECTURE
        experts = _integer(file, "expert_count", MAX_EXPERTS) if is_moe else 0
        ffn_length = "expert_feed_forward_length" if is_moe else "feed_forward_length"
        hidden_size = _integer(file, "embedding_length", MAX_WIDTH)
        num_attention_heads = _integer(file, "attention.head_count", MAX_HEADS)
        num_key_value_heads = _integer(file, "attention.head_count_kv", MAX_HEADS, default=num_attention_heads)
        if num_attention_heads % num_key_value_heads:
            problem = f"{num_key_value_heads} key and value heads cannot be shared by {num_attention_heads} query heads"
            raise _error(file, "attention.head_count_kv", problem)
        return cls(
            vocab_size=_vocab_size(file),
            hidden_size=hidden_size,
            intermediate_size=_integer(file, ffn_length, MAX_WIDTH),
            num_experts=experts,
            num_experts_per_tok=_integer(file, "expert_used_count", experts) if experts else 0,
            num_layers=_num_layers(file),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=_head_dim(file, hidden_size, num_attention_heads),
            rms_norm_eps=_number(
                file, "attention.layer_norm_rms_epsilon", None, lambda epsilon: 0 < epsilon < 1, "between 0 and 1"
            ),
            rope_theta=_number(file, "rope.freq_base", DEFAULT_ROPE_THETA, lambda theta: theta >= 1, "at least 1"),
            max_position_embeddings=max(stretched, _integer(file, "context_length", MAX_CONTEXT)),
            tie_word_embeddings="output.weight" not in file.tensors,
            labels=_labels(file),
            generates=CLASSIFIER not in file.tensors,
            yarn=yarn,
            rope_attention_factor=_attention_factor(file, yarn),
        )


def why_unsupported(metadata: Mapping[str, Any], tensors: Iterable[TensorEntry]) -> str | None:
    """Return why no file with this header runs, as far as kind and tensor types tell; None if nothing is known against
    it."""
    architecture = metadata.get("general.architecture")
    if architecture not in (ARCHITECTURE, MOE_ARCHITECTURE):
        return f"it holds {printable(architecture)}; forge runs {ARCHITECTURE!r} and {MOE_ARCHITECTURE!r}"
    unsupported = sorted({tensor.ggml_type.name for tensor in tensors if tensor.ggml_type not in SUPPORTED_TYPES})
    return f"forge does not compute with its {', '.join(unsupported)} tensors" if unsupported else None


def expected_tensors(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Return the name and shape ([rows, columns]; [columns] for a norm) of every tensor of such a model, in order of
    use."""
    return {name: tuple(side.size for side in sides) for name, sides in _tensor_sides(config)}


def check_tensors(file: GGUFFile, config: Qwen3Config) -> None:
    """Raise GGUFError unless the tensors of `file` are exactly those of `config`, each of a type that forge computes
    with."""
    expected = set()
    for name, sides in _tensor_sides(config):
        expected.add(name)
        if name not in file.tensors:
            raise file.tensor_error(name, "", "the model needs this tensor, and the file does not have it")
        _check_tensor(file, name, sides)
    for name in file.tensors:
        if name not in expected:
            kind = MOE_ARCHITECTURE if config.num_experts else ARCHITECTURE
            problem = f"a {kind} model has no such tensor, and leaving it out could change what the model says"
            raise file.tensor_error(name, "", problem)


class _Side(NamedTuple):
    """The length of one axis of a tensor, and the hyper-parameters that say so."""

    size: int
    reason: str


def _tensor_sides(config: Qwen3Config) -> Iterator[tuple[str, tuple[_Side, ...]]]:
    vocabulary = _Side(config.vocab_size, "the number of tokens in tokenizer.ggml.tokens")
    hidden = _Side(config.hidden_size, "qwen3.embedding_length")
    intermediate = _Side(config.intermediate_size, "qwen3.feed_forward_length")
    head = _Side(config.head_dim, "qwen3.attention.key_length")
    queries = _Side(config.query_size, "qwen3.attention.head_count times qwen3.attention.key_length")
    experts = _Side(config.num_experts, "qwen3moe.expert_count")
    keys = _Side(config.key_value_size, "qwen3.attention.head_count_kv times qwen3.attention.key_length")

    yield "token_embd.weight", (vocabulary, hidden)
    for layer in range(config.num_layers):
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.attn_q.weight", (queries, hidden)
        yield f"blk.{layer}.attn_k.weight", (keys, hidden)
        yield f"blk.{layer}.attn_v.weight", (keys, hidden)
        yield f"blk.{layer}.attn_q_norm.weight", (head,)
        yield f"blk.{layer}.attn_k_norm.weight", (head,)
        yield f"blk.{layer}.attn_output.weight", (hidden, queries)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,)
        if config.num_experts:
            yield f"blk.{layer}.ffn_gate_inp.weight", (experts, hidden)
            yield f"blk.{layer}.ffn_gate_exps.weight", (experts, intermediate, hidden)
            yield f"blk.{layer}.ffn_up_exps.weight", (experts, intermediate, hidden)
            yield f"blk.{layer}.ffn_down_exps.weight", (experts, hidden, intermediate)
            continue
        yield f"blk.{layer}.ffn_gate.weight", (intermediate, hidden)
        yield f"blk.{layer}.ffn_up.weight", (intermediate, hidden)
        yield f"blk.{layer}.ffn_down.weight", (hidden, intermediate)
    yield "output_norm.weight", (hidden,)
    if config.labels:
        yield CLASSIFIER, (_Side(len(config.labels), "the number of labels"), hidden)
    if config.generates and not config.tie_word_embeddings:
        yield "output.weight", (vocabulary, hidden)


def _check_tensor(file: GGUFFile, name: str, sides: tuple[_Side, ...]) -> None:
    tensor = file.tensors[name]
    if tensor.ggml_type not in SUPPORTED_TYPES:
        supported = ", ".join(ggml_type.name for ggml_type in sorted(SUPPORTED_TYPES))
        problem = f"forge does not compute with {tensor.ggml_type.name}; it does with {supported}"
        raise file.tensor_error(name, "type", problem)
    if len(tensor.shape) != len(sides):
        problem = f"{list(tensor.shape)} has {len(tensor.shape)} dimensions where the model has {len(sides)}"
        raise file.tensor_error(name, "shape", problem)
    for length, side in zip(tensor.shape, sides, strict=True):
        if length != side.size:
            problem = f"{list(tensor.shape)} has {length} where {side.reason} says {side.size}"
            raise file.tensor_error(name, "shape", problem)


def _check_kind(file: GGUFFile) -> None:
    """Refuse the files that are not one whole Qwen3 model."""
    split_count = file.get("split.count", int, 1)
    if split_count > 1:
        problem = (
            f"the model is split into {split_count} files; forge reads one file (llama-gguf-split --merge joins them)"
        )
        raise file.error("split.count", problem)
    architecture = file.require("general.architecture", str)
    if architecture not in (ARCHITECTURE, MOE_ARCHITECTURE):
        problem = f"this file holds {printable(architecture)}; forge runs {ARCHITECTURE!r} and {MOE_ARCHITECTURE!r}"
        raise file.error("general.architecture", problem)
    if architecture == ARCHITECTURE and file.get(_key(file, "expert_count"), int, 0) > 0:
        raise _error(file, "expert_count", f"{ARCHITECTURE} has no experts; {MOE_ARCHITECTURE} does")
    if not file.get(_key(file, "attention.causal"), bool, True):
        raise _error(file, "attention.causal", "forge runs causal attention only")


def _yarn(file: GGUFFile) -> Yarn | None:
    """Read YaRN, if the file has it. Refuses other RoPE scaling; 'linear' by a factor of 1 (llama.cpp's default; it
    reads 0 as 1) scales nothing."""
    scaling = file.get(_key(file, "rope.scaling.type"), str, "none")
    if scaling not in ("none", "linear", "yarn"):
        raise _error(file, "rope.scaling.type", f"RoPE scaling {printable(scaling)} is not supported")
    names = "rope.scaling.factor", "rope.scale_linear"
    factors = {name: file.get(_key(file, name), float, 0.0) or 1.0 for name in names}
    if scaling != "yarn":
        for name, factor in factors.items():
            if factor != 1.0:
                raise _error(file, name, f"RoPE scaling by {factor} is not supported; YaRN is")
        return None
    for name, only in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if file.get(_key(file, f"rope.scaling.{name}"), float, only) != only:
            raise _error(file, f"rope.scaling.{name}", f"forge supports {only:g} only")
    name = next((name for name, factor in factors.items() if factor != 1.0), "rope.scaling.factor")
    if not 1 <= factors[name] <= MAX_YARN_FACTOR:
        raise _error(file, name, f"YaRN by {factors[name]:g} is not from 1 to {MAX_YARN_FACTOR}")
    _number(file, "rope.freq_base", DEFAULT_ROPE_THETA, lambda theta: theta > 1, "above 1, which YaRN needs")
    context_length = _integer(file, "context_length", MAX_CONTEXT)
    betas = {
        name: _number(file, f"rope.scaling.yarn_{name}", default, lambda beta: beta > 0, "above 0")
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    original = _integer(file, "rope.scaling.original_context_length", MAX_CONTEXT, default=context_length)
    return Yarn(factors[name], original, **betas)


def _attention_factor(file: GGUFFile, yarn: Yarn | None) -> float:
    """Multiply YaRN's own factor by `attn_factor` and `yarn_attn_factor`, which llama.cpp applies without YaRN as
    well."""
    product = 1.0 if yarn is None else yarn.attention_factor
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        product *= _number(file, name, 1.0, lambda factor: factor > 0, "above 0")
    return product


def _num_layers(file: GGUFFile) -> int:
    """Read the number of layers, at most as many as the file has tensors: a malformed file cannot make us list those of
    4,000 million layers."""
    num_layers = _integer(file, "block_count", 2**32)
    if num_layers > len(file.tensors):
        problem = f"{num_layers} layers cannot be in a file of {len(file.tensors)} tensors"
        raise _error(file, "block_count", problem)
    return num_layers


def _head_dim(file: GGUFFile, hidden_size: int, num_attention_heads: int) -> int:
    if _key(file, "attention.key_length") not in file.fields and hidden_size % num_attention_heads:
        problem = f"{num_attention_heads} heads do not divide the width {hidden_size}, and key_length is not given"
        raise _error(file, "attention.head_count", problem)
    head_dim = _integer(file, "attention.key_length", MAX_WIDTH, default=hidden_size // num_attention_heads)
    if head_dim % 2:
        raise _error(file, "attention.key_length", f"{head_dim} is odd; RoPE turns pairs")
    for name in ("attention.value_length", "rope.dimension_count"):
        value_length = _integer(file, name, MAX_WIDTH, default=head_dim)
        if value_length != head_dim:
            raise _error(file, name, f"{value_length} is not the {head_dim} of qwen3.attention.key_length")
    return head_dim


def _labels(file: GGUFFile) -> tuple[str, ...]:
    """Return the labels that the file names, or numbers for them; none without a classification head."""
    key = _key(file, "classifier.output_labels")
    if CLASSIFIER not in file.tensors:
        return ()
    if key in file.fields:
        return tuple(file.string_array(key))
    return numbered_labels(file.tensors[CLASSIFIER].shape[0])


def numbered_labels(count: int) -> tuple[str, ...]:
    """Return the names that transformers gives to labels without names."""
    return tuple(f"LABEL_{number}" for number in range(count))


def _vocab_size(file: GGUFFile) -> int:
    """Return the number of tokens. `check_tensors` holds the embedding's rows against it, and refuses more as well as
    fewer rows: an id without a token could be sampled but not written."""
    vocab_size = len(file.string_array("tokenizer.ggml.tokens"))
    if vocab_size == 0:
        raise file.error("tokenizer.ggml.tokens", "the vocabulary is empty")
    stated = _integer(file, "vocab_size", MAX_CONTEXT, default=vocab_size)
    if stated != vocab_size:
        raise _error(file, "vocab_size", f"{stated} is not the number of tokens in tokenizer.ggml.tokens, {vocab_size}")
    return vocab_size


def _integer(file: GGUFFile, name: str, maximum: int, default: int | None = None) -> int:
    """Read the hyper-parameter `qwen3.<name>`, from 1 to `maximum`; without a default it must be there."""
    key = _key(file, name)
    if default is not None and key not in file.fields:
        return default
    if file.fields.get(key) is not None and file.fields[key].type_name.startswith("array"):
        raise file.error(key, "is an array; forge does not run models whose layers differ")
    value = file.require(key, int)
    if not 1 <= value <= maximum:
        raise file.error(key, f"{value} is not from 1 to {maximum}")
    return value


def _number(file: GGUFFile, name: str, default: float | None, valid: Callable[[float], bool], words: str) -> float:
    """Read the hyper-parameter `qwen3.<name>`, which is to be `words`; without a default it must be there."""
    key = _key(file, name)
    value = file.require(key, float) if default is None else file.get(key, float, default)
    if not valid(value):
        raise file.error(key, f"{value} is not {words}")
    return value


def _key(file: GGUFFile, name: str) -> str:
    """Return a hyper-parameter's key, which begins with the architecture."""
    return f"{file.metadata['general.architecture']}.{name}"


def _error(file: GGUFFile, name: str, problem: str) -> GGUFError:
    return file.error(_key(file, name), problem)
