"""`forge models`: which models there are, what is in a file, and where more come from."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import completion, options
from forge.cli.arguments import command
from forge.cli.models_synth import synth
from forge.gguf import GGUFError, GGUFFile
from forge.model.catalog import HASH_MODEL, bundled_models, pulled_models, resolve_model
from forge.model.config import why_unsupported
from forge.views.json_output import as_object, plain
from forge.views.models import (
    ListedModel,
    inspection,
    inspection_screen,
    main_type,
    models_screen,
    parameter_count,
    pulled_screen,
)
from forge.views.progress import TransferBar
from forge.views.screen import Report, report
from forge.views.terminal import open_error_console

if TYPE_CHECKING:
    from pathlib import Path

models = typer.Typer(
    help="List models, look into a file, make one up, or download one.", no_args_is_help=True, rich_markup_mode="rich"
)
models.command("synth")(synth)


@models.command("list")
@command
def list_models() -> Report:
    """The models that come with forge, and those that were pulled."""
    listed = _bundled() + _computed() + _pulled()
    return report(plain(listed), lambda: models_screen(listed))


@models.command("inspect")
@command
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
        str,
        typer.Argument(
            metavar="OWNER/NAME[:QUANT]",
            help="A model on the hub, such as Qwen/Qwen3-0.6B-GGUF:Q8_0.",
            show_default=False,
        ),
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
