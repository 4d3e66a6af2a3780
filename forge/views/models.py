"""Model files on the screen: the list of bundled ones, and what a GGUF file's header says about one.

Every string that came out of a file is made printable first.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.cache.kv_storage import vector_bytes
from forge.views.formatting import NOTHING, count, parameters, plural, size
from forge.views.metrics import Fact, flowing
from forge.views.palette import ACCENT, QUIET, TITLE, TROUBLE
from forge.views.terminal import new_table, print_table
from forge.views.text import one_line, quoted

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
    """Return the type that most parameters have."""
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
    """Return a file's header as plain data, whatever architecture it is."""
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
    """Return a file for `--json`, every tensor included."""
    numbers = summary.kv_numbers
    return asdict(summary) | {
        "hyper_parameters": dict(summary.hyper_parameters),
        "kv_bytes_per_token": numbers.bytes_by_dtype() if numbers else None,
    }


def grouped(tensors: Sequence[TensorLine]) -> list[TensorLine]:
    """Tensors of different layers that are alike as one line: `blk.0-5.attn_q.weight`."""
    groups: dict[tuple, list[tuple[int, TensorLine]]] = {}
    for tensor in tensors:
        match = _LAYER.fullmatch(tensor.name)
        key = (match[2], tensor.shape, tensor.type) if match else (tensor.name,)
        groups.setdefault(key, []).append((int(match[1]) if match else -1, tensor))
    return [_as_one(group) for group in groups.values()]


def _as_one(group: list[tuple[int, TensorLine]]) -> TensorLine:
    first = group[0][1]
    if len(group) == 1:
        return first
    match = _LAYER.fullmatch(first.name)
    assert match is not None, "only tensors of layers are grouped"
    name = f"blk.{_ranges(sorted(layer for layer, _ in group))}.{match[2]}"
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
    """Read the numbers from the metadata that llama.cpp's converter writes for every decoder architecture; None if one
    is missing."""
    architecture = metadata.get("general.architecture")
    keys = ("block_count", "attention.head_count_kv", "attention.key_length")
    numbers = [value for key in keys if isinstance(value := metadata.get(f"{architecture}.{key}"), int)]
    return KvNumbers(*numbers) if len(numbers) == len(keys) else None


_LONGEST_VALUE = 60


@dataclass(frozen=True)
class ListedModel:
    """A bundled model. Type and parameters are None where the file is missing or unreadable."""

    name: str
    aliases: tuple[str, ...]
    path: str
    bytes: int
    description: str
    present: bool
    type: str | None = None
    parameters: int | None = None
    trouble: str | None = None
    """Why a file that is there cannot be run."""


def print_models(console: Console, models: Sequence[ListedModel]) -> None:
    """Three lines per bundled model: its figures, what it is for, where it is."""
    names = [", ".join([model.name, *model.aliases]) for model in models]
    widest = max(len(name) for name in names)
    for name, model in zip(names, models, strict=True):
        line = Text(f"{name:<{widest}}   ", ACCENT if model.present else QUIET)
        console.print(line.append_text(flowing(_listed_facts(model), 10**6)[0]))
        console.print(Text("  ").append_text(_about(model)))
        console.print(Text(f"  {one_line(model.path)}", QUIET), soft_wrap=True)


def _listed_facts(model: ListedModel) -> list[Fact]:
    return [
        ("type", model.type or NOTHING),
        ("parameters", NOTHING if model.parameters is None else parameters(model.parameters)),
        ("size", size(model.bytes) if model.present else NOTHING),
    ]


def print_inspection(console: Console, summary: FileSummary, everything: bool) -> None:
    """Header, hyper-parameters, tokenizer, tensors, and what a token costs in the cache."""
    width = console.width
    console.print(Text(one_line(summary.path), TITLE), soft_wrap=True)
    for line in flowing(_header_facts(summary), width):
        console.print(line)
    console.print()
    _print_pairs(console, summary.hyper_parameters)
    if summary.tokenizer:
        console.print(Text("\ntokenizer", TITLE))
        for line in flowing(_tokenizer_facts(summary.tokenizer), width):
            console.print(line)
    console.print()
    print_table(console, _types_table(summary.types))
    console.print()
    print_table(console, _tensor_table(summary.tensors if everything else grouped(summary.tensors)))
    if summary.kv_numbers:
        console.print(Text(f"\n{summary.kv_numbers.sentence()}"))


def _header_facts(summary: FileSummary) -> list[Fact]:
    total = sum(entry.parameters for entry in summary.types)
    return [
        ("GGUF version", str(summary.version)),
        ("size", size(summary.bytes)),
        ("parameters", parameters(total)),
        ("tensors", count(len(summary.tensors))),
        ("metadata entries", count(summary.metadata_entries)),
        ("alignment", str(summary.alignment)),
    ]


def _tokenizer_facts(tokenizer: TokenizerSummary) -> list[Fact]:
    return [
        ("model", f"{one_line(tokenizer.model)} ({one_line(tokenizer.pre_tokenizer)})"),
        ("tokens", count(tokenizer.tokens)),
        ("merges", count(tokenizer.merges)),
        *((role, f"{token_id} {quoted(text)}") for role, token_id, text in tokenizer.special),
        ("chat template", "yes" if tokenizer.has_chat_template else "no"),
    ]


def _print_pairs(console: Console, pairs: Sequence[tuple[str, Any]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style=QUIET, overflow="fold")
    table.add_column(overflow="fold")
    for key, value in pairs:
        table.add_row(Text(_clipped(key)), Text(_clipped(f"{value:g}" if isinstance(value, float) else str(value))))
    print_table(console, table)


def _types_table(types: Sequence[TypeTotal]) -> Table:
    table = new_table()
    table.add_column("type")
    for name in ("tensors", "parameters", "bytes"):
        table.add_column(name, justify="right")
    for total in types:
        table.add_row(total.type, count(total.tensors), parameters(total.parameters), size(total.bytes))
    return table


def _tensor_table(tensors: Sequence[TensorLine]) -> Table:
    table = new_table()
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", justify="right")
    table.add_column("type")
    table.add_column("bytes", justify="right")
    table.add_column("", style=QUIET)
    for tensor in tensors:
        shape = " x ".join(str(length) for length in tensor.shape)
        copies = plural(tensor.copies, "layer") if tensor.copies > 1 else ""
        table.add_row(Text(_clipped(tensor.name)), shape, tensor.type, size(tensor.bytes), copies)
    return table


def _about(model: ListedModel) -> Text:
    if model.trouble:
        return Text(one_line(model.trouble), TROUBLE)
    if not model.present:
        return Text("missing: make models trains it again", TROUBLE)
    return Text(one_line(model.description))


def _clipped(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _LONGEST_VALUE else f"{line[:_LONGEST_VALUE]}… ({len(line)} characters)"
