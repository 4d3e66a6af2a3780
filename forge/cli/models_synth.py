"""`forge models synth`: a model file of random weights in a real model's shape."""

from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import options
from forge.cli.arguments import command
from forge.errors import UsageError
from forge.model.synth import SHAPES, synthetic_config
from forge.option import option
from forge.views.json_output import as_object
from forge.views.models import synthetic_screen
from forge.views.progress import TransferBar
from forge.views.screen import Report, report
from forge.views.terminal import open_error_console

if TYPE_CHECKING:
    from forge.model.config import Qwen3Config

_SHAPE, _FILE = "Shape", "File"
_PUBLISHED = "the shape's"


@dataclass(frozen=True)
class ShapeArgs:
    """The numbers of a shape, by the names that `synthetic_config` has for them."""

    num_layers: int | None = option(None, "Layers.", _SHAPE, flags="--layers", shown=_PUBLISHED)
    hidden_size: int | None = option(None, "Width.", _SHAPE, flags="--hidden", shown=_PUBLISHED)
    intermediate_size: int | None = option(None, "Width of the feed-forward.", _SHAPE, flags="--ffn", shown=_PUBLISHED)
    num_attention_heads: int | None = option(None, "Query heads.", _SHAPE, flags="--heads", shown=_PUBLISHED)
    num_key_value_heads: int | None = option(None, "Key and value heads.", _SHAPE, flags="--kv-heads", shown=_PUBLISHED)
    head_dim: int | None = option(None, "Width of a head.", _SHAPE, shown="128")
    vocab_size: int | None = option(None, "Tokens.", _SHAPE, flags="--vocab", shown="151936")
    max_position_embeddings: int | None = option(None, "Context length.", _SHAPE, flags="--context", shown="40960")
    tie_word_embeddings: bool | None = option(
        None, "Whether the output matrix is the embedding.", _SHAPE, flags="--tied/--untied", shown="tied"
    )


@command
def synth(
    sizes: ShapeArgs,
    shape: Annotated[
        str | None,
        typer.Argument(metavar="SHAPE", help="qwen3-0.6b, qwen3-1.7b or qwen3-4b; or give every number yourself."),
    ] = None,
    type: Annotated[
        str, typer.Option("--type", "-t", help="F16, BF16, Q8_0, Q4_0, Q4_K_M, …", rich_help_panel=_FILE)
    ] = "Q8_0",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write.", show_default="SHAPE-TYPE.gguf", rich_help_panel=_FILE),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same weights.", rich_help_panel=_FILE)] = 0,
    pure: Annotated[
        bool, typer.Option("--pure", help="Every matrix of that type, no mixture.", rich_help_panel=_FILE)
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.", rich_help_panel=_FILE)] = False,
) -> Report:
    """Write a GGUF file of random weights: a real shape to measure with, and no download. What it says is noise."""
    from forge.model.synth import default_file_name, find_quantization, synth

    find_quantization(type)
    config = _config(shape, {name: value for name, value in vars(sizes).items() if value is not None})
    name = shape.lower() if shape else "synthetic"
    path = out or Path(default_file_name(name, type))
    with TransferBar(open_error_console()) as bar:
        written = synth(
            path.expanduser(),
            config,
            type,
            name=f"{name} (random weights)",
            seed=seed,
            pure=pure,
            force=force,
            on_progress=lambda done, total: bar(f"writing {path.name}", done, total),
        )
    shown = options.shown_path(written.path)
    return report(as_object(written) | {"path": shown}, lambda: synthetic_screen(shown, written))


def _config(shape: str | None, values: dict[str, Any]) -> "Qwen3Config":
    """Return the named shape with the given values in place of its own; without a name, the given values."""
    if shape is None:
        missing = [
            field.metadata["flags"]
            for field in fields(ShapeArgs)
            if field.metadata["shown"] == _PUBLISHED and field.name not in values
        ]
        if missing:
            raise UsageError(f"without a shape ({', '.join(SHAPES)}) give {', '.join(missing)}")
        return synthetic_config(**values)
    published = SHAPES.get(shape.lower())
    if published is None:
        raise UsageError(f"unknown shape {shape!r:.60}; there are {', '.join(SHAPES)}, or give --layers and the rest")
    stated = {name: getattr(published, name) for name in signature(synthetic_config).parameters}
    return synthetic_config(**stated | values)
