"""`forge models`: which models there are, what is in a file, and where more come from."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import completion, options
from forge.cli.models_synth import synth
from forge.gguf import GGUFError, GGUFFile
from forge.model.catalog import HASH_MODEL, bundled_models, pulled_models, resolve_model
from forge.model.config import why_unsupported
from forge.views.json_output import to_json
from forge.views.models import (
    ListedModel,
    main_type,
    parameter_count,
    print_inspection,
    print_models,
    summarise,
    summary_object,
)
from forge.views.progress import TransferBar, print_pulled
from forge.views.terminal import open_console, open_error_console

if TYPE_CHECKING:
    from pathlib import Path

models = typer.Typer(
    help="List models, look into a file, make one up, or download one.", no_args_is_help=True, rich_markup_mode="rich"
)
models.command("synth")(synth)


@models.command("list")
def list_models(json: options.JsonOption = False) -> None:
    """The models that come with forge, and those that were pulled."""
    listed = _bundled() + _computed() + _pulled()
    if json:
        open_console().print(to_json(listed), soft_wrap=True)
    else:
        print_models(open_console(), listed)


@models.command("inspect")
def inspect_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, or a bundled model's name.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="List every tensor, not one line per layer kind.")] = False,
    json: options.JsonOption = False,
) -> None:
    """What is in a model file: header, hyper-parameters, tokenizer, tensors, bytes per token in the cache."""
    with GGUFFile.open(resolve_model(model)) as file:
        summary = summarise(
            options.shown_path(file.path),
            file.size,
            file.version,
            file.alignment,
            file.metadata,
            list(file.tensors.values()),
        )
    if json:
        open_console().print(to_json(summary_object(summary)), soft_wrap=True)
    else:
        print_inspection(open_console(), summary, everything)


@models.command("pull")
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME[:QUANT]",
            help="A model on the hub, such as Qwen/Qwen3-0.6B-GGUF:Q8_0.",
            show_default=False,
        ),
    ],
    json: options.JsonOption = False,
) -> None:
    """Download a model from the Hugging Face hub: a GGUF file, or a folder of safetensors. Resumes, and verifies."""
    from forge.model.pull import pull

    try:
        with TransferBar(open_error_console()) as bar:
            pulled = pull(name, on_progress=bar)
    except KeyboardInterrupt:
        print("forge: interrupted; what has come is kept, and the same command goes on from there", file=sys.stderr)
        raise
    if json:
        open_console().print(to_json(pulled), soft_wrap=True)
    else:
        print_pulled(open_console(), pulled)


def _bundled() -> list[ListedModel]:
    """List the bundled models, with what the headers of those that are present say."""
    listed = []
    for model in bundled_models():
        entry = ListedModel(
            name=model.name,
            aliases=model.aliases,
            path=options.shown_path(model.path),
            bytes=model.bytes,
            description=model.description,
            present=model.present,
        )
        listed.append(_with_header(entry, model.path) if model.present else entry)
    return listed


def _computed() -> list[ListedModel]:
    """Describe the model without a file."""
    description = "computes a hash of the text and nothing else: for watching the scheduler"
    return [ListedModel(HASH_MODEL, (), "no file", 0, description, True, type="none", parameters=0)]


def _pulled() -> list[ListedModel]:
    """List what `forge models pull` has brought."""
    listed = []
    for model in pulled_models():
        entry = ListedModel(
            name=model.name,
            aliases=(),
            path=options.shown_path(model.path),
            bytes=model.bytes,
            description="pulled",
            present=True,
        )
        listed.append(entry if model.path.is_dir() else _with_header(entry, model.path))
    return listed


def _with_header(entry: ListedModel, path: "Path") -> ListedModel:
    """Complete the entry with what the file's header says, or with what is wrong with it."""
    try:
        with GGUFFile.open(path) as file:
            tensors = list(file.tensors.values())
            trouble = why_unsupported(file.metadata, tensors)
            return replace(entry, type=main_type(tensors), parameters=parameter_count(tensors), trouble=trouble)
    except GGUFError as error:
        return replace(entry, trouble=str(error))
