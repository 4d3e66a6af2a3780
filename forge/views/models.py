"""Model files on the screen: the list of bundled ones, what a GGUF file's header says, and what was made or pulled.

Every string that came out of a file is made printable first.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.cache.kv_storage import vector_bytes
from forge.views.formatting import NOTHING, count, parameters, plural, size
from forge.views.metrics import Fact, flowing
from forge.views.palette import ACCENT, QUIET, TITLE, TROUBLE
from forge.views.screen import Part, Table, fill, labelled, title, unbroken
from forge.views.text import one_line, quoted

if TYPE_CHECKING:
    from forge.gguf.reader import TensorEntry
    from forge.model.catalog import PulledModel
    from forge.model.synth import SyntheticFile


_KV_DTYPES = ("float32", "float16", "int8")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorLine:
    """One tensor, or the same tensor of several layers."""

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int
    """Bytes of all its tensors together."""
    copies: int = 1


def main_type(tensors: "Iterable[TensorEntry]") -> str | None:
    """Return the type that most parameters have."""
    totals = type_totals(tensors)
    return max(totals, key=lambda total: total["parameters"])["type"] if totals else None


def parameter_count(tensors: "Iterable[TensorEntry]") -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def type_totals(tensors: "Iterable[TensorEntry]") -> list[dict[str, Any]]:
    """Add up tensors, parameters and bytes of each type, the largest first."""
    by_type: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in tensors:
        by_type[_type_name(tensor)].append(tensor)
    totals = [
        {
            "type": name,
            "tensors": len(group),
            "parameters": parameter_count(group),
            "bytes": sum(tensor.nbytes for tensor in group),
        }
        for name, group in by_type.items()
    ]
    return sorted(totals, key=lambda total: -total["bytes"])


def inspection(metadata: Mapping[str, Any], tensors: "Sequence[TensorEntry]") -> dict[str, Any]:
    """Return what a file's header says as plain data, whatever architecture it is."""
    numbers = _kv_numbers(metadata)
    return {
        "metadata_entries": len(metadata),
        "hyper_parameters": {
            key: value
            for key, value in metadata.items()
            if not key.startswith("tokenizer.") and isinstance(value, str | int | float)
        },
        "tokenizer": _tokenizer_facts(metadata),
        "types": type_totals(tensors),
        "tensors": [TensorLine(entry.name, entry.shape, _type_name(entry), entry.nbytes) for entry in tensors],
        "kv_numbers": numbers,
        "kv_bytes_per_token": numbers and _kv_bytes(**numbers),
    }


