"""From a name to a model that is ready to run: from weights on disk to a device, or without any of that."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from forge.gguf import GGUFFile
from forge.model.backend import Array, Backend, Tensor
from forge.model.catalog import is_hash_model, model_name, resolve_model
from forge.model.hash_model import create_hash_model
from forge.model.hf_directory import HuggingFaceDirectory
from forge.model.model import Model
from forge.model.qwen3 import DenseLayerWeights, Qwen3, Qwen3Weights
from forge.model.qwen3_moe import MoeLayerWeights, Qwen3Moe
from forge.model.weight_source import GGUFWeights, WeightSource, balanced_norms, classifier_rows
from forge.reasons import Pooling
from forge.tokenizer import Tokenizer
from forge.tokenizer.byte_tokenizer import ByteTokenizer

LoadProgress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each tensor."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its tokenizer and what its file says about it."""

    name: str
    model: Model
    tokenizer: Tokenizer
    path: Path | None = None
    """None for a model without a file."""
    device_description: str = "NumPy"
    """The device's name for a person."""
    default_kv_dtype: str = "float32"
    """The dtype of its keys and values by default."""
    pooling: Pooling = "last"
    """How its file says that hidden states become an embedding."""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """The `SamplingParams` that its file recommends, by name; empty where it says nothing."""


def load_model(
    name_or_path: str | Path | LoadedModel,
    create_backend: Callable[[], Backend],
    on_progress: LoadProgress | None = None,
) -> LoadedModel:
    """Load the model that `name_or_path` means (`resolve_model`, `is_hash_model`).

    create_backend: called once, for a model that has weights, before they are read. A `LoadedModel` is returned as it
    is.

    Raises `UsageError` if there is none of that name, and the `ForgeError` of its format if its file is not sound.
    """
    if isinstance(name_or_path, LoadedModel):
        return name_or_path
    if is_hash_model(name_or_path):
        name = str(name_or_path)
        return LoadedModel(
            name=name, model=create_hash_model(name), tokenizer=ByteTokenizer(), device_description="a hash, no weights"
        )
    path = resolve_model(name_or_path)
    backend = create_backend()
    with open_weights(path) as weights:
        tokenizer = Tokenizer(weights.tokenizer_spec())
        return LoadedModel(
            name=model_name(path),
            model=load_qwen3(weights, backend, on_progress),
            tokenizer=tokenizer,
            path=path,
            device_description=backend.description,
            default_kv_dtype=backend.default_kv_dtype,
            pooling=weights.pooling,
            default_sampling=weights.default_sampling,
        )


def load_qwen3(source: WeightSource, backend: Backend, on_progress: LoadProgress | None = None) -> Qwen3:
    """Load every tensor once, giving back each one's pages of the file before the next is read.

    So the peak of memory is what the backend keeps, with one tensor of the file beside it.
    """
    config, done = source.config, 0
    load_by_dimensions = {1: backend.load_vector, 2: backend.load_matrix, 3: backend.load_experts}

    def load(name: str) -> Array:
        nonlocal done
        tensor = source.tensor(f"{name}.weight")
        loaded = load_by_dimensions[len(tensor.shape)](_as_computed(source, name))
        source.release(f"{name}.weight")
        done += tensor.nbytes
        if on_progress is not None:
            on_progress(done, source.nbytes)
        return loaded

    layer_type = MoeLayerWeights if config.num_experts else DenseLayerWeights
    model_type = Qwen3Moe if config.num_experts else Qwen3
    with backend.loading(source.path, source.nbytes):
        embedding = load("token_embd")
        layers = tuple(
            layer_type(**{field.name: load(f"blk.{index}.{field.name}") for field in fields(layer_type)})
            for index in range(config.num_layers)
        )
        output_norm = load("output_norm")
        if config.labels:
            head = load("cls.output")
        elif config.generates:
            head = embedding if config.tie_word_embeddings else load("output")
        else:
            head = None
    return model_type(config, Qwen3Weights(embedding, layers, output_norm, head), backend)


def _as_computed(source: WeightSource, name: str) -> Tensor:
    """Return a tensor of the source, by its name without `.weight`, in the form that the model computes with."""
    tensor = source.tensor(f"{name}.weight")
    if name == "cls.output":
        return classifier_rows(tensor)
    if name.endswith("attn_q_norm"):
        return balanced_norms(tensor, source.tensor(f"{name.replace('_q_norm', '_k_norm')}.weight"))[0]
    if name.endswith("attn_k_norm"):
        return balanced_norms(source.tensor(f"{name.replace('_k_norm', '_q_norm')}.weight"), tensor)[1]
    return tensor


def open_weights(path: Path) -> WeightSource:
    """Open the model at `path`: a GGUF file, or a Hugging Face folder.

    Raises the `ForgeError` of that format (`GGUFError`, `SafetensorsError`, `ModelFolderError`) if it is not sound."""
    if path.is_dir():
        return HuggingFaceDirectory.open(path)
    file = GGUFFile.open(path)
    try:
        return GGUFWeights(file)
    except BaseException:
        file.close()
        raise
