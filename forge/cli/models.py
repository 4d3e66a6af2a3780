"""`forge models`: which models there are, what is in a file, and where more come from."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import completion, options
from forge.cli.arguments import command
from forge.errors import UsageError
from forge.gguf import GGUFError, GGUFFile
from forge.model.catalog import BUNDLED_MODELS, HASH_MODEL, pulled_models, resolve_model
from forge.model.config import why_unsupported
from forge.model.synth import SHAPES, default_file_name, find_quantization, synth, synthetic_config
from forge.option import option
from forge.views.json_output import as_object, plain
from forge.views.models import (
    ListedModel,
    inspection,
    inspection_screen,
    main_type,
    models_screen,
    parameter_count,
    pulled_screen,
    synthetic_screen,
)
from forge.views.progress import TransferBar
from forge.views.screen import Report, report
from forge.views.terminal import open_error_console

if TYPE_CHECKING:
    from forge.model.catalog import BundledModel, PulledModel
    from forge.model.config import Qwen3Config

models = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


_SHAPE, _FILE = "Shape", "File"
_PUBLISHED = "the shape's"


@dataclass(frozen=True)
class ShapeArgs:
    """The numbers of a shape, by the names that `Qwen3Config` has for them."""

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


@dataclass(frozen=True)
class WritingArgs:
    """The file that is written, and what its weights are drawn from and stored as."""

    type: str = option("Q8_0", "F16, BF16, Q8_0, Q4_0, Q4_K_M, …", _FILE, flags="--type -t")
    out: Path | None = option(None, "The file to write.", _FILE, flags="--out -o", shown="SHAPE-TYPE.gguf")
    seed: int = option(0, "Same seed, same weights.", _FILE)
    pure: bool = option(False, "Every matrix of that type, no mixture.", _FILE)
    force: bool = option(False, "Replace an existing file.", _FILE)


@models.command("list")
@command
def list_models() -> Report:
    """The models that come with forge, and those that were pulled."""
    listed = [_listed(model, model.aliases, model.description) for model in BUNDLED_MODELS]
    computes = "computes a hash of the text and nothing else: for watching the scheduler"
    listed += [ListedModel(HASH_MODEL, (), "no file", 0, computes, True, type="none", parameters=0)]
    listed += [_listed(model, (), "pulled") for model in pulled_models()]
    return report(plain(listed), lambda: models_screen(listed))


@models.command("inspect")
@command
def inspect_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A GGUF file, or a bundled model's name.", autocompletion=completion.models
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="List every tensor, not one line per layer kind.")] = False,
) -> Report:
    """What is in a model file: header, hyper-parameters, tokenizer, tensors, bytes per token in the cache."""
    with GGUFFile.open(resolve_model(model)) as file:
        about = {"path": options.shown_path(file.path), "bytes": file.size, "version": file.version}
        facts = about | {"alignment": file.alignment} | inspection(file.metadata, list(file.tensors.values()))
    return report(facts, lambda: inspection_screen(facts, everything))


@models.command("pull")
@command
def pull(
    name: Annotated[
        str, typer.Argument(metavar="OWNER/NAME[:QUANT]", help="A model on the hub, such as Qwen/Qwen3-0.6B-GGUF:Q8_0.")
    ],
) -> Report:
    """Download a model from the Hugging Face hub: a GGUF file, or a folder of safetensors. Resumes, and verifies."""
    from forge.model.pull import pull

    try:
        with TransferBar(open_error_console()) as bar:
            pulled = pull(name, on_progress=bar)
    except KeyboardInterrupt:
        print("forge: interrupted; what has come is kept, and the same command goes on from there", file=sys.stderr)
        raise
    return report(as_object(pulled), lambda: pulled_screen(pulled))


@models.command("synth")
@command
def synthesize(
    sizes: ShapeArgs,
    written_as: WritingArgs,
    shape: Annotated[
        str | None,
        typer.Argument(metavar="SHAPE", help="qwen3-0.6b, qwen3-1.7b or qwen3-4b; or give every number yourself."),
    ] = None,
) -> Report:
    """Write a GGUF file of random weights: a real shape to measure with, and no download. What it says is noise."""
    find_quantization(written_as.type)
    config = _config(shape, {name: value for name, value in vars(sizes).items() if value is not None})
    name = shape.lower() if shape else "synthetic"
    path = written_as.out or Path(default_file_name(name, written_as.type))
    with TransferBar(open_error_console()) as bar:
        written = synth(
            path.expanduser(),
            config,
            written_as.type,
            name=f"{name} (random weights)",
            seed=written_as.seed,
            pure=written_as.pure,
            force=written_as.force,
            on_progress=lambda done, total: bar(f"writing {path.name}", done, total),
        )
    shown = options.shown_path(written.path)
    return report(as_object(written) | {"path": shown}, lambda: synthetic_screen(shown, written))


def _config(shape: str | None, values: dict[str, Any]) -> "Qwen3Config":
    """Return the named shape with the given values in place of its own; without a name, the given values."""
    if shape is None:
        needed = [field for field in fields(ShapeArgs) if field.metadata["shown"] == _PUBLISHED]
        missing = [field.metadata["flags"] for field in needed if field.name not in values]
        if missing:
            raise UsageError(f"without a shape ({', '.join(SHAPES)}) give {', '.join(missing)}")
        return synthetic_config(**values)
    published = SHAPES.get(shape.lower())
    if published is None:
        raise UsageError(f"unknown shape {shape!r:.60}; there are {', '.join(SHAPES)}, or give --layers and the rest")
    return synthetic_config(**{field.name: getattr(published, field.name) for field in fields(ShapeArgs)} | values)


def _listed(model: "BundledModel | PulledModel", aliases: tuple[str, ...], description: str) -> ListedModel:
    """Describe a model's file, with what its header says where there is one."""
    path = options.shown_path(model.path)
    entry = ListedModel(model.name, aliases, path, model.bytes, description, model.path.exists())
    return _with_header(entry, model.path) if model.path.is_file() else entry


def _with_header(entry: ListedModel, path: Path) -> ListedModel:
    """Complete the entry with what the file's header says, or with what is wrong with it."""
    try:
        with GGUFFile.open(path) as file:
            tensors = list(file.tensors.values())
            trouble = why_unsupported(file.metadata, tensors)
            return replace(entry, type=main_type(tensors), parameters=parameter_count(tensors), trouble=trouble)
    except GGUFError as error:
        return replace(entry, trouble=str(error))
