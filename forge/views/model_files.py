"""What a GGUF file says about itself, as plain data: made from its header, shown by `forge.views.models`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from forge.cache.kv_storage import vector_bytes
from forge.views.formatting import count, size

if TYPE_CHECKING:
    from forge.gguf.header import TensorEntry

_KV_DTYPES = ("float32", "float16", "int8")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorLine:
    """One tensor, or the same tensor of several layers."""

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int
    """Of all of them together."""
    copies: int = 1


@dataclass(frozen=True)
class TypeTotal:
    """The tensors of one type in a model file."""

    type: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class TokenizerSummary:
    """What a model file says of its tokenizer."""

    model: str
    pre_tokenizer: str
    tokens: int
    merges: int
    special: tuple[tuple[str, int, str], ...]
    """(role, id, text): `("eos", 2, "<|im_end|>")`."""
    has_chat_template: bool


@dataclass(frozen=True)
class KvNumbers:
    """What a token leaves in the KV cache: a key and a value in every layer and KV head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def per_token(self) -> int:
        """Numbers, whatever they are rounded to."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def bytes_by_dtype(self) -> dict[str, int]:
        vectors = 2 * self.num_layers * self.num_kv_heads
        return {dtype: vectors * vector_bytes(self.head_dim, dtype) for dtype in _KV_DTYPES}

    def sentence(self) -> str:
        sizes = ", ".join(f"{size(num_bytes)} in {dtype}" for dtype, num_bytes in self.bytes_by_dtype().items())
        return (
            f"KV cache per token: 2 (key and value) x {self.num_layers} layers x {self.num_kv_heads} KV heads x "
            f"{self.head_dim} = {count(self.per_token)} numbers, {sizes}"
        )


@dataclass(frozen=True)
class FileSummary:
    """What a GGUF file says about itself."""

    path: str
    bytes: int
    version: int
    alignment: int
    metadata_entries: int
    hyper_parameters: tuple[tuple[str, Any], ...]
    tokenizer: TokenizerSummary | None
    types: tuple[TypeTotal, ...]
    tensors: tuple[TensorLine, ...]
    kv_numbers: KvNumbers | None
    """None where the file does not say enough to know."""


def main_type(tensors: "Iterable[TensorEntry]") -> str | None:
    """The type that most parameters have."""
    totals = type_totals(tensors)
    return max(totals, key=lambda total: total.parameters).type if totals else None


def parameter_count(tensors: "Iterable[TensorEntry]") -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def type_totals(tensors: "Iterable[TensorEntry]") -> tuple[TypeTotal, ...]:
    """Per type, the largest first."""
    by_type: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in tensors:
        by_type[_type_name(tensor)].append(tensor)
    totals = [
        TypeTotal(name, len(group), parameter_count(group), sum(tensor.nbytes for tensor in group))
        for name, group in by_type.items()
    ]
    return tuple(sorted(totals, key=lambda total: -total.bytes))


def summarise(
    path: str,
    num_bytes: int,
    version: int,
    alignment: int,
    metadata: Mapping[str, Any],
    tensors: "Sequence[TensorEntry]",
) -> FileSummary:
    """A file's header as plain data, whatever architecture it is."""
    return FileSummary(
        path=path,
        bytes=num_bytes,
        version=version,
        alignment=alignment,
        metadata_entries=len(metadata),
        hyper_parameters=tuple(
            (key, value)
            for key, value in metadata.items()
            if not key.startswith("tokenizer.") and isinstance(value, str | int | float)
        ),
        tokenizer=_tokenizer_summary(metadata),
        types=type_totals(tensors),
        tensors=tuple(TensorLine(entry.name, entry.shape, _type_name(entry), entry.nbytes) for entry in tensors),
        kv_numbers=_kv_numbers(metadata),
    )


def summary_object(summary: FileSummary) -> dict[str, Any]:
    """A file for `--json`, every tensor included."""
    numbers = summary.kv_numbers
    return asdict(summary) | {
        "hyper_parameters": dict(summary.hyper_parameters),
        "kv_bytes_per_token": numbers.bytes_by_dtype() if numbers else None,
    }


def grouped(tensors: Sequence[TensorLine]) -> list[TensorLine]:
    """Tensors of different layers that are alike as one line: `blk.0-5.attn_q.weight`."""
    groups: dict[tuple, list[tuple[int, TensorLine]]] = {}
    for tensor in tensors:
        found = _LAYER.fullmatch(tensor.name)
        key = (found[2], tensor.shape, tensor.type) if found else (tensor.name,)
        groups.setdefault(key, []).append((int(found[1]) if found else -1, tensor))
    return [_as_one(group) for group in groups.values()]


def _as_one(group: list[tuple[int, TensorLine]]) -> TensorLine:
    first = group[0][1]
    if len(group) == 1:
        return first
    found = _LAYER.fullmatch(first.name)
    assert found is not None, "only tensors of layers are grouped"
    name = f"blk.{_ranges(sorted(layer for layer, _ in group))}.{found[2]}"
    return TensorLine(name, first.shape, first.type, sum(tensor.bytes for _, tensor in group), len(group))


def _ranges(numbers: list[int]) -> str:
    """`0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _type_name(tensor: "TensorEntry") -> str:
    return getattr(tensor.ggml_type, "name", str(tensor.ggml_type))


def _tokenizer_summary(metadata: Mapping[str, Any]) -> TokenizerSummary | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return None
    special = []
    for role in ("bos", "eos", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special.append((role, token_id, str(tokens[token_id])))
    merges = metadata.get("tokenizer.ggml.merges")
    return TokenizerSummary(
        model=str(metadata.get("tokenizer.ggml.model", "unknown")),
        pre_tokenizer=str(metadata.get("tokenizer.ggml.pre", "no pre-tokenizer named")),
        tokens=len(tokens),
        merges=len(merges) if isinstance(merges, list) else 0,
        special=tuple(special),
        has_chat_template=isinstance(metadata.get("tokenizer.chat_template"), str),
    )


def _kv_numbers(metadata: Mapping[str, Any]) -> KvNumbers | None:
    """From the metadata that llama.cpp's converter writes for every decoder architecture."""
    architecture = metadata.get("general.architecture")
    keys = ("block_count", "attention.head_count_kv", "attention.key_length")
    numbers = [value for key in keys if isinstance(value := metadata.get(f"{architecture}.{key}"), int)]
    return KvNumbers(*numbers) if len(numbers) == len(keys) else None
