"""Model files on the screen: the list of bundled ones, and one file looked into.

Every string that came out of a file is made printable first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.views.formatting import NOTHING, count, parameters, plural, size
from forge.views.metrics import Fact, flowing
from forge.views.model_files import FileSummary, TensorLine, TokenizerSummary, TypeTotal, grouped
from forge.views.palette import ACCENT, QUIET, TITLE, TROUBLE
from forge.views.terminal import new_table, print_table
from forge.views.text import one_line, quoted

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