def grouped(tensors: Sequence[TensorLine]) -> list[TensorLine]:
    """Join tensors of different layers that are alike into one line: `blk.0-5.attn_q.weight`."""
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
    """Format numbers as ranges: `0-3,7`."""
    groups = groupby(enumerate(numbers), key=lambda at: at[1] - at[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _type_name(tensor: "TensorEntry") -> str:
    return getattr(tensor.ggml_type, "name", str(tensor.ggml_type))


def _tokenizer_facts(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the file says of its tokenizer. special: (role, id, text), as `("eos", 2, "<|im_end|>")`."""
    tokens, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if not isinstance(tokens, list):
        return None
    ids = [(role, metadata.get(f"tokenizer.ggml.{role}_token_id")) for role in ("bos", "eos", "padding")]
    return {
        "model": str(metadata.get("tokenizer.ggml.model", "unknown")),
        "pre_tokenizer": str(metadata.get("tokenizer.ggml.pre", "no pre-tokenizer named")),
        "tokens": len(tokens),
        "merges": len(merges) if isinstance(merges, list) else 0,
        "special": [(role, i, str(tokens[i])) for role, i in ids if isinstance(i, int) and 0 <= i < len(tokens)],
        "has_chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
    }


_KV_NUMBERS = {
    "num_layers": "block_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
"""What a token leaves in the KV cache, a key and a value in every layer and KV head: by the names of the metadata that
llama.cpp's converter writes for every decoder architecture."""


def _kv_numbers(metadata: Mapping[str, Any]) -> dict[str, int] | None:
    architecture = metadata.get("general.architecture")
    numbers = {name: metadata.get(f"{architecture}.{key}") for name, key in _KV_NUMBERS.items()}
    return {**numbers} if all(isinstance(value, int) for value in numbers.values()) else None  # type: ignore[dict-item]


def _kv_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {dtype: 2 * num_layers * num_kv_heads * vector_bytes(head_dim, dtype) for dtype in _KV_DTYPES}


def _kv_sentence(facts: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{size(num_bytes)} in {dtype}" for dtype, num_bytes in facts["kv_bytes_per_token"].items())
    product = "2 (key and value) x {num_layers} layers x {num_kv_heads} KV heads x {head_dim}"
    numbers = count(2 * prod(facts["kv_numbers"].values()))
    return f"KV cache per token: {fill(product, facts['kv_numbers'])} = {numbers} numbers, {sizes}"


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


def models_screen(models: Sequence[ListedModel]) -> Iterator[Part]:
    """Draw three lines per bundled model: its figures, what it is for, where it is."""
    names = [", ".join([model.name, *model.aliases]) for model in models]
    widest = max(len(name) for name in names)
    for name, model in zip(names, models, strict=True):
        line = Text(f"{name:<{widest}}   ", ACCENT if model.present else QUIET)
        yield line.append_text(flowing(_listed_facts(model), 10**6)[0])
        yield Text("  ").append_text(_about(model))
        yield unbroken(f"  {one_line(model.path)}", QUIET)


def _listed_facts(model: ListedModel) -> list[Fact]:
    return [
        ("type", model.type or NOTHING),
        ("parameters", NOTHING if model.parameters is None else parameters(model.parameters)),
        ("size", size(model.bytes) if model.present else NOTHING),
    ]


def synthetic_screen(path: str, written: "SyntheticFile") -> Iterator[Part]:
    """Draw a line of what the file is, and one of what its weights are stored as."""
    largest_first = sorted(written.type_bytes.items(), key=lambda item: -item[1])
    made = fill("{bytes:size}, {parameters:parameters} random parameters in {tensors:plural tensor}", written)
    yield Text(f"{one_line(path)}: {made}")
    yield Text(f"weights: {', '.join(f'{name} {size(nbytes)}' for name, nbytes in largest_first)}")


def pulled_screen(pulled: "PulledModel") -> Iterator[Part]:
    """Draw where the model is now, and how to run it."""
    yield unbroken(f"{one_line(str(pulled.path))}: {size(pulled.bytes)}")
    yield unbroken(f"run it: forge generate --model {one_line(pulled.name)} ...")


def inspection_screen(facts: Mapping[str, Any], everything: bool) -> Iterator[Part]:
    """Draw header, hyper-parameters, tokenizer, tensors, and what a token costs in the cache."""
    yield unbroken(one_line(facts["path"]), TITLE)
    yield lambda width: flowing(_header(facts), width)
    named = facts["hyper_parameters"].items()
    texts = [(key, f"{value:g}" if isinstance(value, float) else str(value)) for key, value in named]
    yield from (None, labelled([(_clipped(key), _clipped(text)) for key, text in texts], wraps=(0, 1)))
    if tokenizer := facts["tokenizer"]:
        yield from (None, title("tokenizer"), lambda width: flowing(_tokenizer(tokenizer), width))
    yield None
    totals = ("tensors: {tensors:count}", "parameters: {parameters:parameters}", "bytes: {bytes:size}")
    yield from (Table.of(facts["types"], "type: {type}", *totals), None)
    shown: dict[str, Callable[[Any], str]] = {
        "clipped": _clipped,
        "product": lambda shape: " x ".join(map(str, shape)),
        "layers": lambda copies: plural(copies, "layer") if copies > 1 else "",
    }
    columns = ["tensor: {name:clipped}", "shape: {shape:product}", "type: {type}", "bytes: {bytes:size}"]
    tensors = facts["tensors"] if everything else grouped(facts["tensors"])
    yield Table.of(tensors, *columns, ": {copies:layers}", formats=shown, lefts=(2, 4), styles={4: QUIET}, wraps=True)
    if facts["kv_numbers"]:
        yield from (None, Text(_kv_sentence(facts)))


def _header(facts: Mapping[str, Any]) -> list[Fact]:
    total = sum(entry["parameters"] for entry in facts["types"])
    return [
        ("GGUF version", str(facts["version"])),
        ("size", size(facts["bytes"])),
        ("parameters", parameters(total)),
        ("tensors", count(len(facts["tensors"]))),
        ("metadata entries", count(facts["metadata_entries"])),
        ("alignment", str(facts["alignment"])),
    ]


def _tokenizer(facts: Mapping[str, Any]) -> list[Fact]:
    return [
        ("model", f"{one_line(facts['model'])} ({one_line(facts['pre_tokenizer'])})"),
        ("tokens", count(facts["tokens"])),
        ("merges", count(facts["merges"])),
        *((role, f"{token_id} {quoted(text)}") for role, token_id, text in facts["special"]),
        ("chat template", "yes" if facts["has_chat_template"] else "no"),
    ]


def _about(model: ListedModel) -> Text:
    if model.trouble:
        return Text(one_line(model.trouble), TROUBLE)
    if not model.present:
        return Text("missing: make models trains it again", TROUBLE)
    return Text(one_line(model.description))


def _clipped(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _LONGEST_VALUE else f"{line[:_LONGEST_VALUE]}… ({len(line)} characters)"
