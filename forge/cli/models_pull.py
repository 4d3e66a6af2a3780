"""`forge models pull`: a model from the Hugging Face hub."""

import sys
from typing import Annotated

import typer

from forge.cli import options
from forge.views.json_output import to_json
from forge.views.progress import TransferBar, print_pulled
from forge.views.terminal import open_console, open_error_console


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
