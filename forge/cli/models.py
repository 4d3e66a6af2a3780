"""`forge models`: which models come with forge, and what is in a GGUF file."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options

if TYPE_CHECKING:
    from forge.views.models import ListedModel

models = typer.Typer(
    help="List the bundled models, or look into a GGUF file.", no_args_is_help=True, rich_markup_mode="rich"
)


@models.command("list")
def list_models(json: options.JsonOption = False) -> None:
    """The models that come with forge."""
    from forge.views.json_output import to_json
    from forge.views.models import listed_object, print_models
    from forge.views.terminal import open_console

    listed = _bundled()
    if json:
        open_console().print(to_json([listed_object(model) for model in listed]), soft_wrap=True)
    else:
        print_models(open_console(), listed)


@models.command("inspect")
def inspect_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, or a bundled model's name.", show_default=False)
    ],
    everything: Annotated[bool, typer.Option("--all", help="List every tensor, not one line per layer kind.")] = False,
    json: options.JsonOption = False,
) -> None:
    """What is in a model file: header, hyper-parameters, tokenizer, tensors, bytes per token in the cache."""
    from forge.gguf import GGUFFile
    from forge.model.catalog import resolve_model
    from forge.views.json_output import to_json
    from forge.views.model_files import summarise, summary_object
    from forge.views.models import print_inspection
    from forge.views.terminal import open_console

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


def _bundled() -> "list[ListedModel]":
    """The bundled models, with what the headers of those that are present say."""
    from forge.gguf import GGUFError, GGUFFile
    from forge.model.catalog import bundled_models
    from forge.views.model_files import main_type, parameter_count
    from forge.views.models import ListedModel

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
        if model.present:
            try:
                with GGUFFile.open(model.path) as file:
                    tensors = list(file.tensors.values())
                    entry = replace(entry, type=main_type(tensors), parameters=parameter_count(tensors))
            except GGUFError as error:
                entry = replace(entry, trouble=str(error))
        listed.append(entry)
    return listed
