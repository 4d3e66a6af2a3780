"""`forge models synth`: a model file of random weights in a real model's shape."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import options

if TYPE_CHECKING:
    from forge.model.config import Qwen3Config

_SHAPE, _FILE = "Shape", "File"
_PUBLISHED = "the shape's"


def synth(
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
    layers: Annotated[
        int | None, typer.Option("--layers", help="Layers.", show_default=_PUBLISHED, rich_help_panel=_SHAPE)
    ] = None,
    hidden: Annotated[
        int | None, typer.Option("--hidden", help="Width.", show_default=_PUBLISHED, rich_help_panel=_SHAPE)
    ] = None,
    ffn: Annotated[
        int | None,
        typer.Option("--ffn", help="Width of the feed-forward.", show_default=_PUBLISHED, rich_help_panel=_SHAPE),
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", help="Query heads.", show_default=_PUBLISHED, rich_help_panel=_SHAPE)
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option("--kv-heads", help="Key and value heads.", show_default=_PUBLISHED, rich_help_panel=_SHAPE),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", help="Width of a head.", show_default="128", rich_help_panel=_SHAPE)
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", help="Tokens.", show_default="151936", rich_help_panel=_SHAPE)
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Context length.", show_default="40960", rich_help_panel=_SHAPE)
    ] = None,
    tied: Annotated[
        bool | None,
        typer.Option(
            "--tied/--untied",
            help="Whether the output matrix is the embedding.",
            show_default="tied",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Write a GGUF file of random weights: a real shape to measure with, and no download. What it says is noise."""
    from forge.model.synth import default_file_name, find_quantization, synth
    from forge.views.json_output import to_json
    from forge.views.terminal import open_console, open_error_console
    from forge.views.transfer import TransferBar, print_synthetic, synthetic_object

    find_quantization(type)
    given = {
        "num_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }
    config = _config(shape, {name: value for name, value in given.items() if value is not None})
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
    if json:
        open_console().print(to_json(synthetic_object(shown, written)), soft_wrap=True)
    else:
        print_synthetic(open_console(), shown, written)


def _config(shape: str | None, given: dict[str, Any]) -> "Qwen3Config":
    """The named shape with what was given in place of its own; without a name, what was given."""
    from forge.errors import UsageError
    from forge.model.synth import SHAPES, synthetic_config

    if shape is None:
        required = {
            "num_layers": "--layers",
            "hidden_size": "--hidden",
            "intermediate_size": "--ffn",
            "num_attention_heads": "--heads",
            "num_key_value_heads": "--kv-heads",
        }
        missing = [option for name, option in required.items() if name not in given]
        if missing:
            raise UsageError(f"without a shape ({', '.join(SHAPES)}) give {', '.join(missing)}")
        return synthetic_config(**given)
    published = SHAPES.get(shape.lower())
    if published is None:
        raise UsageError(f"unknown shape {shape!r:.60}; there are {', '.join(SHAPES)}, or give --layers and the rest")
    stated = {name: value for name, value in vars(published).items() if name not in ("rms_norm_eps", "rope_theta")}
    return synthetic_config(**stated | given)
